"""The one class that a backend's author subclasses."""

from __future__ import annotations

import inspect
import secrets
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import seed as seeded
from hypothesis.stateful import run_state_machine_as_test

from diloco_protocol import BaseExecutor, Capabilities

from ._harness import Harness
from ._lab import Lab
from ._machine import ExecutorMachine, machine
from ._promises import HarnessFault
from ._self_check import check_harness
from ._suite_cancel import Cancelling
from ._suite_collect import Collecting
from ._suite_details import Details
from ._suite_find import Finding
from ._suite_follow import Following
from ._suite_launch import Launching
from ._suite_logs import Logs
from ._suite_names import Names
from ._suite_results import Results
from ._suite_runs import Runs
from ._suite_states import States
from ._suite_threads import Threads
from ._suite_told import Telling


class ExecutorConformance(
    States,
    Details,
    Cancelling,
    Runs,
    Collecting,
    Results,
    Launching,
    Telling,
    Finding,
    Names,
    Threads,
    Logs,
    Following,
):
    """Every promise of the contract, as tests. Subclass it, and give it a :class:`Harness`.

    A standard test may be changed only openly: by ``@pytest.mark.xfail(reason=...)`` on a method of the same name. Anything
    else is refused when the class is made.

    Attributes:
        examples: Sequences that the state machine tries.
        steps: Steps of each.
        shrink: Whether a sequence that breaks a promise is made as short as can be.
        fresh: Whether other sequences are tried every time. A failure says how to try the same ones again.
        machine: The rules of the state machine; a backend may add its own in a subclass.
    """

    examples: int = 40
    steps: int = 30
    shrink: bool = True
    fresh: bool = False
    machine: type[ExecutorMachine] = ExecutorMachine

    def make_harness(self) -> Harness:
        """A fresh world."""
        raise NotImplementedError(
            f"{type(self).__name__} needs make_harness(), which returns a Harness"
        )

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        refuse_overrides(cls)

    def _sound(self) -> None:
        """Check the harness before the first test of a class; if it cannot judge, no test is run.

        Raises:
            HarnessFault: Says what to do.
        """
        cls = type(self)
        if "_fault" not in vars(cls):
            cls._fault = None
            try:
                check_harness(self.make_harness, cls.__name__)
            except HarnessFault as fault:
                cls._fault = str(fault)
        if cls._fault is not None:
            raise HarnessFault(cls._fault)

    _fault: str | None = None

    @pytest.fixture
    def lab(self) -> Iterator[Lab]:
        """A fresh world with its executor, for one test."""
        self._sound()
        lab = Lab(self.make_harness())
        yield lab
        lab.close()

    def test_d1_what_it_cannot_do_is_declared(self, lab: Lab) -> None:
        """Capabilities are declared and make sense, the harness is complete, and no test was taken away."""
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
        executor.close()
        executor.close()

    def test_any_sequence_keeps_every_promise(self, request: pytest.FixtureRequest) -> None:
        """The state machine."""
        self._sound()
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


def _seed(config: pytest.Config) -> int | None:
    """The seed that was asked for: with our own option, or with that of hypothesis."""
    for name in ("diloco_seed", "hypothesis_seed"):
        if (chosen := config.getoption(name, None)) is not None:
            return int(chosen)
    return None


def run_machine(
    make_harness: Any,
    *,
    examples: int,
    steps: int,
    shrink: bool,
    rules: type[ExecutorMachine] = ExecutorMachine,
    seed: int | None = None,
) -> None:
    """Try sequences until one breaks a promise: the same ones every time, or those of a seed."""
    phases = [Phase.generate, Phase.shrink] if shrink else [Phase.generate]
    factory = machine(make_harness, rules)
    if seed is not None:
        factory = seeded(seed)(factory)
    try:
        run_state_machine_as_test(
            factory,
            settings=settings(
                max_examples=examples,
                stateful_step_count=steps,
                phases=phases,
                deadline=None,
                database=None,
                derandomize=seed is None,
                print_blob=False,
                suppress_health_check=list(HealthCheck),
            ),
        )
    except Exception as error:
        if seed is not None:
            error.add_note(f"--diloco-seed {seed} tries these sequences again")
        raise


STANDARD = [name for name in dir(ExecutorConformance) if name.startswith("test_")] + [
    "lab",
    "__init_subclass__",
]


def refuse_overrides(cls: type) -> None:
    """Refuse a class in which a standard test is not what it was, unless it is marked xfail with a reason.

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
                f"{cls.__name__} replaces the standard test {name}. A promise that is not kept is shown, not hidden: mark the "
                "method with @pytest.mark.xfail(reason=...), and call super()'s in it"
            )


_ORIGINAL = {name: inspect.getattr_static(ExecutorConformance, name) for name in STANDARD}
