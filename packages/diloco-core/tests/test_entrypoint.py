"""The replica's entrypoint, as a function and by hand."""

import json
import logging
import re
import sys

import pytest
import torch
from warm_processes import WarmProcess

from diloco_core import (
    AfterRunError,
    ConfigurationError,
    DiLoCo,
    ReplicaLostError,
    RunExistsError,
    connect,
)
from diloco_core.replica_entrypoint import _show_log, load_trainer, main, run

TRAINER = """
import torch
from diloco_core import DiLoCo, ObjectStoreAllReduce, connect, make_diloco_outer_loop

class Namespace:
    @staticmethod
    def inner():
        return "inner"

not_a_function = 7

def mean(start):
    exchange = connect()
    tensor = torch.tensor([start + exchange.rank])
    with ObjectStoreAllReduce() as reduce:
        reduce.mean([tensor])
    return tensor.tolist()

def two_means():
    with ObjectStoreAllReduce() as reduce:
        reduce.mean([torch.ones(1)])
        reduce.mean([torch.ones(1)])

def nothing(**kwargs):
    return kwargs

def quorum():
    return connect().settings.min_replicas

def place():
    exchange = connect()
    return [exchange.rank, exchange.world_size, exchange.process, exchange.processes]

def fails():
    connect()
    raise ValueError("no data")

def fails_afterwards():
    mean(1.0)
    raise ValueError("no room for the model")
"""


@pytest.fixture(autouse=True)
def own_environment(monkeypatch):
    """What ``run`` puts into the environment is taken out again."""
    for name in ("RENDEZVOUS_URI", "REPLICA_RANK", "REPLICA_WORLD_SIZE"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    log = logging.getLogger("diloco_core")
    handlers, level = list(log.handlers), log.level
    yield
    log.handlers[:] = handlers
    log.setLevel(level)


@pytest.fixture
def trainer(tmp_path, monkeypatch):
    """A module of the user's on the path, with a name of its own per test."""
    name = f"trainer_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(TRAINER)
    monkeypatch.syspath_prepend(tmp_path)
    return name


@pytest.mark.parametrize("devices", [1, 2, 8])
def test_it_calls_the_trainer_and_returns_its_result(
    trainer, tmp_path, monkeypatch, caplog, devices
):
    """A replica that sees GPUs that it does not use is told so."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    kwargs = {"a": [1, {"b": None}], "c": "é"}
    place = {"rendezvous_uri": str(tmp_path / "run"), "rank": 0, "world_size": 1}
    options = {"trainer_fn": "nothing", "trainer_kwargs": kwargs, **place}
    assert run(trainer_module=trainer, **options) == kwargs
    texts = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(texts) == (devices > 1)
    assert all(f"rank 0: this replica sees {devices} GPUs and is one process" in t for t in texts)


@pytest.fixture
def alone(tmp_path, monkeypatch):
    """The environment of the only replica of a run."""
    monkeypatch.setenv("RENDEZVOUS_URI", str(tmp_path / "run"))
    monkeypatch.setenv("REPLICA_RANK", "0")
    monkeypatch.setenv("REPLICA_WORLD_SIZE", "1")


@pytest.mark.parametrize("by_hand", [False, True])
def test_processes_of_torchrun_are_one_replica(trainer, tmp_path, monkeypatch, capsys, by_hand):
    """The trainer, which connects with no arguments, gets the exchange that was opened for it."""
    torchrun = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "RANK": "1", "WORLD_SIZE": "2"}
    for name, value in torchrun.items():
        monkeypatch.setenv(name, value)
    uri, elastic = str(tmp_path / "run"), {"min_replicas": 1}
    if by_hand:
        place = ["--rendezvous", uri, "--rank", "1", "--world-size", "3"]
        place += ["--connect-options-json", json.dumps(elastic)]
        assert main([*place, "--trainer-module", trainer, "--trainer-fn", "place"]) == 0
        assert json.loads(capsys.readouterr().out) == [1, 3, 1, 2]
        return
    place = {"rendezvous_uri": uri, "rank": 1, "world_size": 3, "connect_options": elastic}
    assert run(trainer_module=trainer, trainer_fn="place", **place) == [1, 3, 1, 2]
    assert not (tmp_path / "run").exists(), "only the first process opens the store"


def test_connect_options_make_the_run_elastic(trainer, tmp_path):
    where = {"rendezvous_uri": str(tmp_path / "run"), "rank": 0, "world_size": 3}
    options = {"min_replicas": 2, "grace": 5.0}
    assert run(trainer_module=trainer, trainer_fn="quorum", connect_options=options, **where) == 2
    with pytest.raises(ConfigurationError, match=r"has 'quorum', which is not .*min_replicas"):
        run(trainer_module=trainer, trainer_fn="quorum", connect_options={"quorum": 2}, **where)


def test_a_failure_ends_the_exchange(trainer, alone):
    exchange = connect()
    with pytest.raises(ValueError, match="no data"):
        run(trainer_module=trainer, trainer_fn="fails")
    assert exchange.ended


@pytest.mark.parametrize("call", ["connect(min_replica=2)", "DiLoCo(None, None, None, sync=1)"])
def test_arguments_that_our_functions_do_not_have_are_not_repeated(call, trainer, alone, tmp_path):
    """Each is a refusal, which is final."""
    text = f"from diloco_core import DiLoCo, connect\ndef train():\n    {call}\n"
    (tmp_path / "train_misspelt.py").write_text(text)
    exchange = connect()
    with pytest.raises(ConfigurationError, match="got an unexpected keyword") as told:
        run(trainer_module="train_misspelt")
    assert told.value.final
    assert exchange.ended


def test_what_fails_after_the_run_is_not_repeated_if_the_run_is_fixed(trainer, alone):
    """A second attempt would be refused, and that error would hide the first."""
    with pytest.raises(AfterRunError, match="had left the run: ValueError: no room for the model"):
        run(trainer_module=trainer, trainer_fn="fails_afterwards")


def test_what_fails_after_an_elastic_run_may_be_repeated(trainer, alone, tmp_path):
    (tmp_path / "train_and_fail.py").write_text(
        "import torch\nfrom diloco_core import DiLoCo, connect\n"
        "def train():\n"
        "    model = torch.nn.Linear(1, 1)\n"
        "    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "    with DiLoCo(model, optimizer, connect(), sync_every=1):\n"
        "        optimizer.step()\n"
        "    raise ValueError('no room for the model')\n"
    )
    with pytest.raises(ValueError, match="no room"):
        run(trainer_module="train_and_fail", connect_options={"min_replicas": 1})


def test_arguments_that_the_trainer_does_not_take_are_refused(trainer, alone, tmp_path):
    for kwargs, text in (({"begin": 1.0}, ""), ({}, "missing a required argument: 'start'")):
        given = {"trainer_module": trainer, "trainer_fn": "mean", "trainer_kwargs": kwargs}
        words = rf"do not fit {trainer}.mean\(start\): .*{text}"
        for called in (run, run.check_arguments):
            with pytest.raises(ConfigurationError, match=words):
                called(**given, rank=3)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["trainer_kwargs", "connect_options"])
@pytest.mark.parametrize("called", [run, run.check_arguments])
def test_options_that_are_no_mapping_are_refused_by_name(trainer, alone, name, called):
    with pytest.raises(ConfigurationError, match=rf"{name} must map names .*, not \['resume'\]"):
        called(trainer_module=trainer, **{name: ["resume"]})


def test_a_prefix_that_holds_another_run_is_refused_before_a_launch(trainer, monkeypatch, tmp_path):
    """The launcher is told at once, and not each replica when it joins."""
    place = str(tmp_path / "run")
    given = {"trainer_module": trainer, "trainer_fn": "nothing", "rendezvous_uri": place}
    given["trainer_kwargs"] = {"a": 1, "c": 2}
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monkeypatch.setenv("DILOCO_COHORT", "second")
    run.check_arguments(**given)
    assert not (tmp_path / "run").exists()
    exchange = connect(place, rank=0, world_size=1, run_id="first")
    with DiLoCo(model, optimizer, exchange, sync_every=1):
        run.check_arguments(**given, connect_options={"resume": True})
        run.check_arguments(**given, connect_options={"run_id": "first"})
        with pytest.raises(RunExistsError, match=r"holds the run 'first' .* own.*\"resume\": True"):
            run.check_arguments(**given)
    monkeypatch.setenv("DILOCO_COHORT", "first")
    run.check_arguments(**given)
    (tmp_path / "run" / "manifest.json").write_text("damaged")
    monkeypatch.setenv("DILOCO_COHORT", "second")
    run.check_arguments(**given)


@pytest.mark.parametrize(
    ("module", "function", "text"),
    [
        ("no_such_trainer_module", "train", "no module 'no_such_trainer_module'"),
        ("json.no_such", "train", "json.no_such"),
        (None, "missing", "has no function 'missing'"),
        (None, "not_a_function", "has no function 'not_a_function'"),
        (None, "Namespace.missing", "has no function"),
    ],
)
def test_a_trainer_that_is_not_there_is_named(trainer, module, function, text):
    assert load_trainer(trainer, "Namespace.inner")() == "inner"
    with pytest.raises(ConfigurationError, match=text):
        load_trainer(module or trainer, function)


@pytest.mark.parametrize(
    ("source", "named"),
    [
        (
            "\nimport some_package_that_is_not_installed",
            "'some_package_that_is_not_installed', which .*needs_more.py imports in line 2",
        ),
        ("def train(:", "invalid syntax"),
        ("a = {}\nWIDTH = a['width']", r"KeyError: 'width' \(.*needs_more.py, line 2"),
        ("raise SystemExit(2)", r"it ends the program \(SystemExit: 2\) while it is imported"),
    ],
)
def test_a_module_that_cannot_be_imported_says_why_and_is_not_tried_again(
    tmp_path, monkeypatch, source, named
):
    (tmp_path / "needs_more.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigurationError, match=f"'needs_more' cannot be imported: .*{named}"):
        load_trainer("needs_more", "train")
    sys.modules.pop("needs_more", None)


def test_the_name_of_a_file_in_place_of_a_module_is_recognised():
    with pytest.raises(ConfigurationError, match=r"Did you mean 'my_trainer'\?$"):
        load_trainer("my_trainer.py", "train")


@pytest.mark.parametrize(
    ("module", "hint"),
    [
        ("./charlm", r"\. Did you mean 'charlm'\?"),
        ("/home/me/charlm.py", r"\. Did you mean 'charlm'\?"),
        (".charlm", r"\. Did you mean 'charlm'\?"),
        ("a..b", r"\. Did you mean 'a\.b'\?"),
        ("", ""),
    ],
)
def test_a_path_in_place_of_a_module_is_refused(module, hint):
    with pytest.raises(ConfigurationError, match=f", not '{module}'{hint}$"):
        load_trainer(module, "train")


@pytest.fixture
def in_fork(tmp_path):
    """Runs the command line in processes that need not import torch, and ends them."""
    started = []

    def start(*arguments, **variables):
        folder = tmp_path / f"process{len(started)}"
        started.append(WarmProcess(folder, main, arguments, **variables))
        return started[-1]

    yield start
    for replica in started:
        replica.kill()


@pytest.mark.processes
def test_two_replicas_by_hand(in_fork, trainer, tmp_path):
    common = ["--rendezvous", str(tmp_path / "run"), "--world-size", "2"]
    common += ["--trainer-module", trainer]
    common += ["--trainer-fn", "mean", "--trainer-kwargs-json", '{"start": 1.0}']
    # The trainer itself connects with no arguments: what the command line says reaches it too.
    replicas = [in_fork(*common, "--rank", "0"), in_fork(*common, REPLICA_RANK="1")]
    for replica in replicas:
        status, out, err = replica.communicate()
        assert status == 0, err
        assert json.loads(out) == [1.5]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "--trainer-module"),
        (["--trainer-module", "json", "--trainer-kwargs-json", "{"], "is not JSON"),
        (["--trainer-module", "json", "--trainer-kwargs-json", "[1]"], "JSON object, not list"),
        (["--trainer-module", "no_such_trainer_module"], "no module 'no_such_trainer_module'"),
        (["--trainer-module", "json", "--trainer-fn", "dumps"], "do not fit json.dumps(obj, "),
        (
            ["--trainer-module", "os", "--trainer-fn", "getpid"],
            "set RENDEZVOUS_URI, REPLICA_RANK, REPLICA_WORLD_SIZE, or pass uri=, rank=,",
        ),
    ],
)
@pytest.mark.processes
def test_wrong_arguments_by_hand(in_fork, arguments, text):
    status, _, err = in_fork(*arguments).communicate()
    assert status == 2
    assert text in err
    assert "Traceback" not in err


@pytest.mark.parametrize("when", ["before it joins", "after it joined"])
@pytest.mark.processes
def test_the_others_learn_of_a_failure(in_fork, trainer, tmp_path, when):
    (tmp_path / "fails.py").write_text(
        "from diloco_core import ObjectStoreAllReduce\nimport torch\n"
        "def train(join):\n"
        "    if join:\n"
        "        ObjectStoreAllReduce().mean([torch.ones(1)])\n"
        "    raise RuntimeError('the disk is full')\n"
    )
    common = ["--rendezvous", str(tmp_path / "run"), "--world-size", "2"]
    good = in_fork(*common, "--rank", "0", "--trainer-module", trainer, "--trainer-fn", "two_means")
    kwargs = json.dumps({"join": when == "after it joined"})
    options = ["--trainer-module", "fails", "--trainer-kwargs-json", kwargs]
    bad = in_fork(*common, "--rank", "1", *options)
    good_status, _, good_err = good.communicate()
    bad_status, _, bad_err = bad.communicate()
    assert good_status == 1
    assert ReplicaLostError.__name__ in good_err
    frames = re.findall(r'File "(.+)", line', good_err)
    assert not [path for path in frames if "/diloco_core/_" in path], "none below the trainer's"
    assert any("replica_entrypoint.py" in path for path in frames)
    syncs = "1 sync" if when == "after it joined" else "0 syncs"
    assert f"rank 1 failed after {syncs}:" in good_err
    assert "the disk is full" in good_err
    assert bad_status == 1
    assert "the disk is full" in bad_err


def test_the_log_is_shown_only_where_the_program_shows_none(capsys, monkeypatch):
    log, root = logging.getLogger("diloco_core"), logging.getLogger()
    monkeypatch.setattr(log, "handlers", [])
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(log, "level", logging.NOTSET)
    log.manager._clear_cache()
    _show_log()
    _show_log()
    log.info("rank 0: outer step 1")
    assert capsys.readouterr().err.count("rank 0: outer step 1") == 1
    monkeypatch.setattr(root, "handlers", [logging.NullHandler()])
    log.info("rank 0: outer step 2")
    assert not capsys.readouterr().err
    log.manager._clear_cache()
