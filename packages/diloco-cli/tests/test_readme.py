"""What the README shows is what the command prints."""

import dataclasses
import doctest
import json
import re
import shlex
from pathlib import Path

import pytest

from diloco_cli._report._summary import read_prices
from diloco_cli._told import run_facts
from diloco_cli._view import View, Word, rank_facts, screenful, see
from diloco_protocol import Reason, ReplicaState, ReplicaStatus
from diloco_protocol.telemetry import HistoryKey, Live, SyncLine, Told, live_key

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
DATA = {"setup", "metrics", "place", "result", "states"}  # whose names depend on the run
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE

pytestmark = pytest.mark.processes


@pytest.fixture
def monday(laptop):
    """A machine on which the run of the README has ended."""
    laptop.launch("steps", {"count": 2, "fails": 1}, "monday", n=2, wait=True)
    live = Live(
        run="monday", rank=0, world_size=2, epoch=1, host="node-7", time=1.8e9,
        step=250, sync=2, phase="waiting", waits_for=[1], missing=1, seconds_per_step=0.5,
        training_share=0.93, metrics={"loss": 2.31}, writes=310, reads=120,
    )  # fmt: skip
    alone = dataclasses.replace(live, world_size=1, waits_for=(), missing=0, ended="left")
    line = SyncLine(
        number=2, time=1.8e9 - 10, sync=2, fragment="0", committed=True, members=2, bytes_sent=1024,
        bytes_received=2048, wait_seconds=4.0, exchange_seconds=1.0, compute_seconds=90.0,
        exposed_seconds=5.0, total_inner_steps=200, contribution="counted", metrics={"loss": 2.31},
    )  # fmt: skip
    for name, key, record in (
        ("told", live_key(0), live),
        ("told", HistoryKey(0, 1, 2, 2).key, line),
        ("ended", live_key(0), alone),
    ):
        path = laptop.folder / name / key
        path.parent.mkdir(parents=True)
        path.write_bytes(record.to_bytes())
    return laptop


def test_what_the_verbs_print(monday):
    shown = re.findall(r"```sh\ndiloco ([^\n]*)\n```\n\n```text\n(.*?)```", README, re.DOTALL)
    assert len(shown) == 8
    for line, text in shown:
        backend = None if "./told" in line else "local_process"
        if line.startswith("cancel"):
            monday.launch("waits", {"folder": str(monday.folder)}, "tuesday", n=2)
        printed = monday.diloco(*shlex.split(line), backend=backend).stdout
        assert doctest.OutputChecker().check_output(text, printed, FLAGS), (line, printed)


def test_the_table_that_watch_draws():
    """It is made here from what four replicas tell, since they would take minutes."""
    now = 1.8e9

    def lives(sync, sent, more):
        common = {
            "run": "run-1", "world_size": 4, "epoch": 1, "time": now, "step": 60 * sync,
            "sync": sync, "phase": "waiting", "host": "node-7", "place": "us-east-1", "attempt": 1,
            "seconds_per_step": 0.5, "training_share": 0.93, "bytes_sent": sent,
            "metrics": {"loss": 2.31},
        }  # fmt: skip
        told = {rank: Live(**{**common, "rank": rank, **more(rank)}) for rank in range(4)}
        return run_facts("s3://bucket/run-1", Told(told, {}, 0, 0, 0))["replicas"]

    waits = {"waits_for": (3,), "missing": 1}
    seen = see({}, lives(10, 0, lambda rank: {}), now - 300, now - 305)
    later = lives(11, 41_200_000, lambda rank: {"phase": "training", "time": now - 64})
    seen = see(seen, later, now - 64, now - 69)
    last = lives(12, 82_400_000, lambda rank: {"phase": "training"} if rank == 2 else waits)
    seen = see(seen, last[:3], now - 4, now - 9)
    running = ReplicaStatus(ReplicaState.RUNNING)
    pending = ReplicaStatus(ReplicaState.PENDING, attempt=2, reason=Reason.STARTING)
    words = [Word(running)] * 3 + [Word(pending)]
    rows = [rank_facts(rank, seen[rank], words[rank], now, 90.0) for rank in range(4)]
    syncs = [
        SyncLine(
            number=number, time=now - 41 + 180 * (number - 12), sync=number, fragment="0",
            committed=True, members=4, bytes_sent=0, bytes_received=0, wait_seconds=0.0,
            exchange_seconds=0.0,
            metrics={"loss": 2.31 + 0.002 * (12 - number) ** 2},
        )
        for number in range(1, 13)
    ]  # fmt: skip
    view = View("s3://bucket/run-1", rows, [(1, line) for line in syncs], 0, (), now)
    drawn = ["".join(cell.text for cell in line) for line in screenful(view, 86, 24)]
    shown = re.search(r"```text\n(s3://bucket/run-1: 4 .*?)```", README, re.DOTALL)
    assert shown[1] == "\n".join(drawn) + "\n"


def names(value):
    """The names in a JSON value, with those of the first item of each list; states are data."""
    if isinstance(value, dict):
        inner = {name: names(each) for name, each in value.items()}
        return {**inner, **dict.fromkeys(DATA & inner.keys(), "data")}
    return [names(value[0])] if isinstance(value, list) and value else "value"


def examples():
    """The JSON of each verb; the name of the verb begins the paragraph before it."""
    found, head = {}, ""
    section = README.partition("\n## JSON\n")[2]
    for match in re.finditer(
        r"^`(\w+(?: URI)?)`|^```json\n(.*?)^```", section, re.MULTILINE | re.DOTALL
    ):
        head = match[1] or head
        if match[2]:
            found[head] = json.loads(match[2])
    return found


def test_the_json_of_the_verbs(monday):
    shown = examples()
    assert set(shown) == {
        "ls",
        "status",
        "status URI",
        "report",
        "wait",
        "watch",
        "logs",
        "cancel",
        "check",
        "export",
        "plan",
    }
    for verb, arguments in (
        ("ls", []),
        ("status", ["monday"]),
        ("status URI", ["./told"]),
        ("report", ["./told"]),
        ("wait", ["monday"]),
        ("logs", ["monday"]),
        ("watch", ["./ended"]),
        ("cancel", ["monday", "--yes"]),
        ("check", []),
        ("plan", ["7e9", "16", "--period=600"]),
    ):
        backend = None if verb in {"plan", "report", "status URI"} else "local_process"
        printed = monday.diloco(verb.split()[0], *arguments, "--json", backend=backend).stdout
        real = json.loads(printed.splitlines()[0] if verb in {"logs", "watch"} else printed)
        assert names(real) == names(shown[verb]), verb


def test_the_price_table_is_one():
    table = re.search(r"^```json\n(.*?\"date\".*?)^```", README, re.MULTILINE | re.DOTALL)
    assert read_prices(table[1].encode())["replica_hour"]["*"] == 0.0


def test_every_exit_code_is_there():
    from diloco_cli import _app, _facts, _session

    codes = {*_facts.CODES, _session.INTERRUPTED, _app._PIPE_CLOSED}
    assert set(map(int, re.findall(r"^\| (\d+) \|", README, re.MULTILINE))) == codes


def test_every_file_is_there():
    source = Path(__file__).parents[1] / "src/diloco_cli"
    named = set(re.findall(r"`(_\w+\.py)`", README))
    assert named == {path.name for path in source.rglob("_[a-z]*.py")}, (
        "the last section of the README"
    )
