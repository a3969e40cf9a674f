"""The hand behind the executor's back: it moves the world, and tells the model what was done."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from signal import Signals
from typing import Any

from diloco_protocol import Reason, ReplicaState
from diloco_protocol.backend import FINAL_CODE

from . import _model
from ._blame import fault
from ._harness import Step, Truth
from ._lab_verbs import Moment, Verbs
from ._model import Replica, Run
from ._promises import HarnessFault

FAILURES = frozenset({Step.FAIL, Step.OOM, Step.KILL})


class Hand(Verbs):
    """The part of the lab that moves the world."""

    def drive(self, replica: Replica, step: Step, value: Any = None) -> None:
        """Make a replica do something, and check that the world has done it."""
        self.adopt(replica, was := self.harness.truth(replica.handle))
        before = was.state, was.attempt
        shown = "" if value is None else f" with {str(value)[:60]}"
        self.note(f"{replica} is made to {step}{shown}", "drive")
        began = self.moment()
        replica.raced = replica.stopping and step in {Step.SUCCEED, Step.FAIL}
        self.harness.drive(replica.handle, step, value)
        if step is Step.START:
            # A replica that starts by itself has run since its launch, and may have reached its
            # timeout.
            if not self.harness.starts_by_itself:
                self._started(replica, began)
        elif step is Step.SUCCEED:
            replica.end(ReplicaState.SUCCEEDED, Reason.COMPLETED, 0, value)
        elif step is Step.FAIL:
            self._failed(replica, began, Reason.ERROR, value)
        elif step is Step.OOM:
            self._failed(replica, began, Reason.OOM, 137, "SIGKILL")
        elif step is Step.KILL:
            self._failed(replica, began, Reason.ERROR, 128 + Signals[value], value)
        elif step is Step.PREEMPT:
            self._again(replica, began)
        elif step is Step.STOP:
            _model.stopped(replica, self.capabilities)
        elif step is Step.PRINT:
            replica.write("".join(f"{line}\n" for line in value).encode())
        if replica.state.terminal and step is not Step.START:
            replica.ended = (began.unix, self.harness.now())
        truth = self.harness.truth(replica.handle)
        if step is Step.SUCCEED and truth.state is ReplicaState.FAILED and len(str(value)) > 4096:
            most = self.capabilities.max_result_bytes
            self.broken("R11", f"max_result_bytes={most}", f"a smaller result made {replica} fail")
        allowed = replica.possible(self.harness.clock(), self.capabilities)
        counted = self.capabilities.counts_attempts or not self.harness.starts_by_itself
        if step in FAILURES and counted and (truth.state, truth.attempt) == before:
            fault(
                self.harness,
                f"drive(…, Step.{step.name}, {value!r}) changed nothing: the world tells {truth}. "
                f"It must end the attempt that runs, or declare Step.{step.name} in cannot",
                "drive",
            )
        if step in FAILURES and truth.state is not replica.state:
            limit = replica.run.options.get("max_restarts")
            text = f"{replica} is {truth.state} in attempt {truth.attempt}"
            self.broken("L9", text, f"it was launched with max_restarts={limit}")
        if truth.state not in allowed or (replica.state.terminal and truth.alive):
            raise HarnessFault(
                f"the world was to make {replica} {step}, but tells {truth} after it"
            )
        if replica.state is ReplicaState.FAILED and step in FAILURES:
            self._as_driven(replica, step, value, truth)

    def _as_driven(self, replica: Replica, step: Step, value: Any, truth: Truth) -> None:
        """Check that the world's own records of a failure, where they say it, are as asked for."""
        text = f"drive(…, Step.{step.name}, {value!r}) was to make {replica}"
        if truth.exit_code is not ... and truth.exit_code != replica.exit_code:
            fault(
                self.harness,
                f"{text} exit with {replica.exit_code}, and the world tells {truth}",
                "drive",
            )
        if truth.out_of_memory is not ... and truth.out_of_memory != (step is Step.OOM):
            ran = "run out of memory" if step is Step.OOM else "fail with memory left"
            fault(self.harness, f"{text} {ran}, and the world tells {truth}", "drive")

    def _failed(
        self,
        replica: Replica,
        began: Moment,
        reason: Reason,
        exit_code: int,
        signal: str | None = None,
    ) -> None:
        if replica.restarts < (replica.run.options.get("max_restarts") or 0):
            replica.restarts += 1
            self._again(replica, began)
        else:
            replica.end(ReplicaState.FAILED, reason, exit_code)
            replica.signal = signal
            _model.failed(replica, self.capabilities)

    def _again(self, replica: Replica, began: Moment) -> None:
        replica.again(counted=self.capabilities.counts_attempts)
        if self.harness.starts_by_itself:
            self._started(replica, began)

    def write(self, replica: Replica, data: bytes, stream: str = "stdout") -> None:
        """Make a replica write bytes."""
        shown = repr(data) if len(data) < 80 else f"{data[:60]!r}… ({len(data)} bytes)"
        self.note(f"{replica} writes {shown} to {stream}", "drive")
        self.harness.write(replica.handle, data, stream)
        replica.write(data, stream)

    def overfill(self, replica: Replica, value: Any) -> None:
        """Make a replica return more than the backend declares that it carries."""
        size = len(json.dumps(value, separators=(",", ":")))
        self.note(f"{replica} returns {size} bytes of JSON", "drive")
        self.harness.drive(replica.handle, Step.SUCCEED, value)
        truth = self.harness.truth(replica.handle)
        # The runner ends with this code, since another attempt would return as much.
        code = 1 if truth.exit_code == 1 else FINAL_CODE
        replica.end(ReplicaState.FAILED, Reason.ERROR, code)
        _model.failed(replica, self.capabilities)
        if truth.state is not ReplicaState.FAILED:
            most = self.capabilities.max_result_bytes
            self.broken("R11", f"max_result_bytes={most}", f"with {size} it is {truth.state}")

    def lose(self, replica: Replica, left: bytes | None = None) -> None:
        """Lose the result of a replica, or leave something else in its place."""
        shown = (
            repr(left) if left is None or len(left) < 80 else f"{left[:60]!r}… ({len(left)} bytes)"
        )
        self.note(f"the result of {replica} is lost; in its place there is {shown}", "lose")
        self.harness.lose(replica.handle, left)
        replica.lost = True
        truth = self.harness.truth(replica.handle)
        if truth.state is not replica.state:
            raise HarnessFault(
                f"only the result of {replica} was to be lost, and now it is {truth}"
            )

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait for something that another thread does, but no longer than a call may take."""
        end = time.monotonic() + self.harness.patience
        while not condition() and time.monotonic() < end:
            time.sleep(0.001)

    def up(self, n: int = 1, **options: Any) -> Run:
        """Launch a run and start all of it."""
        run = self.launch(n, **options)
        for replica in run.replicas:
            self.drive(replica, Step.START)
        return run

    def settle(self) -> None:
        """Let everything that is under way come to its end."""
        self.check_settled(self._settle())

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.note(f"{seconds:g} s pass", "advance")
        self.harness.advance(seconds)

    def overrun(self, run: Run) -> None:
        """Let time pass until all that was started of a run has timed out, and see it end."""
        assert run.timeout is not None
        self.advance(run.timeout + self.harness.overrun)
        self.settle()

    def overrun_once(self, replica: Replica) -> None:
        """Let time pass until a replica with a restart left times out, and see it restarted."""
        assert replica.run.timeout is not None
        began = self.moment()
        self.advance(replica.run.timeout + self.harness.overrun)
        self._settle()
        truth = self.harness.truth(replica.handle)
        if truth.state is None or truth.state.terminal:
            limit = replica.run.options.get("max_restarts")
            self.broken(
                "L9",
                f"past its timeout, {replica} is {truth.state} in attempt {truth.attempt}",
                f"it was launched with max_restarts={limit}, and a timeout is a failure as any "
                "other. Either the platform was told of fewer restarts, or the world does not "
                "start again in advance() what is overdue",
            )
        replica.restarts += 1
        self._again(replica, began)

    def age(self, seconds: float) -> None:
        """Let days pass; what the backend has forgotten then is gone."""
        self.note(f"{seconds:g} s pass", "age")
        self.harness.age(seconds)

    def expire(self, run: Run) -> None:
        """Make the backend forget a run that has ended."""
        self.note(f"the backend forgets {run.name}", "expire")
        self.harness.expire(run.handles)
        for replica in run.replicas:
            replica.gone = True
