"""Runs while they are being removed, and afterwards: C9, L11."""

from __future__ import annotations

from diloco_protocol import BackendError, ReplicaHandle, RunConflictError

from ._harness import Ability, Step
from ._lab import Lab
from ._model import Run
from ._purged import check_purged


class Removal:
    """Fixed tests of C9 and L11."""

    def test_c9_after_a_purge_there_is_nothing(self, lab: Lab) -> None:
        """Check that no record, result, log or name is left for any executor, after any end.

        It holds from the moment at which purge returns.
        """
        runs = [lab.up(2) for _ in range(3)]
        for replica in [one for run in runs for one in run.replicas]:
            if lab.can(Step.PRINT):
                lab.drive(replica, Step.PRINT, [f"{replica} was here"])
        for replica in runs[0].replicas:
            lab.drive(replica, Step.SUCCEED, f"of {replica}")
        lab.drive(runs[1].replicas[0], Step.FAIL, 3)
        for run in runs[1:]:
            lab.cancel_run(run)
        lab.settle()
        lab.observe_all()
        for run in runs:
            lab.purge(run, look=True)
            again = lab.up(len(run.replicas), run_id=run.run_id, kwargs=run.kwargs)
            lab.cancel_run(again)
            lab.settle()

    def test_c9_purge_waits_for_a_removal_that_is_under_way(self, lab: Lab) -> None:
        """Purge a run that another user has begun to remove."""
        lab.needs(Ability.REMOVE)
        run = self._ended(lab)
        lab.harness.remove(run.handles[0])
        lab.note(f"another user removes {run.name}", "purge")
        try:
            lab.within("C9", lambda: lab.executor.purge(run.handles[0]))
        except BackendError as error:
            if not error.retryable:
                lab.broken("C9", f"purge raised {error!r}", "the run will be gone in a moment")
            return
        check_purged(lab, run)

    def test_l11_a_run_that_is_being_removed_is_not_given_out(self, lab: Lab) -> None:
        """Launch the run again: this waits or is refused, and once it is gone the name is free."""
        lab.needs(Ability.REMOVE)
        old = self._ended(lab)
        living = lab.harness.living()
        lab.harness.remove(old.handles[0])
        lab.note(f"another user removes {old.name}", "purge")
        handles: list[ReplicaHandle] = []
        began = lab.moment()
        try:
            handles = lab.within("L11", lambda: lab.try_launch(old))
        except RunConflictError as error:
            lab.note(f"the launch raised {error!r}")
        except BackendError as error:
            if not error.retryable:
                lab.broken("L11", f"it raised {error!r}", "a RunConflictError, or one that passes")
        for replica in old.replicas:
            replica.gone = True
        if set(handles) & set(old.handles):
            lab.broken("L11", f"it gave {handles}", f"{old.name} is being removed")
        lab.harness.settle()
        new = lab.take(handles, old.kwargs, began) if handles else None
        if new is None:
            if lab.harness.living() != living:
                lab.broken("L11", "it was refused", "something was started")
            new = lab.launch(len(old.replicas), run_id=old.run_id, kwargs=old.kwargs)
        alive = lab.harness.living() - living
        if alive != len(new.replicas):
            lab.broken("L11", f"{new.name} was launched", f"{alive} of its replicas live")
        lab.observe_all()
        lab.attach(new)

    def _ended(self, lab: Lab) -> Run:
        run = lab.up(2)
        for replica in run.replicas:
            lab.drive(replica, Step.SUCCEED, "old")
        lab.observe_all()
        return run
