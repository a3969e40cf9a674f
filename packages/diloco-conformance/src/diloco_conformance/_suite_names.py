"""Names of runs, and what can be found by a name alone: H4 to H6."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from diloco_protocol import (
    BackendError,
    BaseExecutor,
    FolderJournal,
    InvalidRequestError,
    ReplicaHandle,
    ReplicaNotFoundError,
    ReplicaState,
)

from ._harness import Ability, Fault, Operation, Step
from ._lab import Lab
from ._model import Run
from ._refusals import must_raise
from ._scenes import RETRYABLE, check_error


def verbs(executor: BaseExecutor, handle: ReplicaHandle) -> dict[str, Callable[[], Any]]:
    """Return every verb that takes a handle, as a call with this one."""
    return {
        "poll": lambda: executor.poll(handle),
        "describe": lambda: executor.describe(handle),
        "stream_logs": lambda: executor.stream_logs(handle),
        "log_iter": lambda: list(executor.log_iter(handle)),
        "meets_at": lambda: executor.meets_at(handle),
        "collect": lambda: executor.collect([handle], timeout=0),
        "cancel": lambda: executor.cancel(handle),
        "purge": lambda: executor.purge(handle),
    }


class Names:
    """Fixed tests of H4 to H6."""

    def test_h4_an_old_handle_is_not_the_new_run(self, lab: Lab) -> None:
        """Check that every verb says that it is gone, also in a process that knows neither run."""
        old, _ = self._again(lab)
        for replica in old.replicas:
            replica.nobody_knows()
        lab.observe_all()
        lab.poll_all()
        for handle in old.handles:
            for verb in ("stream_logs", "log_iter"):
                lab.note(f"{verb}(old rank {handle.rank})", "logs")
                call = verbs(lab.executor, handle)[verb]
                why = "its log was purged with it"
                must_raise(lab, "H4", verb, call, ReplicaNotFoundError, why)
            (entry,) = lab.verb("H4", lambda one=handle: lab.executor.collect([one], timeout=0))  # type: ignore[misc]
            if (entry["status"], entry["reason"]) != ("failed", "lost"):
                lab.broken("H4", f"collect says {entry}", "there is no record of it")
        lab.observe_all()

    def test_h4_an_old_handle_ends_nothing_and_removes_nothing(self, lab: Lab) -> None:
        """Cancel and purge by an old handle, while the new run lives and after its end."""
        old, new = self._again(lab)
        for what in ("lives", "has ended"):
            before = [lab.harness.truth(handle) for handle in new.handles]
            for verb in ("cancel", "purge"):
                lab.note(f"{verb}(old), while the new run {what}", "old")
                for handle in old.handles:
                    try:
                        lab.within("H4", verbs(lab.executor, handle)[verb])
                    except BackendError as error:
                        if not isinstance(error, (InvalidRequestError, ReplicaNotFoundError)):
                            raise
                lab.harness.settle()
                after = [lab.harness.truth(handle) for handle in new.handles]
                if after != before:
                    lab.broken("H4", f"{verb} with an old handle returned", f"{before}, {after}")
            for replica in new.replicas:
                if replica.live:
                    lab.drive(replica, Step.SUCCEED, "new")
        lab.observe_all()
        lab.attach(new)

    def test_h4_a_journal_tells_them_apart(self, lab: Lab) -> None:
        """Check that the journal has the end of the first run, which is not that of the second."""
        with tempfile.TemporaryDirectory() as folder:
            journal = FolderJournal(Path(folder))
            lab.forget(journal=journal)
            old, new = self._again(lab, journal=journal)
            for replica in old.replicas:
                state = lab.verb("H4", lambda r=replica: lab.executor.poll(r.handle))  # type: ignore[misc]
                if state is not ReplicaState.SUCCEEDED:
                    lab.broken("H4", f"poll({replica}) is {state}", "its journal knows its end")
            for replica in new.replicas:
                state = lab.verb("H4", lambda r=replica: lab.executor.poll(r.handle))  # type: ignore[misc]
                if state is not lab.harness.truth(replica.handle).state:
                    lab.broken("H4", f"poll({replica}) is {state}", "it is a run of its own")
                lab.observe(replica)

    def _again(self, lab: Lab, **options: Any) -> tuple[Run, Run]:
        """Return a run that was purged, and another one of its name that lives."""
        old = lab.up(2, run_id=f"{lab.harness.run_prefix}-again")
        for replica in old.replicas:
            if lab.can(Step.PRINT):
                lab.drive(replica, Step.PRINT, ["of the old run"])
            lab.drive(replica, Step.SUCCEED, "old")
        lab.observe_all()
        lab.purge(old)
        new = lab.up(2, run_id=old.run_id, kwargs=old.kwargs)
        if lab.can(Step.PRINT):
            for replica in new.replicas:
                lab.drive(replica, Step.PRINT, ["of the new run"])
        lab.forget(**options)
        return old, new

    def test_h5_handles_of_another_backend_are_refused(self, lab: Lab) -> None:
        """Try such a handle with every verb; nothing may change."""
        run = lab.up()
        stranger = replace(run.handles[0], backend_name="another-backend")
        refused_everywhere(lab, lab.executor, stranger)
        lab.observe_all()

    def test_h5_handles_of_another_place_are_refused(self, lab: Lab) -> None:
        """Check that an executor elsewhere does not answer for the replicas launched here.

        Elsewhere means on another account, cluster or host.
        """
        lab.needs(Ability.ELSEWHERE)
        run = lab.up(2)
        lab.drive(run.replicas[0], Step.SUCCEED, 1)
        lab.note("an executor elsewhere is asked", "elsewhere")
        elsewhere = lab.harness.elsewhere()
        for handle in run.handles:
            refused_everywhere(lab, elsewhere, handle)
        elsewhere.close()
        lab.observe_all()

    def test_h6_exists_is_true(self, lab: Lab) -> None:
        """Ask for runs that are pending, running, ended or purged, and for runs that never were."""
        run = lab.launch(1)
        self._exists(lab, run.run_id, there=True)
        lab.drive(run.replicas[0], Step.START)
        self._exists(lab, run.run_id, there=True)
        lab.drive(run.replicas[0], Step.FAIL, 1)
        self._exists(lab, run.run_id, there=True)
        lab.forget()
        self._exists(lab, run.run_id, there=True)
        self._exists(lab, f"{run.run_id}-", there=False)
        self._exists(lab, f"{run.run_id}-0", there=False)
        self._exists(lab, run.run_id[:-1] + "x", there=False)
        self._exists(lab, run.run_id[:-1].rstrip("-"), there=False)
        self._exists(lab, "never-was", there=False)
        lab.purge(run)
        self._exists(lab, run.run_id, there=False)

    def _exists(self, lab: Lab, run_id: str, *, there: bool) -> None:
        lab.note(f"exists({run_id!r})")
        answer = lab.verb("H6", lambda: lab.executor.exists(run_id))
        if answer is not there:
            lab.broken("H6", f"exists({run_id!r}) is {answer!r}", f"it is {there}")

    def test_h6_a_backend_that_cannot_be_asked_is_an_exception(self, lab: Lab) -> None:
        """Check that this is reported neither as a missing run nor as an empty list."""
        lab.needs(Operation.OBSERVE)
        run = lab.up()
        lab.attach(run)  # what was known before must not be the answer later
        self._exists(lab, run.run_id, there=True)
        for fault in lab.faults(*RETRYABLE, Fault.FORBIDDEN):
            for what, call in (
                ("list_runs()", lambda: lab.executor.list_runs()),
                ("attach(run 1)", lambda: lab.executor.attach(run.run_id)),
                ("exists(run 1)", lambda: lab.executor.exists(run.run_id)),
                ("attach('never-was')", lambda: lab.executor.attach("never-was")),
                ("exists('never-was')", lambda: lab.executor.exists("never-was")),
            ):
                with lab.fault(Operation.OBSERVE, fault):
                    lab.note(what)
                    try:
                        gave = lab.within("H6", call)
                    except ReplicaNotFoundError as error:
                        lab.broken(
                            "H6", f"{what} raised {error!r}", f"{fault}: the executor cannot know"
                        )
                    except BackendError as error:
                        check_error(lab, "H6", what, error, fault)
                        continue
                lab.broken("H6", f"{what} gave {gave!r}", f"{fault}: the backend was not asked")
        lab.attach(run)


def refused_everywhere(lab: Lab, executor: BaseExecutor, handle: ReplicaHandle) -> None:
    """Check that every verb refuses a handle that belongs elsewhere."""
    for verb, call in verbs(executor, handle).items():
        lab.note(f"{verb}(a handle that belongs elsewhere)")
        where = f"the handle belongs elsewhere: {handle}"
        must_raise(lab, "H5", verb, call, InvalidRequestError, where)
