"""Two threads, one of which calls an executor in the middle of a call of the other: T1."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from diloco_protocol import ReplicaHandle

from ._check_collect import collect
from ._harness import Step
from ._lab import Lab
from ._logs import allowed
from ._model import Replica
from ._purged import check_purged
from ._stepping import Two, interrupted, places

Pair = tuple[Callable[[], Any], Callable[[], Any]]
"""A call, and the one that is made in the middle of it."""


def in_between(lab: Lab, make: Callable[[], Pair]) -> Iterator[Two]:
    """Yield what two calls give: first one after the other, then the second amid the first.

    It is made before each line of the first; both calls are made anew each time.
    """
    first, second = make()
    gave, lines = lab.verb("T1", lambda: places(lab.executor, first))
    yield Two(gave, lab.verb("T1", second))
    for line in lines:
        first, second = make()
        yield lab.verb(
            "T1",
            lambda one=first, other=second, at=line: interrupted(lab.executor, one, other, at),  # type: ignore[misc]
        )


class Meanwhile:
    """Fixed tests of T1."""

    def test_t1_what_another_thread_asks_meanwhile_changes_no_answer(self, lab: Lab) -> None:
        """Ask about two runs in different states, each in the middle of asking about the other."""
        lives, ended, other = (lab.up(1).replicas[0] for _ in range(3))
        for replica in (lives, ended, other):
            if lab.can(Step.PRINT):
                lab.drive(replica, Step.PRINT, [f"this is {replica}"])
        for replica in (ended, other):
            lab.drive(replica, Step.SUCCEED, f"of {replica}")
        lab.observe_all()

        def result(handle: ReplicaHandle) -> Any:
            return lab.executor.collect([handle], timeout=0)[0]["result"]

        verbs: dict[str, tuple[Callable[[ReplicaHandle], Any], Callable[[Replica], list[Any]]]] = {
            "poll": (lab.executor.poll, lambda one: [one.state]),
            "collect": (result, lambda one: [one.result]),
        }
        if lab.can(Step.PRINT):
            logs = lab.executor.stream_logs
            verbs["logs"] = logs, lambda one: ["\n".join(lines) for lines in allowed(lab, one)]
        for name, (verb, right) in verbs.items():
            for pair in ((lives, ended), (ended, other)):
                lab.note(f"{name} of {pair[0]} and {pair[1]} at once")
                first, second = (partial(verb, replica.handle) for replica in pair)
                for two in in_between(lab, lambda pair=(first, second): pair):  # type: ignore[misc]
                    for replica, gave in zip(pair, two[:2], strict=True):
                        if gave not in (true := right(replica)):
                            lab.broken("T1", f"{gave!r} of {replica}", f"it is {true[0]!r}")
                lab.observe_all()

    def test_t1_an_older_look_undoes_nothing_that_a_newer_one_has_told(self, lab: Lab) -> None:
        """Start a replica, and see it run, while another thread is looking at it.

        What that thread saw before is old by then: its look must say what the newer one has
        reported.
        """
        if lab.harness.starts_by_itself:
            pytest.skip("here replicas are real, and start when they please")
        replicas: list[Replica] = []

        def make() -> Pair:
            if replicas:
                lab.drive(replicas[-1], Step.SUCCEED, "old")
            replica = lab.launch(1).replicas[0]
            replicas.append(replica)
            lab.harness.settle()
            poll = partial(lab.executor.poll, replica.handle)

            def start_and_poll() -> Any:
                lab.drive(replica, Step.START)
                return poll()

            return poll, start_and_poll

        with lab.part_of("T1"):
            for older, newer, meanwhile in in_between(lab, make):
                if older not in ("pending", "running") or newer != "running":
                    lab.broken(
                        "T1", f"poll gave {older!r} and {newer!r}", "it was pending, and runs"
                    )
                if meanwhile and older != "running":
                    lab.broken(
                        "T1",
                        f"a poll that began earlier came back later, and gave {older!r}",
                        "another thread had been told already that it runs",
                    )
                lab.observe(replicas[-1])
                now = lab.verb("T1", partial(lab.executor.describe, replicas[-1].handle))
                if now.attempt != 1:
                    lab.broken("T1", f"it is attempt {now.attempt}", "it has been started once")

    def test_t1_what_another_thread_ends_meanwhile_is_all_that_it_ends(self, lab: Lab) -> None:
        """Check that cancel, and purge, end what they were asked to end, and no more."""
        if lab.harness.starts_by_itself:
            pytest.skip("here replicas are real, and each line of the executor takes two of them")
        for verb in ("cancel", "purge"):
            beside = lab.up(1)
            pairs: list[list[Replica]] = []

            def make(verb: str = verb, pairs: list[list[Replica]] = pairs) -> Pair:
                pairs.append([lab.up(1).replicas[0] for _ in range(2)])
                for one in pairs[-1] if verb == "purge" else []:
                    lab.drive(one, Step.SUCCEED, "old")
                lab.note(f"{verb} of {pairs[-1][0]} and {pairs[-1][1]} at once", verb)
                first, second = (
                    partial(getattr(lab.executor, verb), one.handle) for one in pairs[-1]
                )
                return first, second

            for two in in_between(lab, make):
                if two[:2] != (None, None):
                    lab.broken("T1", f"{verb} gave {two[:2]!r}", "nothing stands in its way")
                with lab.part_of("T1"):
                    for one in pairs[-1]:
                        if verb == "cancel":
                            lab.accepted(one)
                        else:
                            one.gone = True
                            check_purged(lab, one.run)
                    lab.settle()
                    lab.observe(beside.replicas[0])
                    for one in pairs[-1]:
                        lab.observe(one)
            lab.drive(beside.replicas[0], Step.SUCCEED, "beside")
            collect(lab, beside.replicas)
