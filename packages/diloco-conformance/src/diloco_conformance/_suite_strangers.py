"""Handles that lead nowhere, foreign runs, shared journals, lists that change: H5, H7, H9."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from diloco_protocol import (
    BackendError,
    FolderJournal,
    InvalidRequestError,
    ReplicaNotFoundError,
    RunConflictError,
)

from ._check_collect import collect
from ._harness import Ability, Step
from ._lab import Lab
from ._model import Run
from ._promises import HarnessFault
from ._refusals import must_raise
from ._suite_names import refused_everywhere, verbs

READING = ("poll", "describe", "stream_logs", "log_iter", "collect")


class Strangers:
    """Fixed tests of H5, H7 and H9."""

    def test_h9_a_handle_that_lacks_something_is_refused(self, lab: Lab) -> None:
        """Leave out each part in turn: every verb refuses the handle and names the part.

        Nothing may change.
        """
        run = lab.up(2)
        handle = run.handles[0]
        names = list(handle.metadata)
        some = [{key: handle.metadata[key] for key in names if key != name} for name in names]
        for metadata in [*some, {}]:
            broken = replace(handle, metadata=metadata)
            for verb, call in verbs(lab.executor, broken).items():
                lab.note(f"{verb}(a handle with the metadata {metadata})")
                lacks = f"the handle lacks a part of {names}"
                must_raise(lab, "H9", verb, call, InvalidRequestError, lacks)
        lab.settle()
        lab.observe_all()

    def test_h9_a_handle_that_leads_nowhere_has_a_named_error(self, lab: Lab) -> None:
        """Change its metadata, or name a rank that is not in the run; siblings stay unchanged."""
        run = lab.up(2)
        for replica in run.replicas:
            lab.drive(replica, Step.SUCCEED, "there")
        handle = run.handles[1]
        wrong = [
            replace(handle, metadata={**handle.metadata, name: word})
            for name in handle.metadata
            for word in ("nonsense", "0", "a/b c", "é")
        ]
        wrong += [replace(handle, rank=99, world_size=100), replace(handle, run_id="never-was")]
        for one in wrong:
            for verb in READING:
                lab.note(f"{verb}({one})")
                try:
                    gave = lab.within("H9", verbs(lab.executor, one)[verb])
                except (InvalidRequestError, ReplicaNotFoundError):
                    continue
                except BackendError as error:
                    lab.broken("H9", f"{verb} raised {error!r}", "there is no such replica")
                lost = verb == "collect" and [entry["reason"] for entry in gave] == ["lost"]
                # A replica that is found in other words, such as by another address, is found
                # whole.
                if not lost and one.rank == 99:
                    lab.broken("H9", f"{verb} gave {gave!r}", f"there is no rank 99 in {run.name}")
        lab.observe_all()
        collect(lab, run.replicas)

    def test_h9_what_is_not_ours_is_no_run(self, lab: Lab) -> None:
        """Check that no verb finds it, counts it, ends it or launches over it.

        It must not stand in the way of other runs, either.
        """
        lab.needs(Ability.FOREIGN)
        run = lab.up(1)
        name = f"{lab.harness.run_prefix}-foreign"
        lab.harness.foreign(name)
        lab.note(f"there is something else by the name of {name!r}", "foreign")
        for _ in range(2):
            self._no_run(lab, name)
            lab.attach(run)
            lab.observe_all()
            lab.forget()
        living = lab.harness.living()
        try:
            lab.launch(2, run_id=name, refusable=True)
        except RunConflictError:
            pass
        except BackendError as error:
            lab.broken("H9", f"the launch raised {error!r}", "its name is taken: RunConflictError")
        else:
            lab.broken(
                "H9",
                f"{name!r} was launched",
                "there is something else by that name, unless foreign() put nothing there",
            )
        lab.settle()
        if lab.harness.living() != living:
            lab.broken("H9", "the launch was refused", "something was started, or ended")
        self._no_run(lab, name)
        lab.observe_all()

    def _no_run(self, lab: Lab, name: str) -> None:
        listed = lab.verb("H9", lab.executor.list_runs)
        if name in listed or lab.verb("H9", lambda: lab.executor.exists(name)):
            lab.broken("H9", f"list_runs gave {listed}, exists True", f"{name!r} is no run")
        calls: dict[str, Callable[[], Any]] = {
            "attach": lambda: lab.executor.attach(name),
            "cancel_run": lambda: lab.executor.cancel_run(name),
        }
        for verb, call in calls.items():
            must_raise(lab, "H9", verb, call, ReplicaNotFoundError, f"{name!r} is no run")

    def test_h5_a_journal_speaks_for_its_own_place_alone(self, lab: Lab) -> None:
        """Check that a journal shared with an executor elsewhere has no answer there."""
        lab.needs(Ability.ELSEWHERE)
        with tempfile.TemporaryDirectory() as folder:
            journal = FolderJournal(Path(folder))
            lab.forget(journal=journal)
            run = lab.up(2)
            lab.drive(run.replicas[0], Step.SUCCEED, "ours")
            lab.observe_all()
            collect(lab, run.replicas)
            elsewhere = lab.harness.elsewhere()
            elsewhere._journal = journal  # noqa: SLF001
            lab.note("an executor elsewhere has the same journal", "elsewhere")
            for handle in run.handles:
                refused_everywhere(lab, elsewhere, handle)
            self._not_there(lab, elsewhere, run.run_id)
            elsewhere.close()
            lab.forget()
        lab.observe_all()

    def _not_there(self, lab: Lab, executor: Any, run_id: str) -> None:
        for verb in ("attach", "cancel_run"):
            call = partial(getattr(executor, verb), run_id)
            must_raise(lab, "H5", verb, call, ReplicaNotFoundError, "there is no such run there")

    def test_h7_runs_that_go_and_come_meanwhile_hide_no_others(self, lab: Lab) -> None:
        """Purge and launch runs between two pages; all others must be listed, once and in order."""
        lab.needs(Ability.BETWEEN)
        if lab.harness.many_runs < 3:
            pytest.skip(
                f"the harness says that more than {lab.harness.many_runs} runs are too many"
            )
        runs = []
        for number in range(lab.harness.many_runs):
            runs.append(lab.up(1, run_id=f"{lab.harness.run_prefix}-{number}-page"))
            lab.drive(runs[-1].replicas[0], Step.SUCCEED)
            lab.advance(1.5 * lab.harness.resolution)
        purged, stay = runs[:2], runs[2:]
        another = lab.harness.make_executor()
        changes: list[bool] = []
        gone: list[Run] = []

        def change() -> None:
            changes.append(True)
            for run in purged:
                another.purge(run.handles[0])
                gone.append(run)
            another.launch_replicas(
                1,
                lab.harness.entrypoint,
                dict(lab.harness.entrypoint_args),
                run_id=f"{lab.harness.run_prefix}-new",
            )

        lab.harness.between(change)
        lab.note("two runs are purged and one is launched between two pages of the list", "purge")
        listed = lab.verb("H7", lab.executor.list_runs)
        wanted = [run.run_id for run in stay]
        got = [run_id for run_id in listed if run_id in wanted]
        if got != wanted or len(set(listed)) != len(listed):
            lab.broken("H7", f"list_runs gave {listed}", f"these were there all the time: {wanted}")
        if not changes:
            raise HarnessFault(
                "between(action) has not called action although list_runs was called: it must be "
                "called after the next call that lists a page of the runs. If this backend lists "
                "none, declare Ability.BETWEEN in cannot"
            )
        lab.settle()
        for run in gone:
            for replica in run.replicas:
                replica.gone = True
                if (truth := lab.harness.truth(replica.handle)).state is not None:
                    lab.broken("C9", f"purge({run.name}) returned", f"there is still {truth}")
        lab.observe_all()
