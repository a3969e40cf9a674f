"""``logs`` on backends in memory."""

import json
import threading

import pytest
from cli_lab import DONE, RUNNING, World, command
from click.exceptions import Exit

from diloco_cli import _logs
from diloco_cli._logs import logs
from diloco_protocol import InvalidRequestError, ReplicaNotFoundError, UnavailableError


def world_of(count=3, **logs_by_rank):
    lines = {rank: [f"line {rank}a", f"line {rank}b"] for rank in range(count)}
    lines.update({int(name[1:]): found for name, found in logs_by_rank.items()})
    return World("a", {"one": [DONE] * count}, logs=lines)


def test_all_ranks_in_turn():
    made = command(world_of(11))
    assert logs(made.session, "one", ranks=["0,10"]) == 0
    assert made.out().splitlines() == [
        " 0 | line 0a",
        " 0 | line 0b",
        "10 | line 10a",
        "10 | line 10b",
    ]


def test_json_is_one_value_per_line():
    made = command(world_of(1, r0=["\x1b[2J\ttoken=hunter2"]), as_json=True)
    assert logs(made.session, "one") == 0
    assert made.out() == '{"rank": 0, "line": "\\u001b[2J\\ttoken=<redacted>"}\n'
    assert json.loads(made.out())["line"] == "\x1b[2J\ttoken=<redacted>"


def test_lines_are_bounded_and_escaped():
    made = command(world_of(1, r0=["[red]\x1b[2J\r" + "x" * 1_000_000, "a\tb"]))
    assert logs(made.session, "one") == 0
    first, second = made.out().splitlines()
    assert first.startswith("0 | [red]\\x1b[2J\\rxxx")
    assert len(first) < 17_000
    assert second == "0 | a\tb"


def test_what_is_asked_of_the_backend(monkeypatch):
    world, asked = world_of(1), []
    monkeypatch.setattr(world, "_logs", lambda handle, query: asked.append(query) or iter([]))
    made = command(world)
    assert logs(made.session, "one", follow=True, since="10m", grep="loss.*") == 0
    (query,) = asked
    assert (query.follow, query.since, query.regex) == (True, 999_400.0, "loss.*")


@pytest.mark.parametrize(
    ("query", "told"),
    [
        ({"grep": "("}, "is not a regular expression"),
        ({"since": "soon"}, "is not a time"),
        ({"ranks": ["3"]}, "the run has the ranks 0-2 here"),
        ({"grep": "(", "follow": True}, "is not a regular expression"),
    ],
)
def test_what_is_refused(query, told):
    with pytest.raises(InvalidRequestError, match=told):
        logs(command(world_of()).session, "one", **query)


@pytest.mark.parametrize("follow", [False, True])
def test_a_log_that_is_gone_does_not_hide_the_others(follow):
    made = command(world_of(3, r1=ReplicaNotFoundError("its pod is gone")))
    assert logs(made.session, "one", follow=follow) == 3
    assert sorted(made.out().splitlines()) == [
        "0 | line 0a", "0 | line 0b", "2 | line 2a", "2 | line 2b",
    ]  # fmt: skip
    assert made.err() == "rank 1: its pod is gone\n"


def test_a_backend_that_cannot_be_reached():
    made = command(world_of(2, r0=ReplicaNotFoundError("gone"), r1=UnavailableError("away")))
    assert logs(made.session, "one") == 4


@pytest.mark.parametrize("follow", [False, True])
def test_a_fault_of_a_backend_is_raised(follow, monkeypatch):
    world = world_of(1)

    def fault(handle, query):
        yield "first"
        raise RuntimeError("a bug")

    monkeypatch.setattr(world, "_logs", fault)
    made = command(world)
    with pytest.raises(RuntimeError, match="a bug"):
        logs(made.session, "one", follow=follow)
    assert made.out() == "0 | first\n"


def test_lines_come_as_they_are_written(monkeypatch):
    """Rank 1 writes only when the line of rank 0 has been printed, and the other way round."""
    world, out = world_of(2), None
    printed = [threading.Event() for _ in range(3)]

    def lines(handle, query):
        assert printed[handle.rank].wait(60)
        yield f"number {handle.rank}"
        if handle.rank == 0:
            assert printed[2].wait(60)
            yield "number 2"

    class Out(type(command(world).session.screen.out)):
        def write(self, text):
            printed[int(text.strip()[-1]) + 1].set() if text.strip()[-1] != "2" else None
            return super().write(text)

    out = Out()
    monkeypatch.setattr(world, "_logs", lines)
    made = command(world, out=out)
    printed[0].set()
    assert logs(made.session, "one", follow=True) == 0
    assert made.out().splitlines() == ["0 | number 0", "1 | number 1", "0 | number 2"]


def test_the_lines_that_wait_to_be_printed_are_bounded(monkeypatch):
    """A rank that writes faster than lines can be printed is not read ahead of without end."""
    monkeypatch.setattr(_logs, "_AHEAD", 5)
    world, read = world_of(1), []

    def lines(handle, query):
        for number in range(1000):
            read.append(number)
            yield str(number)

    monkeypatch.setattr(world, "_logs", lines)
    made = command(world)
    seen = []
    monkeypatch.setattr(_logs, "_print", lambda *_: seen.append(len(read) - len(seen)))
    assert logs(made.session, "one", follow=True) == 0
    assert max(seen) <= 5 + 3


def test_ctrl_c_says_how_to_come_back_to_the_same_lines(monkeypatch):
    world = world_of(2)

    def lines(handle, query):
        raise KeyboardInterrupt

    monkeypatch.setattr(world, "_logs", lines)
    made = command(world)
    with pytest.raises(Exit):
        logs(made.session, "one", ranks=["0", "1"], grep="a b")
    assert made.err().endswith("\n  diloco logs one --rank 0 --rank 1 --grep 'a b' --backend a\n")
    with pytest.raises(Exit):
        logs(made.session, "one", grep="token=hunter2")
    assert made.err().endswith("\n  diloco logs one --grep 'token=<redacted>' --backend a\n")


def test_too_many_ranks_to_follow():
    made = command(World("a", {"one": [RUNNING] * 65}))
    with pytest.raises(
        InvalidRequestError, match="follows at most 64 ranks at once, and these are 65"
    ):
        logs(made.session, "one", follow=True)
    assert logs(command(World("a", {"one": [DONE] * 65})).session, "one") == 0
