"""The arguments of a constructor: L12."""

from __future__ import annotations

import tempfile
from pathlib import Path

from diloco_protocol import BackendError, FolderJournal, RunConflictError

from ._check_collect import collect
from ._harness import Ability, Step
from ._lab import Lab
from ._suite_told import check_environment

GIVEN = {"CONF_EACH": "constructor", "CONF_BOTH": "constructor"}
"""Variables that a constructor is given; a launch sets the second one as well."""


class Constructing:
    """Fixed tests of L12."""

    def test_l12_the_environment_of_the_constructor_is_in_every_launch(self, lab: Lab) -> None:
        """Check that variables of the launch win over those of the constructor.

        Another launch of the same name is compared with both together.
        """
        lab.forget(env=GIVEN)
        run, second = lab.up(2, env={"CONF_BOTH": "launch"}), lab.up(1)
        lab.observe_all()
        if lab.can(Ability.TOLD):
            for handle in run.handles:
                check_environment(lab, "L12", handle, {**GIVEN, "CONF_BOTH": "launch"})
            check_environment(lab, "L12", second.handles[0], GIVEN)
        lab.forget()
        both = {**GIVEN, "CONF_BOTH": "launch"}
        for one, env, same in (
            (run, both, True),
            (run, {"CONF_BOTH": "launch"}, False),
            (second, {}, False),
        ):
            gave: object
            try:
                gave = lab.relaunch(one, env=env)
            except BackendError as error:
                gave = error
            right = gave == one.handles if same else isinstance(gave, RunConflictError)
            if not right:
                lab.broken(
                    "L12",
                    f"launched with env={env} by an executor made without any, it gave {gave!r}",
                    f"{one.name} was launched by one that was made with env={GIVEN}, so this is "
                    f"{'the same' if same else 'another'} launch. Does the constructor pass env "
                    "on: super().__init__(env=env)?",
                )

    def test_l12_the_journal_of_the_constructor_is_written_and_read(self, lab: Lab) -> None:
        """Check that the journal has the launch and the ends that were seen.

        The ends must be known when the backend has forgotten them.
        """
        with tempfile.TemporaryDirectory() as folder:
            journal = FolderJournal(Path(folder))
            lab.forget(journal=journal)
            run = lab.up(2)
            if (written := journal.handles(run.run_id)) != run.handles:
                lab.broken(
                    "L12",
                    f"after the launch of {run.name} the journal has {written}",
                    (
                        f"its handles are {run.handles}. Does the constructor pass journal on: "
                        "super().__init__(journal=journal)?"
                    ),
                )
            lab.drive(run.replicas[0], Step.SUCCEED, "kept")
            lab.drive(run.replicas[1], Step.FAIL, 3)
            lab.settle()
            lab.observe_all()
            before = collect(lab, run.replicas)
            lab.purge(run)
            if lab.verb("H6", lambda: lab.executor.exists(run.run_id)):
                lab.broken("H6", f"exists({run.run_id!r}) is True", "the journal alone knows of it")
            for _ in range(2):
                after = lab.verb("L12", lambda: lab.executor.collect(run.handles, timeout=0))
                if after != before:
                    lab.broken("L12", f"after the purge, collect says {after}", f"before: {before}")
                lab.forget(journal=journal)
            lab.forget()

    def test_l12_a_purge_writes_into_the_journal_what_nobody_has_seen(self, lab: Lab) -> None:
        """Purge a run whose ends nothing has looked at; the journal must have them by then."""
        with tempfile.TemporaryDirectory() as folder:
            lab.forget(journal=FolderJournal(Path(folder)))
            run = lab.up(2)
            lab.drive(run.replicas[0], Step.SUCCEED, "kept")
            lab.drive(run.replicas[1], Step.FAIL, 3)
            lab.settle()
            lab.purge(run)
            after = lab.verb("L12", lambda: lab.executor.collect(run.handles, timeout=0))
            ends = [(entry["status"], entry["result"]) for entry in after]
            states = [replica.state for replica in run.replicas]
            if [status for status, _ in ends] != states or ends[0] != ("succeeded", "kept"):
                lab.broken(
                    "L12",
                    f"after the purge, collect says {after}",
                    (
                        "the journal has every end with its result: BaseExecutor.purge writes them "
                        "before _purge is called"
                    ),
                )
            lab.forget()

    def test_l12_names_begin_as_the_constructor_says(self, lab: Lab) -> None:
        """Check that names not given by a launch begin with that prefix, and all differ."""
        prefix = f"{lab.harness.run_prefix}-team"
        lab.forget(run_id=prefix)
        names = [lab.launch(1, named=False).run_id for _ in range(2)]
        if len(set(names)) < 2 or not all(name.startswith(prefix) for name in names):
            lab.broken(
                "L12",
                f"launches without a run_id were called {names}",
                f"the constructor was given run_id={prefix!r}, with which they begin",
            )
