"""What the tests share."""

import json
import ssl
import sys
import urllib.request
from pathlib import Path

import pytest

from diloco_eks import EKSExecutor, EKSOptions
from diloco_localcloud import KubernetesStandIn
from diloco_protocol import Backoff, Outcome, Reason, make_request, outcome_to_message

sys.path.insert(0, str(Path(__file__).parent))  # the world of the standard suite


def make_options(**values):
    return EKSOptions(**{"image": "registry.example/team/trainer:1", **values})


def make(n=4, entrypoint="trainer:train", kwargs=None, **options):
    return make_request(n, entrypoint, kwargs, **{"run_id": "run-1", **options})


def pytest_collection_finish(session):
    """Without a cluster no live test is begun."""
    from live_cluster import live_cluster

    if any(item.get_closest_marker("live") for item in session.items):
        live_cluster()


@pytest.fixture
def options_for():
    return make_options


@pytest.fixture
def request_for():
    return make


def job_json(completions=4, status=None, **values):
    """A Job as a cluster tells it.

    ``values``: suspend, cancelled, deleting, restarts, deadline, first_rank, queue.
    """
    annotations = {
        "diloco.dev/first-rank": str(values.get("first_rank", 0)),
        "diloco.dev/world-size": str(completions),
    }
    if values.get("cancelled"):
        annotations["diloco.dev/cancelled"] = "2026-11-21T04:30:00Z"
    labels = {"diloco.dev/run-id": "run-1", "app.kubernetes.io/managed-by": "diloco-eks"}
    if "queue" in values:
        labels["kueue.x-k8s.io/queue-name"] = values["queue"]
    metadata = {
        "name": "run-1",
        "uid": "u-1",
        "resourceVersion": "1",
        "annotations": annotations,
        "labels": labels,
    }
    if values.get("deleting"):
        metadata["deletionTimestamp"] = "2026-11-21T04:31:00Z"
    spec = {"completions": completions, "completionMode": "Indexed"}
    spec["backoffLimitPerIndex"] = values.get("restarts", 0)
    spec |= {"suspend": True} if values.get("suspend") else {}
    spec |= {"activeDeadlineSeconds": values["deadline"]} if "deadline" in values else {}
    return {"metadata": metadata, "spec": spec, "status": status or {}}


def pod_json(index, phase="Running", state=None, **values):
    """A pod as a cluster tells it.

    ``values``: name, created, failures, ignored, deleting, conditions, reason, message.
    """
    annotations = {"batch.kubernetes.io/job-completion-index": str(index)}
    for key, name in (("failures", "failure"), ("ignored", "ignored-failure")):
        if key in values:
            annotations[f"batch.kubernetes.io/job-index-{name}-count"] = str(values[key])
    metadata = {
        "name": values.get("name", f"run-1-{index}-abcde"),
        "labels": {"batch.kubernetes.io/job-completion-index": str(index)},
        "annotations": annotations,
        "creationTimestamp": values.get("created", "2026-11-21T04:30:47Z"),
    }
    if values.get("deleting"):
        metadata["deletionTimestamp"] = "2026-11-21T04:31:00Z"
    status = {"phase": phase, "conditions": values.get("conditions", [])}
    if state is None and phase == "Running":
        state = {"running": {"startedAt": "2026-11-21T04:30:48Z"}}
    if state:
        status["containerStatuses"] = [{"name": "replica", "state": state}]
    status |= {key: values[key] for key in ("reason", "message") if key in values}
    return {"metadata": metadata, "status": status}


@pytest.fixture
def a_job():
    return job_json


@pytest.fixture
def a_pod():
    return pod_json


class Bench:
    """A stand-in cluster with executors, whose clock is the cluster's: no test waits."""

    def __init__(self, stand_in, folder):
        self.stand_in = stand_in
        self.world = stand_in.world
        self.kubeconfig = stand_in.kubeconfig(folder / "kubeconfig")
        self.executors = []

    def executor(self, **values):
        backoff = Backoff(
            first=0.5,
            factor=1.5,
            cap=5.0,
            clock=self.world.now,
            sleep=self.world.advance,
            uniform=lambda: 0.5,
        )
        values = {
            "backoff": backoff,
            "clock": self.world.now,
            "kubeconfig": self.kubeconfig,
            **values,
        }
        self.executors.append(EKSExecutor("registry.example/trainer:1", **values))
        return self.executors[-1]

    def launch(self, n=2, *, start=True, executor=None, kwargs=None, **options):
        """Launch a run; its pods run if ``start``."""
        executor = executor or self.executor()
        handles = executor.launch_replicas(
            n, "trainer:train", kwargs, **{"run_id": "run-1", **options}
        )
        self.world.settle()
        if start:
            for pod in self.pods(handles[0]):
                pod.start()
            self.world.settle()
        return Run(self, executor, handles)

    def create(self, path, body, method="POST", kind="application/json"):
        """Create something, as whoever runs the cluster does; or change it."""
        stand_in = self.stand_in
        trusted = stand_in.authority
        context = ssl.create_default_context(cadata=trusted) if trusted else None
        headers = {"Authorization": f"Bearer {stand_in.access.token}", "Content-Type": kind}
        request = urllib.request.Request(
            stand_in.url + path, json.dumps(body).encode(), headers, method=method
        )
        with urllib.request.urlopen(request, context=context) as answer:
            return json.loads(answer.read())

    def label_namespace(self, **labels):
        """Label the namespace of the runs with Pod Security Standards: ``warn="restricted"``."""
        keys = {f"pod-security.kubernetes.io/{mode}": level for mode, level in labels.items()}
        body = {"metadata": {"labels": keys}}
        path = "/api/v1/namespaces/default"
        return self.create(path, body, "PATCH", "application/merge-patch+json")

    def pods(self, handle):
        return self.world.pods(handle.metadata["job_name"], handle.metadata["namespace"])

    def close(self):
        for executor in self.executors:
            executor.close()


class Run:
    """A run on a bench."""

    def __init__(self, bench, executor, handles):
        self.bench = bench
        self.world = bench.world
        self.executor = executor
        self.handles = handles

    @property
    def name(self):
        return self.handles[0].metadata["job_name"]

    def pod(self, rank):
        return self.world.pod(self.name, rank, self.handles[0].metadata["namespace"])

    def states(self, executor=None):
        return [str((executor or self.executor).poll(handle)) for handle in self.handles]

    def describe(self, rank=0, executor=None):
        return (executor or self.executor).describe(self.handles[rank])


@pytest.fixture
def bench(tmp_path):
    yield from _made(KubernetesStandIn(), tmp_path)


@pytest.fixture
def punctual_bench(tmp_path):
    """For tests that name moments: the control plane has its usual delays, strict timing or not."""
    yield from _made(KubernetesStandIn(strict_timing=0), tmp_path)


def _made(stand_in, folder):
    with stand_in:
        bench = Bench(stand_in, folder)
        yield bench
        bench.close()


def _report(result=None, **values):
    outcome = Outcome(**{"exit_code": 0, "reason": Reason.COMPLETED, "result": result, **values})
    return outcome_to_message(outcome)


@pytest.fixture
def report():
    """The termination message (and the log lines) with which a runner reports."""
    return _report


@pytest.fixture
def a_bench():
    """Makes a bench of a stand-in and a folder."""
    return Bench
