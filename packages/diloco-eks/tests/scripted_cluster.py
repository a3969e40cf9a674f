"""The standard suite's world for Kubernetes: a stand-in cluster over HTTP, whose pods the suite moves."""

import tempfile
from dataclasses import replace
from pathlib import Path

from diloco_conformance import Ability, Fault, Harness, Operation, Step, Told, Truth
from diloco_eks import EKSExecutor
from diloco_localcloud import KubernetesStandIn
from diloco_protocol import Outcome, Reason, environment, outcome_to_message, spec_from_environment

FAULTS = {
    Fault.THROTTLE: "throttle",
    Fault.SERVER_ERROR: "server_error",
    Fault.CUT: "cut",
    Fault.FORBIDDEN: "forbidden",
}
CALLS = {
    Operation.LAUNCH: [("create", "jobs")],
    Operation.OBSERVE: [("get", "jobs"), ("list", "jobs"), ("list", "pods")],
    Operation.CANCEL: [("patch", "jobs")],
}


def indexes(text):
    """``"0,2-4"`` as numbers."""
    ranges = [part.split("-") for part in text.split(",") if part]
    return {number for bounds in ranges for number in range(int(bounds[0]), int(bounds[-1]) + 1)}


class ClusterHarness(Harness):
    """Jobs on a stand-in; the runner's part (timeouts, outcomes) is played here."""

    entrypoint = "trainer:train"
    cannot = {
        Fault.REFUSED: "the stand-in would have to be stopped; a cut connection is what it has",
        Fault.CONFLICT: "the executor patches without a resource version, so nothing can conflict",
        Ability.SENT: "the cluster keeps Jobs with its own defaults; test_manifest.py compares what is sent",
        Ability.RACE: "the controller ends pods within one of its steps",
    }

    def __init__(self, **options):
        super().__init__()
        self.options = options
        self.folder = tempfile.TemporaryDirectory(prefix="diloco-eks-")
        self.stand_in = KubernetesStandIn(tls=False).start()
        self.world = self.stand_in.world
        self.kubeconfig = self.stand_in.kubeconfig(Path(self.folder.name) / "kubeconfig")
        self.deadlines = {}
        self.attempts = {}
        self.names = []

    def make_executor(self):
        harness = self

        class Executor(EKSExecutor):
            def _submit(self, request):  # the world must know of every Job, also of those that are created twice
                harness.names.append(request.run_id)
                return super()._submit(request)

        backoff = replace(self.backoff(), first=0.5)
        return Executor("any/image:1", kubeconfig=self.kubeconfig, backoff=backoff, clock=self.clock, **self.options)

    # --- the clock ---

    def clock(self):
        return self.world.now()

    def sleep(self, seconds):
        limit = self.time.limit
        if limit is not None and self.clock() > limit:
            self.time.limit = 0
            self.time.sleep(seconds)  # raises
        self.advance(seconds)

    def advance(self, seconds):
        self.world.advance(seconds)
        self.time_out()

    def time_out(self):
        """What the runners do: end what is overdue."""
        late = False
        for (name, index), deadline in list(self.deadlines.items()):
            if self.clock() > deadline:
                del self.deadlines[name, index]
                pod = self.pod(name, index)
                if pod is not None and pod.alive:
                    late = True
                    pod.fail(124, self.message(Outcome(124, error="the timeout passed", reason=Reason.TIMEOUT)))
        if late:
            self.world.settle()

    # --- the hand ---

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
        name, index = handle.metadata["job_name"], handle.rank
        pod = self.pod(name, index)
        if step is Step.START:
            pod.start()
            self.deadlines[name, index] = self.clock() + self.spec(handle).timeout
        elif step is Step.PRINT:
            pod.log("".join(f"{line}\n" for line in value))
            return
        else:
            self.deadlines.pop((name, index), None)
        if step is Step.SUCCEED:
            pod.succeed(self.message(Outcome(0, result=value, reason=Reason.COMPLETED), pod))
        elif step is Step.FAIL:
            pod.fail(value, self.message(Outcome(value, error=f"exit code {value}", reason=Reason.ERROR)))
        elif step is Step.OOM:
            pod.oom()
        elif step is Step.PREEMPT:
            pod.disrupt()
            self.attempts[name, index] = self.attempts.get((name, index), 1) + 1
            self.world.settle(within=31.0)  # its grace
        self.world.settle()

    def settle(self):
        self.world.settle(within=15.0)

    def spec(self, handle):
        container = self.pod(handle.metadata["job_name"], handle.rank).json["spec"]["containers"][0]
        return spec_from_environment({entry["name"]: entry.get("value", "") for entry in container["env"]})

    def expire(self, handles):
        cluster = self.stand_in._cluster
        with cluster.changed:
            cluster.delete_job("default", handles[0].metadata["job_name"], "Background")
        self.world.settle()

    # --- the truth ---

    def truth(self, handle):
        name, index = handle.metadata["job_name"], handle.rank
        job = self.job(name)
        if job is None:
            return Truth(None, alive=False)
        pod, status = self.pod(name, index), job["status"]
        alive = pod is not None and pod.exists and pod.json["status"]["phase"] in {"Pending", "Running"}
        attempt = self.attempts.get((name, index), 1)
        if index in indexes(status.get("completedIndexes", "")):
            return Truth("succeeded", alive=alive, attempt=attempt)
        if index in indexes(status.get("failedIndexes", "")):
            return Truth("failed", alive=alive, attempt=attempt)
        over = next((c for c in status.get("conditions", []) if c["type"] == "Failed" and c["status"] == "True"), None)
        if over is not None and not alive:
            # Nobody sets a deadline on a running Job but who cancels it; its own is hours away.
            state = "cancelled" if over["reason"] == "DeadlineExceeded" else "failed"
            return Truth(state, alive=False, attempt=attempt)
        going = any(c["type"] == "FailureTarget" and c["status"] == "True" for c in status.get("conditions", []))
        stopping = going or "diloco.dev/cancelled" in job["metadata"].get("annotations", {})
        running = pod is not None and pod.alive
        return Truth("running" if running else "pending", alive=True, attempt=attempt, stopping=stopping)

    def living(self):
        return sum(self.lives(name) for name in set(self.names))

    def lives(self, name):
        job = self.job(name)
        if job is None:
            return 0
        ended = indexes(job["status"].get("completedIndexes", ""))
        ended |= indexes(job["status"].get("failedIndexes", ""))
        over = any(c["type"] == "Failed" and c["status"] == "True" for c in job["status"].get("conditions", []))
        return sum(pod.alive for pod in self.world.pods(name)) if over else job["spec"]["completions"] - len(ended)

    def told(self, handle):
        spec = replace(self.spec(handle), rank=handle.rank)
        container = self.pod(handle.metadata["job_name"], handle.rank).json["spec"]["containers"][0]
        known = {entry["name"]: entry.get("value", "").replace("$$", "$") for entry in container["env"]}
        return Told(spec.rank, spec.world_size, spec.kwargs, {**known, **environment(spec)})

    # --- faults ---

    def inject(self, operation, fault, *, after=0):
        if after:
            return  # a launch is one call
        if fault is Fault.AMBIGUOUS:
            self.stand_in.faults.add("ambiguous", verb="create", resource="jobs", times=1)
            return
        for verb, resource in CALLS[operation]:
            self.stand_in.faults.add(FAULTS[fault], verb=verb, resource=resource, times=None)

    def clear(self):
        self.stand_in.faults.clear()

    def calls(self):
        return len(self.stand_in.calls)

    def close(self):
        self.stand_in.stop()
        self.folder.cleanup()
