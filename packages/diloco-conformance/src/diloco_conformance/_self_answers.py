"""Check that a harness carries out requests whose answers it loses, and loses all that it should.

What the executor then does proves nothing: one that looks again finds its run in any case. So the
world is examined when an error reaches the executor, and the errors are counted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from diloco_protocol import BackendError

from ._blame import fault
from ._harness import Fault, Operation
from ._self_sample import Sample
from ._stepping import each_line


def lost_answers_are_of_requests_that_are_done(sample: Sample) -> None:
    """Check that something of the launch lives when the executor hears of the error."""
    for kind in (Fault.AMBIGUOUS, Fault.UNANSWERED):
        if not sample.lab.can(Operation.LAUNCH, kind):
            continue
        before = sample.harness.living()
        living = _errors(sample, kind)
        if living and max(living) <= before:
            fault(
                sample.harness,
                f"under inject({Operation.LAUNCH!r}, {kind!r}) nothing of a launch lived when the "
                "executor heard that its request had failed: the request must be carried out, and "
                "then its answer lost",
                "inject",
            )


def no_answer_comes(sample: Sample) -> None:
    """Check that no answer comes, neither to the first launch nor to the second."""
    lab, harness = sample.lab, sample.harness
    if not lab.can(Operation.LAUNCH, Fault.UNANSWERED):
        return
    well = len(_errors(sample, None))
    harness.inject(Operation.LAUNCH, Fault.UNANSWERED)
    first, second = (len(_errors(sample, None)) for _ in range(2))
    harness.clear()
    if first > well and second <= well:
        fault(
            harness,
            f"under inject({Operation.LAUNCH!r}, {Fault.UNANSWERED!r}) the first launch met "
            f"{first - well} errors, and the second one none: every answer must be lost until "
            "clear()",
            "inject",
        )


ANSWER_CHECKS: list[Callable[[Sample], None]] = [
    lost_answers_are_of_requests_that_are_done,
    no_answer_comes,
]


def _errors(sample: Sample, kind: Fault | None) -> list[int]:
    """Return the number of living replicas at each error that the executor met in a launch.

    The launch runs under this fault.
    """
    lab, harness = sample.lab, sample.harness
    living: list[int] = []
    sample.number += 1
    run_id = f"{harness.run_prefix}-self-check-{sample.number}"
    arguments = dict(harness.entrypoint_args)

    def launch() -> None:
        with each_line(lab.executor, lambda _: living.append(harness.living()), event="exception"):
            lab.executor.launch_replicas(
                1, harness.entrypoint, arguments, run_id=run_id, timeout=harness.timeout
            )

    if kind is not None:
        harness.inject(Operation.LAUNCH, kind)
    with contextlib.suppress(BackendError):
        sample.ask(launch)
    if kind is not None:
        harness.clear()
    with contextlib.suppress(BackendError):
        sample.ask(lambda: lab.executor.cancel_run(run_id))
    # A replica that is still ending would count as living before the next launch, and be gone after
    # it
    harness.settle()
    return living
