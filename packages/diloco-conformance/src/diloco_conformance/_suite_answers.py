"""Launches whose answers are lost: L2."""

from __future__ import annotations

from ._harness import Fault, Operation
from ._lab import Lab
from ._scenes import unanswered_launch


class Answers:
    """Fixed tests of L2: the platform has done what it was asked, but its answer is lost."""

    def test_l2_what_was_started_without_an_answer_is_ended_or_named(self, lab: Lab) -> None:
        """Lose answers, of the first replica or a later one, once or every time.

        Either all replicas live, or each one that lives is a survivor.
        """
        lab.needs(Operation.LAUNCH)
        for fault in lab.faults(Fault.AMBIGUOUS, Fault.UNANSWERED, Fault.CUT, Fault.SERVER_ERROR):
            for after in range(3):
                unanswered_launch(lab, fault, after)

    def test_l2_who_cannot_look_names_what_may_live(self, lab: Lab) -> None:
        """Lose an answer, and then the means to find out whether a replica exists, or to end it."""
        lab.needs(Operation.LAUNCH, Fault.AMBIGUOUS, Operation.OBSERVE, Fault.SERVER_ERROR)
        others = [(Operation.OBSERVE, after) for after in range(3)] + [(Operation.CANCEL, 0)]
        for operation, first in others:
            for fault in (Fault.AMBIGUOUS, Fault.UNANSWERED):
                for after in (0, 1):
                    if lab.can(fault, operation):
                        unanswered_launch(lab, fault, after, (operation, first))
