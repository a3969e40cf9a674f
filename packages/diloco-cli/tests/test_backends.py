"""A run is looked for in every backend."""

import threading

import pytest
from cli_lab import RUNNING, Broken, World, command

from diloco_cli._backends import UnsetError, make_executor
from diloco_local import LocalProcessExecutor
from diloco_protocol import (
    AuthError,
    InvalidRequestError,
    ReplicaNotFoundError,
    UnavailableError,
)

UNSET = UnsetError("modal needs --option modal.app=…")


def find(*worlds, backend=None, run_id="one", **options):
    session = command(*worlds, backend=backend, **options).session
    with session.run(run_id) as run:
        return run


def test_the_one_backend_that_has_it():
    run = find(World("a", {}), World("b", {"one": [RUNNING] * 3}))
    assert (run.backend, len(run.handles), run.notes) == ("b", 3, ())


def test_two_backends_have_it():
    worlds = [World("a", {"one": [RUNNING]}), World("b", {"one": [RUNNING]})]
    with pytest.raises(InvalidRequestError, match=r"a and b each have a run one: .*--backend a or"):
        find(*worlds)
    assert find(*worlds, backend="b").backend == "b"


def test_no_backend_has_it():
    with pytest.raises(ReplicaNotFoundError, match="there is no run one on a, b"):
        find(World("a", {}), World("b", {}))


def test_a_backend_that_cannot_be_reached_is_named():
    broken = Broken("b", AuthError("no credentials, password=hunter2"))
    made = command(World("a", {"one": [RUNNING]}), broken)
    with made.session.run("one") as run:
        assert run.backend == "a"
    assert made.err() == "b could not be searched: no credentials, password=<redacted>\n"
    with pytest.raises(UnavailableError, match=r"no run two on a\. b could not be searched"):
        find(World("a", {}), broken, run_id="two")
    with pytest.raises(AuthError):
        find(World("a", {}), broken, backend="b")


def test_a_backend_that_does_not_answer_is_given_up():
    class Slow(World):
        def _attach(self, run_id):
            threading.Event().wait(600)

        def close(self):
            raise AssertionError("it waits for its answer, too")

    with pytest.raises(UnavailableError, match=r"b could not be searched: there was no answer"):
        find(World("a", {}), Slow("b", {}), patience=0.05)


def test_a_backend_that_wants_to_leave_is_named():
    leaves = Broken("b", SystemExit("no licence"))
    with pytest.raises(UnavailableError, match=r"b could not be searched: it raised SystemExit"):
        find(World("a", {}), leaves)


def test_a_backend_that_needs_options_was_not_searched():
    with pytest.raises(ReplicaNotFoundError, match=r"modal was not searched: modal needs --option"):
        find(World("a", {}), Broken("modal", UNSET))
    with pytest.raises(UnavailableError, match="it is not known whether there is a run one"):
        find(Broken("modal", UNSET))
    with pytest.raises(UnsetError):
        find(Broken("modal", UNSET), backend="modal")


@pytest.mark.parametrize("name", ["s3://bucket/run", "Run", "", "a\x1b"])
def test_a_name_that_no_run_has(name):
    with pytest.raises(InvalidRequestError, match="a run is named by its run_id") as error:
        find(World("a", {}), run_id=name)
    assert "\x1b" not in str(error.value)


def test_no_backend_is_installed():
    with pytest.raises(InvalidRequestError, match="no backend is installed here: install the one"):
        find()


def test_executors_are_closed():
    world = World("a", {"one": [RUNNING]})
    closed = []
    world.close = lambda: closed.append(True)
    find(world)
    assert closed == [True]


def test_an_executor_is_made_of_text(tmp_path):
    executor = make_executor("local_process", {"root": str(tmp_path), "grace": "3"})
    assert isinstance(executor, LocalProcessExecutor)
    with pytest.raises(InvalidRequestError, match="local_process has no option 'image'"):
        make_executor("local_process", {"image": "x"})
    with pytest.raises(InvalidRequestError, match="grace must be a number of seconds"):
        make_executor("local_process", {"grace": "-1"})


def test_an_executor_with_five_verbs_alone(monkeypatch):
    monkeypatch.setattr("diloco_cli._backends.get_executor", lambda name: object)
    with pytest.raises(InvalidRequestError, match="has only the verbs of ServerlessExecutor"):
        make_executor("five", {})
