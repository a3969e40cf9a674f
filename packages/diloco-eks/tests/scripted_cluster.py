"""The standard suite's world for Kubernetes: a stand-in over HTTP, whose pods the suite moves."""

import copy
import math
import tempfile
from dataclasses import replace
from pathlib import Path
from signal import Signals

from cluster_truth import condition, index_of, indexes, lives_of, of_handle, resources_of, truth_of
from kubernetes import client, config

from diloco_conformance import Ability, Fault, Harness, Operation, Step, Told
from diloco_eks import EKSExecutor
from diloco_localcloud import KubernetesStandIn
from diloco_protocol import (
    InvalidRequestError,
    Outcome,
    Reason,
    environment,
    outcome_to_message,
    spec_from_environment,
)

FAULTS = {
    Fault.THROTTLE: "throttle",
    Fault.SERVER_ERROR: "server_error",
    Fault.CUT: "cut",
    Fault.FORBIDDEN: "forbidden",
}
INDEX = "batch.kubernetes.io/job-completion-index"
CALLS = {
    Operation.LAUNCH: [("create", "jobs")],
    Operation.OBSERVE: [("get", "jobs"), ("list", "jobs"), ("list", "pods")],
    Operation.CANCEL: [("patch", "jobs")],
    Operation.LOGS: [("get", "pods/log")],
    Operation.PURGE: [("delete", "jobs")],
}


class ClusterHarness(Harness):
    """Jobs on a stand-in; the runner's part (timeouts, outcomes) is played here."""

    entrypoint = "trainer:train"
    gpus = ("L40S", "h100:8", "2")
    keeps_carriage_returns = False
    cannot = {
        Fault.REFUSED: "the stand-in would have to be stopped; a cut connection is what it has",
        Fault.CONFLICT: "the executor patches without a resource version, so nothing can conflict",
        Ability.SENT: (
            "the cluster keeps Jobs with its own defaults; test_manifest.py compares what is sent"
        ),
        Step.STOP: (
            "who deletes a pod gets another one, and who deletes a Job takes its records along"
        ),
        Ability.RACE: "the controller ends pods within one of its steps",
        Ability.BETWEEN: "Kubernetes continues a list as it was at its first page",
    }

    def __init__(self, **options):
        super().__init__()
        self.options = options
        self.folder = tempfile.TemporaryDirectory(prefix="diloco-eks-")
        self.stand_in = KubernetesStandIn(tls=False).start()
        self.world = self.stand_in.world
        self.kubeconfig = self.stand_in.kubeconfig(Path(self.folder.name) / "kubeconfig")
        self.other = None
        self.deadlines = {}
        self.attempts = {}
        self.started = set()
        self.names = []
        self.strangers = set()
        self.begun = {}
        self.secrets = {}

    def make_executor(self, **options):
        harness = self

        class Executor(EKSExecutor):
            _last_look = 60.0  # real seconds, while the world's are scripted

            def _submit(
                self, request
            ):  # the world must know of every Job, also of those that are created twice
                if harness.job(request.run_id) is None:
                    harness.forget(request.run_id)
                harness.names.append(request.run_id)
                return super()._submit(request)

        backoff = replace(self.backoff(), first=0.5)
        return Executor(
            "any/image:1",
            kubeconfig=self.kubeconfig,
            backoff=backoff,
            clock=self.clock,
            **{**self.options, **options},
        )

    # --- the clock ---

    def clock(self):
        return self.world.now()

    def sleep(self, seconds):
        limit = self.time.limit
        if limit is not None and self.clock() > limit:
            self.time.limit = 0
            self.time.sleep(seconds)  # raises
        if not self.time.idle():
            self.advance(seconds)

    def now(self):
        return self.clock()

    def age(self, seconds):
        self.advance(seconds)

    def elsewhere(self):
        if self.other is None:
            self.other = KubernetesStandIn(tls=False).start()
        kubeconfig = self.other.kubeconfig(Path(self.folder.name) / "elsewhere")
        return EKSExecutor("any/image:1", kubeconfig=kubeconfig, backoff=self.backoff())

    def advance(self, seconds):
        self.world.advance(seconds)
        self.time_out()

    def time_out(self):
        """What the runners do: end what is overdue."""
        late = []
        for (name, index), deadline in list(self.deadlines.items()):
            if self.clock() > deadline:
                del self.deadlines[name, index]
                pod = self.pod(name, index)
                if pod is not None and pod.alive:
                    pod.fail(
                        124,
                        self.message(
                            Outcome(124, error="the timeout passed", reason=Reason.TIMEOUT)
                        ),
                    )
                    late.append((name, index))
        for name, index in late:
            self.again(name, index)

    # --- the hand ---

    def forget(self, name):
        """What was done to a run of this name that is gone is nothing to the next one."""
        for known in (self.deadlines, self.attempts):
            for key in [key for key in known if key[0] == name]:
                del known[key]
        self.started = {key for key in self.started if key[0] != name}

    # --- pods and jobs ---

    def job(self, name):
        try:
            return self.world.job(name)
        except LookupError:
            return None

    def pod(self, name, index):
        try:
            return self.world.pod(name, index)
        except LookupError:
            return None

    def message(self, outcome, pod=None):
        text, lines = outcome_to_message(outcome)
        if lines:
            pod.log("".join(f"{line}\n" for line in lines))
        return text

    def drive(self, handle, step, value=None):
        self.world.settle()
        name, index = handle.metadata["job_name"], index_of(handle)
        pod = self.pod(name, index)
        if step not in {Step.START, Step.PRINT}:
            self.flush(pod)
        if step is Step.START:
            pod.start()
            self.started.add((name, index))
            timeout = self.spec(handle).timeout
            self.deadlines[name, index] = self.clock() + (math.inf if timeout is None else timeout)
        elif step is Step.PRINT:
            self.write(handle, "".join(f"{line}\n" for line in value).encode())
            return
        else:
            self.deadlines.pop((name, index), None)
        if step is Step.SUCCEED:
            self.succeed(pod, value)
        elif step is Step.FAIL:
            outcome = Outcome(value, error=f"exit code {value}", reason=Reason.ERROR)
            pod.fail(value, self.message(outcome))
            self.again(name, index)
        elif step is Step.OOM:
            pod.oom()
            self.again(name, index)
        elif step is Step.KILL:
            code = 128 + Signals[value]
            outcome = Outcome(code, value, error=f"ended by {value}", reason=Reason.ERROR)
            pod.fail(code, self.message(outcome))
            self.again(name, index)
        elif step is Step.PREEMPT:
            pod.disrupt()
            self.next_attempt(name, index)
        self.world.settle()

    def succeed(self, pod, value):
        try:
            pod.succeed(self.message(Outcome(0, result=value, reason=Reason.COMPLETED), pod))
        except InvalidRequestError as error:  # as the runner does
            pod.fail(1, self.message(Outcome(1, error=str(error), reason=Reason.ERROR)))

    def again(self, name, index):
        """If the Job has a restart left for it, its next pod comes after a while.

        Of two failures at once the Job may count one, and end.
        """
        self.world.settle()
        job = self.job(name)
        counted = index in indexes(job["status"].get("failedIndexes"))
        if not counted and condition(job, "FailureTarget") is None:
            self.next_attempt(name, index)

    def next_attempt(self, name, index):
        self.started.discard((name, index))
        self.attempts[name, index] = attempt = self.attempts.get((name, index), 1) + 1
        # Its grace, and the pause before the next pod: 10 s, and twice as long after each further
        # failure, up to 600 s.
        longest = 60.0 + min(10.0 * 2 ** (attempt - 2), 600.0)
        self.world.settle(within=longest, most=2 * longest)

    def write(self, handle, data, stream="stdout"):
        """As a container runtime does, which reads each stream by itself and writes whole lines."""
        pod = self.pod(handle.metadata["job_name"], index_of(handle))
        lines, newline, rest = (self.begun.pop((pod.uid, stream), b"") + data).rpartition(b"\n")
        pod.log(lines + newline)
        self.begun[pod.uid, stream] = rest

    def flush(self, pod):
        """What was begun is a line when nobody writes any more."""
        for stream in ("stdout", "stderr"):
            pod.log(self.begun.pop((pod.uid, stream), b""))

    def secret(self, value):
        reference = f"secrets/key-{len(self.secrets)}"
        self.secrets[reference] = value
        return reference

    def labels(self, handle):
        pod = self.pod(handle.metadata["job_name"], index_of(handle))
        return pod.json["metadata"]["labels"]

    def resources(self, handle):
        self.world.settle()
        return resources_of(self.pod(handle.metadata["job_name"], index_of(handle)).json)

    def settle(self):
        self.world.settle(within=15.0)
        for pod in (pod for name in self.names for pod in self.world.pods(name)):
            wanted = [entry.get("valueFrom", {}) for entry in self.environment(pod)]
            keys = [where["secretKeyRef"] for where in wanted if "secretKeyRef" in where]
            missing = [key for key in keys if f"{key['name']}/{key['key']}" not in self.secrets]
            if missing and pod.json["status"]["phase"] == "Pending":
                text = (
                    f"couldn't find key {missing[0]['key']} in Secret default/{missing[0]['name']}"
                )
                pod.wait_with("CreateContainerConfigError", text)

    def environment(self, pod):
        return pod.json["spec"]["containers"][0].get("env", [])

    def spec(self, handle):
        variables = {entry["name"]: self.value(entry) for entry in self.variables(handle)}
        attempt = self.attempts.get((handle.metadata["job_name"], index_of(handle)), 1)
        spec = spec_from_environment(variables)  # of the first rank; the runner adds the index
        index = int(
            self.pod(handle.metadata["job_name"], index_of(handle)).json["metadata"]["labels"][
                INDEX
            ]
        )
        return replace(spec, rank=spec.rank + index, attempt=attempt)

    def variables(self, handle):
        pod = self.pod(handle.metadata["job_name"], index_of(handle))
        return self.environment(pod)

    def expire(self, handles):
        cluster = self.stand_in._cluster
        with cluster.changed:
            cluster.delete_job("default", handles[0].metadata["job_name"], "Background")
        self.world.settle()

    def foreign(self, name):
        container = {"name": "main", "image": "another/image:1"}
        pod = {"restartPolicy": "Never", "containers": [container]}
        api = client.BatchV1Api(config.new_client_from_config(str(self.kubeconfig)))
        body = {"metadata": {"name": name}, "spec": {"template": {"spec": pod}}}
        api.create_namespaced_job("default", body)
        self.strangers.add(name)

    def remove(self, handle):
        cluster = self.stand_in._cluster
        with cluster.changed:
            cluster.delete_job("default", handle.metadata["job_name"], "Foreground")

    def lose(self, handle, left=None):
        pod = copy.deepcopy(self.pod(handle.metadata["job_name"], index_of(handle)).json)
        end = pod["status"]["containerStatuses"][0]["state"]["terminated"]
        end["message"] = (left or b"").decode(errors="replace")
        cluster = self.stand_in._cluster
        with cluster.changed:
            cluster.put_pod(pod)

    # --- the truth ---

    def truth(self, handle):
        name, index = handle.metadata["job_name"], index_of(handle)
        job = of_handle(self.job(name), handle)
        pod = self.pod(name, index) if job is not None else None
        pod = pod.json if pod is not None and pod.exists else None
        started = (name, index) in self.started
        return truth_of(job, pod, index, self.attempts.get((name, index), 1), started=started)

    def living(self):
        jobs = {name: self.job(name) for name in self.names if name not in self.strangers}
        return sum(
            lives_of(job, [pod.json for pod in self.world.pods(name)])
            for name, job in jobs.items()
            if job
        )

    def told(self, handle):
        spec = self.spec(handle)
        known = {entry["name"]: self.value(entry) for entry in self.variables(handle)}
        variables = {**known, **environment(spec)}
        return Told(spec.rank, spec.world_size, spec.kwargs, variables, spec.timeout)

    def value(self, entry):
        where = entry.get("valueFrom", {}).get("secretKeyRef")
        if where is not None:
            return self.secrets[f"{where['name']}/{where['key']}"]
        return entry.get("value", "").replace("$$", "$")

    # --- faults ---

    def inject(self, operation, fault, *, after=0):
        if fault in {Fault.AMBIGUOUS, Fault.UNANSWERED}:
            times = 1 if fault is Fault.AMBIGUOUS else None
            self.stand_in.faults.add(
                "ambiguous", verb="create", resource="jobs", times=times, after=after
            )
            return
        for verb, resource in CALLS[operation]:
            self.stand_in.faults.add(
                FAULTS[fault], verb=verb, resource=resource, times=None, after=after
            )

    def clear(self):
        self.stand_in.faults.clear()

    def calls(self):
        return len(self.stand_in.calls)

    def close(self):
        self.stand_in.stop()
        if self.other is not None:
            self.other.stop()
        self.folder.cleanup()
