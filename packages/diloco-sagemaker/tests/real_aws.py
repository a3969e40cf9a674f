"""The standard suite's world where training jobs really run, as processes of this machine."""

import os
import sys
import tempfile
import time
import uuid
from pathlib import Path

from scripted_aws import BUCKET, PREFIX, SpotHarness

from diloco_conformance import Ability, Fault, Operation, Puppets, Step
from diloco_localcloud import SageMakerProcesses

REAL = "the scripted world does that"
PATIENCE = 120.0
GROUP = "/aws/sagemaker/TrainingJobs"


class RealAWSHarness(SpotHarness):
    """Real programs, real time. What is known of a job is read where the scripted world reads it.

    Args:
        folder: Where puppets are told what to do.
    """

    entrypoint = Puppets.entrypoint
    starts_by_itself = True
    many_ranks = 11
    many_runs = 3
    long_log = 100_000
    short_timeout = 12.0
    overrun = 2.0
    slack = 20.0
    patience = PATIENCE
    cannot = {
        **SpotHarness.cannot,
        **dict.fromkeys([*Operation, *Fault, Ability.CALLS, Ability.SENT], REAL),
        Step.OOM: "a puppet uses no memory",
        Ability.AGE: "days do not pass here; the scripted world has them",
        Ability.ELSEWHERE: REAL,
    }

    def __init__(self, folder):
        self.folder = tempfile.TemporaryDirectory(prefix="diloco-puppets-", dir=folder)
        self.puppets = Puppets(Path(self.folder.name), patience=PATIENCE)
        self.entrypoint_args = self.puppets.arguments
        self.run_prefix = f"c{uuid.uuid4().hex[:10]}"
        self.attempts, self.ends, self.texts = {}, {}, {}
        super().__init__()
        self.logs = self.client("logs")

    def start_stand_in(self):
        return SageMakerProcesses(kill_seconds=10.0).start()

    def make_executor(self, *, env=None, **options):
        path = os.pathsep.join([str(Puppets.source), *filter(None, sys.path)])
        made = super().make_executor(
            **{
                "run_id": self.run_prefix,
                "log_delay": 1.0,
                "grace": 2.0,
                "command": [sys.executable, "-m", "diloco_protocol.runner"],
                "env": {"PYTHONPATH": path, **(env or {})},
                "clock": time.time,
                **options,
            }
        )
        made._runs.seconds_to_appear = 1.0  # real ones, and the stand-in shows at once what it has
        return made

    # --- the clock ---

    def clock(self):
        return time.monotonic()

    def now(self):
        return time.time()

    def sleep(self, seconds):
        time.sleep(seconds)

    def advance(self, seconds):
        time.sleep(seconds)

    # --- the hand ---

    def attempt(self, handle):
        return self.attempts.get(handle, 1)

    def wait(self, handle, test, what):
        self.puppets.wait(
            lambda: test(self.truth(handle)), f"rank {handle.rank} of {handle.run_id} to {what}"
        )

    def drive(self, handle, step, value=None):
        if step is Step.PREEMPT:
            self.of(handle).interrupt()
            self.attempts[handle] = self.attempt(handle) + 1
        if step in {Step.START, Step.PREEMPT}:
            self.up(handle)
        elif step is Step.STOP:
            self.of(handle).stop()
            self.over(handle)
        else:
            self.puppets.order(handle, step, value, self.attempt(handle))
            if step is Step.PRINT:
                self.logged(handle, "".join(f"{line}\n" for line in value).encode())
            else:
                self.over(handle)

    def up(self, handle):
        """Wait until its program runs, and the records say so."""
        self.puppets.told(handle, self.attempt(handle))
        self.wait(handle, lambda truth: truth.state != "pending", "run")
        timeout = self.spec(handle).timeout
        if timeout is not None:
            self.ends[handle] = self.clock() + timeout

    def over(self, handle):
        self.ends.pop(handle, None)
        self.wait(handle, lambda truth: not truth.alive, "end")

    def write(self, handle, data, stream="stdout"):
        self.puppets.write(handle, data, stream, self.attempt(handle))
        self.logged(handle, data, stream)

    def logged(self, handle, data, stream="stdout"):
        """Wait until the log has these bytes, as far as they are whole lines."""
        place = handle, stream, self.attempt(handle)
        begun = self.texts.pop(place, b"") + data
        whole, _, self.texts[place] = begun.rpartition(b"\n")
        lines = whole.decode(errors="replace").split("\n") if whole else []
        name = handle.metadata["job_name"]
        self.puppets.wait(
            lambda: set(lines) <= set(self.log_of(name)), f"{len(lines)} lines to be in the log"
        )

    def log_of(self, name):
        logs, lines = self.logs, []
        try:
            streams = logs.describe_log_streams(logGroupName=GROUP, logStreamNamePrefix=f"{name}/")
        except logs.exceptions.ResourceNotFoundException:
            return lines
        for stream in streams["logStreams"]:
            place = {"logGroupName": GROUP, "logStreamName": stream["logStreamName"]}
            token = {}
            while True:
                page = logs.get_log_events(**place, startFromHead=True, **token)
                lines += [event["message"] for event in page["events"]]
                if token.get("nextToken") == page["nextForwardToken"]:
                    break
                token = {"nextToken": page["nextForwardToken"]}
        return lines

    def remove(self, handle):
        """With the checkpoints: a new run of this name would continue from them."""
        run = handle.metadata["job_name"][:-5]
        kept = self.s3.list_objects_v2(Bucket=BUCKET, Prefix=f"{PREFIX}/checkpoints/{run}")
        for entry in kept.get("Contents", ()):
            self.s3.delete_object(Bucket=BUCKET, Key=entry["Key"])
        self.world.habits.delete_seconds = 1.0
        for job in self.world.jobs(run):
            self.api.delete_training_job(TrainingJobName=job.name)
        self.world.habits.delete_seconds = 0.0

    def settle(self):
        for handle, end in list(self.ends.items()):
            truth = self.truth(handle)
            if truth.state is None or not truth.alive:
                del self.ends[handle]
            elif self.clock() > end:
                self.over(handle)
        self.puppets.wait(
            lambda: not any(job.status[0] in {"Stopping", "Deleting"} for job in self.world.jobs()),
            "what has begun to end",
        )

    # --- the truth ---

    def told(self, handle):
        return self.puppets.told(handle, self.attempt(handle))

    def close(self):
        super().close()
        self.folder.cleanup()
