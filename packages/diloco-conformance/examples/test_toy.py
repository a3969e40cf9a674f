"""The toy backend, certified."""

from signal import Signals

from toy_cloud import ToyCloud
from toy_executor import ToyExecutor

from diloco_conformance import ExecutorConformance, Harness, Resources, Step, Told, Truth
from diloco_protocol import ReplicaState

FAULTS = {
    "throttle": "Throttled", "server error": "ServerError", "refused": "Refused",
    "cut": "ConnectionCut", "forbidden": "Forbidden", "conflict": "Conflict",
    "ambiguous": "Ambiguous", "unanswered": "Unanswered",
}  # fmt: skip
STATES = {"QUEUED": "pending", "TIMED_OUT": "failed", "STOPPED": "cancelled"}


class ToyHarness(Harness):
    entrypoint = "any_module:any_function"  # nothing runs in this cloud
    gpus = ("L4", "h100:8", "any:2")

    def __init__(self, *, gang=False):
        super().__init__()
        self.cloud = ToyCloud(self.clock, gang=gang)

    def make_executor(self, **options):
        return ToyExecutor(self.cloud, backoff=self.backoff(), **options)

    def drive(self, handle, step, value=None):
        name = handle.metadata["name"]
        if step is Step.START:
            self.cloud.start(name)
        elif step is Step.PREEMPT:
            self.cloud.preempt(name, value)
        elif step is Step.STOP:
            self.cloud.stop_from_outside(name)
        elif step is Step.SUCCEED:
            self.cloud.succeed(name, value)
        elif step is Step.FAIL:
            self.cloud.end(name, "FAILED", value)
        elif step is Step.OOM:
            self.cloud.end(name, "FAILED", 137, reason="OutOfMemory", signal="SIGKILL")
        elif step is Step.KILL:
            self.cloud.end(name, "FAILED", 128 + Signals[value], signal=value)
        elif step is Step.PRINT:
            self.write(handle, "".join(f"{line}\n" for line in value).encode())

    def write(self, handle, data, stream="stdout"):
        self.cloud.write(handle.metadata["name"], data, stream)

    def settle(self):
        self.cloud.settle()

    def advance(self, seconds):
        self.time.sleep(seconds)
        self.cloud.pass_time()

    def truth(self, handle):
        job = self.cloud.find(handle.metadata)
        if job is None:
            return Truth(None, alive=False)
        state = ReplicaState(STATES.get(job.status, job.status.lower()))
        no_memory = job.reason == "OutOfMemory"
        return Truth(state, job.live, job.attempt, job.stopping, job.exit_code, no_memory)

    def living(self):
        return sum(job.live for job in self.cloud.jobs.values())

    def expire(self, handles):
        for handle in handles:
            del self.cloud.jobs[handle.metadata["name"]]

    def lose(self, handle, left=None):
        job = self.cloud.find(handle.metadata)
        job.outputs = {} if left is None else {job.attempt: left}

    def foreign(self, name):
        self.cloud.foreign(name)

    def between(self, action):
        self.cloud.between = action

    def remove(self, handle):
        self.cloud.remove(handle.run_id)

    def age(self, seconds):
        self.advance(seconds)

    def elsewhere(self):
        return ToyExecutor(ToyCloud(self.clock, account="somebody-elses"), backoff=self.backoff())

    def inject(self, operation, fault, *, after=0):
        self.cloud.faults[operation] = (FAULTS[fault], after)

    def clear(self):
        self.cloud.faults.clear()

    def calls(self):
        return self.cloud.calls

    def sent(self):
        return list(self.cloud.made)

    def told(self, handle):
        job = self.cloud.find(handle.metadata)
        body, attempt = job.body, {"DILOCO_ATTEMPT": str(job.attempt)}  # what starts it counts
        secrets = {name: self.cloud.secrets[where] for name, where in body["secrets"].items()}
        spec, environment = body["spec"], {**body["env"], **secrets, **attempt}
        return Told(spec["rank"], spec["world_size"], spec["kwargs"], environment, spec["timeout"])

    def secret(self, value):
        reference = f"secret-{len(self.cloud.secrets)}"
        self.cloud.secrets[reference] = value
        return reference

    def labels(self, handle):
        return self.cloud.find(handle.metadata).body["labels"]

    def resources(self, handle):
        asked = dict(self.cloud.find(handle.metadata).body["resources"])
        if gpu := asked.pop("gpu", None):
            asked["gpu"] = f"{gpu['model']}:{gpu['count']}"
        return Resources(**asked)


class TestToy(ExecutorConformance):
    def make_harness(self):
        return ToyHarness()


class TestToyGang(ExecutorConformance):
    def make_harness(self):
        return ToyHarness(gang=True)
