"""From a Job and its pods to the state of every rank."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_eks._state._observation import Observation
from diloco_eks._state._reading import read_job, read_pod
from diloco_eks._state._states import map_states
from diloco_eks._state._verdict import hides_failure
from diloco_protocol import BackendError, Reason, ReplicaState

OBSERVED = json.loads((Path(__file__).parent / "observed.json").read_text(encoding="utf-8"))
UNSCHEDULABLE = [
    {
        "type": "PodScheduled",
        "status": "False",
        "reason": "Unschedulable",
        "message": "0/3 nodes: Insufficient nvidia.com/gpu",
    }
]
DISRUPTED = [{"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}]
FAILURE_TARGET = {
    "type": "FailureTarget",
    "status": "True",
    "reason": "MaxFailedIndexesExceeded",
    "message": "too many",
}
FAILED = {**FAILURE_TARGET, "type": "Failed"}


def look(job, pods, indexes=None, seen=None):
    facts = read_job(job)
    found = map_states(
        facts, [read_pod(pod) for pod in pods], indexes or range(facts.completions), seen
    )
    return {index: status for index, (status, _) in found.items()}


def words(statuses):
    """One word per index: the state, ``~`` if stopping, the reason."""
    return [
        f"{s.state}{'~' if s.stopping else ''}" + (f"/{s.reason}" if s.reason is not None else "")
        for _, s in sorted(statuses.items())
    ]


P, R, S = "pending/starting", "running", "succeeded/completed"
ENDING = "running~"
GANG, ERROR, TIMEOUT = "failed/gang_failed", "failed/error", "failed/timeout"
EXPECTED = {
    "just created (status empty)": [P],
    "4 pods Pending (image creating)": [P] * 4,
    "4 pods unschedulable": [P] * 4,
    "image cannot be pulled: the Job says only active": ["pending/image"] * 2,
    "2 of 4 Running, 2 Pending (ready not yet counted)": [P, R, R, P],
    "4 Running": [R] * 4,
    "index 0 exited 0; Job not yet told": [R] * 4,
    "1 succeeded": [S, R, R, R],
    "all succeeded": [S] * 4,
    "backoffLimit=0, index 2 exits 3: pod Failed, Job still shows nothing": [R] * 4,
    "backoffLimit=0, index 2 exits 3: FailureTarget, others being deleted, failed=4": [ENDING] * 4,
    "backoffLimit=0, index 2 exits 3: Failed (only after all pods ended); failedIndexes absent; "
    "3 pods are gone": [GANG, GANG, ERROR, GANG],
    "same with index 0 succeeded before: final": [S, GANG, ERROR, GANG],
    "backoffLimitPerIndex=0, index 1 exits 7: the others go on": [R, ERROR, R, R],
    "backoffLimitPerIndex=0, index 1 exits 7: final: Failed/FailedIndexes once every index ended": [
        S, ERROR, S, S,
    ],
    "backoffLimitPerIndex=0 + maxFailedIndexes=0: FailureTarget": [ENDING, ERROR, ENDING, ENDING],
    "backoffLimitPerIndex=0 + maxFailedIndexes=0: final": [GANG, ERROR, GANG, GANG],
    "backoffLimitPerIndex=0 + backoffLimit=0: final": [GANG, ERROR, GANG, GANG],
    "activeDeadlineSeconds=6, index 0 done before: FailureTarget": [S, ENDING, ENDING, ENDING],
    "activeDeadlineSeconds=6, index 0 done before: final": [S, TIMEOUT, TIMEOUT, TIMEOUT],
    "deleting with Foreground: status keeps its numbers, deletionTimestamp and finalizer set": (
        [ENDING] * 4
    ),
    "deleting with Foreground: a second later": [ENDING] * 4,
    "deleting with no policy (orphans)": [ENDING] * 2,
    "created suspended": ["pending/queued"] * 2,
    "resumed": [P] * 2,
    "suspended mid-run": [ENDING] * 2,
    "successPolicy met, others being ended": [S, ENDING, ENDING, ENDING],
    "podFailurePolicy FailJob": [GANG, ERROR, GANG, GANG],
    "out-of-band delete of one pod, backoffLimit 0: final": [GANG] * 2,
    "evicted pod ignored by policy: replacement pending": [R, P],
}  # fmt: skip


def test_every_recorded_state_has_an_expectation():
    assert [entry["title"] for entry in OBSERVED] == list(EXPECTED)


@pytest.mark.parametrize("entry", OBSERVED, ids=lambda entry: entry["title"])
def test_states_recorded_on_a_real_controller(entry, a_job, a_pod):
    expected = EXPECTED[entry["title"]]
    suspend = any(
        c["type"] == "Suspended" and c["status"] == "True"
        for c in entry["status"].get("conditions", [])
    )
    job = a_job(len(expected), entry["status"], suspend=suspend, deleting=entry.get("deleting"))
    pods = [
        a_pod(
            int(pod["name"].split("-")[1]),
            pod["phase"],
            pod["state"],
            name=pod["name"],
            deleting=pod["deleting"],
        )
        for pod in entry["pods"]
    ]
    assert words(look(job, pods)) == expected


def test_the_culprit_is_named_with_its_exit_code(a_job, a_pod):
    job = a_job(3, {"failedIndexes": "1", "conditions": [FAILURE_TARGET, FAILED]}, first_rank=4)
    end = {"exitCode": 7, "reason": "Error", "message": "ValueError: no such data"}
    found = look(job, [a_pod(1, "Failed", {"terminated": end})])
    assert (found[1].exit_code, found[1].reason) == (7, Reason.ERROR)
    assert "no such data" in found[1].message
    assert found[0].message.startswith(
        "the run was ended because rank 5 failed: it exited with code 7"
    )
    assert (found[0].reason, found[0].exit_code) == (Reason.GANG_FAILED, None)


def test_why_a_pod_waits(a_job, a_pod):
    waiting = {
        "waiting": {"reason": "CreateContainerConfigError", "message": 'secret "hub" not found'}
    }
    pods = [
        a_pod(0, "Pending", conditions=UNSCHEDULABLE),
        a_pod(1, "Pending", {"waiting": {"reason": "ErrImagePull", "message": "no such image"}}),
        a_pod(2, "Pending", waiting),
        a_pod(
            3,
            "Pending",
            conditions=[{"type": "PodScheduled", "status": "False", "reason": "SchedulingGated"}],
        ),
    ]
    found = look(a_job(5, {"active": 5}), pods)
    assert [found[i].reason for i in range(5)] == [
        Reason.UNSCHEDULABLE, Reason.IMAGE, Reason.STARTING, Reason.QUEUED, Reason.STARTING,
    ]  # fmt: skip
    assert "Insufficient nvidia.com/gpu" in found[0].message
    assert "no such image" in found[1].message
    assert 'secret "hub" not found' in found[2].message


def test_the_newest_pod_speaks_for_its_index(a_job, a_pod):
    old = a_pod(0, "Failed", {"terminated": {"exitCode": 1}}, name="run-1-0-zzzzz", failures=0)
    new = a_pod(0, "Pending", name="run-1-0-aaaaa", failures=1, created="2026-11-21T04:40:00Z")
    for pods in ([old, new], [new, old]):
        (status,) = look(a_job(1, {"active": 1}, restarts=3), pods).values()
        assert (status.state, status.attempt) == (ReplicaState.PENDING, 2)


def test_a_cluster_whose_clock_is_set_back(a_job, a_pod):
    """What runs came last, whatever is written about when it was made."""
    old = a_pod(0, "Failed", {"terminated": {"exitCode": 1}}, name="run-1-0-zzzzz", failures=0)
    new = a_pod(0, "Running", name="run-1-0-aaaaa", failures=1, created="2026-11-21T03:30:00Z")
    done = a_pod(0, "Succeeded", {"terminated": {"exitCode": 0}}, failures=2, created="1999-01-01")
    for pods in ([old, new], [new, old]):
        (status,) = look(a_job(1, {"active": 1}, restarts=3), pods).values()
        assert (status.state, status.attempt) == (ReplicaState.RUNNING, 2)
    (status,) = look(a_job(1, {"active": 1}, restarts=3), [done, old]).values()
    assert (status.state, status.attempt) == (ReplicaState.RUNNING, 3)  # it is not counted yet


def test_an_eviction_is_a_new_attempt(a_job, a_pod):
    job = a_job(1, {"active": 1})
    going = a_pod(0, "Running", conditions=DISRUPTED, deleting=True)
    gone = a_pod(
        0, "Failed", {"terminated": {"exitCode": 143}}, conditions=DISRUPTED, deleting=False
    )
    again = a_pod(0, "Running", ignored=1, created="2026-11-21T04:40:00Z")
    seen, told = {}, []
    for pods in ([a_pod(0)], [going], [gone], [], [], [again]):
        found = map_states(read_job(job), [read_pod(pod) for pod in pods], [0], seen)
        seen = {0: found[0][1]}
        told.append((str(found[0][0].state), found[0][0].attempt, found[0][0].stopping))
    assert told == [
        ("running", 1, False),
        ("running", 1, True),
        ("pending", 2, False),
        ("pending", 2, False),
        ("pending", 2, False),
        ("running", 2, False),
    ]


def test_a_pod_that_vanishes_is_not_decided_in_one_look(a_job, a_pod):
    """The Job is read first: a pod gone a moment later may have been counted as failed since."""
    running = a_job(1, {"active": 1})
    seen = {0: Observation(ReplicaState.RUNNING, 1)}
    ((status, remembered),) = map_states(read_job(running), [], [0], seen).values()
    assert (status.state, status.attempt) == (ReplicaState.RUNNING, 1)
    failed = a_job(1, {"failedIndexes": "0", "conditions": [FAILURE_TARGET]})
    ((status, _),) = map_states(read_job(failed), [], [0], {0: remembered}).values()
    assert (status.state, status.attempt) == (ReplicaState.FAILED, 1)
    ((status, _),) = map_states(read_job(running), [], [0], {0: remembered}).values()
    assert (status.state, status.attempt, status.reason) == (
        ReplicaState.PENDING,
        2,
        Reason.PREEMPTED,
    )


def test_a_preempted_queue_is_a_new_attempt(a_job, a_pod):
    suspended = {"conditions": [{"type": "Suspended", "status": "True", "reason": "JobSuspended"}]}
    told, seen = [], {}
    for job, pods in (
        (a_job(1, suspended, suspend=True, queue="gpus"), []),
        (a_job(1, {"active": 1}, queue="gpus"), [a_pod(0)]),
        (
            a_job(1, {**suspended, "terminating": 1}, suspend=True, queue="gpus"),
            [a_pod(0, deleting=True)],
        ),
        (a_job(1, suspended, suspend=True, queue="gpus"), []),
        (a_job(1, {"active": 1}, queue="gpus"), [a_pod(0, created="2026-11-21T05:00:00Z")]),
    ):
        ((status, last),) = map_states(
            read_job(job), [read_pod(pod) for pod in pods], [0], seen
        ).values()
        seen = {0: last}
        told.append((str(status.state), status.attempt, status.stopping))
    assert told == [
        ("pending", 1, False), ("running", 1, False), ("running", 1, True), ("pending", 2, False),
        ("running", 2, False),
    ]  # fmt: skip


def cancelled(status, **values):
    return {"status": status, "cancelled": True, **values}


def test_a_cancel_is_over_when_no_pod_is_left(a_job, a_pod):
    target = {"type": "FailureTarget", "status": "True", "reason": "DeadlineExceeded"}
    failed = {**target, "type": "Failed"}
    pods = [a_pod(0, "Succeeded", {"terminated": {"exitCode": 0}}), a_pod(1, deleting=True)]
    steps = [
        (a_job(3, **cancelled({"completedIndexes": "0", "active": 2})), pods),
        (a_job(3, **cancelled({"completedIndexes": "0", "conditions": [target]})), pods),
        (
            a_job(3, **cancelled({"completedIndexes": "0", "conditions": [target, failed]})),
            pods[:1],
        ),
    ]
    told = [words(look(job, pods)) for job, pods in steps]
    stopping = "running~/cancel_requested"
    assert told[0][:2] == told[1][:2] == [S, stopping]
    assert told[2] == [S, "cancelled/cancel_requested", "cancelled/cancel_requested"]


def test_a_failure_that_won_the_race_stays(a_job, a_pod):
    failed = {"type": "Failed", "status": "True", "reason": "DeadlineExceeded"}
    end = {"terminated": {"exitCode": 5, "reason": "Error"}}
    job = a_job(2, **cancelled({"conditions": [failed]}))
    assert words(look(job, [a_pod(0, "Failed", end, failures=0)])) == [
        ERROR,
        "cancelled/cancel_requested",
    ]
    # It had restarts left, so it was the cancel that ended it.
    job = a_job(2, **cancelled({"conditions": [failed]}, restarts=3))
    assert (
        words(look(job, [a_pod(0, "Failed", end, failures=0)]))
        == ["cancelled/cancel_requested"] * 2
    )


def test_a_queued_run_is_cancelled_where_it_stands(a_job, a_pod):
    suspended = {"conditions": [{"type": "Suspended", "status": "True", "reason": "JobSuspended"}]}
    job = a_job(2, **cancelled(suspended, suspend=True))
    assert words(look(job, [])) == ["cancelled/cancel_requested"] * 2
    assert words(look(job, [a_pod(0, deleting=True)]))[0] == "running~/cancel_requested"
    job = a_job(2, **cancelled({**suspended, "terminating": 1}, suspend=True))
    assert words(look(job, [])) == ["pending~/cancel_requested"] * 2


def test_a_condition_that_is_no_longer_true_says_nothing(a_job):
    """A Job that was resumed keeps its condition Suspended, as False."""
    conditions = [
        {"type": kind, "status": "False"}
        for kind in ("Suspended", "FailureTarget", "Failed", "Complete")
    ]
    assert words(look(a_job(1, {"conditions": conditions}), [])) == [P]


def test_a_success_policy_that_is_not_ours_leaves_no_rank_waiting(a_job):
    complete = {"type": "Complete", "status": "True", "reason": "SuccessPolicy"}
    assert words(look(a_job(2, {"completedIndexes": "0", "conditions": [complete]}), [])) == [
        S,
        "failed/platform",
    ]


def test_a_failed_index_without_a_pod_is_still_failed(a_job):
    (status,) = look(a_job(1, {"failedIndexes": "0"}, restarts=2), []).values()
    assert (status.state, status.attempt, status.exit_code) == (ReplicaState.FAILED, 3, None)
    assert "removed" in status.message


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 9)
    | st.sampled_from(["", "0", "0-1", "True", "Failed", "Running", "x"]),
    lambda inside: st.lists(inside, max_size=3)
    | st.dictionaries(st.sampled_from(["type", "status", "name"]), inside),
    max_leaves=5,
)
CONDITIONS = st.lists(
    st.fixed_dictionaries(
        {
            "type": st.sampled_from(
                ["Complete", "Failed", "FailureTarget", "Suspended", "SuccessCriteriaMet"]
            )
        },
        optional={
            "status": st.sampled_from(["True", "False", None]),
            "reason": st.sampled_from(["DeadlineExceeded", 3, ""]),
        },
    )
    | JSON,
    max_size=3,
)
STATUS = st.fixed_dictionaries(
    {},
    optional={
        "conditions": CONDITIONS | JSON,
        "completedIndexes": st.sampled_from(["0", "1", "0-2", "", None, 3, "x"]),
        "failedIndexes": st.sampled_from(["2", "", None, "1-"]),
        "active": JSON,
        "terminating": JSON,
    },
)
CONTAINER = st.fixed_dictionaries(
    {"name": st.sampled_from(["replica", "other"])},
    optional={
        "state": JSON
        | st.fixed_dictionaries(
            {},
            optional={
                "running": JSON,
                "waiting": st.fixed_dictionaries(
                    {"reason": st.sampled_from(["ErrImagePull", "x", 1])}
                )
                | JSON,
                "terminated": st.fixed_dictionaries(
                    {"exitCode": st.sampled_from([0, 1, 137, "1", None])},
                    optional={
                        "reason": JSON,
                        "message": st.sampled_from(["", "{}", "[", '{"version":1}', 5]),
                        "signal": JSON,
                    },
                )
                | JSON,
            },
        )
    },
)
POD = st.builds(
    lambda index, name, phase, deleting, status, failures: {
        "metadata": {
            "name": name,
            "labels": {"batch.kubernetes.io/job-completion-index": index},
            "annotations": {"batch.kubernetes.io/job-index-failure-count": failures},
            **({"deletionTimestamp": "x"} if deleting else {}),
        },
        "status": {"phase": phase, **status},
    },
    st.sampled_from(["0", "1", "2", "7", "x", None, 1]),
    st.sampled_from(["a", "b", None]),
    st.sampled_from(["Pending", "Running", "Succeeded", "Failed", "Unknown", None, 4]),
    st.booleans(),
    st.fixed_dictionaries(
        {},
        optional={
            "containerStatuses": st.lists(CONTAINER | JSON, max_size=2) | JSON,
            "conditions": CONDITIONS | JSON,
        },
    ),
    st.sampled_from(["0", "2", "", None, 1]),
)
SEEN = st.dictionaries(
    st.integers(0, 2),
    st.builds(
        Observation,
        st.sampled_from(["pending", "running"]).map(ReplicaState),
        st.integers(1, 4),
        st.booleans(),
    ),
)


@given(
    STATUS | JSON,
    st.lists(POD | st.just({}), max_size=4),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    SEEN,
)
def test_nothing_is_invented(status, pods, cancelled, suspend, deleting, seen):
    """For any JSON: only the Job's word is an end, and every answer is well-formed and in order."""
    annotations = {"diloco.dev/cancelled": "now"} if cancelled else {}
    metadata = {
        "annotations": annotations,
        "labels": {},
        **({"deletionTimestamp": "x"} if deleting else {}),
    }
    job = {"metadata": metadata, "spec": {"completions": 3, "suspend": suspend}, "status": status}
    try:
        facts = read_job(job)
    except BackendError:
        return
    found = map_states(facts, [read_pod(pod) for pod in pods], range(3), seen)
    cut_short = {pod.index for pod in map(read_pod, pods) if hides_failure(pod)}
    for index, (status, last) in found.items():
        if index not in cut_short:
            assert (status.state is ReplicaState.SUCCEEDED) == (index in facts.completed)
        assert (status.state is ReplicaState.SUCCEEDED) == (
            status.exit_code == 0 and status.reason is Reason.COMPLETED
        )
        if status.state is ReplicaState.CANCELLED:
            assert facts.cancelled
            assert facts.finished or (
                facts.suspended and facts.idle and not any(read_pod(pod).live for pod in pods)
            )
        if status.state is ReplicaState.FAILED:
            assert index in facts.failed or facts.finished or index in cut_short
        if not status.state.terminal:
            assert not facts.finished
        assert status.attempt >= 1
        assert not (status.state.terminal and status.stopping)
        if index in seen:
            assert status.attempt >= seen[index].attempt
            if seen[index].state is ReplicaState.RUNNING and status.state is ReplicaState.PENDING:
                assert status.attempt > seen[index].attempt
        assert (last.state, last.attempt) == (status.state, status.attempt)


def test_a_complete_job_leaves_no_rank_pending(a_job):
    """With a success policy, a Job can be complete without listing every rank."""
    complete = {"type": "Complete", "status": "True", "reason": "SuccessPolicy"}
    job = read_job(a_job(2, {"completedIndexes": "0", "conditions": [complete]}))
    assert [str(status.state) for status, _ in map_states(job, [], range(2)).values()] == [
        "succeeded",
        "failed",
    ]
