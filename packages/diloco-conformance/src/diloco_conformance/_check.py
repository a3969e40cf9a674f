"""What the executor says, held against what is true."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NoReturn, TypeVar

from _pytest.outcomes import OutcomeException

from diloco_protocol import (
    BackendError,
    Reason,
    ReplicaHandle,
    ReplicaNotFoundError,
    ReplicaState,
    ReplicaStatus,
)

from ._check_details import attempt_is_known, check_details
from ._promises import HarnessFault, PromiseBroken
from ._time import Overslept

if TYPE_CHECKING:
    from diloco_protocol import BaseExecutor, Capabilities

    from ._harness import Harness, Truth
    from ._model import Replica, Run

T = TypeVar("T")


class Checks:
    """The part of the lab that judges; :class:`Lab` has the part that acts."""

    harness: Harness
    executor: BaseExecutor
    capabilities: Capabilities
    runs: list[Run]
    history: list[str]
    last: str

    def broken(self, promise: str, said: str, true: str) -> NoReturn:
        """Raise that a promise is broken."""
        raise PromiseBroken(promise, said, true, self.history)

    @contextlib.contextmanager
    def part_of(self, promise: str) -> Iterator[None]:
        """Whatever is broken meanwhile is this promise, since it was only for its sake that it was tried."""
        try:
            yield
        except PromiseBroken as error:
            self.broken(promise, error.said, f"{error.true} ({error.promise})")

    def within(self, promise: str, call: Callable[[], T]) -> T:
        """What a call of the executor returns or raises.

        A call that hangs, or raises something else than a BackendError, breaks the promise.
        """
        done: list[T] = []
        raised: list[BaseException] = []

        def run() -> None:
            try:
                done.append(call())
            except BaseException as error:  # noqa: BLE001 - raised again below, in the thread of the test
                raised.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(self.harness.patience)
        if thread.is_alive():
            self.broken(
                "R2" if promise == "R6" else promise,
                f"nothing, for {self.harness.patience:g} s",
                "every call comes back",
            )
        if not raised:
            return done[0]
        error = raised[0]
        if isinstance(error, Overslept):
            self.broken("R2", "nothing yet", str(error))
        if not isinstance(error, (BackendError, AssertionError, HarnessFault, OutcomeException)):
            self.broken(
                promise,
                f"{type(error).__name__}: {error}",
                "every error of a verb is a BackendError",
            )
        raise error

    # --- one replica ---

    def observe(self, replica: Replica) -> ReplicaStatus | None:
        """Ask for a replica and judge the answer; None if it is gone."""
        for _ in range(1000):
            before = self.harness.truth(replica.handle)
            said, error = self._describe(replica.handle)
            truth = self.harness.truth(replica.handle)
            if truth == before:
                break
        else:
            raise HarnessFault(f"the truth of {replica} never stands still: {before}, {truth}")
        self.adopt(replica, truth)
        if truth.state is None:
            self._gone(replica, said)
        elif said is None:
            self.broken(
                "S4", f"describe({replica}) raised {error!r}", f"there is a record of it: {truth}"
            )
        else:
            self._judge(replica, said, truth)
            replica.said = said
        return said

    def poll(self, replica: Replica) -> None:
        """Poll a replica, twice in a row, and judge the answers."""
        for _ in range(2):
            before = self.harness.truth(replica.handle)
            try:
                state: object = self.executor.poll(replica.handle)
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
                seen = replica.said
                known = seen is not None and seen.state.terminal and seen.state == state
                if state is not None and not known:
                    self.broken("S6", words, "there is no record of it")
            elif state is None:
                self.broken("S4", f"poll({replica}) raised", f"there is a record of it: {truth}")
            elif not self.alike(replica, state, truth):
                late = replica.reason is Reason.TIMEOUT
                self.broken("S7" if late else "S4", words, f"{replica} is {truth.state}")

    def alike(self, replica: Replica, state: ReplicaState, truth: Truth) -> bool:
        """Whether a state may be said of what is true."""
        if state == truth.state:
            return True
        told_apart = self.capabilities.distinguishes_pending or state.terminal
        return not told_apart and replica.live

    def _describe(self, handle: ReplicaHandle) -> tuple[ReplicaStatus | None, Exception | None]:
        try:
            return self.executor.describe(handle), None
        except ReplicaNotFoundError as error:
            return None, error

    def adopt(self, replica: Replica, truth: Truth) -> None:
        """Hold the world against the model, and take from it what the model leaves open."""
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
        possible = replica.possible(self.harness.clock())
        if truth.state not in possible:
            expected = " or ".join(possible)
            self.broken(
                self._culprit(replica, truth),
                f"nothing, at: {self.history[-1]}",
                f"{replica} is {truth.state} now and should be {expected}: nobody asked for that",
            )
        if truth.state.terminal and replica.live:
            replica.end(truth.state, possible[truth.state])
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
            return "S13"  # its time is up by somebody's count
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

    def _gone(self, replica: Replica, said: ReplicaStatus | None) -> None:
        # Who has seen a terminal state may go on answering it.
        seen = replica.said
        if said is not None and not (
            seen is not None and seen.state.terminal and seen.state == said.state
        ):
            self.broken("S6", self._words(replica, said), "there is no record of it")

    def _words(self, replica: Replica, said: ReplicaStatus) -> str:
        parts = [f"describe({replica}) is {said.state}", f"attempt {said.attempt}"]
        parts += [f"reason {said.reason}"] if said.reason else []
        parts += [f"exit code {said.exit_code}"] if said.exit_code is not None else []
        parts += ["stopping"] if said.stopping else []
        return ", ".join(parts)

    def _judge(self, replica: Replica, said: ReplicaStatus, truth: Truth) -> None:
        words = self._words(replica, said)
        alive = (
            "something of it is still alive" if truth.alive else "nothing of it is alive any more"
        )
        true = f"{replica} is {truth.state}, attempt {truth.attempt}, and {alive}"
        if type(said.state) is not ReplicaState:
            self.broken("S1", f"{words} (a {type(said.state).__name__})", true)
        self._forward(replica, said, words, true)
        if said.state is ReplicaState.CANCELLED and truth.alive:
            self.broken("S5", words, true)
        late = truth.state is ReplicaState.FAILED and replica.reason is Reason.TIMEOUT
        if late and (said.state is not ReplicaState.FAILED or said.reason is not Reason.TIMEOUT):
            self.broken("S7", words, f"{replica} was past its timeout and ended for it")
        if not self.alike(replica, said.state, truth) and replica.raced:
            self.broken("C5", words, f"{true}: it ended before the cancel took effect")
        if not self.alike(replica, said.state, truth):
            self.broken("S4", words, true)
        check_details(self, replica, said, truth, words)

    def _forward(self, replica: Replica, said: ReplicaStatus, words: str, true: str) -> None:
        last = replica.said
        if last is None:
            return
        if last.state.terminal and said.state != last.state:
            self.broken("S2", f"first that it is {last.state}, now {words}", true)
        back = last.state is ReplicaState.RUNNING and said.state is ReplicaState.PENDING
        back = back and said.attempt == last.attempt and self.capabilities.counts_attempts
        if back or (said.attempt < last.attempt and attempt_is_known(self, said)):
            self.broken("S3", f"first {self._words(replica, last)}, now {words}", true)

    # --- all of them ---

    def observe_all(self) -> None:
        """Ask for every replica and judge the answers."""
        for replica in self.replicas():
            self.observe(replica)

    def poll_all(self) -> None:
        """Poll every replica, without asking for more, and judge the answers."""
        for replica in self.replicas():
            self.poll(replica)

    def agree(self) -> None:
        """Poll says what describe says, whichever is asked first."""
        for replica in self.replicas():
            self.poll(replica)
            self.observe(replica)
            self.poll(replica)

    def replicas(self) -> list[Replica]:
        """All replicas of all runs."""
        return [replica for run in self.runs for replica in run.replicas]

    def check_settled(self, began_at: float) -> None:
        """After the world has settled, what was to end has ended; ``began_at`` is when it began to settle, on its clock."""
        for run in self.runs:
            for replica in run.replicas:
                if not replica.live:
                    continue
                truth = self.harness.truth(replica.handle)
                over = truth.state is None or (truth.state.terminal and not truth.alive)
                if replica.stopping and not over:
                    self.broken(
                        replica.cancelled_by,
                        f"the cancel of {replica} was accepted",
                        f"it goes on: {truth}",
                    )
                if replica.overdue(began_at) and not over:
                    self.broken(
                        "S7",
                        f"launched with timeout={run.timeout}",
                        f"{replica} is past it and goes on: {truth}",
                    )
                if replica.doomed and not over:
                    self.broken(
                        "S9",
                        "the declared failure scope is the gang",
                        f"{replica} goes on: {truth}",
                    )
                self.adopt(replica, truth)

    def check_launched(self, n: int, run: Run, handles: list[ReplicaHandle]) -> None:
        """What a launch gave is what was asked for."""
        said = f"launch_replicas gave {[(handle.rank, handle.run_id) for handle in handles]}"
        first = run.first_rank
        world_size = run.options.get("world_size", first + n)
        part = "L1" if first == 0 and world_size == n else "L8"
        if [handle.rank for handle in handles] != list(range(first, first + n)):
            self.broken(
                part,
                said,
                f"{n} replicas were asked for, ranks {first} to {first + n - 1} in order",
            )
        if len({handle.run_id for handle in handles}) != 1 or (
            run.run_id and handles[0].run_id != run.run_id
        ):
            self.broken("L1", said, f"all handles of {run.name} carry its run_id {run.run_id!r}")
        if any(
            handle.world_size != world_size or handle.backend_name != self.executor.backend_name
            for handle in handles
        ):
            self.broken(
                part,
                repr(handles),
                f"world_size is {world_size}, the backend {self.executor.backend_name!r}",
            )
        others = {handle for other in self.runs for handle in other.handles}
        if len(set(handles)) != n or others & set(handles):
            self.broken("L1", said, "another replica has the same handle")
