"""The standard suite's world where pods really run: a rehearsal here, or a cluster of yours."""

import tempfile
import time
import uuid
from collections import Counter
from functools import partial
from pathlib import Path

from cluster_truth import condition, index_of, lives_of, of_handle, resources_of, truth_of
from eks_lab import PATIENCE
from exec_puppets import JOB, ExecPuppets, newest, raw
from kubernetes import client, config

from diloco_conformance import Ability, Fault, Harness, Operation, Puppets, Step
from diloco_eks import EKSExecutor
from diloco_eks._request._names import MANAGED_BY, MANAGER
from diloco_protocol import spec_from_environment

REAL = "the cluster is real"
#: How many pods the suite may have at a time; two nodes of two CPUs have room for them.
MOST_PODS = 12


def sparing_executor(api, namespace, wait):
    """An EKSExecutor that launches only what has room beside all diloco-eks pods of the namespace.

    Args:
        api: An ApiClient to look with.
        namespace: Where.
        wait: Waits until something holds, which is told in words, too.
    """
    ours = {"namespace": namespace, "label_selector": f"{MANAGED_BY}={MANAGER}"}

    def taken():
        jobs = raw(client.BatchV1Api(api).list_namespaced_job(**ours, _preload_content=False))
        pods = raw(client.CoreV1Api(api).list_namespaced_pod(**ours, _preload_content=False))
        # What was deleted may still be ending, and the pods of a Job may be still to come.
        alive = Counter(
            pod["metadata"]["labels"][JOB]
            for pod in pods["items"]
            if pod["status"].get("phase") not in {"Succeeded", "Failed"}
        )
        for job in jobs["items"]:
            name = job["metadata"]["name"]
            if not job["spec"].get("suspend") and condition(job, "Failed") is None:
                alive[name] = max(alive[name], lives_of(job, []))
        return alive.total()

    class Executor(EKSExecutor):
        def _submit(self, request):
            room = MOST_PODS - len(request.ranks)
            what = f"room for the pods of {request.run_id} beside others: {MOST_PODS} in all"
            wait(lambda: taken() <= room, what)
            return super()._submit(request)

    return Executor


class RealClusterHarness(Harness):
    """Real pods, real time; the truth is read with a client of its own.

    Args:
        kubeconfig: The cluster.
        context: Of the kubeconfig; None for the current one.
        image: An image with Python and diloco-protocol.
        namespace: Where to work.
        options: For the executor; they put ``Puppets.source`` on the replicas' import path, or are
            those of ``exec_puppets``.
        shared: A folder that the pods see under the same name; without it they are reached by exec.
        short_timeout: Long enough for a pod to come up.
    """

    entrypoint = Puppets.entrypoint
    starts_by_itself = True
    many_ranks = 11
    many_runs = 1
    gpus = ("L40S", "h100:8", "2")
    keeps_carriage_returns = False
    overrun = 0.5
    slack = 10.0
    patience = PATIENCE
    cannot = {
        **dict.fromkeys([*Operation, *Fault, Ability.CALLS, Ability.SENT], REAL),
        Step.OOM: "a puppet uses no memory",
        Step.STOP: (
            "who deletes a pod gets another one, and who deletes a Job takes its records along"
        ),
        Ability.RACE: "a puppet ends within milliseconds of a cancel",
        Ability.AGE: "days do not pass here; the scripted world has them",
        Ability.ELSEWHERE: "there is one cluster; the scripted world has another",
        Ability.BETWEEN: "Kubernetes continues a list as it was at its first page",
        **dict.fromkeys(
            (Ability.LOSE, Ability.DAMAGE),
            (
                "what a pod has said at its end stays as long as the pod; the scripted world "
                "changes it"
            ),
        ),
    }

    def __init__(
        self,
        kubeconfig,
        *,
        context=None,
        image,
        namespace="default",
        options,
        shared=None,
        short_timeout=12.0,
    ):
        super().__init__()
        self.kubeconfig, self.image, self.namespace, self.options = (
            kubeconfig,
            image,
            namespace,
            options,
        )
        self.context = context
        api = config.new_client_from_config(str(kubeconfig), context=context)
        self.core, self.batch = client.CoreV1Api(api), client.BatchV1Api(api)
        self.folder = (
            tempfile.TemporaryDirectory(prefix="diloco-puppets-", dir=shared) if shared else None
        )
        local = Puppets(Path(self.folder.name), patience=PATIENCE) if self.folder else None
        for_streams = config.new_client_from_config(str(kubeconfig), context=context)
        self.puppets = local or ExecPuppets(client.CoreV1Api(for_streams), namespace)
        self.entrypoint_args = self.puppets.arguments
        self.run_prefix = f"c{uuid.uuid4().hex[:10]}"
        self.short_timeout = short_timeout
        self.attempts, self.deadlines, self.started = {}, {}, set()
        self.failures, self.secrets, self.lines, self.begun = {}, [], {}, {}
        self.strangers = []

    def make_executor(self, *, env=None, **options):
        chosen = {
            "kubeconfig": self.kubeconfig,
            "context": self.context,
            "namespace": self.namespace,
            "grace": 2.0,
            "run_id": self.run_prefix,
            **self.options,
            **options,
            "env": {**self.options.get("env", {}), **(env or {})},
        }
        executor = sparing_executor(self.core.api_client, self.namespace, self.puppets.wait)
        return executor(self.image, backoff=self.backoff(), **chosen)

    def clock(self):
        return time.monotonic()

    def sleep(self, seconds):
        time.sleep(seconds)

    def advance(self, seconds):
        time.sleep(seconds)

    # --- the hand ---

    def wait(self, handle, test, what):
        self.puppets.wait(
            lambda: test(self.truth(handle)), f"rank {handle.rank} of {handle.run_id} to {what}"
        )

    def drive(self, handle, step, value=None):
        attempt = self.attempts.get(handle, 1)
        if step is Step.PREEMPT:
            pod = self.pod(handle)["metadata"]
            body = {
                "apiVersion": "policy/v1",
                "kind": "Eviction",
                "metadata": {"name": pod["name"]},
            }
            raw(
                self.core.create_namespaced_pod_eviction(
                    pod["name"], self.namespace, body, _preload_content=False
                )
            )
            attempt = self.attempts[handle] = attempt + 1
            self.started.discard(handle)
        if step in {Step.START, Step.PREEMPT}:
            self.puppets.told(handle, attempt)
            self.wait(handle, lambda truth: truth.state != "pending", "run")
            self.started.add(handle)
            pod = self.pod(handle)
            env = {
                entry["name"]: entry.get("value", "")
                for entry in pod["spec"]["containers"][0]["env"]
            }
            timeout = spec_from_environment(env).timeout
            if timeout is not None:
                self.deadlines[handle] = self.clock() + timeout
            return
        self.puppets.order(handle, step, value, attempt)
        if step is Step.PRINT:
            self.logged(handle, attempt, len(value))
        restarts = self.job(handle)["spec"]["backoffLimitPerIndex"]
        if step in {Step.FAIL, Step.KILL} and self.failures.get(handle, 0) < restarts:
            self.failures[handle] = self.failures.get(handle, 0) + 1
            self.attempts[handle] = attempt + 1
            self.started.discard(handle)
            self.drive(handle, Step.START)
        elif step is not Step.PRINT:
            self.deadlines.pop(handle, None)
            self.wait(handle, lambda truth: truth.state.terminal and not truth.alive, "end")

    def write(self, handle, data, stream="stdout"):
        attempt = self.attempts.get(handle, 1)
        self.puppets.write(handle, data, stream, attempt)
        begun = self.begun.pop((handle, attempt, stream), b"") + data
        self.begun[handle, attempt, stream] = begun.rpartition(b"\n")[2]
        self.logged(handle, attempt, begun.count(b"\n"))

    def logged(self, handle, attempt, lines):
        """Wait until the cluster's own log has so many lines more."""
        self.lines[handle, attempt] = wanted = self.lines.get((handle, attempt), 0) + lines
        name = self.pod(handle)["metadata"]["name"]
        read = self.core.read_namespaced_pod_log
        self.puppets.wait(
            lambda: read(name, self.namespace, _preload_content=False).data.count(b"\n") >= wanted,
            f"{lines} lines to be in the log of {name}",
        )

    def secret(self, value):
        name = f"{self.run_prefix}-{uuid.uuid4().hex[:8]}"
        body = {"metadata": {"name": name}, "stringData": {"key": value}}
        raw(self.core.create_namespaced_secret(self.namespace, body, _preload_content=False))
        self.secrets.append(name)
        return f"{name}/key"

    def labels(self, handle):
        return self.pod(handle)["metadata"]["labels"]

    def resources(self, handle):
        return resources_of(self.puppets.wait(lambda: self.pod(handle), "a pod to be made"))

    def settle(self):
        for handle in {handle.run_id: handle for handle in self.started}.values():
            job = self.job(handle)
            if job is not None and "deletionTimestamp" in job["metadata"]:
                self.wait(handle, lambda truth: truth.state is None, "be purged")
        for handle, deadline in list(self.deadlines.items()):
            truth = self.truth(handle)
            doomed = (
                self.job(handle) is not None
                and condition(self.job(handle), "FailureTarget") is not None
            )
            failing = truth.state is not None and any(
                self.truth(other).state == "failed"
                for other in self.deadlines
                if other.run_id == handle.run_id
            )
            gang = self.options.get("on_replica_failure", "fail_run") == "fail_run" and failing
            if truth.state is None or truth.state.terminal:
                del self.deadlines[handle]
            elif truth.stopping or doomed or gang or self.clock() > deadline:
                self.wait(
                    handle,
                    lambda truth: truth.state is None or (truth.state.terminal and not truth.alive),
                    "end",
                )
            if self.truth(handle).state == "cancelled":
                # Its pod has ended, and may still be there for a moment, with its log.
                what = f"the pod of rank {handle.rank} of {handle.run_id} to be removed"
                self.puppets.wait(partial(self.is_removed, handle), what)

    def is_removed(self, handle):
        pod = self.pod(handle)
        return pod is None or "deletionTimestamp" not in pod["metadata"]

    def expire(self, handles):
        name = handles[0].metadata["job_name"]
        raw(
            self.batch.delete_namespaced_job(
                name, self.namespace, propagation_policy="Background", _preload_content=False
            )
        )
        self.wait(handles[0], lambda truth: truth.state is None, "be forgotten")

    def remove(self, handle):
        name = handle.metadata["job_name"]
        raw(
            self.batch.delete_namespaced_job(
                name, self.namespace, propagation_policy="Foreground", _preload_content=False
            )
        )

    def foreign(self, name):
        pod = {
            "restartPolicy": "Never",
            "containers": [{"name": "main", "image": "another/image:1"}],
        }
        spec = {"suspend": True, "template": {"spec": pod}}
        body = {"metadata": {"name": name}, "spec": spec}
        raw(self.batch.create_namespaced_job(self.namespace, body, _preload_content=False))
        self.strangers.append(name)

    # --- the truth ---

    def job(self, handle):
        try:
            name = handle.metadata["job_name"]
            return raw(self.batch.read_namespaced_job(name, self.namespace, _preload_content=False))
        except client.ApiException as error:
            if error.status == 404:
                return None
            raise

    def pod(self, handle):
        name = handle.metadata["job_name"]
        return newest(self.core, self.namespace, name, index_of(handle))

    def truth(self, handle):
        pod = self.pod(handle)
        started = handle in self.started
        return truth_of(
            of_handle(self.job(handle), handle),
            pod,
            index_of(handle),
            self.attempts.get(handle, 1),
            started=started,
        )

    def living(self):
        found = raw(self.batch.list_namespaced_job(self.namespace, _preload_content=False))["items"]
        count = 0
        for job in found:
            name = job["metadata"]["name"]
            if name.startswith(self.run_prefix) and name not in self.strangers:
                pods = self.core.list_namespaced_pod(
                    self.namespace, label_selector=f"{JOB}={name}", _preload_content=False
                )
                count += lives_of(job, raw(pods)["items"])
        return count

    def told(self, handle):
        return self.puppets.told(handle, self.attempts.get(handle, 1))

    def close(self):
        executor = self.make_executor()
        for run_id in executor.list_runs():
            if run_id.startswith(self.run_prefix):
                handles = executor.attach(run_id)
                executor.cancel(handles[0])
                executor.collect(handles, timeout=PATIENCE)
                executor.purge(handles[0])
        executor.close()
        for name in self.strangers:
            raw(
                self.batch.delete_namespaced_job(
                    name, self.namespace, propagation_policy="Background", _preload_content=False
                )
            )
        for name in self.secrets:
            raw(self.core.delete_namespaced_secret(name, self.namespace, _preload_content=False))
        if self.folder:
            self.folder.cleanup()
