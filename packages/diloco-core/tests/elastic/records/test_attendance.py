"""A replica that is lost, leaves or is back is named in the log of the others."""

import logging

import pytest
from simulated import Fault, Schedule, SimulatedTraining, simulate, violations

from diloco_core import CorruptedObjectError, Elastic, SyncTimeoutError
from diloco_core._run._records._attendance import Attendance
from diloco_core._run._records._farewell import farewell, read_farewell
from diloco_core._run._records._keys import Delta, Hint
from diloco_core._run._records._records import Commit
from diloco_core._wire._sealed import seal


def _delta(rank, sync, epoch=1):
    return Delta(sync, rank, epoch, sync - 1, sync, "0" * 16, "f" * 16)


def _commit(sync, ranks, epoch=1):
    members = tuple(_delta(rank, sync, epoch) for rank in ranks)
    return Commit(
        sync, 0, "0" * 16, "1" * 16, members, dict.fromkeys(ranks, sync), sync, run="f" * 16
    )


class TestAttendance:
    def _begun(self):
        attendance = Attendance()
        attendance.begin(0, {0: 0, 1: 0, 2: 0}, 100.0)
        return attendance

    def test_who_is_silent_is_named_once_with_how_long(self):
        attendance = self._begun()
        assert attendance.committed(_commit(1, [0, 1, 2]), list, 110.0) == []
        ((level, text),) = attendance.committed(_commit(2, [0, 1]), list, 185.0)
        assert level == logging.WARNING
        assert (
            text == "sync 2 goes on without rank 2, which has not contributed in time "
            "(last heard from 75.0 s ago)"
        )
        assert attendance.committed(_commit(3, [0, 1]), list, 200.0) == []
        assert attendance.committed(_commit(4, [0, 1, 2], 2), list, 210.0) == [
            (logging.INFO, "rank 2 is back: it takes part in sync 4")
        ]

    def test_who_never_came(self):
        ((level, text),) = self._begun().committed(_commit(1, [0, 1]), list, 160.5)
        assert level == logging.WARNING
        assert "not heard from since this replica began, 60.5 s ago" in text

    def test_the_same_incarnation_is_warned_of_once(self):
        attendance, levels = self._begun(), []
        for sync in range(1, 8):
            ranks = [0, 1, 2] if sync % 2 else [0, 1]
            levels += [
                level for level, _ in attendance.committed(_commit(sync, ranks), list, 10.0 * sync)
            ]
        assert levels == [logging.WARNING] + [logging.INFO] * 5
        assert attendance.committed(_commit(9, [0, 1, 2], 2), list, 90.0) == []
        assert attendance.committed(_commit(10, [0, 1], 2), list, 100.0)[0][0] == logging.WARNING

    def test_who_leaves_is_not_lost(self):
        attendance = self._begun()
        attendance.committed(_commit(1, [0, 1, 2]), list, 110.0)
        leaving = [Hint(2, 2, 1, "leave").key]
        assert attendance.committed(_commit(2, [0, 1]), lambda: leaving, 120.0) == [
            (logging.INFO, "rank 2 has left or failed: sync 2 goes on without it")
        ]

    @pytest.mark.parametrize("error", [None, ValueError("no more\ndata")])
    def test_how_somebody_has_ended_is_said_once(self, error):
        ends = {
            key: farewell(key, error) for key in (Hint(sync, 2, 1, "leave").key for sync in (2, 3))
        }
        attendance = Attendance()
        attendance.begin(0, {0: 0, 1: 0, 2: 0}, 100.0, ends.get)
        attendance.committed(_commit(1, [0, 1, 2]), list, 110.0)
        said = attendance.committed(_commit(2, [0, 1]), lambda: [Hint(2, 2, 1, "leave").key], 120.0)
        attendance.look([Hint(3, 2, 1, "leave").key], 125.0)
        said += attendance.committed(
            _commit(3, [0, 1]), lambda: [Hint(3, 2, 1, "leave").key], 130.0
        )
        assert said == [
            (
                logging.WARNING,
                "rank 2 has failed: sync 2 goes on without it. Its error: ValueError: no more data",
            )
            if error
            else (logging.INFO, "rank 2 has left: sync 2 goes on without it")
        ]
        ended = "failed: rank 2 (ValueError: no more data)" if error else "left: rank 2"
        assert attendance.describe([2], {2: 1}, [], 130.0) == ended

    @pytest.mark.parametrize("harm", ["gone", "other key", "text", "too large"])
    def test_a_farewell_that_cannot_be_read_stops_nobody(self, harm):
        key = Hint(2, 2, 1, "leave").key

        def read(key):
            if harm == "too large":
                raise CorruptedObjectError(key)
            return {"gone": None, "other key": farewell("other", None), "text": b"\n"}[harm]

        attendance = Attendance()
        attendance.begin(0, {0: 0, 1: 0, 2: 0}, 100.0, read)
        assert attendance.committed(_commit(1, [0, 1]), lambda: [key], 120.0) == [
            (logging.INFO, "rank 2 has left or failed: sync 1 goes on without it")
        ]

    def test_who_comes_for_the_first_time_is_not_back(self):
        attendance = self._begun()
        attendance.committed(_commit(1, [0, 1]), list, 160.5)
        assert attendance.committed(_commit(2, [0, 1, 2]), list, 170.0) == [
            (logging.INFO, "rank 2 has joined: it takes part in sync 2")
        ]

    def test_the_farewell_of_an_earlier_incarnation_does_not_count(self):
        attendance = self._begun()
        attendance.committed(_commit(1, [0, 1, 2], 2), list, 110.0)
        ((level, _),) = attendance.committed(
            _commit(2, [0, 1], 2), lambda: [Hint(2, 2, 1, "leave").key], 120.0
        )
        assert level == logging.WARNING

    def test_who_is_only_late_is_not_lost(self):
        attendance = self._begun()
        attendance.committed(_commit(1, [0, 1, 2]), list, 110.0)
        assert attendance.committed(_commit(2, [0, 1]), lambda: [_delta(2, 2).key], 120.0) == []
        ((level, text),) = attendance.committed(_commit(3, [0, 1]), list, 150.0)
        assert level == logging.WARNING
        assert "last heard from 30.0 s ago" in text

    def test_who_announced_itself_and_never_contributed_is_lost(self):
        attendance = self._begun()
        attendance.look([Hint(1, 7, 1, "join").key], 130.0)
        attendance.look([Hint(1, 7, 1, "join").key], 150.0)
        said = attendance.committed(_commit(1, [0, 1, 2]), list, 190.0)
        assert [text for _, text in said] == [
            "sync 1 goes on without rank 7, which has not contributed in time (last heard from "
            "60.0 s ago)"
        ]

    def test_who_was_not_there_itself_accuses_nobody(self):
        assert self._begun().committed(_commit(1, [1]), lambda: pytest.fail("asked"), 160.0) == []

    def test_without_anybody_missing_nothing_is_listed(self):
        assert (
            self._begun().committed(_commit(1, [0, 1, 2]), lambda: pytest.fail("asked"), 160.0)
            == []
        )

    def test_it_says_of_every_rank_what_became_of_it(self):
        attendance = self._begun()
        attendance.look(
            [Hint(1, 3, 2, "leave").key, Hint(1, 4, 1, "leave").key, Hint(1, 5, 1, "join").key],
            110.0,
        )
        incarnations = {1: 1, 3: 2, 4: 2, 5: 1, 6: 1}
        assert attendance.describe([1, 2, 3, 4, 5, 6, 7], incarnations, [6], 150.0) == (
            "contributed from another state: rank 6; left or failed: rank 3; never started: rank "
            "2, 7; silent: rank 1 (not heard from since this replica began, 50.0 s ago), 4 (last "
            "heard from 40.0 s ago), 5 (last heard from 40.0 s ago)"
        )


@pytest.mark.parametrize("topology", ["sharded", "gather"])
def test_a_run_tells_of_a_replica_that_dies_and_comes_back(topology, caplog):
    training = SimulatedTraining(syncs=12, sizes=(40,))
    fault = Fault(2, 1, 59, "kill before")
    settings = Elastic(2, grace=10.0, topology=topology)
    with caplog.at_level(logging.INFO, "diloco_core"):
        outcome = simulate(
            training, Schedule(3, seed=1, faults=[fault], restart_after=12.0), settings
        )
    assert violations(outcome, training) == []
    told = [(record.levelno, record.getMessage()) for record in caplog.records]
    for rank in (0, 1):
        lost = [
            (level, text)
            for level, text in told
            if text.startswith(f"rank {rank}: ") and "goes on without rank 2, which" in text
        ]
        assert [level for level, _ in lost] == [logging.WARNING]
        assert 10.0 < float(lost[0][1].split("last heard from ")[1].split()[0]) < 15.0
        assert [
            level for level, text in told if text.startswith(f"rank {rank}: rank 2 is back")
        ] == [logging.INFO]
    assert not [text for _, text in told if "without rank 0" in text or "without rank 1" in text]


def test_without_trouble_nothing_is_told(caplog):
    with caplog.at_level(logging.INFO, "diloco_core"):
        simulate(SimulatedTraining(syncs=4, sizes=(40,)), Schedule(3), Elastic(2, grace=10.0))
    assert [
        record.getMessage()
        for record in caplog.records
        if "as incarnation 1" not in record.getMessage()
    ] == []


def test_below_the_quorum_everybody_is_told_apart():
    """Rank 1 leaves after two syncs, rank 2 dies, and rank 3 never starts."""
    short, long = SimulatedTraining(syncs=2, sizes=(40,)), SimulatedTraining(syncs=9, sizes=(40,))
    outcome = simulate(
        lambda node: (short if node.rank == 1 else long)(node),
        Schedule(4, starts=[0.0, 0.0, 0.0, 1e6], faults=[Fault(2, 1, 60, "kill before")]),
        Elastic(2, grace=5.0, topology="sharded"),
        sync_timeout=50.0,
        limit=1000.0,
        most_incarnations=1,
    )
    error = outcome.results[0, 1]
    assert isinstance(error, SyncTimeoutError)
    assert (
        "Contributed: rank 0; left: rank 1; never started: rank 3; silent: rank 2 (last heard from "
        in str(error)
    )


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

    with caplog.at_level(logging.INFO, "diloco_core"):
        simulate(train, Schedule(3), Elastic(2, grace=10.0), most_incarnations=1)
    said = [
        (record.levelno, record.getMessage())
        for record in caplog.records
        if "rank 1 has" in record.getMessage()
    ]
    assert [level for level, _ in said] == [logging.WARNING] * 2, said
    for _, text in said:
        assert (
            "rank 1 has failed: sync 4 goes on without it. Its error: RuntimeError: no space for "
            "s3://" in text
        )
        assert "hunter2" not in text


def test_the_log_tells_who_is_waited_for(caplog):
    """Two of three come to a run that needs three: the log says so after a grace, and once a minute
    until it gives up.
    """
    with caplog.at_level(logging.WARNING, "diloco_core"):
        simulate(
            SimulatedTraining(syncs=3, sizes=(40,)),
            Schedule(3, starts=[0.0, 0.0, 1e6]),
            Elastic(3, grace=10.0),
            sync_timeout=150.0,
            limit=1000.0,
            most_incarnations=1,
        )
    for rank in (0, 1):
        said = [
            record.getMessage()
            for record in caplog.records
            if record.getMessage().startswith(f"rank {rank}: sync")
        ]
        waited = [int(text.split("(min_replicas) for ")[1].split()[0]) for text in said]
        assert [seconds // 10 for seconds in waited] == [1, 7, 13], said
        assert (
            "sync 1 of fragment 0 has been waiting for contributions from 3 replicas (min_replicas)"
            in said[0]
        )
        assert said[0].endswith(
            "s. This replica gives up after 150 s (sync_timeout). Contributed: rank 0, 1; never "
            "started: rank 2"
        )


def test_no_more_of_a_reason_is_shown_than_is_ever_written():
    key = Hint(5, 1, 1, "leave").key
    record = seal("farewell", key, {"event": "failed", "reason": "x" * 10**6})
    assert read_farewell(key, lambda _: record).reason == "x" * 1000
