"""A machine without processes: a supervisor in memory that writes like the real one, when told."""

import contextlib
import json
import os
import shutil
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from signal import Signals
from unittest import mock

from local_lab import run_of

from diloco_conformance import Ability, Fault, Harness, Operation, Resources, Step, Told, Truth
from diloco_local import LocalProcessExecutor
from diloco_local._environment import inherited
from diloco_local._files import create_json, write_json
from diloco_local._orders import show_orders
from diloco_local._record import AttemptState, read_record
from diloco_local._rundir import RunDir
from diloco_local._verdict import Stop, verdict
from diloco_protocol import Outcome, Reason, environment
from diloco_protocol.backend import status_to_data

NO_API = "files and processes have no API that could be disturbed"
CANNOT = {
    **dict.fromkeys([*Operation, *Fault], NO_API),
    Ability.CALLS: NO_API,
    Ability.EXPIRE: "runs stay until they are purged",
    Ability.BETWEEN: "runs are listed by one look at a folder",
    Ability.REMOVE: (
        "a run goes out of sight by one rename, so that nobody sees a removal under way"
    ),
    Ability.SECRETS: "this machine has no store of secrets",
    Step.PREEMPT: "nobody takes the machine away on which the launcher itself runs",
}

#: What the executors share out, and what can be asked of them then: nobody tells the models of
#: these.
GPUS = ["0", "1", "2", "3"]
ASKED = ("2", "any:1")


def gpus_of(environment):
    """What a replica may use, in the words of a launch."""
    devices = environment.get("CUDA_VISIBLE_DEVICES")
    return Resources(gpu=None if devices is None else f"any:{len(devices.split(','))}")


#: Passes the check of the entrypoint, so that no interpreter has to start.
INTERPRETER = '#!/bin/sh\necho "{}" > "$7"\n'


class Life:
    """One replica in the scripted world."""

    def __init__(self, order):
        self.order = order
        self.phase = "starting"
        self.started_at = None
        self.status = None
        self.attempt = 1

    @property
    def live(self):
        return self.status is None


class ScriptedHarness(Harness):
    """Run directories without processes."""

    entrypoint = "anything:at_all"
    cannot = CANNOT
    gpus = ASKED

    def __init__(self):
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="diloco-scripted-"))
        self.python = self.folder / "python"
        self.python.write_text(INTERPRETER)
        self.python.chmod(0o700)
        self.runs = {}
        self.uids = {}
        self.locks = {}
        self.requests = []

    def make_executor(self, **options):
        harness = self

        class Executor(LocalProcessExecutor):
            _supervise = staticmethod(harness.supervise)

        return Executor(
            root=self.folder / "state",
            python=self.python,
            inherit_env=["PATH"],
            pythonpath=[],
            cwd="/",
            gpus=GPUS,
            backoff=self.backoff(),
            clock=self.clock,
            sleep=self.sleep,
            **options,
        )

    # --- the supervisor ---

    def supervise(self, run: RunDir, lock, orders, *, recover=False):
        assert not recover, "the scripted supervisor is never killed"
        self.locks[run.path] = os.dup(lock)  # the lock is the sign of its life
        self.uids[run.path] = run.uid
        self.runs[run.path] = {order.rank: Life(order) for order in orders}
        self.requests += show_orders(run, orders, inherited(os.environ, ["PATH"]))
        for order in orders:
            files = run.replica(order.rank).attempt(1)
            files.path.mkdir(mode=0o700)
            write_json(files.spec, order.spec.to_dict())
            self.save(run, order.rank)
        run.started.touch()

    def save(self, run, rank):
        life = self.runs[run.path][rank]
        state = AttemptState(life.attempt, life.phase, started_at=life.started_at or 0.0)
        write_json(run.replica(rank).state, asdict(state))

    def failed(self, run, rank, **how):
        """An attempt has failed: the next one waits for its start, or that was the last."""
        life = self.runs[run.path][rank]
        if life.attempt > read_record(run).max_restarts:
            self.end(run, rank, **how)
            return
        life.attempt, life.phase, life.started_at = life.attempt + 1, "starting", None
        self.save(run, rank)

    def end(
        self, run, rank, *, code=None, signal=None, result=None, stop=None, oom=False, told=False
    ):
        """An attempt is the last; ``told`` is whether its runner was told to end, by whomever."""
        files, number = run.replica(rank), self.runs[run.path][rank].attempt
        attempt, outcome = files.attempt(number), None
        if code is not None:
            size, most = len(json.dumps(result)), LocalProcessExecutor.capabilities.max_result_bytes
            if size > most:
                code, result = 1, None
            reason = Reason.COMPLETED if code == 0 else Reason.ERROR
            reason = Reason.CANCEL_REQUESTED if told else reason
            now, began = self.clock(), self.runs[run.path][rank].started_at
            error = None if code == 0 else f"exited with code {code}"
            error = f"{size} bytes of {most}" if size > most else error
            outcome = Outcome(
                code, signal, error, result=result, reason=reason, started_at=began, finished_at=now
            )
            attempt.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            attempt.outcome.write_text(outcome.to_json())
        status = verdict(
            attempt=number,
            outcome=outcome,
            wait_status=9,
            stop=stop,
            oom=oom,
            started_at=self.runs[run.path][rank].started_at,
            finished_at=self.clock(),
        )
        life = self.runs[run.path][rank]
        life.status, life.code, life.oom = status, code, oom
        create_json(files.final, status_to_data(status))
        if not any(life.live for life in self.runs[run.path].values()):
            os.close(self.locks.pop(run.path))

    def living_replicas(self):
        for path, lives in self.runs.items():
            run = RunDir(path, self.uids[path])
            yield from ((run, rank, life) for rank, life in lives.items() if life.live)

    # --- the hand ---

    def find(self, handle):
        run = run_of(handle)
        return run, self.runs[run.path][handle.rank]

    def drive(self, handle, step, value=None):
        run, life = self.find(handle)
        if step is Step.START:
            life.phase, life.started_at = "running", self.clock()
            attempt = run.replica(handle.rank).attempt(life.attempt)
            attempt.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.save(run, handle.rank)
        elif step is Step.SUCCEED:
            self.end(run, handle.rank, code=0, result=value)
        elif step is Step.FAIL:
            self.failed(run, handle.rank, code=value)
        elif step is Step.OOM:
            self.failed(run, handle.rank, code=137, signal="SIGKILL", oom=True)
        elif step is Step.KILL:
            self.failed(run, handle.rank, code=128 + Signals[value], signal=value)
        elif step is Step.STOP:
            self.end(run, handle.rank, code=143, signal="SIGTERM", told=True)
        elif step is Step.PRINT:
            self.write(handle, "".join(f"{line}\n" for line in value).encode())

    def write(self, handle, data, stream="stdout"):
        run, life = self.find(handle)
        attempt = run.replica(handle.rank).attempt(life.attempt)
        files = {name: attempt.log(name) for name in ("stdout", "stderr")}
        sizes = {name: file.stat().st_size if file.exists() else 0 for name, file in files.items()}
        sizes[stream] += len(data)
        # The time first: without one, who follows meanwhile takes that of the file, which is real
        # and not scripted.
        with attempt.times.open("a") as times:
            times.write(json.dumps([self.clock(), *sizes.values()]) + "\n")
        with files[stream].open("ab") as log:
            log.write(data)

    def foreign(self, name):
        place = self.folder / "state" / "runs" / name
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        place.mkdir()
        (place / "notes.txt").write_text("not a run")

    def lose(self, handle, left=None):
        run, life = self.find(handle)
        outcome = run.replica(handle.rank).attempt(life.attempt).outcome
        outcome.unlink(missing_ok=True)
        if left is not None:
            outcome.write_bytes(left)

    def settle(self):
        for run, rank, _ in list(self.living_replicas()):
            if run.replica(rank).cancel.exists():
                self.end(
                    run,
                    rank,
                    code=143,
                    signal="SIGTERM",
                    stop=Stop(Reason.CANCEL_REQUESTED, self.clock()),
                )

    def advance(self, seconds):
        self.time.sleep(seconds)
        for run, rank, life in list(self.living_replicas()):
            timeout = life.order.spec.timeout
            begun = life.started_at
            if begun is not None and timeout is not None and self.clock() - begun > timeout:
                self.failed(run, rank, code=124, stop=Stop(Reason.TIMEOUT, self.clock()))

    def age(self, seconds):
        self.advance(seconds)

    def elsewhere(self):
        """On another host, which is what this one is called until that executor is closed."""
        renamed = mock.patch("diloco_local._runs.host_name", return_value="another-host")
        renamed.start()

        class Elsewhere(LocalProcessExecutor):
            def close(self):
                super().close()
                renamed.stop()

        return Elsewhere(root=self.folder / "elsewhere", backoff=self.backoff())

    def truth(self, handle):
        run = run_of(handle)
        record = read_record(run)
        if record is None or record.uid != handle.metadata["uid"]:
            return Truth(None, alive=False)
        _, life = self.find(handle)
        if not life.live:
            return Truth(life.status.state, False, life.attempt, False, life.code, life.oom)
        states = {"starting": "pending", "running": "running"}
        stopping = run.replica(handle.rank).cancel.exists()
        return Truth(states[life.phase], True, life.attempt, stopping)

    def living(self):
        return len(list(self.living_replicas()))

    def sent(self):
        return list(self.requests)

    def told(self, handle):
        _, life = self.find(handle)
        spec = replace(life.order.spec, attempt=life.attempt)
        return Told(
            spec.rank, spec.world_size, spec.kwargs, {**life.order.env, **environment(spec)},
            spec.timeout,
        )  # fmt: skip

    def resources(self, handle):
        return gpus_of(self.find(handle)[1].order.env)

    def labels(self, handle):
        return read_record(self.find(handle)[0]).labels

    def close(self):
        for lock in self.locks.values():
            with contextlib.suppress(OSError):
                os.close(lock)
        shutil.rmtree(self.folder)
