"""Check that a harness can judge at all, before the first test.

Otherwise the suite would blame the executor for faults of the harness.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import _pytest.outcomes

from diloco_protocol import BackendError

from ._blame import fault, is_of_the_harness, raised_at
from ._harness import Harness
from ._lab import Lab
from ._promises import HarnessFault, PromiseBroken
from ._self_answers import ANSWER_CHECKS
from ._self_class import check_class
from ._self_executor import check_clocks, check_executor, check_time
from ._self_faults import FAULT_CHECKS
from ._self_records import RECORD_CHECKS
from ._self_sample import Sample
from ._self_told import TOLD_CHECKS
from ._self_used import check_used
from ._self_world import LAST_CHECKS, WORLD_CHECKS

CHECKS = [
    *TOLD_CHECKS,
    *RECORD_CHECKS,
    *WORLD_CHECKS,
    *FAULT_CHECKS,
    *ANSWER_CHECKS,
    *LAST_CHECKS,
]


def check_harness(make_harness: Callable[[], object], owner: str) -> None:
    """Check a harness, its executor, and what the world does when it is told to.

    Args:
        make_harness: Makes a fresh harness.
        owner: The name of the class that has it, for the messages.

    Raises:
        HarnessFault: Something is missing or wrong; says what to do, and where.
    """
    try:
        harness = _make(make_harness, owner)
        try:
            check_class(harness)
            check_used(harness)
            check_clocks(harness)
            check_executor(harness)
            check_time(harness)
            _check_world(harness)
        except BaseException:
            with contextlib.suppress(Exception):
                harness.close()
            raise
        harness.close()
    except (HarnessFault, _pytest.outcomes.OutcomeException):
        raise
    except Exception as error:
        raise HarnessFault(
            f"{owner}: before the first test, {type(error).__name__} was raised: {error}\n  "
            f"{raised_at(error)}"
        ) from error


def _make(make_harness: Callable[[], object], owner: str) -> Harness:
    try:
        harness = make_harness()
    except TypeError as error:
        if "abstract" in str(error):
            raise HarnessFault(
                f"{error}. A harness supplies all of these methods; docs/harness.md of "
                "diloco-conformance says how"
            ) from error
        raise
    if not isinstance(harness, Harness):
        raise HarnessFault(
            f"{owner}.make_harness() returned {harness!r}: it must return a fresh object of a "
            "class that subclasses Harness"
        )
    if not hasattr(harness, "time"):
        fault(
            harness,
            "its __init__ must call super().__init__(), which makes the clock",
            "__init__",
        )
    return harness


def _check_world(harness: Harness) -> None:
    """Move the world a little; errors of the executor meanwhile are left to the tests."""
    lab = Lab(harness)
    try:
        with _left_to_the_tests(harness):
            sample = Sample(lab)
            for check in CHECKS:
                with _left_to_the_tests(harness):
                    if not lab.hung:
                        check(sample)
    finally:
        harness.clear()
        with _left_to_the_tests(harness):
            for replica in [] if lab.hung else lab.replicas():
                lab.within("C1", lambda one=replica: lab.executor.cancel(one.handle))  # type: ignore[misc]
        harness.settle()


@contextlib.contextmanager
def _left_to_the_tests(harness: Harness) -> Iterator[None]:
    """Pass over what the executor does wrong, but not over what the harness raises."""
    try:
        yield
    except (PromiseBroken, _pytest.outcomes.Skipped):
        pass
    except BackendError as error:
        if is_of_the_harness(harness, error):
            raise HarnessFault(
                f"{type(harness).__name__}: before the first test, a method of it raised "
                f"{error!r}\n  {raised_at(error)}"
            ) from error
