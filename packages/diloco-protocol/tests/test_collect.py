"""The wait loop: one question per run and tick, one deadline, nothing ended, the same answers."""

from dataclasses import replace

import pytest

from diloco_protocol import (
    AuthError,
    BackendError,
    Backoff,
    ForbiddenError,
    InvalidRequestError,
    Reason,
    ReplicaHandle,
    ReplicaNotFoundError,
    ReplicaState,
    ReplicaStatus,
    ResultLostError,
    ThrottledError,
    UnavailableError,
    collect,
)

PENDING, RUNNING = ReplicaStatus(ReplicaState.PENDING), ReplicaStatus(ReplicaState.RUNNING)


def succeeded(code=0):
    return ReplicaStatus(ReplicaState.SUCCEEDED, reason=Reason.COMPLETED, exit_code=code)


def failed(code=3, message="it broke"):
    return ReplicaStatus(
        ReplicaState.FAILED, reason=Reason.ERROR, exit_code=code, signal="SIGKILL", message=message
    )


CANCELLED = ReplicaStatus(ReplicaState.CANCELLED, reason=Reason.CANCEL_REQUESTED, exit_code=143)


class World:
    """Runs whose replicas change at set times, and a clock that only sleeping moves."""

    def __init__(self, plan):
        self.plan = plan  # handle -> [(time, status)], in order
        self.now = 0.0
        self.calls = []
        self.faults = []
        self.results = {}

    def sleep(self, seconds):
        self.now += seconds

    def observe(self, handles):
        assert len({handle.run_id for handle in handles}) == 1
        self.calls.append((self.now, handles[0].run_id))
        if self.faults:
            fault = self.faults.pop(0)
            if fault is not None:
                raise fault
        seen = {}
        for handle in handles:
            past = [status for time, status in self.plan.get(handle, []) if time <= self.now]
            if past:
                seen[handle] = past[-1]
        return seen

    def collect(self, handles, timeout=100.0, **options):
        backoff = Backoff(
            first=1.0, factor=1.0, cap=1.0, jitter=0.0, clock=lambda: self.now, sleep=self.sleep
        )
        return collect(
            handles, self.observe, self.results.get, timeout=timeout, backoff=backoff, **options
        )


def handle(rank, run="a"):
    return ReplicaHandle(rank, "b", {"job": f"{run}-{rank}"}, run_id=run, world_size=9)


def test_results_follow_the_handles_given():
    a0, a1, b0 = handle(0), handle(1), handle(0, "b")
    world = World(
        {
            a0: [(0, PENDING), (3, succeeded())],
            a1: [(0, RUNNING), (1, failed())],
            b0: [(0, RUNNING), (2, succeeded())],
        }
    )
    world.results = {a0: {"loss": 1}, b0: [2]}
    results = world.collect([b0, a1, a0, a1])
    assert [(r["run_id"], r["rank"], r["status"], r["result"]) for r in results] == [
        ("b", 0, "succeeded", [2]),
        ("a", 1, "failed", None),
        ("a", 0, "succeeded", {"loss": 1}),
        ("a", 1, "failed", None),
    ]
    assert results[0]["job"] == "b-0"


def test_one_question_per_run_and_tick_whatever_the_number_of_ranks():
    plan = {
        handle(rank, run): [(0, RUNNING), (4, succeeded())] for rank in range(50) for run in "ab"
    }
    world = World(plan)
    world.collect(list(plan))
    ticks = {time for time, _ in world.calls}
    assert len(world.calls) == 2 * len(ticks)


def test_runs_that_have_ended_are_not_asked_again():
    world = World({handle(0): [(0, succeeded())], handle(0, "b"): [(0, RUNNING), (5, succeeded())]})
    world.collect([handle(0), handle(0, "b")])
    assert [run for _, run in world.calls].count("a") == 1


def test_exit_code_is_zero_exactly_for_success():
    world = World(
        {
            handle(0): [(0, succeeded(None))],
            handle(1): [(0, failed(7))],
            handle(2): [(0, failed(0))],
            handle(3): [(0, CANCELLED)],
        }
    )
    results = world.collect([handle(rank) for rank in range(4)])
    assert [result["exit_code"] for result in results] == [0, 7, 1, None]
    assert [result["error"] is None for result in results] == [True, False, False, False]
    assert results[1]["signal"] == "SIGKILL"
    assert results[1]["error"] == "it broke"
    assert results[3]["reason"] == "cancel_requested"


def test_the_deadline_is_shared_and_ends_nothing():
    world = World({handle(rank): [(0, RUNNING)] for rank in range(3)})
    results = world.collect([handle(rank) for rank in range(3)], timeout=10.0)
    assert world.now == 10.0
    assert [(r["status"], r["exit_code"], r["error"]) for r in results] == [
        ("running", None, None)
    ] * 3


def test_a_deadline_of_zero_looks_once():
    world = World({handle(0): [(0, RUNNING)]})
    assert world.collect([handle(0)], timeout=0.0)[0]["status"] == "running"
    assert len(world.calls) == 1


def test_no_deadline():
    world = World({handle(0): [(0, RUNNING), (10_000, succeeded())]})
    assert world.collect([handle(0)], timeout=None)[0]["status"] == "succeeded"


def test_a_missing_record_is_lost_and_never_a_success():
    (result,) = World({}).collect([handle(0)])
    assert (result["status"], result["reason"], result["exit_code"]) == ("failed", "lost", None)
    assert "no record" in result["error"]


def test_it_gives_the_same_answer_again():
    world = World({handle(0): [(0, succeeded())], handle(1): [(0, failed())]})
    world.results = {handle(0): 5}
    handles = [handle(0), handle(1)]
    assert world.collect(handles) == world.collect(handles)


def test_retryable_errors_are_absorbed():
    world = World({handle(0): [(0, succeeded())]})
    world.faults = [UnavailableError("down"), UnavailableError("still down"), None]
    assert world.collect([handle(0)])[0]["status"] == "succeeded"
    assert len(world.calls) == 3


def test_an_error_that_lasts_past_the_deadline_is_raised_where_nothing_is_known():
    world = World({handle(0): [(0, RUNNING)]})
    world.faults = [UnavailableError("down")] * 99
    with pytest.raises(UnavailableError):
        world.collect([handle(0)], timeout=5.0)
    world.faults = [None, *[UnavailableError("down")] * 99]
    assert world.collect([handle(0)], timeout=5.0)[0]["status"] == "running", "the last known state"


def test_other_errors_are_raised_at_once():
    world = World({handle(0): [(0, RUNNING)]})
    world.faults = [AuthError("expired")]
    with pytest.raises(AuthError):
        world.collect([handle(0)])
    assert len(world.calls) == 1


def test_a_result_that_cannot_be_read_yet_is_waited_for():
    world = World({handle(0): [(0, succeeded())]})
    tries = []

    def result_of(_):
        tries.append(1)
        if len(tries) < 3:
            raise UnavailableError("not yet")
        return "here"

    backoff = Backoff(first=1.0, cap=1.0, jitter=0.0, clock=lambda: world.now, sleep=world.sleep)
    (result,) = collect([handle(0)], world.observe, result_of, timeout=60, backoff=backoff)
    assert result["result"] == "here"


def test_a_success_whose_result_cannot_be_read_is_no_success_of_none():
    world = World({handle(0): [(0, succeeded())], handle(1): [(0, RUNNING)]})
    asked = []

    def result_of(_):
        asked.append(world.now)
        raise UnavailableError("the store is down")

    backoff = Backoff(
        first=1.0, factor=1.0, cap=1.0, jitter=0.0, clock=lambda: world.now, sleep=world.sleep
    )
    with pytest.raises(UnavailableError, match="the store is down"):
        collect([handle(0)], world.observe, result_of, timeout=5, backoff=backoff)
    assert len(asked) == 6


def test_one_unreadable_result_does_not_hide_the_siblings():
    world = World({handle(rank): [(0, succeeded())] for rank in range(3)})
    seen = []

    def result_of(replica):
        if replica.rank == 0 and world.now < 3:
            raise UnavailableError("not yet")
        return replica.rank

    backoff = Backoff(
        first=1.0, factor=1.0, cap=1.0, jitter=0.0, clock=lambda: world.now, sleep=world.sleep
    )
    results = collect(
        [handle(rank) for rank in range(3)],
        world.observe,
        result_of,
        timeout=60,
        backoff=backoff,
        progress=lambda known: seen.append(len(known)),
    )
    assert [result["result"] for result in results] == [0, 1, 2]
    assert seen[0] == 3


@pytest.mark.parametrize("error", [ResultLostError, ReplicaNotFoundError])
def test_a_lost_result_is_said_and_holds_up_nobody(error):
    world = World({handle(0): [(0, succeeded())], handle(1): [(0, RUNNING), (3, succeeded())]})

    def result_of(replica):
        if replica.rank == 0:
            raise error("the disk is gone")
        return "here"

    backoff = Backoff(clock=lambda: world.now, sleep=world.sleep)
    first, second = collect(
        [handle(0), handle(1)], world.observe, result_of, timeout=None, backoff=backoff
    )
    assert (first["status"], first["exit_code"], first["result"]) == ("succeeded", 0, None)
    assert first["error"] == "the result is lost: the disk is gone"
    assert (second["result"], second["error"]) == ("here", None)


def test_a_refused_result_holds_up_nobody():
    world = World({handle(0): [(0, succeeded())], handle(1): [(0, RUNNING), (5, failed())]})
    told = []

    def result_of(replica):
        raise AuthError("no right to read logs")

    with pytest.raises(AuthError, match="no right") as caught:
        collect(
            [handle(0), handle(1)],
            world.observe,
            result_of,
            timeout=50,
            backoff=Backoff(
                first=1.0, factor=1.0, cap=1.0, clock=lambda: world.now, sleep=world.sleep
            ),
            progress=lambda known: told.append({h.rank: str(s.state) for h, s in known.items()}),
        )
    assert told[-1] == {0: "succeeded", 1: "failed"}
    assert "rank 0 of run 'a' succeeded" in caught.value.__notes__[0]


def test_what_was_seen_to_end_is_not_lost_with_its_record():
    world = World({handle(0): [(0, succeeded())], handle(1): [(0, RUNNING), (5, failed())]})
    faults = [UnavailableError("not now"), ReplicaNotFoundError("its record is gone")]

    def observe(handles):
        seen = world.observe(handles)
        return {h: s for h, s in seen.items() if h.rank == 1 or world.now < 1}

    def result_of(replica):
        raise faults.pop(0)

    backoff = Backoff(first=1.0, factor=1.0, cap=1.0, clock=lambda: world.now, sleep=world.sleep)
    first, second = collect([handle(0), handle(1)], observe, result_of, timeout=50, backoff=backoff)
    assert (first["status"], first["result"]) == ("succeeded", None)
    assert first["error"] == "the result is lost: its record is gone"
    assert second["status"] == "failed"


def test_a_run_without_any_record_may_be_an_exception():
    world = World({handle(0, "b"): [(0, succeeded())]})

    def observe(handles):
        if handles[0].run_id == "a":
            raise ReplicaNotFoundError("no run a")
        return world.observe(handles)

    backoff = Backoff(clock=lambda: world.now, sleep=world.sleep)
    results = collect(
        [handle(0), handle(1), handle(0, "b")],
        observe,
        world.results.get,
        timeout=9,
        backoff=backoff,
    )
    assert [result["reason"] for result in results] == ["lost", "lost", "completed"]


def test_runs_of_the_same_name_on_two_backends_are_two_runs():
    one, two = ReplicaHandle(0, "b", run_id="a"), ReplicaHandle(0, "c", run_id="a")
    asked = []

    def observe(handles):
        asked.append(handles)
        return {handle: succeeded() for handle in handles}

    collect([one, two], observe, lambda handle: None, timeout=9, backoff=Backoff())
    assert asked == [[one], [two]]


def test_a_backend_that_says_when_to_come_back_is_obeyed_up_to_the_deadline():
    world = World({handle(0): [(0, succeeded())]})
    world.faults = [ThrottledError("slow down", retry_after=40.0), None]
    assert world.collect([handle(0)])[0]["status"] == "succeeded"
    assert [time for time, _ in world.calls] == [0.0, 40.0]
    world = World({handle(0): [(0, RUNNING)]})
    world.faults = [ThrottledError("slow down", retry_after=40.0), None]
    world.collect([handle(0)], timeout=5.0)
    assert [time for time, _ in world.calls] == [0.0, 5.0]


def test_progress_is_reported():
    seen = []
    world = World({handle(0): [(0, PENDING), (2, RUNNING), (4, succeeded())]})
    world.collect([handle(0)], progress=lambda known: seen.append(known[handle(0)].state))
    assert seen[0] is ReplicaState.PENDING
    assert seen[-1] is ReplicaState.SUCCEEDED
    assert ReplicaState.RUNNING in seen


def test_no_handles_no_waiting():
    world = World({})
    assert world.collect([]) == []
    assert world.now == 0.0


def test_a_run_that_cannot_be_asked_for_does_not_hide_another():
    a, b = handle(0), handle(0, "b")
    world = World({b: [(0, RUNNING), (5, succeeded())]})
    seen = []

    def observe(handles):
        if handles[0].run_id == "a":
            raise BackendError("the record of run a is damaged")
        return World.observe(world, handles)

    world.observe = observe
    with pytest.raises(BackendError, match="of run a is damaged") as caught:
        world.collect([a, b], progress=lambda known: seen.append(dict(known)))
    assert seen[-1] == {b: succeeded()}
    assert caught.value.__notes__ == [
        "rank 0 of run 'a' cannot be asked for: 1 of 2 handles are affected; collect the others "
        "without them"
    ]


def test_namesakes_elsewhere_are_runs_of_their_own():
    here, there = (ReplicaHandle(0, "b", {"root": root}, run_id="a") for root in ("r1", "r2"))
    world = World({there: [(0, RUNNING), (5, succeeded())]})
    seen = []

    def observe(handles):
        if here in handles:
            raise BackendError("the record is damaged")
        return World.observe(world, handles)

    world.observe = observe
    with pytest.raises(BackendError, match="damaged") as caught:
        world.collect(
            [here, there],
            progress=lambda known: seen.append(dict(known)),
            place_of=lambda handle: handle.metadata["root"],
        )
    assert seen[-1] == {there: succeeded()}
    assert "1 of 2 handles" in caught.value.__notes__[0]


def test_a_run_that_answers_again_is_collected(caplog):
    a, b = handle(0), handle(0, "b")
    world = World({a: [(0, RUNNING), (9, succeeded())], b: [(0, RUNNING), (5, succeeded())]})
    world.faults = [ForbiddenError("not allowed"), None, ForbiddenError("not allowed"), None]
    assert [each["status"] for each in world.collect([a, b])] == ["succeeded"] * 2
    assert [record.getMessage() for record in caplog.records] == [
        "run 'a' cannot be asked for: not allowed"
    ]


def test_a_failure_for_good_is_told_once_while_others_go_on(caplog):
    dead = replace(failed(message="it was killed.\nmore"), attempt=3)
    lost = ReplicaStatus(ReplicaState.FAILED, reason=Reason.LOST, message="no record")
    plan = {
        handle(0): [(0, RUNNING), (9, failed())],
        handle(1): [(0, RUNNING), (2, dead)],
        handle(2): [(0, RUNNING), (5, failed())],
        handle(3): [(0, RUNNING), (5, failed())],
        handle(4): [(0, lost)],
        handle(5): [(0, CANCELLED)],
    }
    world, warned = World(plan), {}
    for _ in range(2):
        world.collect(list(plan), warned=warned)
    ends = (
        "The others go on without it, or wait until they give up; to end them, cancel the run: "
        "diloco cancel a, or cancel_run() in Python"
    )
    assert [record.getMessage() for record in caplog.records] == [
        f"rank 1 of run 'a' has failed for good after 3 attempts: it was killed. {ends}",
        f"rank 2 (and 1 more) of run 'a' has failed for good: it broke. {ends}",
    ]


def test_the_failure_that_came_first_is_told_and_not_its_victims(caplog):
    """Also where the backend has the end of a victim first; and none if all end together."""
    victim = failed(message="ReplicaLostError: rank 1 failed after 3 syncs: ValueError: it broke")
    second, first = (replace(failed(), finished_at=float(at)) for at in (3, 2))
    plan = {
        handle(0): [(0, RUNNING), (2, victim)],
        handle(1): [(0, RUNNING), (2.2, second)],
        handle(2): [(0, RUNNING), (2.2, first)],
        handle(3): [(0, RUNNING), (9, victim)],
    }
    World(plan).collect(list(plan), warned={})
    (record,) = caplog.records
    assert record.getMessage().startswith("rank 2 (and 1 more) of run 'a' has failed for good: it")
    caplog.clear()
    plan = {handle(0): [(0, RUNNING), (2, failed())], handle(1): [(0, RUNNING), (2.2, victim)]}
    World(plan).collect(list(plan), warned={})
    assert not caplog.records
    plan[handle(1)] = [(0, RUNNING), (60, CANCELLED)]
    plan[handle(0)] = [(0, RUNNING), (2, victim)]
    World(plan).collect(list(plan), warned={})
    assert "rank 0 of run 'a' has failed for good: ReplicaLostError: rank 1" in caplog.text


def test_no_failure_is_told_where_it_ends_the_others(caplog):
    world = World({handle(0): [(0, RUNNING), (9, CANCELLED)], handle(1): [(0, failed())]})
    world.collect([handle(0), handle(1)])
    assert not caplog.records


def test_a_wrong_handle_is_refused_before_anything_is_waited_for():
    a, b = handle(0), handle(0, "b")
    for handles in ([a, b], [b, a]):
        world = World({b: [(0, RUNNING), (5, succeeded())]})

        def observe(asked, world=world):
            if asked[0].run_id == "a":
                raise InvalidRequestError("this handle belongs to another cluster")
            return World.observe(world, asked)

        world.observe = observe
        with pytest.raises(InvalidRequestError, match="another cluster"):
            world.collect(handles)
        assert world.now == 0
