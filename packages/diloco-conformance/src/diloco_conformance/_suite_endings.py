"""Ends that look like other ends, and results that are gone: S8, S15, S16, R5, R12."""

from __future__ import annotations

import tempfile
from contextlib import suppress
from functools import partial
from pathlib import Path

from diloco_protocol import BackendError, FolderJournal, Reason

from ._check_collect import collect
from ._harness import Ability, Step
from ._lab import Lab
from ._suite_names import verbs
from ._suite_states import ended

#: Damage that may be found in place of a result; no reader of any channel takes it for one.
DAMAGED = (b"", b"{", b"\xff\xfe\x00", b"not JSON at all", b'{"a": NaN')

#: Data that another program may have written there: wrong in shape or type, too deep or too long.
ODD = (
    *(b"[]", b"null", b"0", b'"5"', b"{}", b"true", b"[[[]]]"),
    *(b'{"result": 1}', b'{"result_lines": "5", "version": [], "state": {}, "attempt": "x"}'),
    *(b"[" * 100_000, b"9" * 5000, b'"\\ud800"', b'{"a": 1, "a": 2}', b"\0" * 1000),
)
READING = ("poll", "describe", "stream_logs", "log_iter", "collect")


class Endings:
    """Fixed tests of S8, S15, S16, R5 and R12."""

    def test_s8_an_exit_code_alone_proves_nothing(self, lab: Lab) -> None:
        """Exit with codes in which timeouts, kills and cancels end as well."""
        for code in (124, 137, 143, 128, 255):
            replica = lab.up().replicas[0]
            lab.drive(replica, Step.FAIL, code)
            lab.observe(replica)
            collect(lab, [replica])
        lab.forget()
        lab.observe_all()

    def test_s16_texts_can_be_printed(self, lab: Lab) -> None:
        """Check the texts of describe and collect, at every end, and for damaged results."""
        run = lab.launch(2)
        lab.observe_all()
        replicas = [*run.replicas, *ended(lab)]
        if lab.can(Ability.DAMAGE):
            replicas.append(lab.up().replicas[0])
            lab.drive(replicas[-1], Step.SUCCEED)
            lab.lose(replicas[-1], b"\x1b[2Jno JSON \x07")
        collect(lab, replicas)
        lab.observe_all()

    # --- stopped from outside ---

    def test_s15_who_was_stopped_from_outside_is_cancelled(self, lab: Lab) -> None:
        """Stop a replica without a cancel; describe and collect must say so everywhere.

        A cancel that comes later must change nothing.
        """
        lab.needs(Step.STOP)
        run, beside = lab.up(2), lab.up(1)
        with lab.part_of("S15"):
            lab.drive(run.replicas[0], Step.STOP)
            lab.observe_all()
            collect(lab, [*run.replicas, *beside.replicas])
            lab.cancel(run.replicas[0])
            lab.settle()
            lab.forget()
            lab.observe_all()
            (entry,) = collect(lab, run.replicas[:1])
        if entry["reason"] != Reason.STOPPED_EXTERNALLY:
            lab.broken("S15", f"collect says {entry}", "it was not cancelled before it ended")

    def test_s15_a_cancel_is_not_a_stop_from_outside(self, lab: Lab) -> None:
        """Check that a cancel by another process is not one either."""
        lab.needs(Step.STOP)
        with lab.part_of("S15"):
            for run in (lab.up(1), lab.up(1)):
                lab.cancel(run.replicas[0])
                lab.settle()
                lab.forget()
                lab.observe_all()
                collect(lab, run.replicas)

    # --- whose result ---

    def test_r5_the_result_is_that_of_the_attempt_that_succeeded(self, lab: Lab) -> None:
        """Return from attempts whose machine is taken away, so that they do not count."""
        lab.needs(Step.PREEMPT)
        run = lab.up(2)
        for replica in run.replicas:
            for number in (1, 2):
                lab.drive(
                    replica, Step.PREEMPT, f"{replica}, attempt {number}, which does not count"
                )
                lab.observe(replica)
                lab.drive(replica, Step.START)
        collect(lab, run.replicas)
        lab.drive(run.replicas[0], Step.SUCCEED, "this one counts")
        lab.drive(run.replicas[1], Step.SUCCEED, None)
        collect(lab, run.replicas)
        lab.forget()
        collect(lab, run.replicas)

    def test_r5_who_fails_in_the_end_has_no_result(self, lab: Lab) -> None:
        """Check this also for a replica that had returned a result in an earlier attempt."""
        lab.needs(Step.PREEMPT)
        with lab.part_of("R5"):
            for step, value in ((Step.FAIL, 3), (None, None)):
                replica = lab.up().replicas[0]
                lab.drive(replica, Step.PREEMPT, "does not count")
                lab.drive(replica, Step.START)
                if step is None:
                    lab.cancel(replica)
                    lab.settle()
                else:
                    lab.drive(replica, step, value)
                collect(lab, [replica])

    # --- what is gone ---

    def test_r12_a_lost_result_is_said_to_be_lost(self, lab: Lab) -> None:
        """Check that collect says so at once, every time, and gives the results of all others."""
        lab.needs(Ability.LOSE)
        with lab.part_of("R12"):
            self._lose(lab, [None])

    def test_r12_a_damaged_result_is_said_to_be_lost(self, lab: Lab) -> None:
        """Check that any damage is reported in the error of the result, and raises nothing."""
        lab.needs(Ability.LOSE, Ability.DAMAGE)
        with lab.part_of("R12"):
            self._lose(lab, list(DAMAGED))

    def _lose(self, lab: Lab, left: list[bytes | None]) -> None:
        run, beside = lab.up(len(left) + 1), lab.up(1)
        for replica in [*run.replicas, *beside.replicas]:
            lab.drive(replica, Step.SUCCEED, [str(replica)])
        for replica, what in zip(run.replicas, left, strict=False):
            lab.lose(replica, what)
        for _ in range(2):
            lab.forget()
            lab.observe_all()
            begin = lab.harness.clock()
            collect(lab, [*beside.replicas, *run.replicas], timeout=60.0 * lab.unit)
            took = lab.harness.clock() - begin
            if took > lab.harness.slack:
                lab.broken("R12", f"collect took {took:g} s", "what is lost is not waited for")

    def test_r12_whatever_is_left_is_data(self, lab: Lab) -> None:
        """Check that every verb answers or raises a BackendError, for the sibling as well.

        Some of the data may be taken for a result.
        """
        lab.needs(Ability.LOSE, Ability.DAMAGE)
        for left in ODD:
            run = lab.up(2)
            for replica in run.replicas:
                lab.drive(replica, Step.SUCCEED, "returned")
            lab.lose(run.replicas[0], left)
            for handle in run.handles:
                for verb, call in verbs(lab.executor, handle).items():
                    if verb in READING:
                        with suppress(BackendError):
                            lab.within("R12", call)
            sibling = lab.verb("R12", partial(lab.executor.collect, run.handles, timeout=0))[1]
            if (sibling["status"], sibling["result"]) != ("succeeded", "returned"):
                lab.broken(
                    "R12", f"collect says {sibling}", "its result is there, and is 'returned'"
                )
            lab.forget()

    def test_r12_a_journal_keeps_the_loss(self, lab: Lab) -> None:
        """Check that it stays lost, and is not None, when the platform has forgotten the run."""
        lab.needs(Ability.LOSE)
        with tempfile.TemporaryDirectory() as folder, lab.part_of("R12"):
            journal = FolderJournal(Path(folder))
            run = lab.up(2)
            for replica in run.replicas:
                lab.drive(replica, Step.SUCCEED, "returned")
            lab.lose(run.replicas[0])
            for _ in range(2):
                lab.forget(journal=journal)
                for replica in run.replicas:
                    lab.verb("R12", lambda one=replica: lab.executor.describe(one.handle))  # type: ignore[misc]
                first, second = lab.verb("R6", lambda: lab.executor.collect(run.handles, timeout=0))
                if first["result"] is not None or not first["error"]:
                    lab.broken("R12", f"collect says {first}", "its result is lost")
                if second["result"] != "returned":
                    lab.broken("R12", f"collect says {second}", "its result is there")
                if not run.replicas[0].gone:
                    lab.purge(run)
