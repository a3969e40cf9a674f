"""Check that disturbances disturb, and end.

The checks look at what the world lets happen, not only at what the executor says.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from diloco_protocol import BackendError, ReplicaHandle

from ._blame import fault
from ._harness import Fault, Harness, Operation, Step
from ._scenes import RETRYABLE
from ._self_sample import Sample

MANY = 1000
"""A number of calls that is larger than a launch takes."""
LAUNCHES = 4
"""A number of launches that together take more than one call."""


def looks_are_disturbed(sample: Sample) -> None:
    """Check that an executor that has seen nothing cannot say what is true while it cannot ask."""
    if not _can(sample, Operation.OBSERVE):
        return
    handles = sample.first.run.handles
    _states(sample, handles)  # an error here, before any disturbance, shows nothing about one
    virtual = type(sample.harness).sleep is Harness.sleep
    for kind in (
        Fault.FORBIDDEN,
        *(RETRYABLE if virtual else ()),
    ):  # the others are retried for long
        if sample.lab.can(kind):
            _looks_are_disturbed(sample, handles, kind)
    try:
        _states(sample, handles)
    except BackendError as error:
        _not_cleared(sample, Operation.OBSERVE, f"a look raises {error!r}")


def _looks_are_disturbed(sample: Sample, handles: list[ReplicaHandle], kind: Fault) -> None:
    with _disturbed(sample, Operation.OBSERVE, kind), contextlib.suppress(BackendError):
        true = [sample.harness.truth(handle).state for handle in handles]
        if _states(sample, handles) == true:
            what = "an executor that had seen nothing saw what is true"
            _nothing(sample, Operation.OBSERVE, what, kind)


def several_are_disturbed(sample: Sample) -> None:
    """Check that several operations can be disturbed at once, and that clear ends all of it."""
    if not _can(sample, Operation.OBSERVE) or not _can(sample, Operation.LAUNCH):
        return
    harness, handles = sample.harness, sample.first.run.handles
    true = [harness.truth(handle).state for handle in handles]
    harness.inject(Operation.OBSERVE, Fault.FORBIDDEN)
    harness.inject(Operation.LAUNCH, Fault.FORBIDDEN)
    try:
        seen = _states(sample, handles)
    except BackendError:
        seen = []
    harness.clear()
    if seen == true:
        fault(
            harness,
            f"inject({Operation.LAUNCH!r}, …) has ended what inject({Operation.OBSERVE!r}, …) had "
            "begun: several operations add up, until clear()",
            "inject",
        )
    if not _started(sample):
        _not_cleared(sample, Operation.LAUNCH, "a launch is refused")


def launches_are_disturbed(sample: Sample) -> None:
    """Check that launches are disturbed at once and after some calls, and then no longer."""
    if not _can(sample, Operation.LAUNCH):
        return
    with _disturbed(sample, Operation.LAUNCH):
        if _started(sample):
            _nothing(sample, Operation.LAUNCH, "a launch went well")
    with _disturbed(sample, Operation.LAUNCH, after=MANY):
        refused = not _started(sample)
    if not _started(sample):
        _not_cleared(sample, Operation.LAUNCH, "a launch is refused")
    if refused:
        fault(
            sample.harness,
            f"under inject({Operation.LAUNCH!r}, {Fault.FORBIDDEN!r}, after={MANY}) a launch is "
            f"refused: the first {MANY} calls must go well",
            "inject",
        )
    with _disturbed(sample, Operation.LAUNCH, after=1):
        if all(_started(sample) for _ in range(LAUNCHES)):
            fault(
                sample.harness,
                f"under inject({Operation.LAUNCH!r}, {Fault.FORBIDDEN!r}, after=1), {LAUNCHES} "
                "launches went well: only the first call must, and every later one must be refused",
                "inject",
            )


def cancels_are_disturbed(sample: Sample) -> None:
    """Check that a cancel that is refused changes nothing in the world."""
    if not _can(sample, Operation.CANCEL):
        return
    # Not the sample's: while disturbances were waited out, that may have passed its timeout.
    handle = sample.lab.up(1).replicas[0].handle
    with _disturbed(sample, Operation.CANCEL):
        sample.ask(lambda: sample.lab.executor.cancel(handle))
        if sample.harness.truth(handle).stopping:
            _nothing(sample, Operation.CANCEL, "a cancel was accepted")


def logs_are_disturbed(sample: Sample) -> None:
    """Check that logs that cannot be read are not read."""
    if not _can(sample, Operation.LOGS) or not sample.lab.can(Step.PRINT):
        return
    with _disturbed(sample, Operation.LOGS), sample.fresh() as executor:
        text = sample.ask(lambda: executor.stream_logs(sample.second.handle))
        if "self-check" in text:
            _nothing(sample, Operation.LOGS, "a log was read")


def purges_are_disturbed(sample: Sample) -> None:
    """Check that a run that may not be removed is still there; it has ended."""
    if not _can(sample, Operation.PURGE):
        return
    run = sample.lab.up(1)
    sample.lab.drive(run.replicas[0], Step.SUCCEED)
    with _disturbed(sample, Operation.PURGE):
        sample.ask(lambda: sample.lab.executor.purge(run.handles[0]))
        sample.harness.settle()
        if sample.harness.truth(run.handles[0]).state is None:
            run.replicas[0].gone = True
            _nothing(sample, Operation.PURGE, "a run was removed")


FAULT_CHECKS: list[Callable[[Sample], None]] = [
    looks_are_disturbed,
    launches_are_disturbed,
    several_are_disturbed,
    cancels_are_disturbed,
    logs_are_disturbed,
    purges_are_disturbed,
]


def _can(sample: Sample, operation: Operation) -> bool:
    return sample.lab.can(operation, Fault.FORBIDDEN)


@contextlib.contextmanager
def _disturbed(
    sample: Sample, operation: Operation, kind: Fault = Fault.FORBIDDEN, after: int = 0
) -> Iterator[None]:
    sample.harness.inject(operation, kind, after=after)
    try:
        yield
    finally:
        sample.harness.clear()


def _states(sample: Sample, handles: list[ReplicaHandle]) -> list[object]:
    with sample.fresh() as executor:
        return [sample.ask(lambda one=handle: executor.poll(one)) for handle in handles]  # type: ignore[misc]


def _started(sample: Sample) -> bool:
    """Say whether a launch goes well, and something of it lives."""
    before = sample.harness.living()
    sample.number += 1
    run_id = f"{sample.harness.run_prefix}-self-check-{sample.number}"
    try:
        run = sample.lab.launch(1, run_id=run_id, refusable=True)
    except BackendError:
        return False
    return sample.harness.truth(run.handles[0]).alive and sample.harness.living() > before


def _nothing(
    sample: Sample, operation: Operation, what: str, kind: Fault = Fault.FORBIDDEN
) -> None:
    fault(
        sample.harness,
        f"inject({operation!r}, {kind!r}) changes nothing: {what} under it. Until clear(), every "
        "such call to the platform must run into the fault, or the fault must be declared in "
        "cannot",
        "inject",
    )


def _not_cleared(sample: Sample, operation: Operation, what: str) -> None:
    fault(
        sample.harness,
        f"after inject({operation!r}, …) and clear(), {what}: clear() must end all disturbances",
        "clear",
    )
