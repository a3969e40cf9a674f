"""Several calls at once: T1 and T2."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from diloco_protocol import ReplicaHandle, RunConflictError

from ._check_calls import PIECE, interrupt
from ._harness import Step
from ._lab import Lab
from ._logs import check_log


def at_once(lab: Lab, promise: str, calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Return what each of some calls gave or raised; all of them begin at the same moment."""
    gate = threading.Barrier(len(calls))
    answers: list[Any] = [None] * len(calls)

    def run(number: int) -> None:
        gate.wait(lab.harness.patience)
        try:
            answers[number] = calls[number]()
        except Exception as error:  # noqa: BLE001 - the error is the outcome of this call
            answers[number] = error

    def all_of_them() -> None:
        threads = [
            threading.Thread(target=run, args=(number,), daemon=True)
            for number in range(len(calls))
        ]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                while thread.is_alive():
                    thread.join(PIECE)
        finally:
            for thread in filter(threading.Thread.is_alive, threads):
                interrupt(thread)

    lab.within(promise, all_of_them)
    return answers


class Threads:
    """Fixed tests of T1 and T2."""

    def test_t1_threads_get_the_answers_of_their_own(self, lab: Lab) -> None:
        """Ask about several runs in several states, all at once, several times."""
        run, beside, ended = lab.up(2), lab.launch(2), lab.up(2)
        for replica in ended.replicas:
            if lab.can(Step.PRINT):
                lab.drive(replica, Step.PRINT, [f"this is {replica}"])
            lab.drive(replica, Step.SUCCEED, str(replica))
        lab.observe_all()
        executor = lab.executor
        lab.note("all are asked for at once", "threads")
        replicas = [*run.replicas, *beside.replicas, *ended.replicas]
        for _ in range(5):
            calls = [partial(executor.poll, one.handle) for one in replicas]
            for replica, answer in zip(replicas, at_once(lab, "T1", calls), strict=True):
                if answer != replica.state:
                    lab.broken("T1", f"poll({replica}) is {answer!r}", f"it is {replica.state}")
            waits = [partial(executor.collect, [one.handle], timeout=0) for one in ended.replicas]
            for replica, gave in zip(ended.replicas, at_once(lab, "T1", waits), strict=True):
                if isinstance(gave, Exception) or gave[0]["result"] != replica.result:
                    lab.broken("T1", f"collect gave {gave!r} of {replica}", f"{replica.result!r}")
        lab.observe_all()
        if lab.can(Step.PRINT):
            for replica in ended.replicas:
                check_log(lab, replica)

    def test_t1_threads_launch_and_cancel_runs_of_their_own(self, lab: Lab) -> None:
        """Check that each thread gets the run it asked for, and ends the replica it named."""
        names = [f"{lab.harness.run_prefix}-t{number}" for number in range(3)]
        runs, began = [], lab.moment()
        lab.note("three runs are launched at once", "launch")
        launches = [partial(self._launch, lab, name, lab.executor) for name in names]
        for name, handles in zip(names, at_once(lab, "T1", launches), strict=True):
            if isinstance(handles, Exception) or {one.run_id for one in handles} != {name}:
                lab.broken("T1", f"the launch of {name!r} gave {handles!r}", "it is its own run")
            runs.append(lab.take(handles, {"number": 0}, began))
        for run in runs:
            for replica in run.replicas:
                lab.drive(replica, Step.START)
        lab.observe_all()
        lab.note("rank 0 of the first two is cancelled at once", "cancel")
        cancels = [partial(lab.executor.cancel, run.handles[0]) for run in runs[:2]]
        for raised in at_once(lab, "T1", cancels):
            if raised is not None:
                lab.broken("T1", f"cancel raised {raised!r}", "nothing stands in its way")
        for run in runs[:2]:
            lab.accepted(run.replicas[0])
        with lab.part_of("T1"):
            lab.settle()
            lab.observe_all()

    def test_t2_who_launches_the_same_gets_the_same(self, lab: Lab) -> None:
        """Let four launchers that know nothing of each other launch one run."""
        name, began = f"{lab.harness.run_prefix}-same", lab.moment()
        living = lab.harness.living()
        executors = [lab.harness.make_executor() for _ in range(4)]
        lab.note("four executors launch the same run at once", "launch")
        answers = at_once(lab, "T2", [partial(self._launch, lab, name, one) for one in executors])
        for handles in answers:
            if isinstance(handles, Exception):
                lab.broken("T2", f"a launch raised {handles!r}", "all of them ask for the same")
            if handles != answers[0]:
                lab.broken("T2", f"one got {handles}", f"another one got {answers[0]}")
        run = lab.take(answers[0], {"number": 0}, began)
        alive = lab.harness.living() - living
        if alive != 2:
            lab.broken("T2", "all got the same handles", f"{alive} replicas live, not 2")
        lab.observe_all()
        lab.attach(run)

    def test_t2_who_launches_something_else_is_refused(self, lab: Lab) -> None:
        """Let two ask for different things: one gets its run, the other a RunConflictError."""
        name, began = f"{lab.harness.run_prefix}-other", lab.moment()
        living = lab.harness.living()
        executors = [lab.harness.make_executor() for _ in range(2)]
        lab.note("two executors launch different runs of one name at once", "launch")
        answers = at_once(
            lab,
            "T2",
            [partial(self._launch, lab, name, one, number) for number, one in enumerate(executors)],
        )
        won = [number for number, got in enumerate(answers) if not isinstance(got, Exception)]
        refused = [got for got in answers if isinstance(got, RunConflictError)]
        if len(won) != 1 or len(refused) != 1:
            lab.broken(
                "T2", f"they got {answers}", "one gets its run, the other a RunConflictError"
            )
        lab.take(answers[won[0]], {"number": won[0]}, began)
        lab.settle()
        alive = lab.harness.living() - living
        if alive != 2:
            lab.broken("T2", f"one got {answers[won[0]]}", f"{alive} replicas live, not 2")
        lab.observe_all()

    def _launch(self, lab: Lab, run_id: str, executor: Any, number: int = 0) -> list[ReplicaHandle]:
        arguments = {**lab.harness.entrypoint_args, "number": number}
        options: dict[str, Any] = {"run_id": run_id, "timeout": lab.harness.timeout}
        handles: list[ReplicaHandle] = executor.launch_replicas(
            2, lab.harness.entrypoint, arguments, **options
        )
        return handles
