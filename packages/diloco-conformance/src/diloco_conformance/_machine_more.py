"""Rules about environments, secrets, parts, logs, signals, whole runs and used names."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from diloco_protocol import Reason, ReplicaState

from ._check_collect import collect
from ._harness import Ability, Fault, Operation, Step
from ._logs import check_lines, check_log
from ._machine_base import MachineBase, pick
from ._model import Replica
from ._scenes import broken_purge
from ._suite_told import check_environment

SIGNALS = st.sampled_from(["SIGABRT", "SIGKILL", "SIGSEGV", "SIGBUS"])
LINES = st.lists(st.sampled_from(["", "one", " two ", "tab\there", "ünï", "x" * 300]), max_size=4)
TEXTS = st.sampled_from(["", "text", "$HOME $(X) $$", "a b'c\"", "ü\n"])


class MoreRules(MachineBase):
    """The second half of the rules."""

    # --- launching ---

    @precondition(lambda self: self.room)
    @rule(n=st.integers(1, 2), offset=st.integers(0, 11), more=st.integers(0, 2))
    def launch_a_part(self, n: int, offset: int, more: int) -> None:
        """Launch a part of a larger run, with ranks that need not begin at 0."""
        self.lab.launch(n, rank_offset=offset, world_size=offset + n + more)

    @precondition(lambda self: self.room and self.lab.can(Ability.TOLD))
    @rule(first=TEXTS, second=TEXTS, secret=st.booleans())
    def launch_with_an_environment(self, first: str, second: str, secret: bool) -> None:
        """Launch with variables and secrets, and look for them in every replica."""
        wanted = {"CONF_FIRST": first, "CONF_SECOND": second}
        options: dict[str, Any] = {"env": dict(wanted)}
        if secret and self.lab.can(Ability.SECRETS):
            wanted["CONF_SECRET"] = f"secret {first}"
            reference = self.lab.harness.secret(wanted["CONF_SECRET"])
            options["secrets"] = {"CONF_SECRET": reference}
        for replica in self.lab.up(2, **options).replicas:
            check_environment(self.lab, "E1", replica.handle, wanted)

    @rule(number=pick)
    def use_a_name_again(self, number: int) -> None:
        """Purge a run that has ended, and launch the same under its name."""
        self.lab.settle()
        old = self.some_run(number, ended=True)
        if old is None or not self.room:
            return
        self.lab.purge(old)
        if number % 2:
            self.lab.forget()
        options = {key: old.options[key] for key in old.options if key != "kwargs"}
        new = self.lab.launch(len(old.replicas), kwargs=old.kwargs, **options)
        for replica in old.replicas:
            self.lab.cancel(replica)
        collect(self.lab, [*old.replicas, *new.replicas])

    # --- what replicas do ---

    @precondition(lambda self: self.lab.can(Step.KILL))
    @rule(number=pick, name=SIGNALS)
    def killed(self, number: int, name: str) -> None:
        """End a replica by a signal."""
        if (replica := self.running(number)) is not None:
            self.lab.drive(replica, Step.KILL, name)

    @precondition(lambda self: self.lab.can(Step.STOP))
    @rule(number=pick)
    def stopped_from_outside(self, number: int) -> None:
        """Stop a replica from outside, as another user might."""
        if (replica := self.running(number)) is not None:
            self.lab.drive(replica, Step.STOP)

    @precondition(lambda self: self.lab.can(Step.PREEMPT))
    @rule(number=pick)
    def return_in_vain(self, number: int) -> None:
        """Let a replica return as its machine is taken away, and start it again."""
        if (replica := self.running(number)) is not None:
            self.lab.drive(replica, Step.PREEMPT, "in vain")
            self.lab.drive(replica, Step.START)

    @precondition(lambda self: self.lab.can(Ability.LOSE))
    @rule(number=pick, left=st.sampled_from([None, b"", b"{"]))
    def lose_a_result(self, number: int, left: bytes | None) -> None:
        """Lose or damage the result of a replica that has succeeded."""
        replica = self.some(number, lambda one: one.state is ReplicaState.SUCCEEDED)
        if replica is not None and replica.result is not None:
            self.lab.lose(replica, left if self.lab.can(Ability.DAMAGE) else None)
            self.lab.forget()
            collect(self.lab, replica.run.replicas)

    @precondition(lambda self: self.lab.can(Step.PRINT))
    @rule(number=pick, lines=LINES)
    def write(self, number: int, lines: list[str]) -> None:
        """Let a replica print, and check that its log has what it printed."""
        if (replica := self.running(number)) is not None:
            self.lab.drive(replica, Step.PRINT, lines)
            check_log(self.lab, replica, 1000)

    # --- what users do ---

    @precondition(lambda self: self.lab.can(Step.PRINT))
    @rule(number=pick, n_lines=st.sampled_from([1, 3, 1000]), follow=st.booleans())
    def read(self, number: int, n_lines: int, follow: bool) -> None:
        """Read a log, and follow it if its replica has ended."""
        replica = self.some(number, lambda one: self._has_a_log(one))
        if replica is None:
            return
        check_log(self.lab, replica, n_lines)
        if follow and replica.state.terminal:
            check_lines(self.lab, replica, promise="G3", follow=True)

    def _has_a_log(self, replica: Replica) -> bool:
        """Say whether the log of a replica is there.

        A platform may remove the replicas that it ends, with all that they wrote. If several ranks
        of a gang are too late at once, it may count one, and end the others.
        """
        capabilities = self.lab.capabilities
        gang = capabilities.failure_scope == "gang" and len(replica.run.replicas) > 1
        ended = replica.state is ReplicaState.CANCELLED or replica.reason is Reason.GANG_FAILED
        ended = ended or (gang and replica.reason is Reason.TIMEOUT)
        return capabilities.remembers_ended or not ended

    @rule(number=pick)
    def cancel_run(self, number: int) -> None:
        """Cancel a run by its name."""
        if (run := self.some_run(number)) is not None:
            self.lab.cancel_run(run)
            self.lab.observe_all()
            if number % 2:
                self.lab.settle()

    @rule(number=pick)
    def close(self, number: int) -> None:
        """Close an executor, twice, and check that the next executor finds every run."""
        self.lab.verb("C8", self.lab.executor.close)
        self.lab.forget()
        run = self.some_run(number)
        if run is not None and not self.lab.verb(
            "H6", lambda: self.lab.executor.exists(run.run_id)
        ):
            self.lab.broken("H6", f"exists({run.run_id!r}) is False", f"{run.name} is there")

    @rule(number=pick, fault=st.sampled_from([Fault.SERVER_ERROR, Fault.FORBIDDEN]))
    def broken_purge(self, number: int, fault: Fault) -> None:
        """Purge while the backend cannot do it, and then again."""
        if self.lab.can(fault, Operation.PURGE):
            self.lab.settle()
            if (run := self.some_run(number, ended=True)) is not None:
                broken_purge(self.lab, run, fault)
