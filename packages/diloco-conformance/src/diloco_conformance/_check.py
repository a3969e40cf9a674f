"""Compare what the executor says of a replica with what is true."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from diloco_protocol import (
    BackendError,
    Reason,
    ReplicaHandle,
    ReplicaNotFoundError,
    ReplicaState,
    ReplicaStatus,
)

from . import _model
from ._check_calls import Calls
from ._check_details import attempt_is_known, check_details, forgotten_timeout
from ._promises import HarnessFault

if TYPE_CHECKING:
    from ._harness import Truth
    from ._model import Replica

T = TypeVar("T")

ENDS = frozenset(state for state in ReplicaState if state.terminal)


class Checks(Calls):
    """The part of the lab that judges one replica; :class:`Lab` has the part that acts."""

    def observe(self, replica: Replica) -> ReplicaStatus | None:
        """Ask for a replica and judge the answer; None if it is gone."""
        for _ in range(1000):
            before = self.harness.truth(replica.handle)
            status, error = self._describe(replica.handle)
            truth = self.harness.truth(replica.handle)
            if truth == before:
                break
        else:
            raise HarnessFault(f"the truth of {replica} never stands still: {before}, {truth}")
        self.adopt(replica, truth)
        if truth.state is None:
            self._gone(replica, status)
        elif status is None:
            self.broken(
                "S4", f"describe({replica}) raised {error!r}", f"there is a record of it: {truth}"
            )
        else:
            self._judge(replica, status, truth)
            replica.said = status
            replica.tell(status.state)
            if status.reason is Reason.TIMEOUT or (
                status.state == "running" and not truth.stopping
            ):
                replica.watcher = self.executor
        return status

    def poll(self, replica: Replica) -> None:
        """Poll a replica, twice in a row, and judge the answers."""
        for _ in range(2):
            before = self.harness.truth(replica.handle)
            try:
                handle = replica.handle
                state: object = self._ask("poll", partial(self.executor.poll, handle))
            except ReplicaNotFoundError:
                state = None
            truth = self.harness.truth(replica.handle)
            if truth != before:
                continue
            self.adopt(replica, truth)
            words = f"poll({replica}) is {state}"
            if state is not None and type(state) is not ReplicaState:
                self.broken("S1", f"{words} (a {type(state).__name__})", "it is a ReplicaState")
            if truth.state is None:
                if state is not None and replica.told != state:
                    self.broken("S6", words, "there is no record of it")
            elif state is None:
                self.broken("S4", f"poll({replica}) raised", f"there is a record of it: {truth}")
            elif not self.alike(replica, state, truth):
                late = replica.reason is Reason.TIMEOUT
                self.broken("S7" if late else "S4", words, f"{replica} is {truth.state}")
            else:
                replica.tell(state)
                if state is ReplicaState.RUNNING and not truth.stopping:
                    replica.watcher = self.executor

    def alike(self, replica: Replica, state: ReplicaState, truth: Truth) -> bool:
        """Say whether the executor may report this state, given what is true."""
        if state == truth.state:
            return True
        told_apart = self.capabilities.distinguishes_pending or state.terminal
        return not told_apart and replica.live

    def _describe(self, handle: ReplicaHandle) -> tuple[ReplicaStatus | None, Exception | None]:
        try:
            return self._ask("describe", lambda: self.executor.describe(handle)), None
        except ReplicaNotFoundError as error:
            return None, error

    def _ask(self, what: str, call: Callable[[], T]) -> T:
        """Ask for a state; if the backend is well, it gives one or says that there is no record."""
        try:
            return self.within("S4", call)
        except ReplicaNotFoundError:
            raise
        except BackendError as error:
            if self.disturbed:
                raise
            self.broken("S4", f"{what} raised {error!r}", "the backend is well")

    def adopt(self, replica: Replica, truth: Truth) -> None:
        """Compare the world with the model, and take from the world what the model leaves open."""
        if replica.gone or truth.state is None:
            if truth.state is not None:
                raise HarnessFault(
                    f"the records of {replica} were removed, but the world tells {truth}"
                )
            if not replica.gone:
                self.broken(
                    "C6", f"nothing, at: {self.history[-1]}", f"there is no record of {replica}"
                )
            return
        possible = replica.possible(self.harness.clock(), self.capabilities)
        if truth.state not in possible:
            expected = " or ".join(possible)
            self.broken(
                self._culprit(replica, truth),
                f"nothing, at: {self.history[-1]}",
                f"{replica} is {truth.state} now and should be {expected}: the suite did not ask "
                "for that",
            )
        if truth.state.terminal and replica.live:
            replica.end(truth.state, possible[truth.state])
            if truth.state is ReplicaState.FAILED:
                _model.failed(replica, self.capabilities)
        elif replica.live:
            replica.state = truth.state

    def _culprit(self, replica: Replica, truth: Truth) -> str:
        if not replica.live:
            return "C2" if self.last == "cancel" else "S2"
        if truth.state is ReplicaState.CANCELLED:
            return "C3"
        if truth.state is ReplicaState.FAILED and any(
            one.state is truth.state for one in replica.run.replicas
        ):
            return "S9"
        run, now = replica.run, self.harness.clock()
        if truth.state is ReplicaState.FAILED and (
            run.timeout is None or now - run.launched_at > run.timeout
        ):
            return "S13"  # by some count, its time is up
        promise = {
            "cancel": "C3",
            "collect": "R2",
            "launch": "L3",
            "purge": "C6",
            "expire": "C6",
        }.get(self.last)
        if promise is None:
            raise HarnessFault(f"after {self.history[-1]!r} the world tells {truth} of {replica}")
        return promise

    def _gone(self, replica: Replica, status: ReplicaStatus | None) -> None:
        # An executor that has seen a terminal state may go on reporting it.
        if status is not None and replica.told != status.state:
            self.broken("S6", self._words(replica, status), "there is no record of it")

    def _words(self, replica: Replica, status: ReplicaStatus) -> str:
        parts = [f"describe({replica}) is {status.state}", f"attempt {status.attempt}"]
        for name, value in (("reason", status.reason), ("exit code", status.exit_code)):
            if value is not None:
                parts.append(f"{name} {value}")
            elif status.state in ENDS:  # what is missing may be the mistake
                parts.append(f"no {name}")
        parts += ["stopping"] if status.stopping else []
        return ", ".join(parts)

    def _judge(self, replica: Replica, status: ReplicaStatus, truth: Truth) -> None:
        words = self._words(replica, status)
        alive = (
            "something of it is still alive" if truth.alive else "nothing of it is alive any more"
        )
        true = f"{replica} is {truth.state}, attempt {truth.attempt}, and {alive}"
        if type(status.state) is not ReplicaState:
            self.broken("S1", f"{words} (a {type(status.state).__name__})", true)
        self._forward(replica, status, words, true)
        if status.state is ReplicaState.CANCELLED and truth.alive:
            self.broken("S5", words, true)
        late = truth.state is ReplicaState.FAILED and replica.reason is Reason.TIMEOUT
        timed_out = status.state is ReplicaState.FAILED and status.reason is Reason.TIMEOUT
        if late and not timed_out and not forgotten_timeout(self, replica, status.reason):
            self.broken("S7", words, f"{replica} was past its timeout and ended for it")
        if not self.alike(replica, status.state, truth) and replica.raced:
            self.broken("C5", words, f"{true}: it ended before the cancel took effect")
        if not self.alike(replica, status.state, truth):
            self.broken("S4", words, true)
        check_details(self, replica, status, truth, words)

    def _forward(self, replica: Replica, status: ReplicaStatus, words: str, true: str) -> None:
        last = replica.said
        if last is None:
            return
        if last.state.terminal and status.state != last.state:
            self.broken("S2", f"first that it is {last.state}, now {words}", true)
        back = last.state is ReplicaState.RUNNING and status.state is ReplicaState.PENDING
        back = back and status.attempt == last.attempt and self.capabilities.counts_attempts
        if back or (status.attempt < last.attempt and attempt_is_known(self, status)):
            self.broken("S3", f"first {self._words(replica, last)}, now {words}", true)
