"""What the Job controller does that the recorded states do not show."""

from __future__ import annotations

import pytest

IGNORE = {
    "rules": [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    ]
}


def notes(pod):
    """(failures, ignored failures) of the pod's index, as its annotations have them."""
    listed = pod.json["metadata"]["annotations"]
    names = ("job-index-failure-count", "job-index-ignored-failure-count")
    return tuple(listed.get(f"batch.kubernetes.io/{name}") for name in names)


def test_a_failed_index_is_tried_again_after_its_back_off(clients):
    world = clients.world
    clients.running(clients.indexed("run", 2, backoffLimitPerIndex=2))
    first = world.pod("run", 1, "ns")
    assert notes(first) == ("0", None)
    first.fail(3)
    world.advance(5)
    during = clients.job("run")["status"]
    assert (during["active"], during.get("failed"), during["failedIndexes"]) == (2, None, "")
    world.advance(6)
    second = world.pod("run", 1, "ns")
    assert second.name != first.name
    assert notes(second) == ("1", None)
    world.settle()
    assert clients.job("run")["status"]["failed"] == 1
    second.fail(3)
    world.advance(19)
    assert world.pod("run", 1, "ns").name == second.name  # the second back-off is 20 s
    world.advance(4)
    world.pod("run", 1, "ns").fail(3)
    world.settle()
    status = clients.job("run")["status"]
    assert (status["failed"], status["failedIndexes"], status["active"]) == (3, "1", 1)


def test_ignored_disruptions_count_apart(clients):
    world = clients.world
    clients.running(
        clients.indexed(
            "run", 2, backoffLimitPerIndex=0, maxFailedIndexes=0, podFailurePolicy=IGNORE
        )
    )
    world.pod("run", 1, "ns").evict()
    world.settle()
    world.advance(10)
    world.settle()
    again = world.pod("run", 1, "ns")
    assert notes(again) == ("0", "1")
    assert [pod.index for pod in world.pods("run", "ns")] == [0, 1]
    assert clients.conditions("run") == []
    again.start()
    again.fail(1)
    world.settle()
    assert clients.conditions("run")[-1] == ("Failed", "MaxFailedIndexesExceeded")


def test_the_count_of_failures_outlives_a_wait_for_room(clients):
    world = clients.world
    clients.running(clients.indexed("run", 2, backoffLimitPerIndex=2))
    world.pod("run", 0, "ns").fail(1)
    world.advance(1.5)
    clients.patch("run", {"spec": {"parallelism": 1}})
    world.advance(60)
    assert [pod.index for pod in world.pods("run", "ns") if pod.alive] == [1]
    clients.patch("run", {"spec": {"parallelism": 2}})
    world.settle()
    assert notes(world.pod("run", 0, "ns")) == ("1", None)


def test_looking_again_does_not_lengthen_a_back_off(clients):
    world = clients.world
    clients.running(clients.indexed("run", 2))
    world.pod("run", 1, "ns").fail(1)
    for second in range(9):
        name = world.pod("run", 0, "ns").name
        clients.core.patch_namespaced_pod(
            name=name, namespace="ns", body={"metadata": {"annotations": {"n": str(second)}}}
        )
        world.advance(1)
    assert clients.job("run")["status"]["active"] == 2
    world.advance(3)
    world.pod("run", 1, "ns").start()
    world.settle()
    status = clients.job("run")["status"]
    assert (status["active"], status["ready"], status["failed"]) == (2, 2, 1)


def test_pods_without_indexes_are_replaced_when_they_have_ended(clients):
    clients.running(clients.indexed("run", 2, completionMode=None, podReplacementPolicy="Failed"))
    first, second = clients.world.pods("run", "ns")
    first.ignore_term()
    first.delete()
    clients.world.advance(20)
    assert {pod.name for pod in clients.world.pods("run", "ns")} == {first.name, second.name}
    clients.world.advance(40)
    assert first.name not in {pod.name for pod in clients.world.pods("run", "ns")}
    assert len(clients.world.pods("run", "ns")) == 2


def test_fail_index_needs_no_retries(clients):
    rule = {"action": "FailIndex", "onExitCodes": {"operator": "In", "values": [42]}}
    clients.running(
        clients.indexed("run", 2, backoffLimitPerIndex=5, podFailurePolicy={"rules": [rule]})
    )
    clients.world.pod("run", 0, "ns").fail(42)
    clients.world.settle()
    assert clients.job("run")["status"]["failedIndexes"] == "0"


def test_exit_zero_on_sigterm_is_a_failure_all_the_same(clients):
    clients.running(clients.indexed("run", 2, backoffLimitPerIndex=0, maxFailedIndexes=0))
    clients.world.pod("run", 0, "ns").on_term(exit_code=0, after=0.1)
    clients.world.pod("run", 1, "ns").fail(1)
    clients.world.settle()
    status = clients.job("run")["status"]
    assert (status["failed"], status["failedIndexes"], status.get("completedIndexes")) == (
        2,
        "1",
        None,
    )


def test_failed_waits_for_the_last_pod(clients):
    world = clients.world
    clients.running(clients.indexed("run", 2, grace=20, backoffLimitPerIndex=0, maxFailedIndexes=0))
    world.pod("run", 0, "ns").ignore_term()
    world.pod("run", 1, "ns").fail(1)
    world.advance(15)
    assert clients.conditions("run") == [("FailureTarget", "MaxFailedIndexesExceeded")]
    assert clients.job("run")["status"]["terminating"] == 1
    world.advance(15)
    assert clients.conditions("run")[-1] == ("Failed", "MaxFailedIndexesExceeded")


def test_a_lost_node_keeps_the_job_from_its_end(clients):
    world = clients.world
    clients.running(
        clients.indexed(
            "run", 2, backoffLimitPerIndex=0, maxFailedIndexes=0, podFailurePolicy=IGNORE
        )
    )
    lost = world.pod("run", 0, "ns")
    lost.lose()
    world.advance(3600)
    assert (lost.exists, lost.alive, clients.job("run")["status"]["terminating"]) == (True, True, 1)
    assert len(world.pods("run", "ns")) == 2  # nothing takes its place while it may still run
    lost.found()
    world.advance(60)
    assert not lost.exists
    assert notes(world.pod("run", 0, "ns")) == ("0", "1")


def test_cancel_by_deadline_keeps_the_evidence(clients):
    world = clients.world
    clients.running(
        clients.indexed(
            "run", 3, backoffLimitPerIndex=0, maxFailedIndexes=0, ttlSecondsAfterFinished=20
        )
    )
    world.pod("run", 0, "ns").log("done\n")
    world.pod("run", 0, "ns").succeed()
    world.settle()
    patch = {
        "metadata": {"annotations": {"diloco.dev/cancelled": "now"}},
        "spec": {"activeDeadlineSeconds": 1},
    }
    clients.patch("run", patch)
    world.advance(0.1)
    assert clients.conditions("run") == [("FailureTarget", "DeadlineExceeded")]
    world.settle()
    ended = clients.job("run")
    assert clients.conditions("run")[-1] == ("Failed", "DeadlineExceeded")
    assert ended["status"]["completedIndexes"] == "0"
    assert ended["metadata"]["annotations"]["diloco.dev/cancelled"] == "now"
    assert [pod["metadata"]["name"] for pod in clients.pods()] == [world.pod("run", 0, "ns").name]
    assert clients.log(world.pod("run", 0, "ns").name) == b"done\n"
    world.advance(21)
    with clients.refused(404, "NotFound", 'jobs.batch "run" not found'):
        clients.job("run")
    assert clients.pods() == []


def test_a_deadline_does_not_run_while_suspended(clients):
    clients.create(clients.indexed("run", 2, suspend=True, activeDeadlineSeconds=5))
    clients.world.advance(60)
    assert clients.conditions("run") == [("Suspended", "JobSuspended")]
    clients.patch("run", {"spec": {"suspend": False}})
    clients.world.advance(4)
    assert clients.conditions("run") == []
    clients.world.advance(4)
    assert clients.conditions("run")[0] == ("FailureTarget", "DeadlineExceeded")


def test_parallelism_zero_looks_like_nothing(clients):
    clients.running(clients.indexed("run", 2))
    for pod in clients.world.pods("run", "ns"):
        pod.ignore_term()
    clients.patch("run", {"spec": {"parallelism": 0}})
    clients.world.advance(0.1)
    status = clients.job("run")["status"]
    assert {key: status.get(key) for key in ("active", "ready", "terminating", "failed")} == {
        "active": None,
        "ready": 0,
        "terminating": 2,
        "failed": None,
    }


def test_without_parallelism_one_runs_after_the_other(clients):
    clients.running(clients.indexed("run", 3, parallelism=None))
    assert [pod.index for pod in clients.world.pods("run", "ns")] == [0]
    clients.world.pod("run", 0, "ns").succeed()
    clients.world.settle()
    assert [pod.index for pod in clients.world.pods("run", "ns")] == [0, 1]


def test_no_completions_is_complete_at_once(clients):
    clients.create(clients.indexed("run", 0))
    clients.world.settle()
    assert clients.conditions("run")[-1] == ("Complete", "CompletionsReached")


def test_a_job_without_indexes(clients):
    body = clients.indexed("run", 2, completionMode=None)
    clients.running(body)
    pods = clients.world.pods("run", "ns")
    assert [pod.index for pod in pods] == [None, None]
    for pod in pods:
        pod.succeed()
    clients.world.settle()
    assert clients.conditions("run")[-1] == ("Complete", "CompletionsReached")
    assert clients.job("run")["status"]["succeeded"] == 2


def test_elastic_completions(clients):
    clients.running(clients.indexed("run", 2))
    clients.patch("run", {"spec": {"completions": 3, "parallelism": 3}})
    clients.world.settle()
    assert [pod.index for pod in clients.world.pods("run", "ns")] == [0, 1, 2]
    clients.patch("run", {"spec": {"completions": 1, "parallelism": 1}})
    clients.world.settle()
    assert [pod.index for pod in clients.world.pods("run", "ns")] == [0]


def test_pods_out_of_range_go_first(clients):
    clients.create(clients.indexed("run", 3))
    clients.world.settle()
    waiting = clients.world.pod("run", 0, "ns").name
    for index in (1, 2):
        clients.world.pod("run", index, "ns").start()
    clients.world.settle()
    clients.patch("run", {"spec": {"completions": 1, "parallelism": 1}})
    clients.world.settle()
    assert [pod.name for pod in clients.world.pods("run", "ns")] == [waiting]


def test_a_job_gets_fewer_pods_and_more_again(clients):
    clients.running(clients.indexed("run", 3))
    clients.patch("run", {"spec": {"parallelism": 1}})
    clients.world.settle()
    assert [pod.index for pod in clients.world.pods("run", "ns")] == [0]
    clients.patch("run", {"spec": {"parallelism": 2}})
    clients.world.settle()
    assert [pod.index for pod in clients.world.pods("run", "ns")] == [0, 1]


def test_no_pods_without_the_service_account(clients):
    clients.create(clients.indexed("run", 2, template={"serviceAccountName": "nope"}))
    clients.world.advance(1)
    assert clients.pods() == []
    events = clients.plain(clients.core.list_namespaced_event(namespace="ns"))["items"]
    assert 'serviceaccount "nope" not found' in events[0]["message"]
    clients.core.create_namespaced_service_account(
        namespace="ns", body={"metadata": {"name": "nope"}}
    )
    clients.world.advance(15)
    assert len(clients.pods()) == 2


def test_a_new_job_of_an_old_name_while_the_old_pods_live(clients):
    world = clients.world
    clients.running(clients.indexed("run", 2))
    for pod in world.pods("run", "ns"):
        pod.ignore_term()
    old = clients.job("run")["metadata"]["uid"]
    clients.delete("run", propagation_policy="Background")
    with clients.refused(404, "NotFound", "run"):
        clients.job("run")
    clients.create(clients.indexed("run", 2))
    world.advance(2)
    new = clients.job("run")["metadata"]["uid"]
    assert len(clients.pods(label_selector="batch.kubernetes.io/job-name=run")) == 4
    chosen = clients.pods(label_selector=f"batch.kubernetes.io/controller-uid={new}")
    assert len(chosen) == 2
    assert all("deletionTimestamp" not in pod["metadata"] for pod in chosen)
    world.advance(40)
    assert clients.pods(label_selector=f"batch.kubernetes.io/controller-uid={old}") == []


def test_foreground_delete_ends_with_the_last_pod(clients):
    clients.running(clients.indexed("run", 2, grace=20))
    clients.world.pod("run", 0, "ns").ignore_term()
    clients.delete("run", propagation_policy="Foreground")
    clients.world.advance(15)
    with clients.refused(
        409, "AlreadyExists", 'object is being deleted: jobs.batch "run" already exists'
    ):
        clients.create(clients.indexed("run", 2))
    clients.delete("run", propagation_policy="Foreground")
    assert clients.conditions("run") == []
    clients.world.advance(10)
    with clients.refused(404, "NotFound", "run"):
        clients.job("run")


@pytest.mark.parametrize("seconds", [1, 3])
def test_time_to_live(clients, seconds):
    clients.running(clients.indexed("run", 1, ttlSecondsAfterFinished=seconds))
    clients.world.pod("run", 0, "ns").succeed()
    clients.world.advance(2.5)
    assert clients.conditions("run")[-1][0] == "Complete"
    clients.world.advance(seconds + 1)
    with clients.refused(404, "NotFound", "run"):
        clients.job("run")


def test_a_thousand_replicas(clients):
    clients.create(clients.indexed("run", 1000))
    clients.world.settle()
    assert clients.job("run")["status"]["active"] == 1000
    assert len(clients.world.pods("run", "ns")) == 1000


def test_a_second_delete_does_not_begin_the_grace_anew(clients):
    clients.running(clients.indexed("run", 1, grace=20, backoffLimitPerIndex=1))
    pod = clients.world.pod("run", 0, "ns")
    pod.ignore_term()
    pod.delete()
    due = pod.json["metadata"]["deletionTimestamp"]
    clients.world.advance(10)
    pod.delete()
    assert pod.json["metadata"]["deletionTimestamp"] == due
    clients.core.delete_namespaced_pod(
        name=pod.name, namespace="ns", grace_period_seconds=2
    )  # a shorter one counts
    assert pod.json["metadata"]["deletionTimestamp"] < due
    clients.world.advance(4)
    assert not pod.exists


def test_a_condition_keeps_its_time(clients):
    clients.create(clients.indexed("run", 1, suspend=True))
    clients.world.settle()
    before = clients.job("run")["status"]["conditions"]
    clients.world.advance(60)
    clients.patch("run", {"spec": {"backoffLimit": 3}})
    clients.world.settle()
    assert clients.job("run")["status"]["conditions"] == before


def test_deleted_pods_of_no_node(clients):
    clients.world.schedulable = False
    clients.create(clients.indexed("run", 1, backoffLimitPerIndex=1, podFailurePolicy=IGNORE))
    clients.world.settle()
    pod = clients.world.pod("run", 0, "ns")
    pod.delete()
    clients.world.advance(10)
    assert pod.exists  # held by the controller, which waits for its end
    clients.world.advance(30)
    assert not pod.exists
    assert notes(clients.world.pod("run", 0, "ns"))[0] == "1"
