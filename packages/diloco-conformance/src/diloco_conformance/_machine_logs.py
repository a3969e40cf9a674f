"""Rules about logs that are followed while other things happen, and about restarted replicas."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from diloco_protocol import InvalidRequestError

from ._harness import Ability, Step
from ._logs import Follower
from ._machine_base import MachineBase
from ._model import Run

WORDS = st.lists(st.sampled_from(["", "one", " two ", "ünï", "x" * 300]), min_size=1, max_size=3)


class LogRules(MachineBase):
    """Rules that follow logs, and rules with restarts."""

    @precondition(lambda self: self.room and self.lab.can(Step.PRINT))
    @rule(
        before=WORDS,
        after=WORDS,
        again=st.booleans(),
        end=st.sampled_from(["succeed", "fail", "cancel"]),
    )
    def follow_what_lives(self, before: list[str], after: list[str], again: bool, end: str) -> None:
        """Check that every line comes while its replica lives, through a preemption, to its end."""
        lab, lines = self.lab, [*before]
        replica = lab.up(2).replicas[1]
        with lab.harness.time.held():
            follower = Follower(lab, replica)
            lab.drive(replica, Step.PRINT, before)
            follower.expect(*lines)
            if again and lab.can(Step.PREEMPT):
                lab.drive(replica, Step.PREEMPT)
                lab.drive(replica, Step.START)
            lab.drive(replica, Step.PRINT, after)
            lines += after
            follower.expect(*lines)
            if end == "cancel":
                lab.cancel(replica)
                lab.settle()
            else:
                lab.drive(replica, Step(end), 3 if end == "fail" else "followed")
            follower.finish(*lines)

    @precondition(lambda self: self.room and self.lab.can(Ability.RESTART))
    @rule(n=st.integers(1, 2), restarts=st.integers(1, 2), code=st.integers(1, 255))
    def launch_with_restarts(self, n: int, restarts: int, code: int) -> None:
        """Let a replica fail and be started again, for other rules to act on."""
        run = self._restarting(n, restarts)
        if run is not None:
            replica = run.replicas[0]
            self.lab.drive(replica, Step.START)
            self.lab.drive(replica, Step.FAIL, code)
            self.lab.observe_all()
            self.lab.drive(replica, Step.START)

    def _restarting(self, n: int, restarts: int) -> Run | None:
        entrypoint, kwargs = self.lab.harness.entrypoint, self.lab.harness.entrypoint_args
        try:
            self.lab.within(
                "L9", lambda: self.lab.executor.plan(1, entrypoint, kwargs, max_restarts=restarts)
            )
        except InvalidRequestError:
            return None
        return self.lab.launch(n, max_restarts=restarts)
