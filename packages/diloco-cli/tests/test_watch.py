"""``watch`` on backends in memory and on the store of a run that tests write."""

import io
import json
import os
import re
import threading
from functools import partial
from unittest import mock

import pytest
from cli_lab import DONE, FAILED, NOW, RUNNING, Broken, Terminal, World, command
from click.exceptions import Exit
from test_journal import journal_in

from diloco_cli import _app, _watch
from diloco_cli._session import Screen
from diloco_cli._told import Store
from diloco_protocol import (
    BackendError,
    InvalidRequestError,
    ReplicaNotFoundError,
    SpecVersionError,
    UnavailableError,
)
from diloco_protocol.telemetry import HistoryKey, Live, SyncLine, live_key


class Told:
    """The store of a run in a folder, which counts what is asked of it."""

    def __init__(self, folder, monkeypatch):
        self.folder, self.uri = folder, str(folder)
        self.asked = []
        (folder / "live").mkdir(parents=True)
        for name in ("list_keys", "read"):
            monkeypatch.setattr(Store, name, self._counted(getattr(Store, name)))
        self.broken = None

    def _counted(self, method):
        def counted(store, key, *more):
            if self.broken:
                raise self.broken
            self.asked.append(key)
            return method(store, key, *more)

        return counted

    def live(self, rank=0, world_size=2, **more):
        fields = {
            "run": "one", "rank": rank, "world_size": world_size, "epoch": 1, "attempt": 1,
            "time": NOW, "step": 20, "sync": 2, "phase": "training", "metrics": {"loss": 0.5},
        }  # fmt: skip
        data = Live(**{**fields, **more}).to_bytes()
        (self.folder / live_key(rank)).write_bytes(data)

    def syncs(self, rank, *numbers):
        path = self.folder / HistoryKey(rank, 1, 1, numbers[-1]).key
        path.parent.mkdir(parents=True, exist_ok=True)
        for old in path.parent.iterdir():
            old.unlink()
        lines = [
            SyncLine(
                number=number, time=NOW + number, sync=number, fragment="0", committed=True,
                members=2, bytes_sent=1, bytes_received=1, wait_seconds=0.0, exchange_seconds=0.0,
                metrics={"loss": 1 / number},
            )
            for number in numbers
        ]  # fmt: skip
        path.write_bytes(b"".join(line.to_bytes() for line in lines))

    def taken(self):
        """What was asked for since this was called last."""
        asked, self.asked = self.asked, []
        return asked


@pytest.fixture
def told(tmp_path, monkeypatch):
    return Told(tmp_path / "run", monkeypatch)


def follow(made, target, *turns, every=5.0, columns=100, lines=24):
    """Watch, and do something at each pause; Ctrl-C where a turn is that. The exit code."""
    left = list(turns)

    def sleep(seconds):
        assert seconds == every
        turn = left.pop(0)
        if turn is KeyboardInterrupt:
            raise KeyboardInterrupt
        turn()

    with mock.patch.dict(os.environ, COLUMNS=str(columns), LINES=str(lines)):
        code = _watch.watch(made.session, target, every, sleep=sleep)
    assert not left, "it ended too early"
    return code


def nothing():
    pass


class TestSources:
    def test_the_store_and_the_backend_that_has_the_run(self, told):
        world = World("a", {"one": [RUNNING, RUNNING], "other": [FAILED, FAILED]})
        told.live(0)
        told.live(1, phase="waiting", waits_for=[0], missing=1)
        told.syncs(0, 1, 2)

        def ends():
            world.runs["one"] = [DONE, FAILED]
            told.live(0, ended="left", phase="idle", sync=3)
            told.syncs(0, 1, 2, 3)

        made = command(world, Broken("b", BackendError("no route")))
        assert follow(made, told.uri, nothing, ends) == 1
        assert made.out().splitlines() == [
            "sync 2: 2 of 2, loss 0.5, 2B sent and received, waited 0 s",
            "rank 0: running, training, attempt 1",
            "rank 1: running, waiting for 0, attempt 1",
            "sync 3: 2 of 2, loss 0.3333, 2B sent and received, waited 0 s",
            "rank 0: succeeded, completed, left, attempt 1",
            "rank 1: failed, error, was waiting, attempt 1: ValueError: no data",
            f"{told.uri}: 1 succeeded, 1 failed",
        ]

    def test_a_name_asks_its_backend_alone(self):
        world = World("a", {"one": [RUNNING, RUNNING]})
        made = command(world)
        assert follow(made, "one", lambda: world.runs.update(one=[DONE, DONE])) == 0
        assert made.out().splitlines() == [
            "rank 0: running, attempt 1",
            "rank 1: running, attempt 1",
            "the store is not read: the launch of one names no place to meet at",
            "rank 0: succeeded, completed, attempt 1",
            "rank 1: succeeded, completed, attempt 1",
            "one: 2 succeeded",
        ]
        with pytest.raises(ReplicaNotFoundError):
            follow(made, "two")

    def test_a_name_finds_the_store_by_its_backend(self, told):
        """The store's word on other launches, and on how many ranks there are, counts for less."""
        world = World("a", {"one": [RUNNING, RUNNING], "other": [FAILED]})
        world.meets["one"] = f"file://{told.uri}/"

        def tells():
            told.live(0, 3)
            told.live(1, 3, run="other", phase="idle")
            told.syncs(0, 1, 2)

        made = command(world)
        ends = partial(world.runs.update, one=[DONE, DONE])
        assert follow(made, "one", tells, ends) == 0
        assert made.out().splitlines() == [
            "rank 0: running, attempt 1",
            "rank 1: running, attempt 1",
            "sync 1: 2 of 2, loss 1, 2B sent and received, waited 0 s",
            "sync 2: 2 of 2, loss 0.5, 2B sent and received, waited 0 s",
            "rank 0: running, training, attempt 1",
            "rank 1: running, idle, attempt 1",
            "rank 0: succeeded, completed, was training, attempt 1",
            "rank 1: succeeded, completed, was idle, attempt 1",
            "one: 2 succeeded",
        ]
        asked = [name for call, name in world.calls if call == "rendezvous"]
        assert asked == ["one"]

    def test_a_store_that_fails_leaves_what_the_backend_says(self, told):
        world = World("a", {"one": [RUNNING, RUNNING]})
        world.meets["one"] = told.uri
        told.broken = UnavailableError("no route")

        def back():
            told.broken = None
            told.live(0)
            world.runs["one"] = [DONE, DONE]

        made = command(world)
        assert follow(made, "one", back) == 0
        lines = made.out().splitlines()
        assert lines[:2] == ["rank 0: running, attempt 1", "rank 1: running, attempt 1"]
        assert lines[2].startswith("the store is silent since")
        assert lines[3:] == [
            "rank 0: succeeded, completed, was training, attempt 1",
            "rank 1: succeeded, completed, attempt 1",
            "one: 2 succeeded",
        ]

    @pytest.mark.parametrize(
        ("ends", "code"), [(("left", "left"), 0), (("left", "failed"), 1), (("left", "odd"), 3)]
    )
    def test_the_store_alone(self, told, ends, code):
        made = command(World("a", {}))
        told.live(0)

        def end():
            for rank, each in enumerate(ends):
                told.live(rank, ended=each)

        assert follow(made, told.uri, nothing, end) == code
        assert "a is silent" not in made.err()

    def test_a_rank_is_asked_about_in_the_launch_that_it_has_named(self, told):
        """A run that was continued under another name, and in another backend."""
        a, b = World("a", {"one": [DONE, DONE]}), World("b", {"two": [RUNNING, RUNNING]})
        told.live(0, run="one", ended="left")
        told.live(1, run="two", backend="b")

        def end():
            b.runs["two"] = [FAILED, FAILED]

        made = command(a, b)
        assert follow(made, told.uri, end) == 1
        assert made.out().splitlines() == [
            "rank 0: succeeded, completed, left, attempt 1",
            "rank 1: running, training, attempt 1",
            "rank 1: failed, error, was training, attempt 1: ValueError: no data",
            f"{told.uri}: 1 succeeded, 1 failed",
        ]

    def test_one_run_on_two_backends(self, told):
        told.live(0, 3, backend="a")
        told.live(1, 3, backend="b")
        told.live(2, 3, backend="not-installed")
        worlds = World("a", {"one": [DONE, FAILED]}), World("b", {"one": [FAILED, DONE]})
        made = command(*worlds)
        assert (
            follow(made, told.uri, lambda: told.live(2, 3, backend="not-installed", ended="left"))
            == 0
        )
        assert made.out().splitlines()[-1] == f"{told.uri}: 3 succeeded"

    def test_a_backend_that_cannot_be_reached_is_named_and_asked_again(self, told, monkeypatch):
        monkeypatch.setattr(_watch, "_RETRY", 0.0)
        world = Broken("a", UnavailableError("no route, password=hunter2"))
        told.live(0)
        told.live(1)

        def back():
            world.error = None
            world.runs = {"one": [DONE, DONE]}
            world._attach = world.handles

        made = command(world)
        assert follow(made, told.uri, nothing, back) == 0
        noted = [line for line in made.out().splitlines() if "silent about one since" in line]
        assert len(noted) == 1
        assert "no route" in noted[0]
        assert "hunter2" not in noted[0]

    def test_a_backend_that_goes_silent_is_not_believed_for_ever(self, monkeypatch):
        world = World("a", {"one": [RUNNING]})

        def silent(handles):
            raise UnavailableError("no route")

        made = command(world)
        turns = (lambda: monkeypatch.setattr(world, "_observe_run", silent), KeyboardInterrupt)
        with pytest.raises(Exit):
            follow(made, "one", *turns)
        assert made.out().splitlines()[2].startswith("rank 0: running 0s ago, attempt 1")

    def test_a_backend_that_hangs_stops_nothing(self, told, monkeypatch):
        gate = threading.Event()
        world = World("a", {"one": [RUNNING, RUNNING]})
        monkeypatch.setattr(world, "_attach", lambda run_id: gate.wait(60) and [])
        told.live(0)
        told.live(1)
        made = command(world)
        try:
            with pytest.raises(Exit):
                follow(
                    made, told.uri, lambda: told.live(0, phase="idle"), KeyboardInterrupt, every=1
                )
        finally:
            gate.set()
        assert "every backend is silent about one since" in made.out()

    def test_a_store_that_goes_silent(self, told):
        """What its ranks do then is not known, so they are not silent."""
        told.live(0)
        made, now = command(World("a", {})), [NOW]
        object.__setattr__(made.session, "clock", lambda: now[0])

        def fail():
            told.broken = UnavailableError("503 SlowDown")
            now[0] += 10_000

        def heal():
            told.broken = None

        def end():
            for rank in range(2):
                told.live(rank, ended="left")

        assert follow(made, told.uri, fail, nothing, heal, end) == 0
        said = made.out().splitlines()
        (noted,) = [number for number, line in enumerate(said) if "the store is silent" in line]
        assert "503 SlowDown" in said[noted]
        (silent,) = [number for number, line in enumerate(said) if "silent 2h 46m" in line]
        assert silent > noted, "it was so when the store could be read again"

    def test_what_is_no_run(self, told, tmp_path):
        made = command(World("a", {}))
        with pytest.raises(InvalidRequestError, match="such as run: give the URI of one"):
            follow(made, str(tmp_path))
        with pytest.raises(ReplicaNotFoundError, match="there is no run in"):
            follow(made, f"{tmp_path}/none")
        told.broken = UnavailableError("403")
        with pytest.raises(UnavailableError, match="403"):
            follow(made, told.uri)
        told.broken = None
        told.live(0)
        path = told.folder / live_key(0)
        path.write_bytes(path.read_bytes().replace(b'"version":1', b'"version":2'))
        with pytest.raises(SpecVersionError):
            follow(made, told.uri)

    def test_a_run_whose_replicas_have_told_nothing_yet_is_awaited(self, told):
        made = command(World("a", {"one": [DONE, DONE]}))
        assert follow(made, told.uri, nothing, lambda: told.live(0)) == 0


class TestJournal:
    """Where no rank tells anything (any more), the journal knows the run."""

    @pytest.fixture
    def journal(self, told):
        """A journal in the store, as a backend has written it that saw one of two replicas end."""
        world = World("a", {"one": [DONE, RUNNING]}, journal=journal_in(told.folder))
        world._journal.record_launch(world.handles("one"))
        world.describe_run(world.handles("one"))
        return world._journal

    def test_without_a_backend(self, told, journal):
        handles, made = World("a", {"one": [DONE] * 2}).handles("one"), command(World("b", {}))
        now = [NOW]
        object.__setattr__(made.session, "clock", lambda: now[0])

        def ends():
            journal.record_end(handles[1], FAILED, None)

        def a_minute_later():
            now[0] += 60

        assert follow(made, told.uri, ends, a_minute_later) == 1
        assert made.out().splitlines() == [
            "rank 0: succeeded, completed, attempt 1",
            "ended, as the journal in the store says: rank 0",
            "rank 1: failed, error, attempt 1: ValueError: no data",
            "ended, as the journal in the store says: ranks 0-1",
            f"{told.uri}: 1 succeeded, 1 failed",
        ]

    def test_a_backend_that_knows_more_comes_first(self, told, journal):
        world = World("a", {"one": [None, FAILED]})
        made = command(world)
        assert follow(made, told.uri) == 1
        assert made.out().splitlines()[-1] == f"{told.uri}: 1 succeeded, 1 failed"

    def test_what_ranks_tell_later_counts(self, told, journal):
        made = command(World("b", {}))

        def back():
            told.live(0, ended="failed")
            told.live(1, ended="left")

        assert follow(made, told.uri, back) == 1
        assert made.out().splitlines()[-1] == f"{told.uri}: 1 succeeded, 1 failed"


def test_the_requests_of_a_refresh(told):
    """One listing, and what has changed; the syncs of one rank as seldom as they are written."""
    for rank in range(100):
        told.live(rank, 100)
    told.syncs(0, 1)
    told.syncs(1, 1)
    made, seen = command(World("a", {})), []

    def one_changes():
        seen.append(told.taken())
        told.live(57, 100, step=21)

    def another_look():
        seen.append(told.taken())

    with pytest.raises(Exit):
        follow(made, told.uri, one_changes, another_look, another_look, KeyboardInterrupt)
    assert len(seen[0]) == 1 + 100 + 2
    assert seen[0][-2:] == ["history/00000/", HistoryKey(0, 1, 1, 1).key]
    assert seen[1:] == [["live/", live_key(57)], ["live/"]]


def test_of_a_long_history_the_newest_objects_are_read(told):
    told.live(0, 1)
    told.syncs(0, 1)
    (path,) = (told.folder / "history/00000").iterdir()
    keys = [HistoryKey(0, 1, number, number).key for number in range(2, 100)]
    for key in keys:
        (told.folder / key).write_bytes(path.read_bytes())
    with pytest.raises(Exit):
        follow(command(World("a", {})), told.uri, KeyboardInterrupt)
    read = [key for key in told.taken() if key.endswith(".jsonl")]
    assert sorted(read) == keys[-50:]


def test_a_store_that_may_only_be_read(told):
    told.live(0, 1, ended="left")
    for path in (told.folder, told.folder / "live"):
        path.chmod(0o500)
    before = sorted(told.folder.rglob("*"))
    try:
        assert follow(command(World("a", {})), told.uri) == 0
        assert sorted(told.folder.rglob("*")) == before
    finally:
        told.folder.chmod(0o700)


def test_json(told):
    world = World("a", {"one": [RUNNING, RUNNING]})
    told.live(0, host="\x1b[2J", metrics={"api_key": "hunter2"})
    told.syncs(0, 1)
    made = command(world, as_json=True, out=Terminal())
    assert follow(made, told.uri, lambda: world.runs.update(one=[DONE, DONE])) == 0
    lines = [json.loads(line) for line in made.out().splitlines()]
    assert [(each["version"], each["change"]) for each in lines] == [
        (1, "sync"), (1, "replica"), (1, "replica"), (1, "replica"), (1, "replica"), (1, "end"),
    ]  # fmt: skip
    first = lines[1]
    assert (first["state"], first["phase"], first["host"]) == ("running", "training", "\\x1b[2J")
    assert first["metrics"] == {"api_key": "<redacted>"}
    assert (lines[2]["rank"], lines[2]["phase"]) == (1, None)
    assert lines[-1]["states"] == {"succeeded": 2}


class TestTerminal:
    def drawn(self, told, *turns, **size):
        made = command(World("a", {"one": [RUNNING, RUNNING]}), out=Terminal())
        with pytest.raises(Exit):
            follow(made, told.uri, *turns, KeyboardInterrupt, **size)
        return made.out(), made.err()

    def test_one_table_that_is_drawn_again(self, told):
        told.live(0)
        told.live(1)
        out, err = self.drawn(told, lambda: told.live(1, phase="waiting", waits_for=[0], missing=1))
        assert out.count("RANK") >= 2
        assert "\x1b[2K" in out, "what was drawn before is replaced"
        assert "waiting for 0" in out
        assert "\x1b[?25h" in out.split("waiting for 0")[-1], "the cursor is shown again"
        assert err.endswith(
            f"run {told.uri} is left as it is. Come back with:\n  diloco watch {told.uri}\n"
        )

    def test_no_color(self, told, monkeypatch):
        told.live(0)
        made = command(World("a", {"one": [RUNNING, RUNNING]}))
        out = Terminal()
        screen = Screen(out, io.StringIO(), {"NO_COLOR": "1"})
        object.__setattr__(made.session, "screen", screen)
        with pytest.raises(Exit):
            follow(made, told.uri, KeyboardInterrupt)
        assert "running" in out.getvalue()
        assert "m" not in {text[-1] for text in _sequences(out.getvalue())}
        screen = Screen(dumb := Terminal(), io.StringIO(), {"TERM": "dumb"})
        object.__setattr__(made.session, "screen", screen)
        with pytest.raises(Exit):
            follow(made, told.uri, KeyboardInterrupt)
        assert "\x1b" not in dumb.getvalue()

    def test_a_thousand_ranks(self, told):
        for rank in range(1000):
            told.live(rank, 1000)
        told.live(7, 1000, ended="failed")
        out, _ = self.drawn(told, columns=100, lines=20)
        assert out.count("\n") <= 20
        assert "2-6, 8-999" in out


def _sequences(text):
    return re.findall("\x1b\\[[0-9;?]*[a-zA-Z]", text) or ["\x1b["]


class TestCommand:
    def test_no_backend_has_to_be_installed(self, told, monkeypatch, capsys):
        monkeypatch.setattr("diloco_cli._session.executor_names", list)
        told.live(0, 1, ended="left")
        assert _app.run(["watch", told.uri]) == 0
        assert "succeeded" in capsys.readouterr().out
        assert _app.run(["watch", "monday"]) == 2
        assert _app.run(["watch", told.uri, "--backend", "eks"]) == 2

    @pytest.mark.parametrize("every", ["0", "-1", "nan", "inf", "0.5", "3601"])
    def test_every_has_limits(self, every):
        assert _app.run(["watch", "./run", "--every", every]) == 2

    @pytest.mark.parametrize(
        ("fault", "said"),
        [(RuntimeError("a bug"), "a bug"), (SystemExit("no licence"), "it raised SystemExit")],
    )
    def test_a_fault_is_not_swallowed(self, told, monkeypatch, fault, said):
        told.live(0)
        world = World("a", {"one": [RUNNING, RUNNING]})

        def observe(handles):
            raise fault

        monkeypatch.setattr(world, "_observe_run", observe)
        with pytest.raises(RuntimeError, match=said):
            follow(command(world), told.uri)
