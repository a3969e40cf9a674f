"""Waiting for replicas: R1 to R8."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from itertools import pairwise
from typing import Any

from diloco_protocol import BackendError, InvalidRequestError, ReplicaHandle, ReplicaStatus

from ._check_collect import collect
from ._harness import Ability, Fault, Operation, Step
from ._lab import Lab
from ._refusals import must_raise
from ._scenes import RETRYABLE
from ._suite_states import ended


def calls_of_a_look(lab: Lab) -> tuple[int, int]:
    """Return how many calls a new executor takes to look at 2 ranks, and at 12."""
    counts = []
    for n in (2, 12):
        run = lab.up(n)
        lab.forget()
        before = lab.harness.calls()
        collect(lab, run.replicas)
        counts.append(lab.harness.calls() - before)
        for replica in run.replicas:
            lab.drive(replica, Step.SUCCEED)
    return counts[0], counts[1]


class Collecting:
    """Fixed tests of R1 to R8."""

    def test_r1_results_follow_the_handles(self, lab: Lab) -> None:
        """Collect backwards, twice, and from several runs in any order."""
        one, two = lab.up(3), lab.up(3)
        for run in (one, two):
            for replica in run.replicas:
                lab.drive(replica, Step.SUCCEED, f"{replica}")
        collect(
            lab,
            [*two.replicas[::-1], one.replicas[1], two.replicas[1], one.replicas[1], *one.replicas],
        )
        if lab.verb("R1", lambda: lab.executor.collect([], timeout=0)) != []:
            lab.broken("R1", "no handles gave results", "there is nothing to collect")
        handle_list = list(one.handles)
        results = lab.verb("R1", lambda: lab.executor.collect(handle_list, timeout=0))
        for kind, handles in (("tuple", tuple(handle_list)), ("iterator", iter(handle_list))):
            lab.note(f"collect(handles in a {kind})", "collect")
            got = lab.verb("R1", lambda some=handles: lab.executor.collect(some, timeout=0))  # type: ignore[misc]
            if got != results:
                lab.broken("R1", f"for a {kind}, collect gave {got}", f"for a list, {results}")

    def test_r2_the_deadline_is_kept_and_nothing_is_ended(self, lab: Lab) -> None:
        """Collect any number of running replicas; one deadline holds for all of them."""
        runs = [lab.up(3), lab.up(2)]
        replicas = lab.replicas()
        unit = lab.harness.short_timeout / 60
        for timeout in (0.0, unit, 10 * unit):
            collect(lab, replicas, timeout=timeout)
            lab.observe_all()
        lab.drive(runs[0].replicas[0], Step.SUCCEED, 1)
        collect(lab, replicas, timeout=unit)
        lab.settle()
        lab.observe_all()

    def test_r2_it_waits_for_what_ends_meanwhile(self, lab: Lab) -> None:
        """Check that collect comes back at once when all have ended."""
        run = lab.up(2)
        seen: list[Mapping[ReplicaHandle, ReplicaStatus]] = []

        def progress(statuses: Mapping[ReplicaHandle, ReplicaStatus]) -> None:
            if not seen:
                for replica in run.replicas:
                    lab.drive(replica, Step.SUCCEED, str(replica))
            seen.append(statuses)
            true = {
                replica.handle: lab.harness.truth(replica.handle).state for replica in run.replicas
            }
            wrong.update(
                (str(status.state), str(true[handle]))
                for handle, status in statuses.items()
                if len(seen) > 1 and status.state is not true[handle]
            )

        wrong: set[tuple[str, str]] = set()
        begin = lab.harness.clock()
        collect(lab, run.replicas, timeout=50.0, progress=progress)
        if lab.harness.clock() - begin > 25:
            lab.broken(
                "R2",
                f"collect took {lab.harness.clock() - begin:g} s",
                "all had ended after the first look",
            )
        if len(seen) < 2 or not set(run.handles) <= set(seen[-1]):
            lab.broken(
                "R2",
                f"progress was called {len(seen)} times, last with {seen[-1]}",
                "it is told of every look",
            )
        if wrong:
            lab.broken("R2", f"progress was told {wrong}", "of each, the second is true")

    def test_r2_a_time_that_is_none_is_refused(self, lab: Lab) -> None:
        """Check that a wrong time is not taken for another one, and not waited for."""
        handles = lab.up().handles
        wrong: tuple[Any, ...] = (-1, -0.5, math.nan, -math.inf, "5", True, [1], 10**400)
        for timeout in wrong:
            lab.note(f"collect(timeout={timeout!r})", "collect")
            call = partial(lab.executor.collect, handles, timeout=timeout)
            must_raise(lab, "R2", "collect", call, InvalidRequestError, "no time to wait is such")

    def test_r4_exit_codes(self, lab: Lab) -> None:
        """Expect 0 for successes, the true code for failures, and none for cancelled replicas."""
        for entry, replica in zip(collect(lab, ended(lab)), lab.replicas(), strict=True):
            if replica.reason == "error" and entry["exit_code"] != replica.exit_code:
                lab.broken("R4", str(entry), f"its program exited with {replica.exit_code}")

    def test_r5_every_replica_has_its_own_result(self, lab: Lab) -> None:
        """Collect the results of two runs out of order, after the replicas were polled."""
        values: list[Any] = [
            None,
            0,
            "",
            {"nested": [1, 2.5, None, True, {"ä": "🙂"}]},
            [[]],
            2**63,
            -0.5,
            False,
        ]
        runs = [lab.up(4), lab.up(4)]
        for replica, value in zip(lab.replicas(), values, strict=True):
            lab.drive(replica, Step.SUCCEED, value)
            lab.observe(replica)
        collect(lab, [*runs[1].replicas, *runs[0].replicas[::-1]])
        lab.forget()
        collect(lab, lab.replicas())

    def test_r5_large_results_arrive(self, lab: Lab) -> None:
        """Return results as large as declared, up to 2 MB; collect must not hang on them."""
        size = min(2_000_000, lab.capabilities.max_result_bytes or 2_000_000)
        run = lab.up(2)
        for replica in run.replicas:
            lab.drive(replica, Step.SUCCEED, f"{replica.handle.rank}" * (size - 2))
        collect(lab, run.replicas, timeout=8.0)
        collect(lab, run.replicas[::-1])

    def test_r6_errors_that_pass_are_absorbed(self, lab: Lab) -> None:
        """Check that the wait goes on when the backend is well again."""
        lab.needs(Operation.OBSERVE)
        for fault in lab.faults(*RETRYABLE):
            run = lab.up(2)
            for replica in run.replicas:
                lab.drive(replica, Step.SUCCEED, str(fault))
            lab.harness.inject(Operation.OBSERVE, fault)
            lab.note(
                f"from now on, every observe meets: {fault}; it is well again after the first look"
            )
            try:
                collect(lab, run.replicas, timeout=60.0, progress=lambda _: lab.harness.clear())
            except BackendError as error:
                lab.broken(
                    "R6",
                    f"collect raised {error!r}",
                    "the error had passed long before the deadline",
                )
            finally:
                lab.harness.clear()

    def test_r6_other_errors_are_raised(self, lab: Lab) -> None:
        """Check that an error that will not pass is raised at once, and any other at the deadline.

        It is raised at the deadline if nothing is known by then.
        """
        lab.needs(Operation.OBSERVE)
        run = lab.up(2)
        for fault in lab.faults(Fault.FORBIDDEN, Fault.SERVER_ERROR):
            begin = lab.harness.clock()
            with lab.fault(Operation.OBSERVE, fault):
                try:
                    results = collect(lab, run.replicas, timeout=10.0)
                except BackendError as error:
                    if error.retryable != (fault in RETRYABLE):
                        lab.broken(
                            "R6",
                            f"collect raised {error!r}, retryable={error.retryable}",
                            str(fault),
                        )
                else:
                    lab.broken(
                        "R6", f"collect gave {results}", f"{fault}: the backend could not be asked"
                    )
            if lab.harness.clock() - begin > 10 + lab.harness.slack:
                lab.broken(
                    "R2", f"collect took {lab.harness.clock() - begin:g} s", "its timeout was 10 s"
                )
        lab.observe_all()

    def test_r6_a_result_that_cannot_be_read_is_not_lost(self, lab: Lab) -> None:
        """Disturb the backend after the state was read; later the result must be there."""
        lab.needs(Operation.OBSERVE)
        for fault in lab.faults(Fault.SERVER_ERROR, Fault.FORBIDDEN):
            for after in (1, 2):
                replica = lab.up().replicas[0]
                lab.drive(replica, Step.SUCCEED, "kept")
                lab.forget()
                with lab.fault(Operation.OBSERVE, fault, after=after):
                    try:
                        (entry,) = lab.within(
                            "R6",
                            lambda one=replica: lab.executor.collect([one.handle], timeout=10.0),  # type: ignore[misc]
                        )
                    except BackendError as error:
                        lab.note(f"it raised {type(error).__name__}")
                    else:
                        if entry["status"] == "succeeded" and entry["result"] != "kept":
                            lab.broken("R6", str(entry), f"{fault}: the result could not be read")
                collect(lab, [replica])

    def test_r7_a_lost_replica_has_failed(self, lab: Lab) -> None:
        """Check that a replica without a record has not succeeded; others are not affected."""
        run, beside = lab.up(2), lab.up(1)
        for replica in [*run.replicas, *beside.replicas]:
            lab.drive(replica, Step.SUCCEED, "lost")
        lab.purge(run)
        lab.forget()
        for replica in run.replicas:
            replica.nobody_knows()
        collect(lab, [run.replicas[1], beside.replicas[0], run.replicas[0]])

    def test_r9_without_a_timeout_it_waits_for_all(self, lab: Lab) -> None:
        """Wait for longer than a minute; collect must return as soon as the last one has ended."""
        run = lab.up(2)
        begin = lab.harness.clock()
        last = [begin]

        def progress(_: Mapping[ReplicaHandle, ReplicaStatus]) -> None:
            passed = lab.harness.clock() - begin
            for replica, after in zip(run.replicas, (30, 150), strict=True):
                if replica.live and passed > after * lab.unit:
                    lab.drive(replica, Step.SUCCEED, str(replica))
                    last[0] = lab.harness.clock()

        collect(lab, run.replicas, timeout=None, progress=progress)
        late = lab.harness.clock() - last[0]
        if late > 15 * lab.unit + lab.harness.slack:
            lab.broken("R9", f"collect came back {late:g} s later", "all had ended")

    def test_r9_what_has_ended_is_not_waited_for(self, lab: Lab) -> None:
        """Check that with no argument but the handles, collect returns at once."""
        replicas = ended(lab)
        begin = lab.harness.clock()
        collect(lab, replicas, timeout=None)
        took = lab.harness.clock() - begin
        if took > lab.harness.slack:
            lab.broken("R9", f"collect took {took:g} s", "all had ended before")

    def test_r10_it_says_what_describe_says(self, lab: Lab) -> None:
        """Compare both for every end and for second attempts, here and in another process."""
        replicas = ended(lab)
        if lab.can(Step.KILL):
            replicas.append(lab.up().replicas[0])
            lab.drive(replicas[-1], Step.KILL, "SIGABRT")
        if lab.can(Step.PREEMPT):
            for step, value in ((Step.SUCCEED, 1), (Step.FAIL, 5)):
                replicas.append(lab.up().replicas[0])
                lab.drive(replicas[-1], Step.PREEMPT)
                lab.drive(replicas[-1], Step.START)
                lab.drive(replicas[-1], step, value)
        lab.observe_all()
        collect(lab, replicas)
        lab.forget()
        collect(lab, replicas)
        lab.observe_all()
        collect(lab, replicas)

    def test_r10_only_a_success_has_a_result(self, lab: Lab) -> None:
        """Check that a replica that failed, was cancelled or still runs has no result."""
        collect(lab, [*ended(lab), *lab.launch().replicas, *lab.up().replicas])

    def test_r8_the_calls_of_a_look_do_not_grow_with_the_ranks(self, lab: Lab) -> None:
        """Check that looking at twelve ranks costs as many calls as looking at two."""
        lab.needs(Ability.CALLS)
        counts = calls_of_a_look(lab)
        # A backend that has to be asked for each rank may take six times as many calls for twelve
        # as for two.
        most = counts[0] * (1 if lab.capabilities.calls_per_look == "run" else 6)
        if counts[1] > most:
            lab.broken("R8", f"{counts[1]} calls for 12 ranks", f"{counts[0]} calls for 2 ranks")

    def test_r8_ends_that_were_seen_are_not_asked_for_again(self, lab: Lab) -> None:
        """Check that from one look to the next, only ranks that have not ended cost calls.

        This is for backends that are asked for each rank.
        """
        lab.needs(Ability.CALLS)
        run = lab.up(6)
        for replica in run.replicas[:4]:
            lab.drive(replica, Step.SUCCEED, str(replica))
        counts = []

        def progress(_: Mapping[ReplicaHandle, ReplicaStatus]) -> None:
            counts.append(lab.harness.calls())

        collect(lab, run.replicas, timeout=20.0 * lab.unit, progress=progress)
        looks = [after - before for before, after in pairwise(counts)]
        few = 4 * (2 if lab.capabilities.calls_per_look == "rank" else 1)
        if looks and max(looks) > few:
            lab.broken("R8", f"later looks cost {looks} calls", f"two ranks go on: {few} at most")
        elif not looks:
            lab.broken("R8", "it looked only once", "two ranks go on, and it was to wait")
