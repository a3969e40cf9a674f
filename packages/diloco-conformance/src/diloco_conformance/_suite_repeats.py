"""Collecting more than once: R3."""

from __future__ import annotations

from functools import partial

from ._check_collect import collect, repeats
from ._harness import Step
from ._lab import Lab
from ._suite_states import ended


class Repeating:
    """Fixed tests of R3."""

    def test_r3_collecting_again_gives_the_same(self, lab: Lab) -> None:
        """Collect after every end, after polling, in another process, and repeatedly."""
        replicas = ended(lab)
        lab.observe_all()
        first = collect(lab, replicas)
        for _ in range(2):
            if not all(map(partial(repeats, lab), first, collect(lab, replicas))):
                lab.broken("R3", "another answer", f"the first was {first}")
        lab.forget()
        lab.observe_all()
        if not all(map(partial(repeats, lab), first, collect(lab, replicas))):
            lab.broken("R3", "another answer in another process", f"the first was {first}")

    def test_r3_what_a_caller_makes_of_it_changes_nothing(self, lab: Lab) -> None:
        """Check that a caller may change a result at will, since it is the caller's own."""
        replica = lab.up().replicas[0]
        lab.drive(replica, Step.SUCCEED, {"losses": [0.5, 0.25]})
        for _ in range(3):
            lab.note("collect, and the caller changes what it got", "collect")
            with lab.part_of("R3"):
                collect(lab, [replica])
            replica.answer = None
            (entry,) = lab.verb("R3", lambda: lab.executor.collect([replica.handle], timeout=0))
            entry["result"]["losses"].append("of the caller")
            entry["error"] = "of the caller"

    def test_r3_what_is_being_ended_is_not_final(self, lab: Lab) -> None:
        """Collect right after the cancel, and again when it has taken effect."""
        run = lab.up(2)
        lab.cancel(run.replicas[0])
        collect(lab, run.replicas)
        lab.observe_all()
        lab.settle()
        collect(lab, run.replicas)
        lab.observe_all()
