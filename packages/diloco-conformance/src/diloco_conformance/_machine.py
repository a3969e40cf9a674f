"""The state machine: everything happens in any order, and is compared with the model.

Users, replicas, platforms and failures act, and all is compared after every step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from ._check_collect import collect
from ._harness import Ability, Fault, Harness, Operation, Step
from ._machine_base import pick
from ._machine_logs import LogRules
from ._machine_more import MoreRules
from ._scenes import (
    broken_cancel,
    broken_look,
    conflicting_launch,
    doubtful_launch,
    early_purge,
    failing_launch,
)

# Exit codes that elsewhere stand for timeouts, kills and signals come often.
CODES = st.sampled_from([124, 128, 137, 143, 255]) | st.integers(1, 255)
values = st.one_of(
    st.none(), st.integers(), st.text(max_size=5), st.lists(st.booleans(), max_size=2)
)


class ExecutorMachine(MoreRules, LogRules):
    """The rules of the state machine.

    Purely random rules miss much, so some of them go straight to where executors err. A backend
    adds rules of its own in a subclass, which its test class names (``machine = MyMachine``). A
    rule acts through ``self.lab``, whose methods check and write down; :meth:`some`,
    :meth:`some_run` and :meth:`running` choose what to act on, and a rule for which they find
    nothing returns.
    """

    # --- launching ---

    @initialize(n=st.integers(1, 3))
    def first(self, n: int) -> None:
        """Launch a run, so that there always is one."""
        self.lab.launch(n)

    @precondition(lambda self: self.room)
    @rule(n=st.integers(1, 3), named=st.booleans(), short=st.booleans())
    def launch(self, n: int, named: bool, short: bool) -> None:
        """Launch a run."""
        timeout = self.lab.harness.short_timeout if short else self.lab.harness.timeout
        self.lab.launch(n, named=named, timeout=timeout)

    @precondition(lambda self: self.room)
    @rule()
    def bring_up(self) -> None:
        """Launch a run and start all of it."""
        self.lab.up(2)

    @precondition(lambda self: self.room)
    @rule()
    def twins(self) -> None:
        """Launch two runs without names at the same moment."""
        for _ in range(2):
            self.lab.launch(1, named=False)

    @rule(number=pick)
    def launch_again(self, number: int) -> None:
        """Launch the same once more, and check that the same replicas are found."""
        run = self.some_run(number)
        if run is None:
            return
        living = self.lab.harness.living()
        handles = self.lab.relaunch(run)
        if handles != run.handles or self.lab.harness.living() > living:
            self.lab.broken(
                "L3", f"launched again, it gave {handles}", f"{run.name} is {run.handles}"
            )

    @rule(number=pick, more=st.sampled_from([{}, {"other": 1}]))
    def conflicting_launch(self, number: int, more: dict[str, Any]) -> None:
        """Launch something else under a name that is taken."""
        if (run := self.some_run(number)) is not None:
            conflicting_launch(self.lab, run, len(run.replicas) + (not more), more)

    @precondition(lambda self: self.room and self.lab.can(Fault.FORBIDDEN, Operation.LAUNCH))
    @rule(after=st.integers(0, 2))
    def failing_launch(self, after: int) -> None:
        """Have a launch refused, at the first call or in the middle."""
        failing_launch(self.lab, after)

    @precondition(lambda self: self.room and self.lab.can(Fault.AMBIGUOUS, Operation.LAUNCH))
    @rule(after=st.integers(0, 2))
    def doubtful_launch(self, after: int) -> None:
        """Lose the answer to a launch."""
        doubtful_launch(self.lab, after)

    # --- what replicas and platforms do ---

    @rule(number=pick)
    def start(self, number: int) -> None:
        """Start a replica."""
        now = self.lab.harness.clock()
        replica = self.some(
            number,
            lambda one: one.live
            and one.started_at is None
            and not (one.stopping or one.doomed or one.overdue(now)),
        )
        if replica is not None:
            self.lab.drive(replica, Step.START)

    @rule(number=pick, value=values)
    def succeed(self, number: int, value: Any) -> None:
        """Let a replica succeed."""
        if (replica := self.running(number, race=True)) is not None:
            self.lab.drive(replica, Step.SUCCEED, value)

    @rule(number=pick, code=CODES)
    def fail(self, number: int, code: int) -> None:
        """Let a replica fail."""
        if (replica := self.running(number)) is not None:
            self.lab.drive(replica, Step.FAIL, code)

    @precondition(lambda self: self.room)
    @rule(code=CODES)
    def failure_completes(self, code: int) -> None:
        """Let one replica of a run fail; look at once, and again when it is over."""
        run = self.lab.up(2)
        self.lab.drive(run.replicas[0], Step.FAIL, code)
        self.lab.observe_all()
        self.lab.settle()

    @precondition(lambda self: self.lab.can(Step.OOM))
    @rule(number=pick)
    def out_of_memory(self, number: int) -> None:
        """Let a replica be killed for want of memory."""
        if (replica := self.running(number)) is not None:
            self.lab.drive(replica, Step.OOM)

    @precondition(lambda self: self.lab.can(Step.PREEMPT))
    @rule(number=pick)
    def preempt(self, number: int) -> None:
        """Take a replica's machine away."""
        if (replica := self.running(number, race=True)) is not None:
            self.lab.drive(replica, Step.PREEMPT)

    @precondition(lambda self: self.lab.can(Ability.TIMEOUT))
    @rule(seconds=st.integers(1, 20))
    def wait(self, seconds: int) -> None:
        """Let time pass, up to a third of the short timeout."""
        self.lab.advance(seconds * self.lab.harness.short_timeout / 60)

    @rule()
    def settle(self) -> None:
        """Let the world come to rest."""
        self.lab.settle()

    @precondition(lambda self: self.room and self.lab.can(Ability.TIMEOUT))
    @rule()
    def overrun(self) -> None:
        """Let a run that was started pass its timeout."""
        self.lab.overrun(self.lab.up(2, timeout=self.lab.harness.short_timeout))

    @precondition(lambda self: self.room)
    @rule(value=values)
    def run_through(self, value: Any) -> None:
        """Let a run go well, and collect it."""
        run = self.lab.up(2)
        for replica in run.replicas:
            self.lab.drive(replica, Step.SUCCEED, [value, replica.handle.rank])
        self.lab.observe_all()
        collect(self.lab, run.replicas)

    # --- what users do ---

    @rule(number=pick)
    def cancel(self, number: int) -> None:
        """Cancel any replica, whatever its state."""
        replicas = self.lab.replicas()
        self.lab.cancel(replicas[number % len(replicas)])

    @rule(number=pick, collecting=st.booleans())
    def cancellation_completes(self, number: int, collecting: bool) -> None:
        """Cancel a replica that runs; look at once, and again when it is over."""
        replica = self.running(number)
        if replica is None:
            return
        self.lab.cancel(replica)
        self.lab.observe_all()
        if collecting:
            collect(self.lab, replica.run.replicas)
        self.lab.settle()

    @rule(number=pick)
    def late_cancel(self, number: int) -> None:
        """Cancel a replica that has ended."""
        if (replica := self.some(number, lambda one: not one.live)) is not None:
            self.lab.cancel(replica)
            self.lab.observe_all()
            self.lab.settle()

    @rule(numbers=st.lists(pick, min_size=1, max_size=4), timeout=st.sampled_from([0.0, 5.0]))
    def collect(self, numbers: list[int], timeout: float) -> None:
        """Collect some replicas of any runs, in any order, some of them twice."""
        replicas = self.lab.replicas()
        timeout = (
            timeout * self.lab.harness.short_timeout / 60 if self.lab.can(Ability.TIMEOUT) else 0.0
        )
        collect(self.lab, [replicas[number % len(replicas)] for number in numbers], timeout=timeout)

    @rule()
    def collect_all(self) -> None:
        """Collect everything."""
        collect(self.lab, self.lab.replicas())

    @rule()
    def forget(self) -> None:
        """Go on in another process, and find every run again from there."""
        self.lab.forget()
        for run in self.lab.runs:
            if not run.replicas[0].gone:
                self.lab.attach(run)

    @rule()
    def poll(self) -> None:
        """Poll and describe."""
        self.lab.agree()

    @rule(number=pick)
    def purge(self, number: int) -> None:
        """Purge a run that has ended; check that one that has not is not removed."""
        self.lab.settle()
        run = self.some_run(number)
        if run is None:
            return
        if run.live:
            early_purge(self.lab, run)
            return
        self.lab.purge(run, look=number % 3 == 0)
        if number % 5 == 0:
            self.lab.purge(run)
        if number % 2:
            self.lab.forget()
        collect(self.lab, run.replicas)

    @precondition(lambda self: self.lab.can(Ability.EXPIRE))
    @rule(number=pick)
    def expire(self, number: int) -> None:
        """Make the backend forget a run that has ended."""
        self.lab.settle()
        if (run := self.some_run(number, ended=True)) is not None:
            self.lab.expire(run)

    # --- what networks do ---

    @rule(
        number=pick,
        fault=st.sampled_from([Fault.THROTTLE, Fault.SERVER_ERROR, Fault.REFUSED, Fault.FORBIDDEN]),
    )
    def broken_look(self, number: int, fault: Fault) -> None:
        """Ask while the backend cannot answer."""
        replica = self.some(number, lambda _: True)
        if replica is not None and self.lab.can(fault, Operation.OBSERVE):
            broken_look(self.lab, replica, fault)

    @rule(number=pick)
    def broken_cancel(self, number: int) -> None:
        """Cancel while the backend cannot do it, for each possible reason."""
        replica = self.running(number)
        for fault in (Fault.SERVER_ERROR, Fault.FORBIDDEN, Fault.CONFLICT):
            if replica is not None and self.lab.can(fault, Operation.CANCEL):
                broken_cancel(self.lab, replica, fault)


def machine(
    make_harness: Callable[[], Harness], rules: type[ExecutorMachine] = ExecutorMachine
) -> type[ExecutorMachine]:
    """Make the state machine of a backend, which makes its own worlds."""

    class Machine(rules):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__(make_harness())

    return Machine
