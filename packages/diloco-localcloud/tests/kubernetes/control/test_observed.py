"""A real controller's states (recorded on Kubernetes 1.34), field by field and in their order."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

OBSERVED = json.loads((Path(__file__).parent / "data" / "observed.json").read_text())


def wanted(title: str, after: str | None = None) -> dict:
    """The recorded state of this title, or the next one called so after another."""
    titles = [state["title"] for state in OBSERVED]
    start = titles.index(after) if after else 0
    return normal(OBSERVED[titles.index(title, start)])


def normal(state: dict) -> dict:
    """Without what differs from run to run: times, uids and the ends of names."""
    status = json.loads(json.dumps(state["status"]))
    status = {key: "time" if key.endswith("Time") else value for key, value in status.items()}
    for condition in status.get("conditions", []):
        condition.pop("lastProbeTime", None)
        condition["lastTransitionTime"] = "time"
        condition["message"] = re.sub(r"(ns/\S+-\d)-\w{5} ", r"\1 ", condition["message"])
    uncounted = status.get("uncountedTerminatedPods", {}).get("failed")
    if uncounted:
        status["uncountedTerminatedPods"] = {"failed": len(uncounted)}
    pods = [re.sub(r"^(\S+-\d)-\w{5}:", r"\1:", pod) for pod in state["pods"]]
    return {
        "status": status,
        "pods": sorted(pods),
        "deleting": "deletionTimestamp" in state,
        "finalizers": state.get("finalizers", []),
    }


def seen(clients, name: str) -> dict:
    """The state here, through the client, as the recording tool wrote it down."""
    this = clients.job(name)
    meta = this["metadata"]
    state = {"status": this["status"], "pods": [line(pod) for pod in clients.pods()]}
    for field in ("deletionTimestamp", "finalizers"):
        if meta.get(field):
            state[field] = meta[field]
    return normal(state)


def line(pod: dict) -> str:
    statuses = pod["status"].get("containerStatuses") or []
    text = f"{pod['metadata']['name']}: {pod['status']['phase']}"
    if statuses:
        state = {kind: brief(kind, value) for kind, value in statuses[0]["state"].items()}
        text += " " + json.dumps(state)
    return text + (" deletionTimestamp set" if "deletionTimestamp" in pod["metadata"] else "")


def brief(kind: str, value: dict) -> dict:
    kept = {"waiting": ("reason", "message"), "running": (), "terminated": ("reason", "exitCode")}[
        kind
    ]
    return {field: value[field] for field in kept if field in value}


def reach(clients, name: str, state: dict, steps: int = 200) -> None:
    """Let the world go on until the recorded state is read."""
    states = []
    for _ in range(steps):
        states.append(seen(clients, name))
        if states[-1] == state:
            return
        if not clients.world.step():
            break
    nearest = max(
        states,
        key=lambda each: sum(
            each["status"].get(key) == value for key, value in state["status"].items()
        ),
    )
    assert nearest == state
    pytest.fail("the state was not reached")


def test_it_begins_with_an_empty_status(clients):
    made = clients.create(clients.indexed("delbg", 1))
    assert made["status"] == {}
    reach(clients, "delbg", wanted("just created (status empty)"))


def test_success(clients):
    clients.create(clients.indexed("happy"))
    world = clients.world
    reach(clients, "happy", wanted("4 pods Pending (image creating)"))
    world.advance(0.6)
    world.pod("happy", 1, "ns").start()
    world.pod("happy", 2, "ns").start()
    reach(clients, "happy", wanted("2 of 4 Running, 2 Pending (ready not yet counted)"))
    world.pod("happy", 0, "ns").start()
    world.pod("happy", 3, "ns").start()
    reach(clients, "happy", wanted("4 Running"))
    world.settle()
    world.pod("happy", 0, "ns").succeed()
    world.advance(1.05)
    world.pod("happy", 1, "ns").succeed()
    reach(clients, "happy", wanted("index 0 exited 0; Job not yet told"))
    world.advance(1.1)
    world.pod("happy", 2, "ns").succeed()
    reach(clients, "happy", wanted("1 succeeded"))
    world.pod("happy", 3, "ns").succeed()
    reach(clients, "happy", wanted("all succeeded"))


def test_unschedulable(clients):
    clients.world.schedulable = False
    clients.create(clients.indexed("pendingu"))
    reach(clients, "pendingu", wanted("4 pods unschedulable"))
    scheduled = clients.pods()[0]["status"]["conditions"][0]
    assert (scheduled["type"], scheduled["status"], scheduled["reason"]) == (
        "PodScheduled",
        "False",
        "Unschedulable",
    )


def test_image_that_cannot_be_pulled(clients):
    title = "image cannot be pulled: the Job says only active"
    state = wanted(title)
    clients.create(clients.indexed("pendingi", 2))
    clients.world.settle()
    for index, pod in enumerate(state["pods"]):
        waiting = json.loads(pod.split(" ", 2)[2])["waiting"]
        clients.world.pod("pendingi", index, "ns").image_error(
            waiting["reason"], waiting["message"]
        )
    reach(clients, "pendingi", state)


def test_backoff_limit_zero(clients):
    titles = [state["title"] for state in OBSERVED]
    first = "backoffLimit=0, index 2 exits 3: pod Failed, Job still shows nothing"
    clients.running(clients.indexed("onefails", backoffLimit=0))
    clients.world.pod("onefails", 2, "ns").fail(3)
    for place in range(3):
        reach(clients, "onefails", wanted(titles[titles.index(first) + place]))


def test_backoff_limit_zero_after_a_success(clients):
    clients.running(clients.indexed("onefails2", backoffLimit=0))
    clients.world.pod("onefails2", 0, "ns").succeed()
    clients.world.settle()
    clients.world.pod("onefails2", 2, "ns").fail(3)
    reach(clients, "onefails2", wanted("same with index 0 succeeded before: final"))


def test_backoff_limit_per_index(clients):
    world, first = clients.world, "backoffLimitPerIndex=0, index 1 exits 7: the others go on"
    clients.running(clients.indexed("perindex", backoffLimitPerIndex=0))
    world.pod("perindex", 1, "ns").fail(7)
    world.advance(1.5)
    world.pod("perindex", 0, "ns").succeed()
    reach(clients, "perindex", wanted(first))
    world.pod("perindex", 2, "ns").succeed()
    world.pod("perindex", 3, "ns").succeed()
    reach(clients, "perindex", wanted("... final: Failed/FailedIndexes once every index ended"))


def test_max_failed_indexes(clients):
    first = "backoffLimitPerIndex=0 + maxFailedIndexes=0: FailureTarget"
    clients.running(clients.indexed("perindexmax", backoffLimitPerIndex=0, maxFailedIndexes=0))
    clients.world.pod("perindexmax", 1, "ns").fail(7)
    reach(clients, "perindexmax", wanted(first))
    reach(clients, "perindexmax", wanted("... final", after=first))


def test_backoff_limit_zero_and_per_index(clients):
    clients.running(clients.indexed("perindexb0", backoffLimitPerIndex=0, backoffLimit=0))
    clients.world.pod("perindexb0", 1, "ns").fail(7)
    reach(clients, "perindexb0", wanted("backoffLimitPerIndex=0 + backoffLimit=0: final"))


def test_deadline(clients):
    first = "activeDeadlineSeconds=6, index 0 done before: FailureTarget"
    clients.running(clients.indexed("deadline", activeDeadlineSeconds=6))
    clients.world.pod("deadline", 0, "ns").succeed()
    reach(clients, "deadline", wanted(first))
    reach(clients, "deadline", wanted("... final", after=first))


def test_foreground_delete(clients):
    first = (
        "deleting with Foreground: status keeps its numbers, deletionTimestamp and finalizer set"
    )
    clients.running(clients.indexed("delfg"))
    clients.delete("delfg", propagation_policy="Foreground")
    reach(clients, "delfg", wanted(first))
    for pod in clients.world.pods("delfg", "ns"):
        pod.ignore_term()
    reach(clients, "delfg", wanted("... a second later"))


def test_delete_without_a_policy_leaves_orphans(clients):
    clients.running(clients.indexed("deldef", 2))
    clients.delete("deldef")
    reach(clients, "deldef", wanted("deleting with no policy (orphans)"))
    clients.world.settle()
    left = clients.pods()
    assert [pod["status"]["phase"] for pod in left] == ["Running", "Running"]
    assert not any(pod["metadata"].get("ownerReferences") for pod in left)


def test_suspend_and_resume(clients):
    world = clients.world
    clients.create(clients.indexed("susp", 2, suspend=True))
    reach(clients, "susp", wanted("created suspended"))
    world.advance(2)
    clients.patch("susp", {"spec": {"suspend": False}})
    reach(clients, "susp", wanted("resumed"))
    for pod in world.pods("susp", "ns"):
        pod.start()
        pod.ignore_term()
    world.settle()
    clients.patch("susp", {"spec": {"suspend": True}})
    reach(clients, "susp", wanted("suspended mid-run"))


def test_pod_failure_policy(clients):
    rule = {
        "action": "FailJob",
        "onExitCodes": {"containerName": "main", "operator": "In", "values": [42]},
    }
    clients.running(clients.indexed("fpol", podFailurePolicy={"rules": [rule]}))
    clients.world.pod("fpol", 1, "ns").fail(42)
    reach(clients, "fpol", wanted("podFailurePolicy FailJob"))


def test_pod_deleted_by_somebody(clients):
    clients.running(clients.indexed("oob", 2, backoffLimit=0))
    pod = clients.world.pod("oob", 1, "ns")
    clients.core.delete_namespaced_pod(name=pod.name, namespace="ns")
    reach(clients, "oob", wanted("out-of-band delete of one pod, backoffLimit 0: final"))


def test_eviction_that_the_policy_ignores(clients):
    pattern = {"type": "DisruptionTarget", "status": "True"}
    rules = [{"action": "Ignore", "onPodConditions": [pattern]}]
    clients.running(clients.indexed("evict", 2, backoffLimit=0, podFailurePolicy={"rules": rules}))
    clients.world.pod("evict", 1, "ns").evict()
    reach(clients, "evict", wanted("evicted pod ignored by policy: replacement pending"))


def test_every_recorded_state_is_used():
    text = Path(__file__).read_text()
    numbered = [
        "... FailureTarget, others being deleted, failed=4",
        "... Failed (only after all pods ended)",
    ]
    unserved = ["successPolicy met, others being ended"]
    for state in OBSERVED:
        title = state["title"]
        assert title in text or any(title.startswith(start) for start in [*numbered, *unserved]), (
            title
        )
