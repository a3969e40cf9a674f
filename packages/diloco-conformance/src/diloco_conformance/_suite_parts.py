"""Parts of a run, each of which is launched separately: L8."""

from __future__ import annotations

from ._check_collect import collect
from ._harness import Ability, Step
from ._lab import Lab
from ._suite_told import check_told


class Parts:
    """Fixed tests of L8."""

    def test_l8_a_part_of_a_run(self, lab: Lab) -> None:
        """Launch ranks from an offset on, of a larger run, with one replica and with several."""
        with lab.part_of("L8"):
            self._parts(lab)

    def _parts(self, lab: Lab) -> None:
        for n, offset, size in ((2, 3, 8), (1, 11, 12), (3, 0, 100)):
            run = lab.up(n, rank_offset=offset, world_size=size, kwargs={"part": offset})
            if lab.can(Ability.TOLD):
                for replica in run.replicas:
                    check_told(lab, replica.handle, {**lab.harness.entrypoint_args, **run.kwargs})
            lab.observe_all()
            lab.forget()
            lab.attach(run)
            if lab.relaunch(run) != run.handles:
                lab.broken("L8", "launched again, it gave other handles", str(run.handles))
            for replica in run.replicas:
                lab.drive(replica, Step.SUCCEED, f"rank {replica.handle.rank}")
            lab.observe_all()
            collect(lab, run.replicas)
        run = lab.up(2, rank_offset=5)  # by default these are the last ranks
        lab.cancel(run.replicas[1])
        lab.settle()
        lab.observe_all()

    def test_l8_parts_of_one_cohort_are_runs_of_their_own(self, lab: Lab) -> None:
        """Check that each part can be found, listed, ended, removed and launched again by itself.

        All of them are on one executor.
        """
        with lab.part_of("L8"):
            cohort = f"{lab.harness.run_prefix}-whole"
            one, two, three = (
                lab.up(2, cohort=cohort, rank_offset=offset, world_size=6) for offset in (0, 2, 4)
            )
            for run in (one, two, three):
                lab.attach(run)
                if lab.relaunch(run) != run.handles:
                    lab.broken("L8", "launched again, it gave other handles", str(run.handles))
            lab.observe_all()
            lab.cancel_run(two)
            lab.settle()
            lab.observe_all()
            lab.drive(one.replicas[1], Step.FAIL, 3)
            lab.settle()
            lab.observe_all()
            collect(lab, lab.replicas())
            lab.purge(two, look=True)
            lab.forget()
            lab.attach(one)
            lab.attach(three)
            lab.observe_all()
