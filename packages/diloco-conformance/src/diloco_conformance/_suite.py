"""The class that the author of a backend subclasses."""

from __future__ import annotations

import inspect
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from diloco_protocol import BaseExecutor, Capabilities

from ._harness import Harness
from ._lab import Lab
from ._machine import ExecutorMachine
from ._one_look import once
from ._promises import HarnessFault
from ._run_machine import run_machine
from ._self_check import check_harness
from ._suite_answers import Answers
from ._suite_between import Meanwhile
from ._suite_cancel import Cancelling
from ._suite_collect import Collecting
from ._suite_constructor import Constructing
from ._suite_declared import Declaring
from ._suite_details import Details
from ._suite_endings import Endings
from ._suite_find import Finding
from ._suite_follow import Following, check_streams
from ._suite_forged import Forgeries
from ._suite_journal import Journals
from ._suite_last_lines import LastLines
from ._suite_launch import Launching
from ._suite_logs import Logs
from ._suite_long_logs import LongLogs
from ._suite_names import Names
from ._suite_parts import Parts
from ._suite_removal import Removal
from ._suite_repeats import Repeating
from ._suite_resources import Asking
from ._suite_restarts import Restarting
from ._suite_results import Results
from ._suite_runs import Runs
from ._suite_secrets import Hiding
from ._suite_states import States
from ._suite_strangers import Strangers
from ._suite_threads import Threads
from ._suite_told import Telling

AFTER_A_HANG = 5
"""The factor by which tests have less patience with an executor, once one of its calls has hung."""


class ExecutorConformance(
    States,
    Details,
    Declaring,
    Endings,
    Cancelling,
    Runs,
    Removal,
    Collecting,
    Repeating,
    Results,
    Launching,
    Parts,
    Restarting,
    Constructing,
    Journals,
    Answers,
    Asking,
    Telling,
    Hiding,
    Finding,
    Names,
    Strangers,
    Forgeries,
    Threads,
    Meanwhile,
    Logs,
    LongLogs,
    Following,
    LastLines,
):
    """Every promise of the contract, as tests. Subclass it, and give it a :class:`Harness`.

    A standard test may be changed only openly: by ``@pytest.mark.xfail(reason=...)`` on a method of
    the same name. Anything else is refused when the class is made.

    Attributes:
        examples: Number of sequences that the state machine tries.
        steps: Number of steps in each.
        shrink: Whether a sequence that breaks a promise is made shorter, by trying a hundred
            others; one that hangs is not.
        fresh: Whether other sequences are tried every time. A failure says how to try the same ones
            again.
        machine: The rules of the state machine; a backend may add its own in a subclass.
    """

    examples: int = 40
    steps: int = 30
    shrink: bool = True
    fresh: bool = False
    machine: type[ExecutorMachine] = ExecutorMachine

    def make_harness(self) -> Harness:
        """Make a harness with a fresh world."""
        raise NotImplementedError(
            f"{type(self).__name__} needs make_harness(), which returns a Harness"
        )

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        refuse_overrides(cls)

    def _sound(self, folder: Path | None = None) -> None:
        """Check the harness before the first test of a class; if it cannot judge, no test is run.

        Args:
            folder: A folder that the workers of this run share, if there are several.

        Raises:
            HarnessFault: Says what to do.
        """
        __tracebackhide__ = True
        cls = type(self)
        if "_fault" not in vars(cls):
            cls._fault = once(cls, folder, lambda: check_harness(self.make_harness, cls.__name__))
        if cls._fault is not None:
            raise HarnessFault(cls._fault)

    _fault: str | None = None
    hung: bool = False

    @pytest.fixture
    def lab(self, request: pytest.FixtureRequest) -> Iterator[Lab]:
        """Make a fresh world with its executor, for one test."""
        __tracebackhide__ = True
        self._sound(_shared(request))
        lab = Lab(self.make_harness())
        if type(self).hung:
            lab.harness.patience /= AFTER_A_HANG
        yield lab
        try:
            lab.close()
        finally:
            type(self).hung |= lab.hung

    def test_d1_what_it_cannot_do_is_declared(self, lab: Lab) -> None:
        """Check that capabilities make sense, the harness is complete, and no test is missing."""
        refuse_overrides(type(self))
        executor = lab.executor
        if not isinstance(executor, BaseExecutor) or not isinstance(
            executor.capabilities, Capabilities
        ):
            raise HarnessFault("make_executor() gives a BaseExecutor with capabilities")
        if executor.capabilities.cancel_scope not in {"replica", "gang"}:
            lab.broken(
                "D1",
                f"cancel_scope={executor.capabilities.cancel_scope!r}",
                "it is 'replica' or 'gang'",
            )
        longest = executor.capabilities.max_timeout
        if longest is not None:
            try:
                lab.within(
                    "D1", lambda: executor.plan(1, lab.harness.entrypoint, {}, timeout=longest + 1)
                )
            except ValueError:
                pass
            else:
                lab.broken(
                    "D1",
                    f"timeout={longest + 1:g} was taken",
                    f"it declares max_timeout={longest:g}",
                )
        names = [option.name for option in executor.options()]
        if len(set(names)) != len(names):
            lab.broken("D1", f"options() gave {names}", "every option has one name")
        check_streams(lab)
        for _ in range(2):
            lab.verb("C8", executor.close)

    def test_any_sequence_keeps_every_promise(self, request: pytest.FixtureRequest) -> None:
        """Run the state machine."""
        self._sound(_shared(request))
        seed = _seed(request.config)
        if seed is None and self.fresh:
            seed = secrets.randbelow(10**9)
        run_machine(
            self.make_harness,
            examples=self.examples,
            steps=self.steps,
            shrink=self.shrink,
            rules=self.machine,
            seed=seed,
        )


def _shared(request: pytest.FixtureRequest) -> Path | None:
    """Return a folder of all workers of pytest-xdist in this run; None if there are none."""
    if not hasattr(request.config, "workerinput"):
        return None
    factory: pytest.TempPathFactory = request.getfixturevalue("tmp_path_factory")
    return factory.getbasetemp().parent


def _seed(config: pytest.Config) -> int | None:
    """Return the seed that was asked for, with the option of this suite or that of hypothesis."""
    for name in ("diloco_seed", "hypothesis_seed"):
        if (chosen := config.getoption(name, None)) is not None:
            return int(chosen)
    return None


STANDARD = [name for name in dir(ExecutorConformance) if name.startswith("test_")] + [
    "lab",
    "__init_subclass__",
]


def refuse_overrides(cls: type) -> None:
    """Refuse a class in which a standard test was replaced, unless marked xfail with a reason.

    Raises:
        TypeError: Names the test.
    """
    for name in STANDARD:
        now = inspect.getattr_static(cls, name, None)
        if now is _ORIGINAL[name]:
            continue
        marks = getattr(now, "pytestmark", [])
        if not any(
            mark.name == "xfail" and str(mark.kwargs.get("reason", "")).strip() for mark in marks
        ):
            raise TypeError(
                f"{cls.__name__} replaces the standard test {name}. A promise that is not kept is "
                "shown, not hidden: mark the method with @pytest.mark.xfail(reason=...), and call "
                "super()'s in it"
            )


_ORIGINAL = {name: inspect.getattr_static(ExecutorConformance, name) for name in STANDARD}
