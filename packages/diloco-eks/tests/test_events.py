"""Which of the cluster's warnings are told, of what, and how often they are asked for."""

from types import SimpleNamespace

import pytest

from diloco_eks._state._events import explained, is_stuck, read_events
from diloco_eks._verbs import _warnings
from diloco_eks._verbs._warnings import Warnings
from diloco_protocol import ForbiddenError, ReplicaState, ReplicaStatus

WAITING = ReplicaStatus(ReplicaState.PENDING, message="it waits")


def event(reason, message="why", minute=0, **values):
    stamp = f"2026-11-21T04:{minute:02}:00Z"
    return {
        "type": "Warning",
        "reason": reason,
        "message": message,
        "lastTimestamp": stamp,
        **values,
    }


def test_the_latest_of_each_reason_and_three_at_most():
    events = [
        event("Old", minute=1),
        event("Mount", "first", minute=2),
        event("Pull", minute=4),
        event("Mount", "then", minute=5),
        event("Hook", minute=3),
    ]
    assert explained(WAITING, read_events(events)).message == (
        "it waits; the cluster says Mount: then; Pull: why; Hook: why"
    )


def test_a_long_message_is_cut():
    told = explained(WAITING, read_events([event("Mount", "x" * 5000)])).message
    assert told.endswith("x…")
    assert len(told) < 700


def test_no_half_of_a_secret_is_left_where_a_message_is_cut():
    for before in range(500, 620, 3):
        text = f"{'x' * before} https://user:hunter2hunter2hunter2@registry.example/image"
        assert "hunter2" not in explained(WAITING, read_events([event("Pull", text)])).message


def test_a_reason_is_cut_and_has_no_secret():
    reason = "Failed https://user:hunter2@registry.example " + "R" * 5000
    told = explained(WAITING, read_events([event(reason)])).message
    assert "Failed https://<redacted>@registry.example RRR" in told
    assert len(told) < 300


def test_of_events_only_what_can_be_told_is_kept():
    """Anybody may write events, and what is known of a pod is remembered."""
    events = [event(f"F{number}" * 1000, "x" * 10_000, number) for number in range(50)]
    kept = read_events([*events, *events])
    assert kept[0].reason.startswith("F49")
    assert sum(len(each.reason) + len(each.message) for each in kept) < 10_000


def test_what_the_status_says_already_is_not_told_again():
    for said in ("no node fits", "x" * 700):
        status = ReplicaStatus(ReplicaState.PENDING, message=f"Unschedulable: {said}")
        assert explained(status, read_events([event("FailedScheduling", said)])) is status


def test_newer_events_count_and_date_themselves_in_a_series():
    series = {"count": 7, "lastObservedTime": "2026-11-21T04:30:00.000000Z"}
    bare = {"lastTimestamp": None, "eventTime": "2026-11-21T04:01:00.000000Z"}
    newer = event("New", **bare, series=series)
    told = explained(WAITING, read_events([event("Old", minute=20), newer])).message
    assert told == "it waits; the cluster says New (7 times): why; Old: why"
    (alone,) = read_events([event("New", **bare)])
    assert (alone.count, alone.last) == (1, 1795233660.0)


@pytest.mark.parametrize(
    ("pod", "values", "stuck"),
    [
        (None, {}, True),
        (100.0, {}, False),
        (50.0, {}, True),
        (None, {"suspended": True}, False),
        (None, {"stopping": True}, False),
        (None, {"state": ReplicaState.RUNNING}, False),
    ],
)
def test_what_is_stuck(pod, values, stuck):
    status = ReplicaStatus(
        values.get("state", ReplicaState.PENDING), stopping=values.get("stopping", False)
    )
    job = SimpleNamespace(created=0.0, suspended=values.get("suspended", False))
    made = None if pod is None else SimpleNamespace(created=pod)
    assert is_stuck(status, made, job, 100.0) is stuck


class Cluster:
    """Says something else each time."""

    def __init__(self):
        self.asked = []

    def list_events(self, namespace, uid):
        self.asked.append(uid)
        return [event("Mount", f"look {len(self.asked)}")]


def test_events_are_asked_for_now_and_then(monkeypatch):
    monkeypatch.setattr(_warnings, "_MOST", 2)
    cluster, now = Cluster(), [0.0]
    warnings = Warnings(cluster, lambda: now[0])

    def told(uid="a"):
        return warnings.explain(WAITING, "default", uid).message.rpartition(": ")[2]

    assert [told(), told()] == ["look 1"] * 2
    now[0] = 14.0
    assert told() == "look 1"
    now[0] = 15.0
    assert told() == "look 2"
    now[0] = 3.0  # somebody has set the clock back
    assert told() == "look 3"
    assert [told("b"), told("c")] == ["look 4", "look 5"]
    assert told("b") == "look 4"
    assert told("a") == "look 6"  # only so many are remembered


def test_the_clock_of_the_launcher_may_be_behind_the_clusters(bench):
    late = bench.executor(clock=lambda: bench.world.now() - 3600)
    run = bench.launch(1, start=False, executor=late)
    run.pod(0).warn("FailedMount", "there is no such volume")
    bench.world.advance(60)
    assert "there is no such volume" in late.describe(run.handles[0]).message


def test_a_right_that_is_given_later_is_used():
    cluster, now = Cluster(), [0.0]
    warnings, allowed = Warnings(cluster, lambda: now[0]), cluster.list_events

    def refuse(namespace, uid):
        raise ForbiddenError("no")

    cluster.list_events = refuse
    assert warnings.explain(WAITING, "default", "a").message == "it waits"
    cluster.list_events, now[0] = allowed, 20.0
    assert warnings.explain(WAITING, "default", "a").message == (
        "it waits; the cluster says Mount: look 1"
    )
    assert warnings.explain(WAITING, "default", "a").message.endswith("look 1")


def test_the_events_of_a_pod_are_for_who_asks_for_one_rank(bench):
    run = bench.launch(20, start=False)
    bench.world.advance(20)
    bench.stand_in.calls.clear()
    run.executor.collect(run.handles, timeout=0)
    assert bench.stand_in.calls.count("list", "events") == 0
    run.describe(3)
    assert bench.stand_in.calls.count("list", "events") == 1
