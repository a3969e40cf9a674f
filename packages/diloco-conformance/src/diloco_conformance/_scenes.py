"""Situations that fixed tests and the state machine share: refused calls, and lost answers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from diloco_protocol import (
    BackendError,
    InvalidRequestError,
    LaunchError,
    ReplicaState,
    RunConflictError,
)

from ._harness import Ability, Fault, Operation
from ._lab import Lab
from ._model import Replica, Run
from ._refusals import must_raise

RETRYABLE = frozenset({Fault.THROTTLE, Fault.SERVER_ERROR, Fault.REFUSED, Fault.CUT})


def check_error(lab: Lab, promise: str, what: str, error: BackendError, fault: Fault) -> None:
    """Check that an error says rightly whether trying again may help."""
    if fault in RETRYABLE and not error.retryable:
        lab.broken(promise, f"{what} raised {error!r}, not retryable", f"{fault}: it may pass")
    if fault is Fault.FORBIDDEN and error.retryable:
        lab.broken(
            promise, f"{what} raised {error!r}, retryable", f"{fault}: trying again does not help"
        )


def broken_look(lab: Lab, replica: Replica, fault: Fault) -> None:
    """Ask while the backend cannot answer, and check what the executor does.

    It raises, or answers from what it has seen for certain.
    """
    with lab.fault(Operation.OBSERVE, fault):
        truth = lab.harness.truth(replica.handle)
        try:
            status = lab.within("S6", lambda: lab.executor.describe(replica.handle))
        except BackendError as error:
            check_error(lab, "S6", f"describe({replica})", error, fault)
            if isinstance(error, LookupError):
                lab.broken(
                    "S6",
                    f"describe({replica}) raised {error!r}",
                    f"{fault}: the executor cannot know whether there is a record",
                )
            return
        # A state that only poll has reported counts as seen, too.
        known = replica.told is not None
        if not (known and truth.state == status.state):
            lab.broken(
                "S6",
                f"describe({replica}) is {status.state}",
                f"{fault}: the backend could not be asked",
            )


def broken_cancel(lab: Lab, replica: Replica, fault: Fault) -> None:
    """Check that a cancel that the backend has not accepted raises, and changes nothing."""
    with lab.fault(Operation.CANCEL, fault):
        lab.note(f"cancel({replica})", "cancel")
        before = lab.harness.truth(replica.handle)
        try:
            lab.within("C4", lambda: lab.executor.cancel(replica.handle))
        except BackendError as error:
            check_error(lab, "C4", f"cancel({replica})", error, fault)
        else:
            lab.broken(
                "C4", f"cancel({replica}) returned", f"{fault}: the backend has not accepted it"
            )
        after = lab.harness.truth(replica.handle)
        if after != before:
            lab.broken("C4", f"cancel({replica}) raised", f"it was {before} and is now {after}")


def failing_launch(lab: Lab, after: int, n: int = 3, *, stuck: bool = False) -> str | None:
    """Check that a launch that is refused, at once or midway, leaves nothing alive, or says what.

    Args:
        lab: The lab.
        after: How many calls go well before.
        n: How many replicas are asked for.
        stuck: Whether it cannot end again what it has started.

    Returns:
        The run_id, if nothing is left of the launch.
    """
    lab.settle()
    living = lab.harness.living()
    run_id = f"{lab.harness.run_prefix}-{len(lab.runs) + 1}-{after}-refused-{len(lab.history)}"
    with lab.fault(Operation.LAUNCH, Fault.FORBIDDEN, after=after):
        if stuck:
            lab.note(f"and every {Operation.CANCEL} meets: {Fault.FORBIDDEN}")
            lab.harness.inject(Operation.CANCEL, Fault.FORBIDDEN)
        try:
            run = lab.launch(n, run_id=run_id)
        except BackendError as error:
            survivors = list(error.survivors) if isinstance(error, LaunchError) else []
            text = f"launch_replicas raised {error!r} with {len(survivors)} survivors"
        else:
            # The backend needed fewer calls than were let through.
            _done(lab, run, after)
            return None
    lab.settle()
    alive = lab.harness.living() - living
    named = sum(lab.harness.truth(handle).alive for handle in set(survivors))
    if not alive == len(survivors) == named:
        lab.broken("L2", text, f"{alive} of its replicas are alive, and {named} of them are named")
    lab.observe_all()
    for handle in survivors:  # the handle of a survivor works like any other
        lab.verb("L2", lambda handle=handle: lab.executor.cancel(handle))  # type: ignore[misc]
    lab.settle()
    if lab.harness.living() != living:
        lab.broken("L2", "every survivor was cancelled", "something of the launch is still alive")
    return None if survivors else run_id


def _done(lab: Lab, run: Run, after: int) -> None:
    if after == 0:
        lab.broken("L2", f"{run.name} was launched", "the backend has refused every call")


def doubtful_launch(lab: Lab, after: int = 0, n: int = 2) -> Run:
    """Check that a launch whose answer is lost is found again under its run_id, once."""
    lab.settle()
    living = lab.harness.living()
    run_id = f"{lab.harness.run_prefix}-{len(lab.runs) + 1}-doubtful-{len(lab.history)}"
    with lab.fault(Operation.LAUNCH, Fault.AMBIGUOUS, after=after):
        try:
            run = lab.launch(n, run_id=run_id)
        except BackendError as error:
            lab.note(f"the launch raised {type(error).__name__}")
            run = None
    if run is None:
        run = lab.launch(n, run_id=run_id)
    elif lab.relaunch(run) != run.handles:
        lab.broken("L3", "launched again, it gave other handles", f"{run.name} is {run.handles}")
    alive = lab.harness.living() - living
    if alive != n:
        lab.broken(
            "L3",
            f"{run.name} was launched, the answer was lost, and it was launched again",
            f"{alive} replicas live",
        )
    return run


def unanswered_launch(
    lab: Lab, fault: Fault, after: int, also: tuple[Operation, int] | None = None, n: int = 3
) -> None:
    """Launch while answers are lost: all of it lives, or the error names what lives.

    Args:
        lab: The lab.
        fault: The fault that the creating calls meet.
        after: How many of them go well before.
        also: Another operation that fails, and how many of its calls go well before.
        n: How many replicas are asked for.
    """
    lab.settle()
    living = lab.harness.living()
    run_id = f"{lab.harness.run_prefix}-{len(lab.runs) + 1}-unheard-{len(lab.history)}"
    survivors: list[Any] = []
    with lab.fault(Operation.LAUNCH, fault, after=after):
        if also is not None:
            operation, first = also
            lab.note(f"and every {operation} after {first} meets: {Fault.SERVER_ERROR}")
            lab.harness.inject(operation, Fault.SERVER_ERROR, after=first)
        try:
            run = lab.launch(n, run_id=run_id)
        except BackendError as error:
            survivors = list(error.survivors) if isinstance(error, LaunchError) else []
            text, run = f"launch_replicas raised {error!r} with {len(survivors)} survivors", None
    alive = lab.harness.living() - living
    if run is not None:
        if alive != n:
            lab.broken("L2", f"{run.name} was launched", f"{alive} replicas live, not {n}")
        lab.cancel_run(run)
        lab.settle()
        return
    lab.settle()
    alive = lab.harness.living() - living
    named = sum(lab.harness.truth(handle).alive for handle in set(survivors))
    if alive != named:
        lab.broken("L2", text, f"{alive} of its replicas are alive, and {named} of them are named")
    for handle in survivors:
        lab.verb("L2", lambda handle=handle: lab.executor.cancel(handle))  # type: ignore[misc]
    lab.settle()
    if lab.harness.living() != living:
        lab.broken("L2", "every survivor was cancelled", "something of the launch is still alive")


def conflicting_launch(lab: Lab, run: Run, n: int, more: dict[str, Any]) -> None:
    """Check that another launch under the run_id of a run is refused, and changes nothing."""
    living = lab.harness.living()
    lab.note(f"launch_replicas({n}, {more}) with the run_id of {run.name}", "launch")
    kwargs = {**lab.harness.entrypoint_args, **run.kwargs, **more}
    options: dict[str, Any] = {"run_id": run.run_id, "timeout": run.timeout}
    must_raise(
        lab,
        "L3",
        f"launch_replicas({n}, {more})",
        lambda: lab.executor.launch_replicas(n, lab.harness.entrypoint, kwargs, **options),
        RunConflictError,
        f"run_id {run.run_id!r} belongs to another launch",
    )
    if lab.harness.living() > living:
        lab.broken(
            "L3",
            "it raised RunConflictError",
            f"{lab.harness.living()} replicas live, {living} before",
        )


def other_launch(lab: Lab, run: Run, n: int, change: dict[str, Any]) -> None:
    """Check that a launch under a run's run_id, with one argument changed, is refused.

    It must also change nothing.
    """
    living, told = lab.harness.living(), _told(lab, run)
    try:
        handles = lab.relaunch(run, n=n, **change)
    except RunConflictError:
        pass
    except InvalidRequestError as error:
        _refused_anyway(lab, run, n, change, error)
    else:
        lab.broken(
            "L7",
            f"launch_replicas({n}, {change}) gave {handles}",
            f"{run.name} has this run_id and was launched with {len(run.replicas)} replicas and "
            f"without {change}, so this launch must be refused with RunConflictError. Look at "
            "what the executor compares with the run that is there (request.fingerprint() is made "
            "from every argument)",
        )
    if (lab.harness.living(), _told(lab, run)) != (living, told):
        lab.broken(
            "L7",
            f"launch_replicas({n}, {change}) under the run_id of {run.name} was refused",
            f"before it, {living} replicas lived and {run.name} was told {told}; now "
            f"{lab.harness.living()} live, and it is told {_told(lab, run)}. A launch that is "
            "refused must change nothing: look at what was sent before it was compared",
        )


def _told(lab: Lab, run: Run) -> list[Any]:
    running = [one for one in run.replicas if one.state is ReplicaState.RUNNING]
    return [lab.harness.told(one.handle) for one in running] if lab.can(Ability.TOLD) else []


def _refused_anyway(
    lab: Lab, run: Run, n: int, change: dict[str, Any], error: InvalidRequestError
) -> None:
    """Accept the refusal of an argument that this backend never takes; it is no conflict."""
    arguments = {**run.options, **change, "run_id": f"{run.run_id}-other"}
    entrypoint = arguments.pop("entrypoint", lab.harness.entrypoint)
    kwargs = {**lab.harness.entrypoint_args, **arguments.pop("kwargs", run.kwargs)}
    try:
        lab.within("L7", lambda: lab.executor.plan(n, entrypoint, kwargs, **arguments))
    except InvalidRequestError:
        return
    lab.broken(
        "L7",
        f"launch_replicas({n}, {change}) under the run_id of {run.name} raised {error!r}",
        f"{change} is allowed under another run_id, so this must be a RunConflictError",
    )


@contextlib.contextmanager
def fault_if_possible(lab: Lab, operation: Operation, fault: Fault) -> Iterator[None]:
    """Disturb the calls to the backend while the block runs, if this world can."""
    with lab.fault(operation, fault) if lab.can(operation, fault) else contextlib.nullcontext():
        yield


def broken_purge(lab: Lab, run: Run, fault: Fault) -> None:
    """Check that a purge that fails raises, and that the next one removes what it left."""
    with lab.fault(Operation.PURGE, fault):
        lab.note(f"purge({run.name})", "purge")
        try:
            lab.within("C9", lambda: lab.executor.purge(run.handles[0]))
        except BackendError as error:
            check_error(lab, "C9", f"purge({run.name})", error, fault)
        else:
            lab.broken("C9", "purge returned", f"{fault}: nothing was removed")
    lab.purge(run)


def early_purge(lab: Lab, run: Run, by: int = 0) -> None:
    """Check that a run that lives is not purged; ``by`` says by which of its handles to try."""
    lab.note(f"purge({run.name})", "purge")
    try:
        lab.within("C6", lambda: lab.executor.purge(run.handles[by]))
    except InvalidRequestError:
        return
    lab.broken(
        "C6",
        f"purge({run.name}) returned",
        f"{next(one for one in run.replicas if one.live)} has not ended",
    )
