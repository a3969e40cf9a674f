"""Test who a replica is: arguments win over the environment, and mistakes and gaps are named."""

import inspect

import pytest
import torch

from diloco_core import ConfigurationError, DiLoCo, SyncError, Timing, connect
from diloco_core._exchange._base import Schema


def test_everything_from_the_environment(environ, monkeypatch):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    exchange = connect()
    assert (exchange.rank, exchange.world_size, exchange.run_id) == (1, 4, "monday")
    exchange.leave()


def test_parts_of_a_run_are_one_run_and_arguments_win(environ, tmp_path):
    exchange = connect(environ={**environ, "DILOCO_COHORT": "week"})
    assert exchange.run_id == "week"
    exchange.leave()
    exchange = connect(str(tmp_path / "b"), rank=0, world_size=2, run_id="tuesday", environ=environ)
    assert (exchange.rank, exchange.world_size, exchange.run_id) == (0, 2, "tuesday")
    assert exchange.store.uri == (tmp_path / "b").as_uri()
    exchange.leave()


@pytest.mark.parametrize(
    ("restarts", "options", "seconds"),
    [
        (None, {}, 300.0),
        ("1", {}, 300.0),
        ("0", {}, 0.0),
        ("0", {"return_within": 20}, 20.0),
        ("0", {"timing": {}}, 0.0),
        ("0", {"timing": {"sync_timeout": 600.0}}, 0.0),
        ("0", {"timing": {"return_within": 20.0}}, 20.0),
        ("1", {"timing": {"sync_timeout": 600.0}}, 300.0),
    ],
)
def test_where_nothing_is_started_again_nobody_waits(
    environ, monkeypatch, restarts, options, seconds
):
    defaults = list(Timing.__init__.__defaults__)  # other tests have another one
    defaults[list(inspect.signature(Timing).parameters).index("return_within")] = 300.0
    monkeypatch.setattr(Timing.__init__, "__defaults__", tuple(defaults))
    if "timing" in options:
        options = {"timing": Timing(**options["timing"])}
    if restarts is not None:
        environ["DILOCO_RESTARTS"] = restarts
    exchange = connect(environ=environ, **options)
    assert exchange.settings.return_within == seconds
    assert connect(environ=environ) is exchange, "a second call need not repeat it"


def test_connecting_twice_gives_the_same_exchange(environ):
    first = connect(environ=environ)
    assert connect(environ=environ) is first
    other = connect(rank=0, environ=environ)
    assert other is not first
    first.leave()
    second = connect(environ=environ)
    assert second is not first
    second.leave()
    other.leave()


@pytest.mark.parametrize("group", ["nccl", 4])
def test_a_process_group_has_to_be_one(environ, group):
    with pytest.raises(ConfigurationError, match="process_group must be a group of torch"):
        connect(environ=environ, process_group=group)


def test_a_process_outside_the_group_is_refused(environ, tmp_path):
    distributed = torch.distributed
    meeting = f"file://{tmp_path}/meeting"
    distributed.init_process_group("gloo", init_method=meeting, rank=0, world_size=1)
    try:
        with pytest.raises(ConfigurationError, match="that this process is in"):
            connect(environ=environ, process_group=distributed.GroupMember.NON_GROUP_MEMBER)
    finally:
        distributed.destroy_process_group()


@pytest.mark.parametrize("left", ["TORCHELASTIC_RUN_ID", "LOCAL_WORLD_SIZE"])
def test_what_torchrun_has_left_in_a_shell_is_named(environ, left):
    with pytest.raises(ConfigurationError, match=f"RANK and WORLD_SIZE must be.*{left}.*unset"):
        connect(environ={**environ, left: "2"})


def test_processes_that_have_not_met_are_refused(environ):
    exchange = connect(environ={**environ, "LOCAL_WORLD_SIZE": "2", "RANK": "0", "WORLD_SIZE": "2"})
    model = torch.nn.Linear(1, 1)
    with pytest.raises(ConfigurationError, match=r"have not met: call.*unset LOCAL_WORLD_SIZE"):
        DiLoCo(model, torch.optim.SGD(model.parameters()), exchange, sync_every=1)
    exchange.leave()


class TestWorldSize:
    """The variable WORLD_SIZE is for torchrun and trainers: it counts processes of one replica."""

    @pytest.mark.parametrize("size", ["1", "8"])
    def test_the_replicas_are_counted_and_not_the_processes_of_one(self, environ, size, caplog):
        lane = {"WORLD_SIZE": size, "LOCAL_RANK": "0", "RANK": "0", "TORCHELASTIC_RUN_ID": "none"}
        for inner in ({"WORLD_SIZE": size}, lane):
            exchange = connect(environ={**environ, **inner})
            assert exchange.world_size == 4
            exchange.leave()
        assert caplog.text == ""

    def test_it_is_not_taken_for_the_number_of_replicas(self, environ):
        del environ["REPLICA_WORLD_SIZE"]
        text = "or set REPLICA_WORLD_SIZE. WORLD_SIZE=8 is not taken for it"
        with pytest.raises(ConfigurationError, match=text):
            connect(environ={**environ, "WORLD_SIZE": "8"})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"RENDEZVOUS_URI": None}, "uri= or set RENDEZVOUS_URI"),
        ({"REPLICA_RANK": None}, "rank="),
        ({"REPLICA_WORLD_SIZE": None}, "world_size="),
        *(
            ({"REPLICA_RANK": text}, "REPLICA_RANK must be a whole number")
            for text in ("1.0", "0x1", "", "one", "1_0", "\u0661", "1e3")
        ),
        ({"REPLICA_RANK": "4"}, "rank must be a whole number from 0 to 3"),
        ({"REPLICA_RANK": "-1"}, "rank must be a whole number from 0 to 3"),
        ({"REPLICA_WORLD_SIZE": "0"}, "world_size must be a whole number from 1 to 100000"),
        ({"RENDEZVOUS_URI": " "}, "RENDEZVOUS_URI"),
        ({"RENDEZVOUS_URI": "nfs7://x"}, "unknown scheme 'nfs7'"),
    ],
)
def test_what_is_missing_or_impossible_is_named(environ, change, words):
    changed = {name: text for name, text in {**environ, **change}.items() if text is not None}
    with pytest.raises(ConfigurationError, match=words):
        connect(environ=changed)


class TestHomeFolders:
    def test_one_that_is_known(self, tmp_path, monkeypatch):
        monkeypatch.setenv("HOME", str(tmp_path))
        exchange = connect("~/run", rank=0, world_size=1)
        assert exchange.store.uri == (tmp_path / "run").as_uri()
        exchange.leave()

    def test_one_that_is_not_known(self):
        with pytest.raises(ConfigurationError, match="'~nobody-here', whose home folder is not"):
            connect("~nobody-here/run", rank=0, world_size=1)


def test_no_password_is_shown(environ, caplog):
    uri = f"memory://key:SECRET@{environ['RENDEZVOUS_URI']}"
    exchange = connect(uri, environ=environ)
    texts = [repr(exchange)]
    for again, options in ((uri, {"world_size": 9}), (f"{uri}\n", {})):
        with pytest.raises(ConfigurationError) as caught:
            connect(again, environ=environ, **options)
        texts.append(str(caught.value))
    exchange.abort(ValueError(f"cannot read {uri}/x"))
    with pytest.raises(SyncError) as caught:
        exchange.join(Schema({}, {}))
    texts.append(str(caught.value))
    assert "cannot read memory://<redacted>@" in texts[-1]
    assert "SECRET" not in " ".join(texts) + caplog.text
