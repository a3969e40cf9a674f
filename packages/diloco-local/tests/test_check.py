import contextlib
import os
import subprocess
import sys
import tracemalloc

import pytest

from diloco_local._check import check_entrypoint
from diloco_local._orders import Order
from diloco_local._processes import ProcessId
from diloco_protocol import InvalidRequestError, ReplicaSpec

pytestmark = pytest.mark.processes

MODULE = """
import sys
print("noise on stdout")
class Trainer:
    @staticmethod
    def fit(): ...
value = 3
def train(): raise AssertionError("the check must not call it")
"""


@pytest.fixture
def check(tmp_path):
    (tmp_path / "good_trainer.py").write_text(MODULE)
    (tmp_path / "broken_trainer.py").write_text("import a_module_nobody_has\n")
    (tmp_path / "talking_trainer.py").write_text(
        "import os\n"
        "for _ in range(64):\n"
        "    os.write(1, b'x' * (1 << 20))\n"
        "    os.write(2, b'x' * (1 << 20))\n"
        "os._exit(7)\n"
    )
    (tmp_path / "exiting_trainer.py").write_text("raise SystemExit(3)\n")
    (tmp_path / "dying_trainer.py").write_text(
        "import os, sys\nsys.stderr.write('last words')\nsys.stderr.flush()\nos._exit(7)\n"
    )
    package = tmp_path / "package_of_trainers"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "good.py").write_text(
        "def main(): raise AssertionError('the check must not call it')"
    )
    (package / "broken.py").write_text("import a_module_nobody_has\n")
    (package / "empty.py").touch()
    (tmp_path / "starting_trainer.py").write_text(
        "import subprocess, sys\n"
        "for session in (False, True):\n"
        "    subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(60)'], "
        "start_new_session=session)\n"
        "import how_it_ends\n"
    )
    (tmp_path / "hanging_trainer.py").write_text("import time\ntime.sleep(600)\n")

    (tmp_path / "choosy_trainer.py").write_text(
        "def train(**kwargs): raise AssertionError('the check must not call it')\n"
        "def check(*, steps): int(steps)\n"
        "train.check_arguments = check\n"
    )

    def run(entrypoint, kwargs=(), python=sys.executable, cwd=tmp_path, **options):
        path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
        order = Order(
            ReplicaSpec(entrypoint, dict(kwargs), 0, 1),
            (python, "-P", "-m", "diloco_protocol.runner"),
            {**os.environ, "PYTHONPATH": path},
            str(cwd),
        )
        check_entrypoint(order, **options)

    return run


@pytest.mark.sampled
@pytest.mark.parametrize(
    "entrypoint", ["good_trainer:train", "good_trainer:Trainer.fit", "package_of_trainers:good"]
)
def test_good(check, entrypoint):
    check(entrypoint)


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"steps": "x"}, "ValueError: invalid literal"),
        ({}, "TypeError: .*missing 1 required .*'steps'"),
    ],
)
def test_an_entrypoint_that_knows_its_arguments_is_asked(check, kwargs, words):
    check("choosy_trainer:train", {"steps": "7"})
    refused = "the check of entrypoint 'choosy_trainer:train' with its arguments failed: "
    with pytest.raises(InvalidRequestError, match=refused + words):
        check("choosy_trainer:train", kwargs)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("entrypoint", "words"),
    [
        ("no_such_trainer:train", "module 'no_such_trainer' failed: ModuleNotFoundError"),
        ("broken_trainer:train", "module 'broken_trainer'.*a_module_nobody_has"),
        ("exiting_trainer:train", "'exiting_trainer:train' .*exited with code 3"),
        ("dying_trainer:train", "'dying_trainer:train'.*code 7: last words"),
        ("good_trainer:no_train", "'good_trainer' has no attribute 'no_train'"),
        ("good_trainer:Trainer.fti", "type object 'Trainer' has no attribute 'fti'"),
        (
            "package_of_trainers:none",
            "'none' in module 'package_of_trainers' failed: AttributeError",
        ),
        ("package_of_trainers:broken", "cannot be used.*a_module_nobody_has"),
        ("package_of_trainers:empty", "'package_of_trainers.empty' has no attribute 'main'"),
        ("good_trainer:value", "'value' .*it is a int, which cannot be called"),
    ],
)
def test_bad(check, entrypoint, words):
    with pytest.raises(InvalidRequestError, match=f"(?s){words}"):
        check(entrypoint)


def test_a_hanging_import_is_ended(check):
    with pytest.raises(InvalidRequestError, match=r"took more than 0\.5 s"):
        check("hanging_trainer:train", timeout=0.5)


def test_a_module_in_the_working_directory_is_not_found(check, tmp_path):
    here = tmp_path / "here"
    here.mkdir()
    (here / "json.py").write_text("raise SystemExit('planted')")  # the check itself imports this
    (here / "a_trainer_lying_here.py").write_text(MODULE)
    check("good_trainer:train", cwd=str(here))
    with pytest.raises(InvalidRequestError, match="ModuleNotFoundError"):
        check("a_trainer_lying_here:train", cwd=str(here))


def test_no_such_interpreter_or_folder(check):
    with pytest.raises(InvalidRequestError, match="/no/python"):
        check("good_trainer:train", python="/no/python")
    with pytest.raises(InvalidRequestError, match="/no/folder"):
        check("good_trainer:train", cwd="/no/folder")


def test_what_a_module_prints_takes_bounded_memory(check):
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequestError, match=r"code 7: x{100}"):
            check("talking_trainer:train")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 22


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("ends", "raised"),
    [
        ("raise ValueError", InvalidRequestError),
        (
            "import os, signal, time; os.kill(os.getppid(), signal.SIGINT); time.sleep(60)",
            KeyboardInterrupt,
        ),
        ("def train(): ...", None),
    ],
    ids=["refused", "interrupted", "good"],
)
def test_the_check_leaves_no_process(check, tmp_path, nothing_survives, ends, raised):
    (tmp_path / "how_it_ends.py").write_text(ends)
    with contextlib.nullcontext() if raised is None else pytest.raises(raised):
        check("starting_trainer:subprocess.run")
    assert nothing_survives() == []


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of its own Popen
def test_an_interruption_while_the_interpreter_is_started_leaves_no_process(
    check, tmp_path, nothing_survives, monkeypatch
):
    class Interrupted(subprocess.Popen):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            raise KeyboardInterrupt

    (tmp_path / "how_it_ends.py").write_text("import time; time.sleep(60)")
    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        check("how_it_ends:train")
    assert nothing_survives() == []


def test_the_check_leaves_no_process_that_has_cleared_its_environment(check, tmp_path):
    (tmp_path / "clearing_trainer.py").write_text(
        "import os, subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(60)'], "
        "env={})\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid))\n"
    )
    check("clearing_trainer:subprocess.run")
    assert ProcessId.of(int((tmp_path / "pid").read_text())) is None


def test_a_check_that_has_no_room_for_its_answer_says_so(check, tmp_path):
    (tmp_path / "filling_trainer.py").write_text(
        "import os, pathlib\npathlib.Path.replace = lambda *_: os._exit(1)\ndef train(): ...\n"
    )
    with pytest.raises(InvalidRequestError, match=r"code 1: it printed nothing .is there room in"):
        check("filling_trainer:train")
