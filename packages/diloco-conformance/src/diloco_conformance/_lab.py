"""Where executor, world and model meet: everything a test does goes through here, is checked, and is written down."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from signal import Signals
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import pytest

from diloco_protocol import BackendError, Reason, ReplicaHandle, ReplicaNotFoundError, ReplicaState

from . import _model
from ._check import Checks
from ._harness import HOOKS, Ability, Fault, Harness, Operation, Step
from ._model import Replica, Run
from ._promises import HarnessFault

if TYPE_CHECKING:
    from diloco_protocol import BaseExecutor, Capabilities

T = TypeVar("T")


class Moment(NamedTuple):
    """A moment: in Unix seconds, and on the world's clock."""

    unix: float
    clock: float


class Lab(Checks):
    """One example: a world, the executor under test, and the model of what must be true.

    Attributes:
        harness: The world.
        executor: The executor at present; :meth:`forget` makes a new one.
        capabilities: What it declares.
        runs: All runs so far.
        history: What was done, a sentence each.
        disturbed: Whether the backend is disturbed at present.
    """

    def __init__(self, harness: Harness) -> None:
        self.harness = harness
        self.executor: BaseExecutor = harness.make_executor()
        self.capabilities: Capabilities = self.executor.capabilities
        self.runs: list[Run] = []
        self.history: list[str] = []
        self.last = "launch"
        self.disturbed = False
        self._declared()

    # --- what can be done here ---

    def _declared(self) -> None:
        known = {*Step, *Fault, *Operation, *Ability}
        wrong = [name for name in self.harness.cannot if name not in known]
        needed = [
            name for name in (Step.START, Step.SUCCEED, Step.FAIL) if name in self.harness.cannot
        ]
        silent = [name for name, why in self.harness.cannot.items() if not str(why).strip()]
        if wrong or needed or silent:
            raise HarnessFault(
                f"cannot= may name a Step, Fault, Operation or Ability with a reason, but not start, succeed or fail: "
                f"unknown {wrong}, needed {needed}, without a reason {silent}"
            )

    def can(self, *needs: str) -> bool:
        """Whether this world, and the backend by what it declares, can do all of that."""
        return self._obstacle(needs) is None

    def needs(self, *needs: str) -> None:
        """Skip the test, with the declared reason, unless all of that can be done."""
        obstacle = self._obstacle(needs)
        if obstacle is not None:
            pytest.skip(obstacle)

    def _obstacle(self, needs: Sequence[str]) -> str | None:
        for need in needs:
            if need == Step.PREEMPT and not self.capabilities.preemptible:
                return "the backend declares that its replicas are not preemptible"
            hook = HOOKS.get(need)
            if hook is not None and getattr(type(self.harness), hook) is getattr(Harness, hook):
                return f"the harness has no {hook}()"
            if need in self.harness.cannot:
                return f"the harness leaves out {str(need)!r}, and says why: {self.harness.cannot[need]}"
        return None

    def moment(self) -> Moment:
        """Now."""
        return Moment(self.harness.now(), self.harness.clock())

    @property
    def unit(self) -> float:
        """Seconds that are short in this world: a second where the short timeout is a minute."""
        return self.harness.short_timeout / 60

    def note(self, what: str, last: str = "") -> None:
        """Write down what is done now."""
        self.history.append(what)
        self.last = last or what.split()[0]

    # --- the verbs ---

    def verb(self, promise: str, call: Callable[[], T]) -> T:
        """Call a verb; while the backend is well, an error of it breaks the promise.

        Raises:
            BackendError: The backend is disturbed.
        """
        try:
            return self.within(promise, call)
        except BackendError as error:
            if self.disturbed:
                raise
            self.broken(promise, f"it raised {error!r}", "the backend is well, and this is allowed")

    def launch(
        self,
        n: int = 1,
        *,
        named: bool = True,
        kwargs: dict[str, Any] | None = None,
        refusable: bool = False,
        starts: bool = True,
        **options: Any,
    ) -> Run:
        """Launch a run, and check what the launch gives.

        Args:
            n: How many replicas.
            named: Whether the run is given a name.
            kwargs: Arguments, besides those that the world needs.
            refusable: Whether it may be refused.
            starts: Whether its replicas are waited for, where they start by themselves.
            **options: The other arguments of the launch.

        Raises:
            BackendError: The backend is disturbed, or the launch is ``refusable``.
        """
        number = len(self.runs) + 1
        options.setdefault("timeout", self.harness.timeout)
        if named:
            options.setdefault("run_id", f"{self.harness.run_prefix}-{number}")
        run = Run(
            f"run {number}",
            options.get("run_id", ""),
            options["timeout"],
            {"number": number, **(kwargs or {})},
            options,
        )
        self.note(f"launch_replicas({n}, {_shown(options)}) is {run.name}", "launch")
        call = partial(self._launch, n, run, options)
        began = self.moment()
        handles = self.within("L1", call) if refusable else self.verb("L1", call)
        self.check_launched(n, run, handles)
        self._add(run, handles, began, starts=starts)
        return run

    def take(self, handles: list[ReplicaHandle], kwargs: dict[str, Any], began: Moment) -> Run:
        """Take up a run that was launched by other hands since ``began``, with the harness's timeout."""
        run = Run(
            f"run {len(self.runs) + 1}",
            handles[0].run_id,
            self.harness.timeout,
            kwargs,
            {"timeout": self.harness.timeout},
        )
        self.check_launched(len(handles), run, handles)
        self._add(run, handles, began, starts=True)
        return run

    def _add(self, run: Run, handles: list[ReplicaHandle], began: Moment, *, starts: bool) -> None:
        run.run_id = run.options["run_id"] = handles[0].run_id
        run.launched_at = self.harness.clock()
        run.replicas = [Replica(handle, run) for handle in handles]
        self.runs.append(run)
        if self.harness.starts_by_itself and starts:
            for replica in run.replicas:
                self.harness.drive(replica.handle, Step.START)
                self._started(replica, began)

    def _started(self, replica: Replica, began: Moment) -> None:
        """A replica runs now, and began to then at the earliest."""
        replica.state, replica.started_at = ReplicaState.RUNNING, self.harness.clock()
        replica.begun_at, replica.started = began.clock, (began.unix, self.harness.now())

    def _launch(self, n: int, run: Run, options: dict[str, Any]) -> list[ReplicaHandle]:
        kwargs = {**self.harness.entrypoint_args, **options.get("kwargs", run.kwargs)}
        entrypoint = options.get("entrypoint", self.harness.entrypoint)
        others = {key: options[key] for key in options if key not in {"kwargs", "entrypoint"}}
        return self.executor.launch_replicas(n, entrypoint, kwargs, **others)

    def relaunch(self, run: Run, *, n: int | None = None, **change: Any) -> list[ReplicaHandle]:
        """Launch the same once more, or with a change.

        Raises:
            BackendError: It was refused, which is allowed only with a change.
        """
        n = len(run.replicas) if n is None else n
        self.note(f"launch_replicas({n}, {_shown(change)}) again, as {run.name}", "launch")
        call = partial(self._launch, n, run, {**run.options, **change})
        if change or n != len(run.replicas):
            return self.within("L3", call)
        return self.verb("L3", call)

    def cancel(self, replica: Replica) -> None:
        """Cancel a replica."""
        self.note(f"cancel({replica})", "cancel")
        self.verb("C1", lambda: self.executor.cancel(replica.handle))
        self.accepted(replica)

    def accepted(self, replica: Replica) -> None:
        """The cancel of a replica was accepted."""
        _model.cancelled(replica, self.capabilities)

    def cancel_run(self, run: Run) -> None:
        """Cancel a whole run by its name."""
        self.note(f"cancel_run({run.name})", "cancel")
        self.verb("C7", lambda: self.executor.cancel_run(run.run_id))
        for replica in run.replicas:
            if replica.live and not replica.stopping:
                replica.stopping, replica.cancelled_by = True, "C7"

    def attach(self, run: Run) -> None:
        """Find a run again by its name."""
        self.note(f"attach({run.name})")
        listed = self.verb("H3", self.executor.list_runs)
        if listed.count(run.run_id) != 1:
            self.broken("H3", f"list_runs gave {listed}", f"there is one run {run.run_id!r}")
        attached = self.verb("H3", lambda: self.executor.attach(run.run_id))
        if attached != run.handles:
            self.broken(
                "H3", f"attach({run.run_id!r}) gave {attached}", f"its handles are {run.handles}"
            )

    def purge(self, run: Run) -> None:
        """Purge a run that has ended."""
        self.note(f"purge({run.name})", "purge")
        self.verb("C6", lambda: self.executor.purge(run.handles[0]))
        for replica in run.replicas:
            replica.gone = True
        began_at = self._settle()  # removing may take the backend a moment
        for replica in run.replicas:
            if (truth := self.harness.truth(replica.handle)).state is not None:
                self.broken("C9", f"purge({run.name}) returned", f"{replica} is there: {truth}")
        self.check_settled(began_at)

    def forget(self) -> None:
        """Go on with an executor that has seen nothing, and handles that went through JSON, as in another process."""
        self.note("go on in another process")
        self.executor.close()
        self.executor = self.harness.make_executor()
        for replica in self.replicas():
            text = json.dumps(replica.handle.to_dict())
            copy = ReplicaHandle.from_dict(json.loads(text))
            if copy != replica.handle or hash(copy) != hash(replica.handle):
                self.broken(
                    "H1", f"the handle of {replica} is {copy!r} after JSON", repr(replica.handle)
                )
            replica.handle = copy

    # --- behind the executor's back ---

    def drive(self, replica: Replica, step: Step, value: Any = None) -> None:
        """Make a replica do something, and see that the world has done it."""
        self.adopt(replica, self.harness.truth(replica.handle))
        shown = "" if value is None else f" with {str(value)[:60]}"
        self.note(f"{replica} is made to {step}{shown}", "drive")
        began = self.moment()
        replica.raced = replica.stopping and step in {Step.SUCCEED, Step.FAIL}
        self.harness.drive(replica.handle, step, value)
        if step is Step.START:
            # One that starts by itself has run since its launch, and may have come to its timeout.
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
        elif step is Step.PRINT:
            replica.write("".join(f"{line}\n" for line in value).encode())
        if replica.state.terminal and step is not Step.START:
            replica.ended = (began.unix, self.harness.now())
        truth = self.harness.truth(replica.handle)
        if step is Step.SUCCEED and truth.state is ReplicaState.FAILED and len(str(value)) > 4096:
            most = self.capabilities.max_result_bytes
            self.broken("R11", f"max_result_bytes={most}", f"a smaller result made {replica} fail")
        allowed = replica.possible(self.harness.clock())
        if step in {Step.FAIL, Step.OOM, Step.KILL} and truth.state is not replica.state:
            limit = replica.run.options.get("max_restarts")
            said = f"{replica} is {truth.state} in attempt {truth.attempt}"
            self.broken("L9", said, f"it was launched with max_restarts={limit}")
        if truth.state not in allowed or (replica.state.terminal and truth.alive):
            raise HarnessFault(
                f"the world was to make {replica} {step}, but tells {truth} after it"
            )

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
        replica.end(ReplicaState.FAILED, Reason.ERROR, 1)
        _model.failed(replica, self.capabilities)
        truth = self.harness.truth(replica.handle)
        if truth.state is not ReplicaState.FAILED:
            most = self.capabilities.max_result_bytes
            self.broken("R11", f"max_result_bytes={most}", f"with {size} it is {truth.state}")

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait for something that another thread does, but not longer than a call may take."""
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

    def _settle(self) -> float:
        """Returns when that began, on the world's clock."""
        self.note("everything under way comes to its end", "settle")
        began_at = self.harness.clock()
        self.harness.settle()
        return began_at

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.note(f"{seconds:g} s pass", "advance")
        self.harness.advance(seconds)

    def overrun(self, run: Run) -> None:
        """Let time pass until all of a run that has been started is past its timeout, and see it end."""
        assert run.timeout is not None
        self.advance(run.timeout + self.harness.overrun)
        self.settle()

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

    @contextlib.contextmanager
    def fault(self, operation: Operation, fault: Fault, *, after: int = 0) -> Iterator[None]:
        """Disturb the calls to the backend meanwhile."""
        self.note(
            f"from now on, every {operation} meets: {fault}"
            + (f", except the first {after}" if after else "")
        )
        self.harness.inject(operation, fault, after=after)
        self.disturbed = True
        try:
            yield
        finally:
            self.disturbed = False
            self.harness.clear()
            self.note("the backend is well again")

    def close(self) -> None:
        """End all that is alive, and let go of the world."""
        try:
            self.harness.clear()
            with contextlib.suppress(BackendError):
                for run in self.runs:
                    for replica in run.replicas:
                        with contextlib.suppress(ReplicaNotFoundError):
                            self.executor.cancel(replica.handle)
                self.harness.settle()
            self.executor.close()
        finally:
            self.harness.time.end()
            self.harness.close()


def _shown(options: Mapping[str, Any]) -> str:
    shown = (f"{name}={value!r}" for name, value in options.items())
    return ", ".join(text if len(text) < 100 else f"{text[:100]}…" for text in shown)
