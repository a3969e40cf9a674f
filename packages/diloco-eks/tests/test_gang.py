"""Several ranks that end at about the same time: each says what became of itself."""

import pytest

from diloco_eks._state._observation import Observation
from diloco_eks._state._reading import read_job, read_pod
from diloco_eks._state._states import map_states
from diloco_protocol import Reason, ReplicaState


def late(report, seconds):
    text = f"it ran for longer than its timeout of {seconds} s"
    return report(exit_code=124, error=text, reason=Reason.TIMEOUT)[0]


def watched(bench, run, seconds=12.0):
    """What was told of every rank, from look to look."""
    told = [run.states()]
    for _ in range(round(seconds / 0.25)):
        bench.world.advance(0.25)
        told.append(run.states())
    return told


def test_every_rank_that_was_past_its_timeout_says_so(punctual_bench, report):
    """The controller counts the first one, and deletes the others' pods before it counts them."""
    run = punctual_bench.launch(3, timeout=100)
    punctual_bench.world.advance(100.0)
    run.pod(0).fail(124, late(report, 100))
    punctual_bench.world.advance(1.5)
    run.pod(1).fail(124, late(report, 100))
    assert watched(punctual_bench, run)[-1] == ["failed"] * 3
    assert punctual_bench.world.job("run-1")["status"]["failedIndexes"] == "0"
    assert [run.describe(rank).reason for rank in range(3)] == [Reason.TIMEOUT] * 3
    assert [run.describe(rank).exit_code for rank in range(3)] == [124, 124, 143]
    assert "longer than its timeout of 100 s" in run.describe(2).message
    # Who saw nothing of them invents nothing.
    assert run.describe(1, punctual_bench.executor()).reason is Reason.GANG_FAILED


def test_a_rank_that_had_time_left_was_ended_by_the_other(bench, report):
    run = bench.launch(2, start=False, timeout=100)
    run.pod(0).start()
    bench.world.advance(50.0)
    run.pod(1).start()
    bench.world.advance(50.0)
    assert run.states() == ["running"] * 2
    run.pod(0).fail(124, late(report, 100))
    watched(bench, run)
    assert [run.describe(rank).reason for rank in (0, 1)] == [Reason.TIMEOUT, Reason.GANG_FAILED]


def test_a_failure_that_was_not_counted_is_told(punctual_bench, report):
    run = punctual_bench.launch(2)
    run.pod(0).fail(3)
    punctual_bench.world.advance(1.5)
    run.pod(1).fail(4, report(exit_code=4, error="ValueError: mine", reason=Reason.ERROR)[0])
    watched(punctual_bench, run)
    status = run.describe(1)
    assert (status.reason, status.exit_code, status.message) == ("error", 4, "ValueError: mine")


def test_who_is_told_of_a_deleted_pod_is_told_what_the_watcher_knew(punctual_bench):
    """Each rank is asked for alone, and the pod of the other one is gone by then."""
    run = punctual_bench.launch(2)
    for rank in (0, 1):
        run.pod(rank).on_term(143, after=1.0)
    run.states()
    run.pod(0).delete()
    watched(punctual_bench, run)
    assert (run.describe(1).reason, punctual_bench.pods(run.handles[0])) == ("gang_failed", [])
    assert run.describe(1).message.startswith(
        "the run was ended because rank 0 failed: its pod run-1-0-"
    )
    assert "was deleted at 2026-01-01T00:00:02Z: by hand" in run.describe(1).message


def test_of_several_deleted_pods_the_job_counts_one(punctual_bench):
    run = punctual_bench.launch(2)
    for rank in (0, 1):
        run.pod(rank).on_term(143, after=1.0 + 2 * rank)
    run.states()
    for rank in (0, 1):
        run.pod(rank).delete()
    watched(punctual_bench, run)
    newcomer = punctual_bench.executor()
    assert [run.describe(rank).reason for rank in (0, 1)] == ["platform", "platform"]
    assert [run.describe(rank, newcomer).reason for rank in (0, 1)] == ["platform", "gang_failed"]


def test_a_deleted_pod_costs_a_restart(punctual_bench):
    run = punctual_bench.launch(1, max_restarts=1)
    for attempt, state in ((2, "running"), (2, "failed")):
        run.pod(0).on_term(143, after=1.0)
        run.pod(0).delete()
        punctual_bench.world.settle(within=30)
        if state == "running":
            run.pod(0).start()
        assert (run.states(), run.describe(0).attempt) == ([state], attempt)
    assert run.describe(0).reason == "platform"


@pytest.mark.sampled
@pytest.mark.parametrize("why", ["image", "secret", "creating"])
def test_what_never_ran_is_pending_until_it_is_cancelled(bench, why):
    run = bench.launch(1, start=False)
    if why == "image":
        run.pod(0).image_error()
    elif why == "secret":
        run.pod(0).wait_with("CreateContainerConfigError", 'secret "s" not found')
    run.executor.cancel(run.handles[0])
    steps, told = [], []
    for _ in range(60):
        bench.world.advance(0.1)
        told.append(str(run.describe(0).state))
        for pod in bench.pods(run.handles[0]):
            told.append(str(run.describe(0, bench.executor()).state))
            steps += [entry["state"] for entry in pod.json["status"]["containerStatuses"]]
    ends = [step["terminated"] for step in steps if "terminated" in step]
    assert ends[0]["reason"] == "ContainerStatusUnknown"
    assert ends[0]["startedAt"] is None
    assert list(dict.fromkeys(told)) == ["pending", "cancelled"]


@pytest.mark.parametrize(
    ("words", "before", "state"),
    [
        ("", None, "pending"),
        ("", "running", "running"),
        (".  The container used to be Running", None, "running"),
    ],
)
def test_a_container_of_which_only_the_status_was_lost_has_run(a_job, a_pod, words, before, state):
    lost = {
        "exitCode": 137,
        "reason": "ContainerStatusUnknown",
        "message": f"The container could not be located when the pod was terminated{words}",
    }
    pod = read_pod(a_pod(0, "Pending", {"terminated": lost}, deleting=True))
    seen = {0: Observation(ReplicaState(before), 1)} if before else {}
    status, _ = map_states(read_job(a_job(1, cancelled=True)), [pod], range(1), seen)[0]
    assert (status.state, status.stopping) == (state, True)
