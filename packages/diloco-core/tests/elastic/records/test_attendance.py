"""A replica that is lost, leaves or is back is named in the log of the others."""

import logging

import pytest
from keys_lab import sealed_again
from members_lab import members_in
from simulated import Fault, Schedule, SimulatedTraining, flawless, once, simulate

from diloco_core import CorruptedObjectError, Elastic, SyncTimeoutError
from diloco_core._run._records._attendance import Attendance, farewell, read_farewell
from diloco_core._run._records._keys import Delta, Hint
from diloco_core._run._records._records import Commit

WARNING, INFO = logging.WARNING, logging.INFO
SETTINGS = Elastic(2, grace=10.0)


def delta(rank, sync, epoch=1):
    return Delta(sync, rank, epoch, sync - 1, sync, "0" * 16, "f" * 16)


def commit(sync, ranks, epoch=1):
    members = tuple(delta(rank, sync, epoch if rank == 2 else 1) for rank in ranks)
    positions = dict.fromkeys(ranks, sync)
    return Commit(sync, 0, "0" * 16, "1" * 16, members, positions, sync, run="f" * 16)


def hint(sync, rank, epoch, kind):
    return Hint(sync, rank, epoch, kind).key


class Watched:
    """Attendance of three ranks since second 100, as the log of one of them tells it."""

    def __init__(self, read=lambda _: None):
        self.attendance = Attendance(0, read)
        self.attendance.begin({0: 0, 1: 0, 2: 0}, 100.0)

    def sync(self, number, ranks, now, epoch=1, keys=()):
        """Return what is said of a sync that names these ranks, rank 2 with this epoch."""
        return self.attendance.committed(commit(number, ranks, epoch), lambda: [*keys], now)


ALL, PAIR = [0, 1, 2], [0, 1]
SILENT = (
    "sync 2 goes on without rank 2, which has not contributed in time (last heard from 75.0 s ago)"
)
STORIES = {  # the number of a sync, whom it names, when, and what is said of it then
    "silent, and back": [
        (1, ALL, 110.0, {}, ()),
        (2, PAIR, 185.0, {}, (WARNING, SILENT)),
        (3, PAIR, 200.0, {}, ()),
        (4, ALL, 210.0, {"epoch": 2}, (INFO, "takes part in sync 4, as incarnation 2")),
    ],
    "started again before it was missed": [
        (1, ALL, 110.0, {}, ()),
        (2, ALL, 120.0, {"epoch": 2}, (INFO, "rank 2 is back: it takes part in sync 2, as inc")),
        (3, ALL, 130.0, {"epoch": 2}, ()),
    ],
    "never came, and joins": [
        (1, PAIR, 160.5, {}, (WARNING, "not heard from since this replica began, 60.5 s ago")),
        (2, ALL, 170.0, {}, (INFO, "rank 2 has joined: it takes part in sync 2")),
    ],
    "each incarnation is warned of once": [
        (1, ALL, 110.0, {}, ()),
        (2, PAIR, 120.0, {}, (WARNING, "")),
        (3, ALL, 130.0, {}, (INFO, "")),
        (4, PAIR, 140.0, {}, (INFO, "")),
        (5, ALL, 150.0, {"epoch": 2}, (INFO, "")),
        (6, PAIR, 160.0, {"epoch": 2}, (WARNING, "")),
    ],
    "an earlier incarnation left": [
        (1, ALL, 110.0, {"epoch": 2}, ()),
        (2, PAIR, 120.0, {"epoch": 2, "keys": [hint(2, 2, 1, "leave")]}, (WARNING, "")),
    ],
    "late, and lost": [
        (1, ALL, 110.0, {}, ()),
        (2, PAIR, 120.0, {"keys": [delta(2, 2).key]}, ()),
        (3, PAIR, 150.0, {}, (WARNING, "last heard from 30.0 s ago")),
    ],
}


@pytest.mark.parametrize("story", STORIES.values(), ids=STORIES)
def test_what_is_said_of_rank_2(story):
    watched = Watched()
    for number, ranks, now, options, expected in story:
        messages = watched.sync(number, ranks, now, **options)
        assert [level for level, _ in messages] == [*expected[:1]]
        assert all(expected[1] in text for _, text in messages)


@pytest.mark.parametrize("error", [None, ValueError("no more\ndata")])
def test_how_somebody_has_ended_is_said_once(error):
    keys = [hint(sync, 2, 1, "leave") for sync in (2, 3)]
    watched = Watched({key: farewell(key, error) for key in keys}.get)
    watched.sync(1, [0, 1, 2], 110.0)
    messages = watched.sync(2, [0, 1], 120.0, keys=keys[:1])
    watched.attendance.look(keys[1:], 125.0)
    messages += watched.sync(3, [0, 1], 130.0, keys=keys[1:])
    failed = "rank 2 has failed: sync 2 goes on without it. Its error: ValueError: no more data"
    left = "rank 2 has left: sync 2 goes on without it"
    assert messages == [(WARNING, failed) if error else (INFO, left)]
    ended = "failed: rank 2 (ValueError: no more data)" if error else "left: rank 2"
    assert watched.attendance.describe([2], {2: 1}, [], 130.0) == ended


@pytest.mark.parametrize("harm", ["gone", "other key", "text", "too large"])
def test_a_farewell_that_cannot_be_read_stops_nobody(harm):
    def read(key):
        if harm == "too large":
            raise CorruptedObjectError(key)
        return {"gone": None, "other key": farewell("other", None), "text": b"\n"}[harm]

    left = "rank 2 has left or failed: sync 1 goes on without it"
    assert Watched(read).sync(1, [0, 1], 120.0, keys=[hint(2, 2, 1, "leave")]) == [(INFO, left)]


def test_who_announced_itself_and_never_contributed_is_lost():
    watched = Watched()
    for now in (130.0, 150.0):
        watched.attendance.look([hint(1, 7, 1, "join")], now)
    ((_, text),) = watched.sync(1, [0, 1, 2], 190.0)
    assert "without rank 7, which has not contributed in time (last heard from 60.0 s ago)" in text


def test_nobody_is_accused_without_need():
    for ranks in ([1], [0, 1, 2]):
        news = Watched().attendance.committed(commit(1, ranks), lambda: pytest.fail("asked"), 160.0)
        assert news == []


def test_it_says_of_every_rank_what_became_of_it():
    watched = Watched()
    hints = [hint(1, 3, 2, "leave"), hint(1, 4, 1, "leave"), hint(1, 5, 1, "join")]
    watched.attendance.look(hints, 110.0)
    incarnations = {1: 1, 3: 2, 4: 2, 5: 1, 6: 1}
    assert watched.attendance.describe([1, 2, 3, 4, 5, 6, 7], incarnations, [6], 150.0) == (
        "contributed from another state: rank 6; left or failed: rank 3; never started: rank "
        "2, 7; silent: rank 1 (not heard from since this replica began, 50.0 s ago), 4 (last "
        "heard from 40.0 s ago), 5 (last heard from 40.0 s ago)"
    )


def test_no_more_of_a_reason_is_shown_than_is_ever_written():
    key = hint(5, 1, 1, "leave")
    record = sealed_again(key, farewell(key, ValueError("x")), reason="x" * 10**6)
    assert read_farewell(key, lambda _: record).reason == "x" * 1000


def said_in(caplog, part):
    logged = [(each.levelno, each.getMessage()) for each in caplog.records]
    return [each for each in logged if part in each[1]]


@pytest.mark.parametrize("topology", ["sharded", "gather"])
def test_a_run_tells_of_a_replica_that_dies_and_comes_back(topology, caplog):
    caplog.set_level(logging.INFO, "diloco_core")
    training = SimulatedTraining(syncs=12, sizes=(40,))
    schedule = Schedule(3, 1, faults=[Fault(2, 1, 59, "kill before")], restart_after=12.0)
    outcome = flawless(training, schedule, Elastic(2, grace=10.0, topology=topology))
    members = members_in(outcome.store)
    assert members[0] == members[-1] == [0, 1, 2]
    waits = [report.wait_seconds for report in training.reports[0, 1]]
    assert max(waits) < 10 + 1
    assert sum(wait > 9 for wait in waits) <= 2, "nobody waits for the dead one again and again"
    for rank in (0, 1):
        lost = said_in(caplog, "goes on without rank 2, which")
        ((level, text),) = [each for each in lost if each[1].startswith(f"rank {rank}: ")]
        assert level == WARNING
        assert 10.0 < float(text.split("last heard from ")[1].split()[0]) < 15.0
        back = said_in(caplog, f"rank {rank}: rank 2 is back")
        assert [level for level, _ in back] == [INFO]
    assert "without rank 0" not in caplog.text
    assert "without rank 1" not in caplog.text


def test_without_trouble_nothing_is_told(caplog):
    caplog.set_level(logging.INFO, "diloco_core")
    simulate(SimulatedTraining(syncs=4, sizes=(40,)), Schedule(3), SETTINGS)
    lines = ("as incarnation 1", ": outer step ", ": done, after ")
    assert [text for text in caplog.messages if not any(each in text for each in lines)] == []


def test_a_replica_that_fails_is_named_with_its_error(caplog):
    training = SimulatedTraining(syncs=9, sizes=(40,))

    def train(node):
        begin = node.exchange.begin

        def fail(job, **options):
            if node.rank == 1 and node.exchange.position.sync == 3:
                raise RuntimeError("no space for s3://AKIA:hunter2@bucket/run")
            return begin(job, **options)

        node.exchange.begin = fail
        try:
            return training(node)
        except RuntimeError as error:
            node.exchange.abort(error)
            raise

    caplog.set_level(logging.INFO, "diloco_core")
    once(train, Schedule(3), SETTINGS)
    logged = said_in(caplog, "rank 1 has")
    assert [level for level, _ in logged] == [WARNING] * 2, logged
    reason = "sync 4 goes on without it. Its error: RuntimeError: no space for s3://"
    assert all(reason in text for _, text in logged)
    assert "hunter2" not in caplog.text


def test_the_log_tells_who_is_waited_for(caplog):
    """After a grace, and once a minute until a replica gives up, whose error says the same."""
    training, schedule = SimulatedTraining(3, (40,)), Schedule(3, starts=[0.0, 0.0, 1e6])
    options = {"sync_timeout": 150.0, "limit": 1000.0}
    outcome = once(training, schedule, Elastic(3, grace=10.0), **options)
    status = "Contributed: rank 0, 1; never started: rank 2"
    for rank in (0, 1):
        notices = [text for text in caplog.messages if text.startswith(f"rank {rank}: sync")]
        waited = [int(text.split("(min_replicas) for ")[1].split()[0]) for text in notices]
        assert [seconds // 10 for seconds in waited] == [1, 7, 13], notices
        assert "sync 1 of fragment 0 has been waiting for contributions from 3 repl" in notices[0]
        ending = f"s. This replica gives up after 150 s (sync_timeout). {status}"
        assert notices[0].endswith(ending)
        assert isinstance(outcome.results[rank, 1], SyncTimeoutError)
        assert status in str(outcome.results[rank, 1])
