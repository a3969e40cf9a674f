"""This machine, with puppets for replicas: what is true of them is read from the process table."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

from local_lab import PATIENCE, run_of
from scripted_world import ASKED, CANNOT, GPUS, gpus_of

from diloco_conformance import Ability, Harness, Puppets, Step, Truth
from diloco_local import LocalProcessExecutor

MARK = "DILOCO_LOCAL_WORLD"


def seconds_of_a_start():
    """How long the smallest program takes to start and end now.

    A replica takes ten times as long until it is up.
    """
    began = time.monotonic()
    subprocess.run([sys.executable, "-S", "-c", ""], check=True)
    return time.monotonic() - began


class RealHarness(Harness):
    """Real processes, real time."""

    entrypoint = Puppets.entrypoint
    starts_by_itself = True
    many_ranks = 11
    many_runs = 1
    gpus = ASKED
    resolution = 0.6  # the supervisor looks at the sizes of logs every half second
    overrun = 0.2
    # How late this machine is says nothing of the executor; the scripted world knows better.
    slack = PATIENCE
    patience = PATIENCE
    cannot = {
        **CANNOT,
        Step.OOM: "the kernel would have to run out of memory",
        Ability.RACE: "a puppet ends within milliseconds of a cancel",
        Ability.AGE: "days do not pass here; the scripted world has them",
        Ability.ELSEWHERE: "there is one machine; the scripted world gives it another name",
        Ability.SENT: (
            "orders go to the supervisor through a pipe; the scripted world compares them"
        ),
    }

    def __init__(self):
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="diloco-real-"))
        self.mark = uuid.uuid4().hex
        self.short_timeout = max(2.0, 20 * seconds_of_a_start())
        self.puppets = Puppets(self.folder, patience=PATIENCE)
        self.entrypoint_args = self.puppets.arguments
        self.ends = {}
        self.attempts = {}
        self.handles = set()

    def make_executor(self, *, env=None, **options):
        return LocalProcessExecutor(
            root=self.folder / "state",
            pythonpath=[Puppets.source],
            env={**(env or {}), MARK: self.mark},
            gpus=GPUS,
            grace=1.0,
            backoff=self.backoff(),
            **options,
        )

    def clock(self):
        return time.monotonic()

    def sleep(self, seconds):
        time.sleep(seconds)

    def files(self, handle):
        return run_of(handle).replica(handle.rank).path

    def drive(self, handle, step, value=None):
        self.handles.add(handle)
        attempt = self.attempts.get(handle, 1)
        if step is Step.START:
            # On a machine that is slow enough, its timeout comes before it is up.
            ended = (self.files(handle) / "final.json").exists
            self.puppets.wait(
                lambda: self.puppets.report(handle, attempt) or ended(),
                f"rank {handle.rank} to come up",
            )
            return
        if step is Step.STOP:
            os.kill(self.puppets.report(handle, attempt)["parent"], signal.SIGTERM)  # its runner
            self.ends[handle] = "cancelled"
            self.puppets.wait(
                (self.files(handle) / "final.json").exists, f"the end of rank {handle.rank}"
            )
            return
        self.puppets.order(handle, step, value, attempt)
        if step in {Step.FAIL, Step.KILL} and attempt <= self.record(handle)["max_restarts"]:
            self.attempts[handle] = attempt + 1
            self.puppets.told(handle, attempt + 1)
        elif step is not Step.PRINT:
            most = LocalProcessExecutor.capabilities.max_result_bytes
            fits = len(json.dumps(value, separators=(",", ":"))) <= most
            self.ends[handle] = "succeeded" if step is Step.SUCCEED and fits else "failed"
            self.puppets.wait(
                (self.files(handle) / "final.json").exists, f"the end of rank {handle.rank}"
            )

    def write(self, handle, data, stream="stdout"):
        self.puppets.write(handle, data, stream, self.attempts.get(handle, 1))

    def record(self, handle):
        return json.loads((self.files(handle).parent / "run.json").read_text())

    def there(self, handle):
        """Whether the run of a handle is there, and not a later one of its name."""
        run = self.files(handle).parent / "run.json"
        return run.exists() and self.record(handle)["uid"] == handle.metadata["uid"]

    def labels(self, handle):
        return self.record(handle)["labels"]

    def lose(self, handle, left=None):
        outcome = self.files(handle) / f"attempt-{self.attempts.get(handle, 1)}" / "outcome.json"
        outcome.unlink(missing_ok=True)
        if left is not None:
            outcome.write_bytes(left)

    def foreign(self, name):
        place = self.folder / "state" / "runs" / name
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        place.mkdir()
        (place / "notes.txt").write_text("not a run")

    def settle(self):
        for handle in self.handles:
            if self.cancelled(handle) or self.late(handle):
                self.puppets.wait(
                    (self.files(handle) / "final.json").exists, f"the end of rank {handle.rank}"
                )

    def advance(self, seconds):
        time.sleep(seconds)
        for handle in self.handles:
            if self.late(handle):
                self.puppets.wait(
                    (self.files(handle) / "final.json").exists, f"the end of rank {handle.rank}"
                )

    def cancelled(self, handle):
        """Whether somebody has asked for its end."""
        files = self.files(handle)
        return files.with_name(f"{files.name}.cancel.json").exists()

    def late(self, handle):
        """Whether its timeout has passed."""
        if not self.there(handle) or self.record(handle)["timeout"] is None:
            return False
        attempt = self.attempts.get(handle, 1)
        told = self.folder / f"{self.puppets.name(handle, attempt)}.told"
        if not told.exists():
            return False
        return time.time() > told.stat().st_mtime + self.record(handle)["timeout"]

    def truth(self, handle):
        if not self.there(handle):
            return Truth(None, alive=False)
        alive = bool(self.processes(handle))
        if alive or not (self.files(handle) / "final.json").exists():
            stopping = self.cancelled(handle)
            return Truth("running", True, self.attempts.get(handle, 1), stopping)
        # If it was not driven, the executor has ended it: for a cancel, or for its timeout. Which
        # came first, only it can tell.
        ended = "cancelled" if self.cancelled(handle) else "failed"
        if ended == "cancelled" and self.late(handle):
            ended = json.loads((self.files(handle) / "final.json").read_text())["state"]
        return Truth(self.ends.get(handle, ended), False, self.attempts.get(handle, 1))

    def processes(self, handle=None):
        """Those of a replica, or of any in this world."""
        wanted = {f"{MARK}={self.mark}".encode()}
        if handle is not None:
            wanted |= {
                f"REPLICA_RANK={handle.rank}".encode(),
                f"DILOCO_RUN_ID={handle.run_id}".encode(),
            }
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    variables = set((entry / "environ").read_bytes().split(b"\0"))
                except OSError:
                    continue
                if wanted <= variables and any(
                    item.startswith(b"REPLICA_RANK=") for item in variables
                ):
                    found.append(variables)
        return found

    def living(self):
        names = (b"REPLICA_RANK=", b"DILOCO_RUN_ID=")
        replicas = {
            tuple(sorted(item for item in variables if item.startswith(names)))
            for variables in self.processes()
        }
        return len(replicas)

    def told(self, handle):
        return self.puppets.told(handle, self.attempts.get(handle, 1))

    def resources(self, handle):
        environment = dict(
            item.decode().split("=", 1)
            for variables in self.puppets.wait(
                lambda: self.processes(handle), f"rank {handle.rank} to come up"
            )
            for item in variables
            if b"=" in item
        )
        return gpus_of(environment)

    def close(self):
        self.puppets.wait(lambda: not self.processes(), "every puppet to be gone")
        self.puppets.wait(lambda: self.cleared(), "the supervisors to leave")

    def cleared(self):
        try:
            shutil.rmtree(self.folder)
        except OSError:
            return False
        return True
