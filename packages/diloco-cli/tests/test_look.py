"""``ls`` and ``status`` on backends in memory."""

import json

import pytest
from cli_lab import DONE, FAILED, NOW, RUNNING, Broken, Terminal, World, command

from diloco_cli._runs import ls, status
from diloco_protocol import (
    AuthError,
    InvalidRequestError,
    ReplicaHandle,
    ReplicaState,
    ReplicaStatus,
    SpecVersionError,
    UnavailableError,
)

HOSTILE = ReplicaStatus(
    ReplicaState.FAILED,
    message="[bold]\x1b[2J\nnext line\u202e password=hunter2 " + "x" * 100_000,
    native="\x1b]0;title\x07",
    url="https://user:hunter2@host/\x1b",
    signal="SIG\x1bKILL",
)


class TestLs:
    def test_runs_of_all_backends_newest_first(self):
        made = command(World("a", {"old": [DONE, FAILED], "new": [RUNNING]}), World("b", {}))
        assert ls(made.session, 20) == 0
        assert made.out().splitlines() == [
            "RUN  STATE                  BACKEND  REPLICAS  STARTED",
            "new  1 running              a               1  1m 30s ago",
            "old  1 succeeded, 1 failed  a               2  1m 30s ago",
        ]
        assert made.err() == ""

    def test_json(self):
        made = command(World("a", {"one": [RUNNING, None]}), as_json=True)
        assert ls(made.session, 20) == 0
        assert json.loads(made.out()) == {
            "version": 1,
            "runs": [
                {
                    "backend": "a",
                    "run_id": "one",
                    "replicas": 2,
                    "world_size": 2,
                    "states": {"running": 1, "unknown": 1},
                    "started_at": NOW - 90,
                    "problem": None,
                }
            ],
            "backends": [{"name": "a", "asked": True, "problem": None}],
        }

    def test_no_runs(self):
        made = command(World("a", {}))
        assert ls(made.session, 20) == 0
        assert made.out() == ""

    def test_a_limit(self):
        world = World("a", {f"run-{number}": [RUNNING] for number in range(5)})
        made = command(world)
        assert ls(made.session, 2) == 0
        assert [line.split()[0] for line in made.out().splitlines()] == ["RUN", "run-4", "run-3"]
        assert made.err() == "a has 3 more, which are older: --limit 5\n"
        assert len(world.calls) == 2, "the others are not looked at"

    def test_a_backend_that_cannot_be_reached(self):
        made = command(World("a", {"one": [RUNNING]}), Broken("b", AuthError("no \x1bcredentials")))
        assert ls(made.session, 20) == 4
        assert "one" in made.out()
        assert made.err() == "b could not be asked: no \\x1bcredentials\n"

    def test_no_backend_can_be_reached(self):
        broken = Broken("b", AuthError("no credentials"))
        with pytest.raises(UnavailableError, match="b could not be asked: no credentials"):
            ls(command(broken).session, 20)
        with pytest.raises(AuthError):
            ls(command(World("a", {}), broken, backend="b").session, 20)

    @pytest.mark.parametrize("kind", [InvalidRequestError, SpecVersionError])
    def test_a_run_that_cannot_be_read(self, kind):
        class Damaged(World):
            def _attach(self, run_id):
                if run_id == "one":
                    raise kind("its record is damaged")
                return super()._attach(run_id)

        made = command(Damaged("a", {"one": [RUNNING], "two": [RUNNING]}))
        assert ls(made.session, 20) == 4
        rows = [line.split() for line in made.out().splitlines()[1:]]
        assert [row[0] for row in rows] == ["two", "one"]
        assert rows[1][1:3] == ["unknown", "a"]
        assert made.err() == "one on a: its record is damaged\n"

    def test_a_run_that_has_just_gone(self):
        class Gone(World):
            def _list_runs(self):
                return ["gone", "one"]

        made = command(Gone("a", {"one": [RUNNING]}))
        assert ls(made.session, 20) == 0
        assert "gone" not in made.out()

    def test_40_columns(self, monkeypatch):
        monkeypatch.setenv("COLUMNS", "40")
        name = "run-20260314-150926-and-more-up-to-48-characters"
        made = command(World("a", {name: [DONE, FAILED]}), out=Terminal())
        ls(made.session, 20)
        assert made.out().splitlines() == [name, "  1 succeeded, 1 failed"]


class TestStatus:
    def test_every_rank(self):
        made = command(World("a", {"one": [RUNNING, FAILED, DONE]}))
        assert status(made.session, "one") == 0
        assert made.out().splitlines() == [
            "one: 1 running, 1 succeeded, 1 failed, on a (zone z1)",
            "RANK  STATE      REASON     ATTEMPT  EXIT  STARTED     TOOK",
            "   0  running                     1        1m 30s ago  1m 30s",
            "   1  failed     error            1  1                 ",
            "   2  succeeded  completed        1  0     1m 30s ago  1m",
            "rank 1: ValueError: no data",
        ]

    def test_json(self):
        made = command(World("a", {"one": [DONE]}), as_json=True)
        assert status(made.session, "one") == 0
        assert json.loads(made.out()) == {
            "version": 1,
            "run_id": "one",
            "backend": "a",
            "place": {"pod": "0", "zone": "z1"},
            "world_size": 1,
            "states": {"succeeded": 1},
            "replicas": [
                {
                    "rank": 0,
                    "state": "succeeded",
                    "reason": "completed",
                    "stopping": False,
                    "attempt": 1,
                    "exit_code": 0,
                    "signal": None,
                    "message": "",
                    "started_at": NOW - 90,
                    "finished_at": NOW - 30,
                    "url": None,
                    "native": "",
                }
            ],
        }

    def test_a_replica_without_a_record_is_unknown(self):
        made = command(World("a", {"one": [DONE, None]}))
        assert status(made.session, "one") == 3
        assert "rank 1: there is no record of it" in made.out()

    def test_a_thousand_ranks_with_one_message(self):
        world = World("a", {"one": [FAILED] * 1000})
        made = command(world)
        assert status(made.session, "one") == 1
        assert made.out().splitlines()[-1] == "ranks 0-999: ValueError: no data"
        assert world.calls == [("observe", 1000)], "one look"

    @pytest.mark.parametrize("as_json", [False, True])
    def test_what_a_backend_says_is_bounded_and_escaped(self, as_json):
        made = command(World("a", {"one": [HOSTILE]}), as_json=as_json)
        assert status(made.session, "one") == 1
        printed = made.out() + made.err()
        assert not set(printed) & {"\x1b", "\x07", "\u202e"}
        assert "hunter2" not in printed
        assert "[bold]" in printed
        assert len(printed) < 3000

    @pytest.mark.parametrize("as_json", [False, True])
    def test_a_place_is_bounded_and_escaped_too(self, as_json, monkeypatch):
        world = World("a", {"one": [DONE]})
        metadata = {"api_token": "hunter2", "zone\x1b": "\x1b[2J" + "z" * 10_000}
        handle = ReplicaHandle(0, "a", metadata, run_id="one")
        monkeypatch.setattr(world, "handles", lambda run_id: [handle])
        made = command(world, as_json=as_json)
        assert status(made.session, "one") == 0
        assert "hunter2" not in made.out()
        assert "\x1b" not in made.out()
        assert len(made.out()) < 2000

    def test_markup_of_a_backend_is_text_on_a_terminal(self):
        made = command(World("a", {"one": [HOSTILE]}), out=Terminal())
        status(made.session, "one")
        assert "rank 0: [bold]\\x1b[2J\\nnext line" in made.out()
        assert "\x1b[31mfailed" in made.out(), "colours are ours"

    def test_stopping(self):
        stopping = ReplicaStatus(ReplicaState.RUNNING, stopping=True)
        made = command(World("a", {"one": [stopping]}))
        assert status(made.session, "one") == 0
        assert "running, stopping" in made.out()
