"""The verbs as the suite calls them: each call is checked and noted, and the model learns of it."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from diloco_protocol import ReplicaHandle, ReplicaState

from . import _model
from ._check_runs import RunChecks
from ._harness import Step
from ._model import Replica, Run
from ._promises import HarnessFault
from ._purged import check_purged

if TYPE_CHECKING:
    from diloco_protocol import BaseExecutor

T = TypeVar("T")


class Moment(NamedTuple):
    """A moment, in Unix seconds and on the world's clock."""

    unix: float
    clock: float


class Verbs(RunChecks):
    """The part of the lab that calls the executor."""

    def moment(self) -> Moment:
        """Return the present moment."""
        return Moment(self.harness.now(), self.harness.clock())

    def note(self, what: str, last: str = "") -> None:
        """Write down what is done now."""
        self.history.append(what)
        self.last = last or what.split()[0]

    # --- the verbs ---

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
            starts: Whether to wait for its replicas, where they start by themselves.
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
        """Take up a run that was launched by other means, with the harness's timeout.

        ``began`` is a moment just before that launch.
        """
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
        """Record that a replica runs now, and began to run at ``began`` at the earliest."""
        replica.state, replica.started_at = ReplicaState.RUNNING, self.harness.clock()
        replica.begun_at, replica.started = began.clock, (began.unix, self.harness.now())

    def _launch(self, n: int, run: Run, options: dict[str, Any]) -> list[ReplicaHandle]:
        kwargs = {**self.harness.entrypoint_args, **options.get("kwargs", run.kwargs)}
        entrypoint = options.get("entrypoint", self.harness.entrypoint)
        others = {key: options[key] for key in options if key not in {"kwargs", "entrypoint"}}
        copies = copy.deepcopy((kwargs, others))
        handles = self.executor.launch_replicas(n, entrypoint, copies[0], **copies[1])
        if copies != (kwargs, others):
            self.broken(
                "L6",
                f"after the launch, the caller's arguments are {copies}",
                f"they were {(kwargs, others)}",
            )
        return handles

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

    def try_launch(self, run: Run) -> list[ReplicaHandle]:
        """Launch the same once more; what an error means is for the caller to judge."""
        return self._launch(len(run.replicas), run, run.options)

    def cancel(self, replica: Replica) -> None:
        """Cancel a replica."""
        self.note(f"cancel({replica})", "cancel")
        self.verb("C1", lambda: self.executor.cancel(replica.handle))
        self.accepted(replica)

    def accepted(self, replica: Replica) -> None:
        """Record that the cancel of a replica was accepted."""
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

    def purge(self, run: Run, *, look: bool = False, by: int = 0) -> None:
        """Purge a run that has ended, ``by`` one of its handles.

        With ``look``, check at once that nothing is left for other executors.
        """
        self.note(f"purge({run.name})", "purge")
        self.verb("C6", lambda: self.executor.purge(run.handles[by]))
        if look:
            check_purged(self, run)
        for replica in run.replicas:
            replica.gone = True
        began_at = self._settle()
        for replica in run.replicas:
            if (truth := self.harness.truth(replica.handle)).state is not None:
                self.broken("C9", f"purge({run.name}) returned", f"{replica} is there: {truth}")
        self.check_settled(began_at)

    def forget(self, **options: Any) -> None:
        """Go on with an executor that has seen nothing, and with handles that went through JSON.

        This is as in another process.

        Args:
            **options: Arguments of its constructor.
        """
        self.note("go on in another process" + (f", with {_shown(options)}" if options else ""))
        self.verb("C8", self.executor.close)
        self.executor = self.make(**options)
        for replica in self.replicas():
            text = json.dumps(replica.handle.to_dict())
            copy = ReplicaHandle.from_dict(json.loads(text))
            if copy != replica.handle or hash(copy) != hash(replica.handle):
                self.broken(
                    "H1", f"the handle of {replica} is {copy!r} after JSON", repr(replica.handle)
                )
            replica.handle = copy

    def make(self, **options: Any) -> BaseExecutor:
        """Make an executor that has seen nothing; one that refuses these options breaks L12."""
        try:
            return self.within("L12", lambda: self.harness.make_executor(**options))
        except HarnessFault as fault:
            if options and isinstance(error := fault.__cause__, TypeError):
                names = ", ".join(options)
                self.broken("L12", f"its constructor: {error}", f"every constructor takes {names}")
            raise

    def _settle(self) -> float:
        """Settle the world, and return when that began, on the world's clock."""
        self.note("everything under way comes to its end", "settle")
        began_at = self.harness.clock()
        self.harness.settle()
        return began_at


def _shown(options: Mapping[str, Any]) -> str:
    shown = (f"{name}={value!r}" for name, value in options.items())
    return ", ".join(text if len(text) < 100 else f"{text[:100]}…" for text in shown)
