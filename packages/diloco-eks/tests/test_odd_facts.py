"""Text that strangers write into Jobs, pods or answers takes no memory and is never recorded.

It hides no other rank either.
"""

import pytest

from diloco_eks import EKSOptions
from diloco_eks._client._answers import own_answer
from diloco_eks._client._client import Client
from diloco_eks._client._cluster import Cluster
from diloco_eks._state._indexes import expand_indexes
from diloco_eks._state._reading import read_job, read_pod, run_of
from diloco_eks._state._states import map_states
from diloco_protocol import BackendError, UnavailableError
from diloco_protocol.backend import status_from_data, status_to_data

LATE = "9999-12-31T23:59:59-23:59"


def ranked(job, completions, size=None):
    job["spec"]["completions"] = completions
    job["metadata"]["annotations"] |= {
        "diloco.dev/first-rank": "0",
        "diloco.dev/world-size": str(size or completions),
    }
    return job


@pytest.mark.parametrize("count", [10_001, 10**9, 10**400], ids=["more", "many", "huge"])
def test_a_job_of_more_replicas_than_a_run_has_is_a_strangers(a_job, count):
    job = ranked(a_job(1, {"completedIndexes": "0-999999998", "failedIndexes": "0-999"}), count)
    assert run_of(job) == ""
    facts = read_job(job)
    assert (facts.run_id, facts.completed, facts.failed) == ("", frozenset(), frozenset())


def test_a_job_without_indexes_is_a_strangers(a_job):
    job = ranked(a_job(2), 2)
    assert run_of(job) == "run-1"
    job["spec"]["completionMode"] = "NonIndexed"
    assert run_of(job) == ""


def test_no_index_is_read_twice():
    with pytest.raises(BackendError, match="lists the indexes"):
        expand_indexes("0-9,0-9", 10)


@pytest.mark.parametrize("grace", [2**62, -(2**62), 10**12, 10**400, -1, True], ids=list("abcdef"))
def test_a_grace_that_no_pod_has(a_job, a_pod, grace):
    pod = a_pod(0, deleting=True)
    pod["metadata"]["deletionGracePeriodSeconds"] = grace
    facts = read_pod(pod)
    assert facts.told_to_end is None
    states = map_states(read_job(a_job(2)), [facts, read_pod(a_pod(1))], [0, 1])
    assert [str(states[index][0].state) for index in (0, 1)] == ["running", "running"]
    assert "is being deleted" in states[0][0].message


def test_a_time_that_no_calendar_has(a_job, a_pod):
    pod = a_pod(0, deleting=True)
    pod["metadata"] |= {"deletionTimestamp": LATE, "deletionGracePeriodSeconds": 0}
    pod["status"]["conditions"] = [{"type": "Ready", "status": "False", "lastTransitionTime": LATE}]
    facts = read_pod(pod)
    assert (facts.told_to_end, facts.unready_since) == (None, None)
    assert map_states(read_job(a_job(1)), [facts], [0])[0][0].stopping


def test_an_end_that_no_journal_takes_is_left_out(a_job, a_pod):
    ended = {"exitCode": 1, "signal": 1_000_000, "startedAt": LATE, "finishedAt": LATE}
    pod = read_pod(a_pod(0, "Failed", {"terminated": ended}))
    job = read_job(a_job(1, {"failedIndexes": "0"}))
    status = map_states(job, [pod], [0])[0][0]
    assert (str(status.state), status.exit_code) == ("failed", 1)
    assert (status.signal, status.started_at, status.finished_at) == (None, None, None)


def test_the_end_of_a_rank_with_any_number_of_restarts_goes_into_a_journal(a_job):
    job = a_job(1, {"failedIndexes": "0"})
    job["spec"]["backoffLimitPerIndex"] = 2**31 - 1
    status = map_states(read_job(job), [], [0])[0][0]
    assert status_from_data(status_to_data(status)) == status


def test_of_an_end_only_what_is_read_is_kept(a_pod):
    ended = {"exitCode": 1, "message": "a" * 10**6, "reason": {}, "containerID": "b" * 10**6}
    kept = read_pod(a_pod(0, "Failed", {"terminated": ended})).terminated
    assert kept.keys() == {"exitCode", "message"}
    assert len(kept["message"]) < 10**5


def test_a_secret_in_a_reason_is_not_cut_to_what_no_longer_looks_like_one(a_pod):
    reason = f"postgres://admin:{'hunter2' * 20}@db/x"
    pod = read_pod(a_pod(0, "Failed", {"terminated": {"exitCode": 1, "reason": reason}}))
    assert "hunter2" not in str(pod.terminated)


def test_an_answer_about_another_namespace():
    there = {"metadata": {"name": "run-1", "uid": "u", "namespace": "production"}}
    with pytest.raises(UnavailableError, match=r"about the namespace \[.*'production'\]"):
        own_answer({"kind": "Job", **there}, "read it", "Job", "run-1", "default")
    with pytest.raises(UnavailableError, match=r"about the namespace \[.*'production'\]"):
        own_answer({"kind": "JobList", "items": [there]}, "list", "JobList", "", "default")
    assert own_answer({"kind": "Job", **there}, "read it", "Job", "run-1", "production")


def test_a_status_about_another_kind():
    def removed(**details):
        answer = {"kind": "Status", "status": "Success", "details": {"name": "run-1", **details}}
        return own_answer(answer, "delete it", "Job", "run-1", "default", removed=True)

    assert removed()
    assert removed(kind="jobs")
    with pytest.raises(UnavailableError, match="not the cluster's own"):
        removed(kind="pods")


def test_events_and_workloads_of_others_are_not_taken(monkeypatch):
    cluster = Cluster(Client(EKSOptions("image")))
    ours = {"metadata": {"name": "a", "ownerReferences": [{"uid": "u", "controller": True}]}}
    label_only = {"metadata": {"name": "b", "ownerReferences": [{"uid": "u"}]}}
    events = [{"involvedObject": {"uid": uid}, "metadata": {}} for uid in ("another", "u")]
    items = [label_only, ours, {"metadata": {"name": "c"}}]
    monkeypatch.setattr(cluster, "_kueue", "v1beta1")
    monkeypatch.setattr(cluster, "_one", lambda *_, **__: {"items": items})
    assert cluster.list_workloads("default", "u") == [ours]
    monkeypatch.setattr(cluster, "_one", lambda *_, **__: {"items": events})
    assert cluster.list_events("default", "u") == events[1:]


def test_what_a_container_says_of_its_end_is_no_longer_than_a_kubelets(a_pod):
    texts = ("reason", "message", "startedAt", "finishedAt", "signal")
    end = dict.fromkeys(texts, "x" * 65_000) | {"exitCode": 1}
    facts = read_pod(a_pod(0, "Failed", {"terminated": end}))
    assert len(repr(facts)) < 15_000


def test_pods_that_say_too_much_are_given_up(bench, monkeypatch):
    run = bench.launch(2)
    for rank in range(2):
        run.pod(rank).fail(1, message="x" * 4000)
    assert len(run.executor._cluster.list_pods("default", run.handles[0].metadata["job_uid"])) == 2
    monkeypatch.setattr("diloco_eks._client._cluster._KEPT", 6000)
    with pytest.raises(UnavailableError, match="they say more than 6000 characters"):
        run.executor._cluster.list_pods("default", run.handles[0].metadata["job_uid"])


def test_quotas_that_say_too_much_are_given_up(bench, monkeypatch):
    monkeypatch.setattr("diloco_eks._client._cluster._KEPT", 6000)
    for number in range(2):
        metadata = {"name": f"q-{number}", "annotations": {"a": "x" * 4000}}
        body = {"metadata": metadata, "spec": {"hard": {"pods": "9"}}}
        bench.create("/api/v1/namespaces/default/resourcequotas", body)
    (quota,) = (each for each in bench.executor().check() if each.subject == "quota")
    assert (quota.ok, "they say more than 6000" in quota.message) == (None, True)
