"""What holds for every Job, whatever happens to its pods."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_localcloud import KubernetesStandIn
from diloco_localcloud._kubernetes._api._checks import _specs
from diloco_localcloud._kubernetes._jobs import _status
from diloco_localcloud._kubernetes._jobs._status import finished, true_condition
from diloco_localcloud._kubernetes._objects._resources import JOBS, PODS

IGNORE = {
    "rules": [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    ]
}

SPECS = st.fixed_dictionaries(
    {},
    optional={
        "backoffLimit": st.integers(0, 3),
        "backoffLimitPerIndex": st.integers(0, 2),
        "podFailurePolicy": st.just(IGNORE),
        "activeDeadlineSeconds": st.sampled_from([5, 60]),
    },
)
DEEDS = st.lists(
    st.tuples(
        st.integers(0, 3),
        st.sampled_from(
            [
                "succeed",
                "succeed",
                "fail",
                "oom",
                "evict",
                "delete",
                "lose",
                "found",
                "suspend",
                "resume",
                "wait",
            ]
        ),
        st.sampled_from([0.0, 0.05, 1.0, 2.5, 12.0]),
    ),
    min_size=1,
    max_size=25,
)


def make(spec):
    stand_in = KubernetesStandIn(tls=False)
    cluster = stand_in._cluster
    pod = {"restartPolicy": "Never", "containers": [{"name": "main", "image": "any"}]}
    body = {
        "metadata": {"name": "run", "namespace": "default"},
        "spec": {
            "completions": 4,
            "parallelism": 4,
            "completionMode": "Indexed",
            "template": {"spec": pod},
            **spec,
        },
    }
    with cluster.changed:
        cluster.store.add(JOBS, _specs.new_job(cluster.store.prepare(JOBS, body)))
    stand_in.world.auto_start = 0.5
    stand_in.world.settle()
    return stand_in, cluster


def do(world, cluster, index, deed):
    if deed in ("suspend", "resume"):
        job = world.job("run")
        with cluster.changed:
            new = {
                **job,
                "metadata": dict(job["metadata"]),
                "spec": {**job["spec"], "suspend": deed == "suspend"},
            }
            cluster.store.replace(JOBS, new)
    elif deed != "wait":
        pods = [pod for pod in world.pods("run") if pod.index == index]
        ended = pods and pods[-1].json["status"]["phase"] in ("Succeeded", "Failed")
        if pods and not (ended and deed in ("succeed", "fail", "oom")):
            getattr(pods[-1], deed)()


def check(job, before):
    status = job.get("status", {})
    done = _status.parse_indexes(status.get("completedIndexes", ""))
    failed = _status.parse_indexes(status.get("failedIndexes", ""))
    assert not done & failed
    assert done | failed <= set(range(4))
    assert status.get("succeeded", 0) == len(done)
    assert status.get("active", 1) > 0  # a count of 0 is absent
    if before is not None:
        assert _status.parse_indexes(before.get("completedIndexes", "")) <= done
        assert before.get("failed", 0) <= status.get("failed", 0)
        for kind in ("FailureTarget", "SuccessCriteriaMet", "Failed", "Complete"):
            assert not true_condition(before, kind) or true_condition(status, kind)
    if finished(job):
        assert status["terminating"] == 0
        assert "active" not in status
        assert not true_condition(status, "Failed") or not true_condition(status, "Complete")
        assert before is None or not finished({"status": before}) or before == status
    if true_condition(status, "Complete"):
        assert done == set(range(4))
    assert ("failedIndexes" in status) <= ("backoffLimitPerIndex" in job["spec"])


@settings(max_examples=60, deadline=None)
@given(SPECS, DEEDS)
def test_the_status_is_lawful(spec, deeds):
    stand_in, cluster = make(spec)
    world, before = stand_in.world, None
    for index, deed, seconds in deeds:
        do(world, cluster, index, deed)
        world.advance(seconds)
        job = world.job("run")
        check(job, before)
        before = job["status"]
    # Left alone, with every node back, it comes to rest: nothing hangs in between.
    for pod in world.pods("run"):
        if pod.exists:
            pod.found()
    world.advance(1500)
    with cluster.changed:
        pods = cluster.store.list(PODS, "default")
    live = [pod for pod in pods if pod["status"]["phase"] not in ("Succeeded", "Failed")]
    job = world.job("run")
    check(job, before)
    if finished(job):
        assert live == []
        assert not any("finalizers" in pod["metadata"] for pod in pods)
    elif not job["spec"].get("suspend"):
        done = _status.parse_indexes(
            job["status"].get("completedIndexes", "")
        ) | _status.parse_indexes(job["status"].get("failedIndexes", ""))
        assert len(live) == 4 - len(done)


@settings(max_examples=30, deadline=None)
@given(SPECS, DEEDS)
def test_the_same_script_gives_the_same_world(spec, deeds):
    ends = []
    for _ in range(2):
        stand_in, cluster = make(spec)
        for index, deed, seconds in deeds:
            do(stand_in.world, cluster, index, deed)
            stand_in.world.advance(seconds)
        ends.append((stand_in.world.job("run"), [pod.json for pod in stand_in.world.pods("run")]))
    assert ends[0] == ends[1]
