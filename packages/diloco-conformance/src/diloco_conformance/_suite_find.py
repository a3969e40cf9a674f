"""Finding replicas again, and where they meet: H1 to H3, H7, H8, H11."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import replace
from functools import partial

import pytest

from diloco_protocol import BackendError, ReplicaNotFoundError

from ._check_collect import collect
from ._harness import Step
from ._lab import Lab
from ._logs import check_log
from ._model import Run
from ._refusals import must_raise

LONGEST = 48
"""The number of characters that a run_id may have."""


class Finding:
    """Fixed tests of H1 to H3, H7, H8 and H11."""

    def test_h1_handles_survive_json(self, lab: Lab) -> None:
        """Check that handles still mean the same afterwards."""
        run = lab.up(2)
        lab.forget()
        lab.observe_all()
        lab.drive(run.replicas[0], Step.SUCCEED, 1)
        lab.forget()
        lab.observe_all()
        if len(dict.fromkeys([*run.handles, *run.handles], 1)) != 2:
            lab.broken(
                "H1",
                f"{run.handles} are not keys of a dict",
                "a handle is hashable and equal by value",
            )

    def test_h2_another_process_knows_as_much(self, lab: Lab) -> None:
        """Check this at every stage of a replica's life."""
        with lab.part_of("H2"):
            self._by_another_process(lab)

    def _by_another_process(self, lab: Lab) -> None:
        run = lab.launch(3)
        lab.forget()
        lab.observe_all()
        for replica in run.replicas:
            lab.drive(replica, Step.START)
        lab.forget()
        lab.observe_all()
        lab.drive(run.replicas[0], Step.SUCCEED, "x")
        lab.cancel(run.replicas[1])
        lab.forget()
        lab.observe_all()
        lab.settle()
        lab.forget()
        collect(lab, run.replicas)
        lab.observe_all()

    def test_h3_runs_are_found_again(self, lab: Lab) -> None:
        """Find runs by name, with the same handles, whether they live or not."""
        runs = [lab.up(2), lab.up(1, named=False), lab.launch(3)]
        lab.drive(runs[1].replicas[0], Step.FAIL, 1)
        for _ in range(2):
            for run in runs:
                lab.attach(run)
            lab.forget()
        lab.observe_all()

    def test_h3_a_run_of_one_is_found_again(self, lab: Lab) -> None:
        """Find the only run: before its start, while it runs and after its end."""
        run = lab.launch(1)
        for step in (Step.START, Step.SUCCEED, None):
            lab.attach(run)
            if step is not None:
                lab.drive(run.replicas[0], step)
            lab.forget()

    def test_h11_a_run_says_where_it_meets(self, lab: Lab) -> None:
        """Ask runs with a rendezvous and without one, and two runs of one name."""
        first = lab.up(2, kwargs={"rendezvous_uri": "s3://bucket/a b/first"})
        other = lab.up(1)
        for replica in first.replicas:
            self._meets(lab, first)
            lab.drive(replica, Step.SUCCEED, 1)
        lab.forget()
        self._meets(lab, first)
        self._meets(lab, other)
        lab.purge(first)
        self._meets_nowhere(lab, first)
        uri = "s3://bucket/second"
        second = lab.up(2, run_id=first.run_id, kwargs={"rendezvous_uri": uri})
        self._meets(lab, second)
        self._meets_nowhere(lab, first)

    def test_h11_no_handle_says_where_it_meets(self, lab: Lab) -> None:
        """Write another rendezvous into each text of a handle: it must not be the answer."""
        forged = "s3://bucket/forged"
        run = lab.up(1, kwargs={"rendezvous_uri": "s3://bucket/true"})
        handle = run.handles[0]
        for key in handle.metadata:
            lab.note(f"meets_at(a handle with {key}={forged!r})", "meets_at")
            wrong = replace(handle, metadata={**handle.metadata, key: forged})
            with contextlib.suppress(BackendError):
                gave = lab.within("H11", partial(lab.executor.meets_at, wrong))
                if gave == forged:
                    lab.broken("H11", f"meets_at gave {gave!r}", "the handle alone says so")

    def _meets(self, lab: Lab, run: Run) -> None:
        true = {**lab.harness.entrypoint_args, **run.kwargs}.get("rendezvous_uri")
        for handle in run.handles:
            lab.note(f"meets_at(rank {handle.rank} of {run.name})", "meets_at")
            uri = lab.verb("H11", partial(lab.executor.meets_at, handle))
            if uri != true:
                lab.broken("H11", f"meets_at gave {uri!r}", f"{run.name} meets at {true!r}")

    def _meets_nowhere(self, lab: Lab, run: Run) -> None:
        for handle in run.handles:
            lab.note(f"meets_at(rank {handle.rank} of {run.name}, which was purged)", "meets_at")
            ask = partial(lab.executor.meets_at, handle)
            must_raise(lab, "H11", "meets_at", ask, ReplicaNotFoundError, "it was purged")

    def test_h7_runs_are_listed_oldest_first(self, lab: Lab) -> None:
        """List more than a page of runs, with any names and ends; each must be listed once."""
        names = [f"{lab.harness.run_prefix}-{name}" for name in ("zebra", "apple", "mango")]
        names += [
            f"{lab.harness.run_prefix}-{number}-page" for number in range(lab.harness.many_runs)
        ]
        for name in names:
            run = lab.launch(1, run_id=name)
            if name.endswith("apple"):
                lab.cancel(run.replicas[0])
                lab.settle()
            lab.advance(1.5 * lab.harness.resolution)
        for _ in range(2):
            listed = lab.verb("H7", lab.executor.list_runs)
            own_names = [name for name in listed if name.startswith(lab.harness.run_prefix)]
            if own_names != names:
                lab.broken("H7", f"list_runs gave {listed}", f"in order of launch: {names}")
            lab.forget()

    def test_h8_more_than_ten_ranks_are_told_apart(self, lab: Lab) -> None:
        """Check that ranks are also in the order of numbers, in which 10 comes after 2."""
        if (most := lab.harness.many_ranks) <= 10:
            pytest.skip(f"the harness says that more than {most} ranks are too many for this world")
        with lab.part_of("H8"):
            self._many_ranks(lab)

    def _many_ranks(self, lab: Lab) -> None:
        run = lab.up(lab.harness.many_ranks)
        lab.attach(run)
        lab.observe_all()
        replicas = run.replicas
        for rank in (1, len(replicas) - 1):
            lab.drive(replicas[rank], Step.SUCCEED, f"result of {rank}")
            lab.observe_all()
        collect(lab, replicas)
        lab.forget()
        lab.attach(run)
        if lab.capabilities.cancel_scope == "replica":
            lab.cancel(replicas[0])
            lab.settle()
            lab.observe_all()
        for rank in range(2, len(replicas) - 1):
            lab.drive(replicas[rank], Step.SUCCEED, [rank])
        collect(lab, replicas[::-1])

    def test_h8_the_longest_names_are_different_runs(self, lab: Lab) -> None:
        """Launch under names of the greatest length, which differ in the last character only."""
        with lab.part_of("H8"):
            name = f"{lab.harness.run_prefix}-{'long-' * LONGEST}"[: LONGEST - 1]
            runs = [lab.up(2, run_id=f"{name}{end}") for end in "ab"]
            lab.attach(runs[0])
            for run in runs:
                for replica in run.replicas:
                    if lab.can(Step.PRINT):
                        lab.drive(replica, Step.PRINT, [f"{replica}"])
                        check_log(lab, replica)
            for replica in runs[1].replicas:
                lab.drive(replica, Step.SUCCEED, f"{replica}")
            collect(lab, lab.replicas())
            lab.purge(runs[1])
            lab.forget()
            lab.attach(runs[0])
            lab.observe_all()

    def test_h8_names_that_begin_alike_are_different_runs(self, lab: Lab) -> None:
        """Check this for attach, list_runs, cancel, collect and purge."""
        with lab.part_of("H8"):
            self._alike(lab)

    def _alike(self, lab: Lab) -> None:
        name = f"{lab.harness.run_prefix}-x"
        ends = ("", "-1", "-10", "-1-0")
        runs = {end: lab.up(2, run_id=f"{name}{end}") for end in ends}
        for replica in runs["-10"].replicas:
            lab.drive(replica, Step.SUCCEED, ["-10", replica.handle.rank])
        for end in ("-1", ""):
            run = runs[end]
            lab.cancel(run.replicas[0])
            lab.settle()
            lab.observe_all()
            if lab.capabilities.cancel_scope == "replica":
                lab.drive(run.replicas[1], Step.SUCCEED, end)
            collect(lab, lab.replicas())
            self._all_found(lab, [one for one in runs.values() if not one.replicas[0].gone])
            lab.purge(run)
            lab.observe_all()
            self._all_found(lab, [one for one in runs.values() if not one.replicas[0].gone])
            lab.forget()
        for replica in runs["-1-0"].replicas:
            lab.drive(replica, Step.SUCCEED, ["-1-0", replica.handle.rank])
        collect(lab, lab.replicas())

    def _all_found(self, lab: Lab, runs: Iterable[Run]) -> None:
        for run in runs:
            lab.attach(run)
