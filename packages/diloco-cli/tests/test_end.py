"""``cancel`` and ``purge`` on backends in memory."""

import io
import json

import pytest
from cli_lab import DONE, FAILED, PATIENCE, RUNNING, Broken, Terminal, World, command
from test_journal import journal_in
from test_told import live, run_of, write

from diloco_cli import _app, _runs
from diloco_cli._runs import end, purge
from diloco_cli._told import spelling
from diloco_protocol import (
    BackendError,
    ForbiddenError,
    InvalidRequestError,
    ReplicaNotFoundError,
    UnavailableError,
)
from diloco_protocol.backend import Answer

SAID = "this ends 2 replicas of run one, on a (zone z1)\n"


def acted(world):
    return sorted(call for call in world.calls if call[0] in {"stop", "purge"})


def answering(made, text, monkeypatch):
    """Let the command have a terminal, on which somebody types a text."""
    monkeypatch.setattr(made.session.screen, "err", Terminal())
    monkeypatch.setattr("sys.stdin", Terminal(text))
    monkeypatch.setattr("sys.stderr", made.session.screen.err)
    return made.session.screen.err.getvalue


def test_without_a_terminal_nothing_is_done(monkeypatch):
    world = World("a", {"one": [RUNNING, RUNNING]})
    made = command(world)
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    with pytest.raises(InvalidRequestError, match=r"nothing was done: .* Add --yes"):
        end(made.session, "cancel", "one", yes=False)
    assert made.err() == SAID
    assert acted(world) == []


@pytest.mark.parametrize(("typed", "code", "stopped"), [("y\n", 0, 2), ("n\n", 2, 0), ("\n", 2, 0)])
def test_on_a_terminal_it_asks(typed, code, stopped, monkeypatch):
    world = World("a", {"one": [RUNNING, RUNNING]})
    made = command(world)
    said = answering(made, typed, monkeypatch)
    assert end(made.session, "cancel", "one", yes=False) == code
    assert said().startswith(SAID + "cancel one? [y/N]: ")
    assert ("nothing was done" in said()) == (not stopped)
    assert len(acted(world)) == stopped


def test_every_rank_is_cancelled():
    world = World("a", {"one": [RUNNING, RUNNING]})
    made = command(world)
    assert end(made.session, "cancel", "one", yes=True) == 0
    assert acted(world) == [("stop", 0), ("stop", 1)]
    assert made.err() == SAID
    assert made.out() == (
        "a was asked to end 2 replicas. To wait until they have:\n  diloco wait one --backend a\n"
    )


@pytest.mark.parametrize("yes", [True, False])
def test_a_run_that_has_ended_is_not_cancelled(yes):
    """Nor is anyone asked, which would be refused here, without a terminal."""
    world = World("a", {"one": [DONE, FAILED]})
    made = command(world)
    assert end(made.session, "cancel", "one", yes=yes) == 0
    assert acted(world) == []
    said = "nothing is done, as all have ended: 2 replicas of run one, on a (zone z1)\n"
    assert (made.err(), made.out()) == (said, "")
    made = command(world, as_json=True)
    assert end(made.session, "cancel", "one", yes=yes) == 0
    assert json.loads(made.out())["replicas"] == 0


def test_a_run_of_which_a_replica_goes_on_is_cancelled():
    world = World("a", {"one": [DONE, RUNNING]})
    assert end(command(world).session, "cancel", "one", yes=True) == 0
    assert acted(world) == [("stop", 0), ("stop", 1)]


def test_a_gang_is_cancelled_once():
    world = World("a", {"one": [RUNNING, RUNNING]}, scope="gang")
    assert end(command(world).session, "cancel", "one", yes=True) == 0
    assert acted(world) == [("stop", 0)]


def test_purge():
    world = World("a", {"one": [DONE]})
    made = command(world)
    assert end(made.session, "purge", "one", yes=True) == 0
    assert acted(world) == [("purge", 0)]
    assert made.err() == (
        "this removes the records, logs and results of 1 replica of run one, "
        "on a (pod 0, zone z1)\n"
    )


def test_purge_of_a_run_that_goes_on_is_refused():
    world = World("a", {"one": [RUNNING]})
    with pytest.raises(InvalidRequestError, match="it has not ended"):
        end(command(world).session, "purge", "one", yes=True)


def test_json():
    made = command(World("a", {"one": [RUNNING, RUNNING]}), as_json=True)
    assert end(made.session, "cancel", "one", yes=True) == 0
    assert json.loads(made.out()) == {
        "version": 1,
        "verb": "cancel",
        "run_id": "one",
        "backend": "a",
        "place": {"zone": "z1"},
        "replicas": 2,
    }


class TestMeeting:
    """By URI: the store says for which names to look, and the backends say which of them meet."""

    @pytest.fixture
    def folder(self, tmp_path):
        """A store in which two runs tell of themselves, and a journal has a third."""
        folder = tmp_path / "run"
        write(folder, run_of(live(0, run="one"), live(1, run="two"), live(2, run="no name!")))
        journal_in(folder).record_launch(World("c", {"three": [DONE]}).handles("three"))
        return folder

    @pytest.fixture
    def worlds(self, folder):
        """Two backends with runs of these names, of which two meet there."""
        a = World("a", {"one": [RUNNING, RUNNING], "two": [RUNNING], "other": [RUNNING]})
        b = World("b", {"one": [RUNNING], "three": [RUNNING] * 3}, scope="gang")
        a.meets = {"one": f"{folder}/", "two": f"{folder}-2", "other": str(folder)}
        b.meets = {"three": f"file://{folder}"}
        return a, b

    def test_those_that_meet_there_are_ended(self, folder, worlds):
        a, b = worlds
        made = command(a, b)
        assert end(made.session, "cancel", str(folder), yes=True) == 0
        assert (acted(a), acted(b)) == ([("stop", 0), ("stop", 1)], [("stop", 0)])
        assert made.err().splitlines() == [
            f"run two on a meets at {folder}-2",
            "run one on b meets at no place",
            SAID.strip(),
            "this ends 3 replicas of run three, on b (zone z1)",
        ]
        assert made.out().splitlines() == [
            "a was asked to end 2 replicas. To wait until they have:",
            "  diloco wait one --backend a",
            "b was asked to end 3 replicas. To wait until they have:",
            "  diloco wait three --backend b",
        ]

    def test_a_backend_can_be_named(self, folder, worlds):
        a, b = worlds
        made = command(a, b, backend="b", as_json=True)
        assert end(made.session, "cancel", str(folder), yes=True) == 0
        assert (a.calls, acted(b)) == ([], [("stop", 0)])
        assert json.loads(made.out()) == {
            "version": 1,
            "verb": "cancel",
            "uri": str(folder),
            "runs": [{"run_id": "three", "backend": "b", "place": {"zone": "z1"}, "replicas": 3}],
        }

    def test_it_asks(self, folder, worlds, monkeypatch):
        a, b = worlds
        made = command(a, b)
        said = answering(made, "n\n", monkeypatch)
        assert end(made.session, "cancel", str(folder), yes=False) == 2
        assert said().endswith(f"cancel {folder}? [y/N]: nothing was done\n")
        assert (acted(a), acted(b)) == ([], [])

    def test_one_that_cannot_be_purged_keeps_no_other(self, folder, worlds):
        a, b = worlds
        b.runs["three"] = [DONE]
        made = command(a, b, as_json=True)
        with pytest.raises(InvalidRequestError, match="it has not ended"):
            end(made.session, "purge", str(folder), yes=True)
        assert (acted(a), acted(b)) == ([], [("purge", 0)])
        assert [run["run_id"] for run in json.loads(made.out())["runs"]] == ["three"]

    def test_forged_names_end_nothing(self, folder, worlds):
        """A stranger may name every run there is: where it meets is not his to say."""
        forged = {"live/00003.json": live(3, run="prod", backend="c", world_size=4)}
        write(folder, forged)
        c = World("c", {"prod": [RUNNING], "three": [RUNNING]}, journal=journal_in(folder))
        c._journal.record_launch(c.handles("prod"), {"rendezvous_uri": str(folder)})
        c.meets = {"prod": "s3://bucket/prod", "three": folder.name}
        made = command(c)
        said = (
            rf"no run meets at {folder} by its own record: looked on c for one, prod, three, two\. "
            rf"run prod on c meets at s3://bucket/prod\. run three on c meets at {folder.name}$"
        )
        with pytest.raises(ReplicaNotFoundError, match=said):
            end(made.session, "cancel", str(folder), yes=True)
        assert acted(c) == []

    def test_a_backend_that_does_not_answer(self, folder, worlds):
        a, _ = worlds
        made = command(a, Broken("b", ForbiddenError("no right to list")))
        assert end(made.session, "cancel", str(folder), yes=True) == 0
        assert "b could not be searched: no right to list" in made.err()
        made = command(World("a", {}), Broken("b", ForbiddenError("no right to list")))
        with pytest.raises(UnavailableError, match=r"looked on a for .*\. b could not be searched"):
            end(made.session, "cancel", str(folder), yes=True)

    def test_a_damaged_record_concerns_its_own_run(self, folder):
        """A stranger who can damage one run would otherwise keep all others from being ended."""

        class Damaged(World):
            def _attach(self, run_id):
                if run_id == "one":
                    raise BackendError("run.json is not JSON")
                return super()._attach(run_id)

        world = Damaged("a", {"two": [RUNNING]})
        with pytest.raises(UnavailableError, match=r"run one on a cannot be read: run\.json"):
            end(command(world).session, "cancel", str(folder), yes=True)
        world.meets = {"two": str(folder)}
        made = command(world)
        assert end(made.session, "cancel", str(folder), yes=True) == 0
        assert acted(world) == [("stop", 0)]
        assert "run one on a cannot be read: run.json is not JSON" in made.err()

    def test_where_nothing_is_told_nothing_is_known(self, tmp_path, worlds):
        uri = write(tmp_path / "silent", {"manifest.json": b"{}"})
        with pytest.raises(ReplicaNotFoundError, match="have told nothing"):
            end(command(*worlds).session, "cancel", uri, yes=True)

    @pytest.mark.parametrize("verb", ["cancel", "purge"])
    def test_a_backend_is_needed(self, verb, folder, monkeypatch, capsys):
        monkeypatch.setattr("diloco_cli._session.executor_names", list)
        assert _app.run([verb, str(folder), "--yes"]) == 2
        assert "no backend is installed here" in capsys.readouterr().err


@pytest.mark.processes
def test_runs_of_a_real_backend(laptop):
    """Two runs that the store names are launched, and the one that meets there is ended."""
    store = laptop.folder / "store"
    write(store, run_of(live(0, run="here"), live(1, run="elsewhere")))
    folder, states = str(laptop.folder), {}
    for run_id, uri in (("here", str(store)), ("elsewhere", f"{store}-2")):
        laptop.launch("waits", {"folder": folder, "rendezvous_uri": uri}, run_id)
    ended = laptop.diloco("cancel", f"file://{store}/", "--yes")
    assert (ended.returncode, "this ends 1 replica of run here" in ended.stderr) == (0, True), ended
    for run_id in ("here", "elsewhere"):
        (result,) = laptop.executor.collect(laptop.executor.attach(run_id), timeout=PATIENCE)
        states[run_id] = result["status"]
        (laptop.folder / "go").touch()  # not before: a replica may end by itself while it is ended
    assert states == {"here": "cancelled", "elsewhere": "succeeded"}
    assert laptop.diloco("purge", str(store), "--yes").returncode == 0
    assert laptop.executor.list_runs() == ["elsewhere"]


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("s3://bucket/run-1", "s3://bucket/run-1/", True),
        ("s3://bucket/run-1", "obstore+s3://bucket/run-1", True),
        ("/a/run 1", "file:///a/run%201/", True),
        ("s3://bucket/run-1", "s3://bucket/run-10", False),
        ("s3://bucket/run-1", "gs://bucket/run-1", False),
        ("s3://bucket/run-1", "s3://bucket/x/../run-1", False),
    ],
)
def test_spellings_of_a_place(one, other, same):
    assert (spelling(one) == spelling(other)) is same


def test_a_relative_path_is_no_place():
    assert [spelling(path) for path in ("run", "./run", "~/run", "", "file://host")] == [None] * 5


class TestStore:
    @pytest.fixture
    def removed(self, monkeypatch):
        calls = []

        def remove(uri, *, really=False):
            calls.append((uri, really))
            return Answer({"uri": uri, "objects": 12, "bytes": 3_000_000}, ())

        monkeypatch.setattr(_runs, "find_extra", lambda name: {"remove": remove}[name])
        return calls

    def test_it_says_what_goes_and_deletes(self, removed):
        made = command(World("a", {}))
        assert purge(made.session, "s3://bucket/run", yes=True, store=True) == 0
        assert "the run in s3://bucket/run, its model and its log: 12 objects" in made.err()
        assert made.out() == "12 objects (3.0 MB) were deleted\n"
        assert removed == [("s3://bucket/run", False), ("s3://bucket/run", True)]

    def test_json(self, removed):
        made = command(World("a", {}), as_json=True)
        purge(made.session, "./run", yes=True, store=True)
        printed = json.loads(made.out())
        assert printed["verb"] == "purge"
        assert (printed["objects"], printed["bytes"]) == (12, 3_000_000)

    def test_who_says_no_keeps_all(self, removed, monkeypatch):
        made = command(World("a", {}))
        answering(made, "n\n", monkeypatch)
        assert purge(made.session, "./run", yes=False, store=True) == 2
        assert removed == [("./run", False)]

    def test_it_needs_a_uri_and_no_backend(self, removed):
        with pytest.raises(InvalidRequestError, match="takes the URI of a run's store"):
            purge(command(World("a", {})).session, "one", yes=True, store=True)
        with pytest.raises(InvalidRequestError, match="a URI asks no backend"):
            purge(command(World("a", {}), backend="a").session, "./run", yes=True, store=True)
        assert removed == []
