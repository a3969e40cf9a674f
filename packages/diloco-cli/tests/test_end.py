"""``cancel`` and ``purge`` on backends in memory."""

import io
import json

import pytest
from cli_lab import DONE, RUNNING, Terminal, World, command

from diloco_cli._end import end
from diloco_protocol import InvalidRequestError

SAID = "this ends 2 replicas of run one, on a (zone z1)\n"


def acted(world):
    return sorted(call for call in world.calls if call[0] != "observe")


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
