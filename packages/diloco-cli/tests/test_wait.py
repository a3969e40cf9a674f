"""``wait`` on a backend in memory."""

import json

import pytest
from cli_lab import DONE, FAILED, RUNNING, World, command
from click.exceptions import Exit

from diloco_cli._runs import wait
from diloco_protocol import Backoff, ResultLostError


class Turns(World):
    """A world in which every pause of ``collect`` moves a run on."""

    def __init__(self, turns, **options):
        self.turns = iter(turns)
        super().__init__("a", {"one": next(self.turns)}, **options)
        self._backoff = Backoff(sleep=self.pause)

    def pause(self, seconds):
        statuses = next(self.turns)
        if isinstance(statuses, type):
            raise statuses
        self.runs["one"] = statuses


def test_it_waits_and_shows_the_ends():
    world = Turns([[RUNNING, RUNNING], [RUNNING, RUNNING], [DONE, RUNNING], [DONE, FAILED]])
    world.results = {0: {"loss": 0.5, "password": "hunter2"}}
    made = command(world)
    assert wait(made.session, "one") == 1
    assert made.err().splitlines() == [
        "one: 2 running",
        "one: 1 running, 1 succeeded",
        "one: 1 succeeded, 1 failed",
    ]
    assert made.out().splitlines() == [
        "one: 1 succeeded, 1 failed, on a (zone z1)",
        "RANK  STATE      REASON     ATTEMPT  EXIT",
        "   0  succeeded  completed        1  0",
        "   1  failed     error            1  1",
        "rank 0: result {'loss': 0.5, 'password': '<redacted>'}",
        "rank 1: ValueError: no data",
    ]


def test_json():
    made = command(Turns([[DONE]], results={0: {"a": [1], "token": "hunter2"}}), as_json=True)
    assert wait(made.session, "one") == 0
    (replica,) = json.loads(made.out())["replicas"]
    assert replica == {
        "rank": 0,
        "state": "succeeded",
        "reason": "completed",
        "attempt": 1,
        "exit_code": 0,
        "signal": None,
        "error": None,
        "result": {"a": [1], "token": "<redacted>"},
    }


def test_a_long_result_is_cut_for_people_alone():
    made = command(Turns([[DONE]], results={0: "x" * 10_000}))
    wait(made.session, "one")
    assert len(made.out()) < 500


def test_lost_replicas_are_unknown():
    made = command(Turns([[DONE, None]]))
    assert wait(made.session, "one") == 3
    assert "unknown" in made.out()
    assert "1 succeeded, 1 unknown" in made.err()


def test_a_lost_result(monkeypatch):
    world = Turns([[DONE]])

    def gone(handle):
        raise ResultLostError("the disk is gone")

    monkeypatch.setattr(world, "_result", gone)
    made = command(world)
    assert wait(made.session, "one") == 3
    assert "rank 0: the result is lost: the disk is gone" in made.out()


def test_ctrl_c_leaves_the_run_alone_and_says_how_to_come_back():
    world = Turns([[RUNNING], KeyboardInterrupt])
    made = command(world)
    with pytest.raises(Exit):
        wait(made.session, "one")
    assert made.err().endswith(
        "run one is left as it is. Come back with:\n  diloco wait one --backend a\n"
    )
    assert made.out() == ""
    assert not [call for call in world.calls if call[0] == "stop"]
