"""Ending whole runs, removing them, and closing executors: C7 to C9, D3."""

from __future__ import annotations

import re
from contextlib import nullcontext, suppress
from functools import partial

from diloco_protocol import BackendError, ReplicaNotFoundError

from ._check_collect import collect
from ._harness import Ability, Fault, Operation, Step
from ._lab import Lab
from ._model import Run
from ._refusals import must_raise
from ._scenes import RETRYABLE, broken_purge, check_error, early_purge

CALLS_PER_CANCEL = 2
"""The number of calls that the cancel of one replica may take.

There may be a read, and a write on the condition that nothing has changed.
"""


class Runs:
    """Fixed tests of C7 to C9 and D3."""

    def test_c7_all_that_lives_of_a_run_ends(self, lab: Lab) -> None:
        """Cancel a run from another process, twice; what has ended stays as it is.

        Runs whose names begin alike must not be touched.
        """
        name = f"{lab.harness.run_prefix}-x"
        run = lab.up(3, run_id=name)
        others = [lab.up(1, run_id=other) for other in (f"{name}-1", f"{name}1", f"{name}-0")]
        lab.drive(run.replicas[0], Step.SUCCEED, "before")
        lab.cancel(run.replicas[1])
        lab.settle()
        lab.forget()
        lab.cancel_run(run)
        lab.observe_all()
        lab.settle()
        lab.observe_all()
        lab.cancel_run(run)
        lab.settle()
        lab.observe_all()
        for other in others:
            lab.drive(other.replicas[0], Step.SUCCEED, "untouched")
        collect(lab, lab.replicas())

    def test_c7_whoever_has_ended_the_others_end(self, lab: Lab) -> None:
        """Let the first or the last rank end: a run is not over because one of its replicas is."""
        for over in (0, 2):
            run = lab.up(3)
            lab.drive(run.replicas[over], Step.SUCCEED, "before")
            lab.cancel_run(run)
            lab.settle()
            lab.observe_all()
            collect(lab, run.replicas)

    def test_c7_what_never_started_ends_too(self, lab: Lab) -> None:
        """Cancel a run of which one replica runs and the others have not started."""
        run = lab.launch(3)
        lab.drive(run.replicas[1], Step.START)
        lab.cancel_run(run)
        lab.settle()
        lab.observe_all()

    def test_c7_an_unknown_run_is_not_cancelled(self, lab: Lab) -> None:
        """Cancel a run that never was, and one that was purged."""
        run = lab.up()
        lab.drive(run.replicas[0], Step.SUCCEED)
        lab.purge(run)
        for run_id in ("never-was", run.run_id):
            lab.note(f"cancel_run({run_id!r})", "cancel")
            must_raise(
                lab,
                "C7",
                f"cancel_run({run_id!r})",
                partial(lab.executor.cancel_run, run_id),
                ReplicaNotFoundError,
                (
                    "there is no such run, so it must raise ReplicaNotFoundError. It "
                    "does if attach "
                    "does: look at _attach"
                ),
            )

    def test_c7_a_cancel_that_is_not_accepted_raises(self, lab: Lab) -> None:
        """Refuse all cancels of a run, or some; repeated, the call must end all replicas."""
        lab.needs(Operation.CANCEL, Fault.FORBIDDEN)
        run = lab.up(3)
        for after in (0, 1):
            with lab.fault(Operation.CANCEL, Fault.FORBIDDEN, after=after):
                lab.note(f"cancel_run({run.name})", "cancel")
                try:
                    lab.within("C7", lambda: lab.executor.cancel_run(run.run_id))
                except BackendError as error:
                    check_error(lab, "C7", f"cancel_run({run.name})", error, Fault.FORBIDDEN)
                    self._names_ranks(lab, run, error)
                else:
                    if not after:
                        lab.broken(
                            "C7",
                            f"cancel_run({run.name}) returned",
                            (
                                f"every cancel met: {Fault.FORBIDDEN}. It must raise what "
                                "the backend "
                                "said: look at _stop"
                            ),
                        )
            for replica in run.replicas:
                replica.stopping |= after > 0 and lab.harness.truth(replica.handle).stopping
            lab.observe_all()
        lab.cancel_run(run)
        lab.settle()
        lab.observe_all()

    def _names_ranks(self, lab: Lab, run: Run, error: BackendError) -> None:
        """Check that the error names the ranks that are not being ended, if others are."""
        left = [one for one in run.replicas if not lab.harness.truth(one.handle).stopping]
        text = str(error).replace(run.run_id, "")
        unnamed = [one for one in left if not re.search(rf"\b{one.handle.rank}\b", text)]
        if unnamed and len(left) < len(run.replicas):
            lab.broken(
                "C7",
                f"cancel_run({run.name}) raised {error!r}",
                (
                    f"{', '.join(map(str, unnamed))} is not being ended, and the error "
                    "must name its "
                    "rank"
                ),
            )

    def test_c7_where_the_scope_is_the_run_one_call_is_enough(self, lab: Lab) -> None:
        """Check that cancel_run takes as many calls for eight ranks as for two.

        Where the scope is the replica, it may take two more for each further rank.
        """
        lab.needs(Ability.CALLS)
        counts = []
        for n in (2, 8):
            run = lab.up(n)
            before = lab.harness.calls()
            lab.cancel_run(run)
            counts.append(lab.harness.calls() - before)
            lab.settle()
        scope = lab.capabilities.cancel_scope
        more = 0 if scope == "gang" else 6 * CALLS_PER_CANCEL
        if counts[1] > counts[0] + more:
            lab.broken(
                "C7",
                f"cancel_run took {counts[0]} calls for 2 ranks, and {counts[1]} for 8",
                f"cancel_scope is {scope!r}, so that 6 more ranks may take {more} more calls. "
                "Look at how often _stop and _attach call the backend",
            )

    def test_c7_a_refused_rank_keeps_no_other_from_its_end(self, lab: Lab) -> None:
        """Check that every rank is asked to end, although the first was refused.

        This is for backends that end each rank by itself.
        """
        lab.needs(Operation.CANCEL, Fault.FORBIDDEN, Ability.CALLS)
        counts = []
        for refused in (False, True):
            calls = []
            for n in (2, 8):
                run = lab.up(n)
                with lab.fault(Operation.CANCEL, Fault.FORBIDDEN) if refused else nullcontext():
                    before = lab.harness.calls()
                    with suppress(BackendError):
                        lab.within("C7", lambda run=run: lab.executor.cancel_run(run.run_id))  # type: ignore[misc]
                    calls.append(lab.harness.calls() - before)
                lab.cancel_run(run)
                lab.settle()
            counts.append(calls[1] - calls[0])
        accepted, refused_ones = counts
        if refused_ones < min(accepted, 6):
            lab.broken(
                "C7",
                (
                    f"when every cancel is refused, cancel_run takes {refused_ones} calls "
                    "more for 8 "
                    "ranks than for 2"
                ),
                (
                    f"when none is, it takes {accepted} more, one for each rank at least: "
                    "it must try "
                    "all of them, and then raise"
                ),
            )

    def test_c8_close_ends_nothing(self, lab: Lab) -> None:
        """Check that close may be repeated, and that the next executor finds all as it was."""
        run = lab.up(2)
        lab.drive(run.replicas[0], Step.SUCCEED, "kept")
        lab.observe_all()
        # Another executor clears the world away: a closed one need not be able to do anything.
        executor, lab.executor = lab.executor, lab.harness.make_executor()
        before = [lab.harness.truth(handle) for handle in run.handles]
        for _ in range(3):
            lab.note("close()", "close")
            try:
                lab.within("C8", executor.close)
            except Exception as error:
                if isinstance(error, AssertionError):
                    raise
                lab.broken("C8", f"close() raised {error!r}", "it never raises")
            after = [lab.harness.truth(handle) for handle in run.handles]
            if after != before:
                lab.broken("C8", f"after close(): {after}", f"before: {before}")
        with lab.harness.make_executor() as executor:
            lab.verb("C8", partial(executor.poll, run.handles[1]))
        lab.note("with executor: poll(…)", "close")
        after = [lab.harness.truth(handle) for handle in run.handles]
        if after != before:
            lab.broken("C8", f"after a with statement: {after}", f"before: {before}")
        with executor:
            pass
        lab.forget()
        lab.observe_all()
        lab.attach(run)
        collect(lab, run.replicas)

    def test_c9_a_purge_that_fails_raises(self, lab: Lab) -> None:
        """Check that the purge can be repeated, and that other runs stay."""
        lab.needs(Operation.PURGE)
        for fault in lab.faults(Fault.FORBIDDEN, Fault.SERVER_ERROR, Fault.CONFLICT):
            run, beside = lab.up(2), lab.up()
            for replica in run.replicas:
                lab.drive(replica, Step.SUCCEED, "kept")
            broken_purge(lab, run, fault)
            lab.observe_all()
            lab.drive(beside.replicas[0], Step.SUCCEED)
        lab.observe_all()

    def test_c9_who_cannot_see_whether_something_lives_does_not_purge(self, lab: Lab) -> None:
        """Check that a live run is not removed because the backend could not be asked."""
        lab.needs(Operation.OBSERVE)
        run = lab.up(2)
        lab.drive(run.replicas[0], Step.SUCCEED)
        before = [lab.harness.truth(handle) for handle in run.handles]
        for fault in lab.faults(*RETRYABLE, Fault.FORBIDDEN):
            with lab.fault(Operation.OBSERVE, fault):
                lab.note(f"purge({run.name})", "purge")
                try:
                    lab.within("C9", lambda: lab.executor.purge(run.handles[0]))
                except BackendError as error:
                    raised = error
                else:
                    lab.broken("C9", "purge returned", f"{run.replicas[1]} has not ended")
            after = [lab.harness.truth(handle) for handle in run.handles]
            if after != before:
                lab.broken("C9", f"purge raised {raised!r}", f"it was {before} and is {after}")
        early_purge(lab, run)
        lab.observe_all()

    def test_c9_runs_whose_names_begin_alike_are_not_purged(self, lab: Lab) -> None:
        """Check that the evidence of those runs stays as well."""
        name = f"{lab.harness.run_prefix}-x"
        runs = [
            lab.up(1, run_id=run_id) for run_id in (name, f"{name}-1", f"{name}1", f"{name}-10")
        ]
        for run in runs:
            lab.drive(run.replicas[0], Step.SUCCEED, run.name)
        lab.purge(runs[0])
        lab.purge(runs[1])
        lab.forget()
        lab.observe_all()
        for run in runs[2:]:
            lab.attach(run)
        collect(lab, lab.replicas())
        for run in runs[:2]:
            if run.run_id in lab.verb("C9", lab.executor.list_runs):
                lab.broken("C9", f"list_runs has {run.run_id!r}", "it was purged")

    def test_d3_check_starts_nothing(self, lab: Lab) -> None:
        """Check that check() says what it finds, the same each time.

        What a launch would refuse, it must refuse as well.
        """
        living, runs = lab.harness.living(), lab.verb("H3", lab.executor.list_runs)
        lab.note("check()", "check")
        first = lab.verb("D3", lab.executor.check)
        if not isinstance(first, list):
            lab.broken("D3", f"check() gave {first!r}", "it gives a list of findings")
        for finding in first:
            if type(finding).__name__ != "Finding" or not (finding.subject and finding.message):
                lab.broken("D3", f"check() gave {finding!r}", "a Finding says what it is about")
            if finding.ok not in {True, False, None}:
                lab.broken("D3", f"check() gave {finding!r}", "ok is True, False or None")
        lab.verb("D3", lambda: lab.executor.check(3, timeout=60.0))
        if lab.harness.living() != living or lab.verb("H3", lab.executor.list_runs) != runs:
            lab.broken("D3", "check() returned", "something was launched")
        try:
            lab.within("D3", lambda: lab.executor.check(1, gpu="NO-SUCH-GPU:3"))
        except ValueError:
            return
        lab.broken("D3", "check(gpu='NO-SUCH-GPU:3') returned", "a launch refuses that")
