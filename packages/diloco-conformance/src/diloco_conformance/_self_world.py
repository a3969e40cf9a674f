"""Whether a world does what its harness is told."""

from __future__ import annotations

from collections.abc import Callable

from ._blame import fault
from ._harness import Ability, Step
from ._self_sample import Sample


def prints_are_recorded(sample: Sample) -> None:
    """In the log of the replica, each stream in its own."""
    lab, harness, handle = sample.lab, sample.harness, sample.second.handle
    if lab.can(Step.PRINT):
        for replica in (sample.first, sample.second):  # some executors read the log of another
            lab.drive(replica, Step.PRINT, ["self-check"])
        if not sample.ask(lambda: lab.executor.stream_logs(handle)):
            fault(
                harness,
                "after drive(…, Step.PRINT, ['self-check']) the log is empty. Either drive writes where the executor "
                "does not read, or the executor reads no logs: mend what is wrong, or declare Step.PRINT in cannot",
                "drive",
            )
    streams = ("stdout", "stderr")
    if not lab.can(Ability.WRITE) or not set(streams) <= set(lab.capabilities.log_streams):
        return
    for stream in streams:
        lab.write(sample.second, f"to {stream}\n".encode(), stream)
    logs = {
        stream: sample.ask(lambda s=stream: list(lab.executor.log_iter(handle, streams=s)))  # type: ignore[misc]
        for stream in streams
    }
    if {"to stdout", "to stderr"} <= set(logs["stdout"]) and not logs["stderr"]:
        fault(
            harness,
            f"write(…, b'to stderr\\n', 'stderr') wrote to standard output: the logs are {logs}",
            "write",
        )


def ends_are_counted(sample: Sample) -> None:
    """What succeeds does not live any more, and nothing else changes."""
    harness = sample.harness
    before = harness.living()
    sample.lab.drive(sample.first, Step.SUCCEED, "self-check")
    after = harness.living()
    if after != before - 1:
        fault(
            harness,
            f"living() was {before}, one replica was made to succeed, and it is {after}: it must count what lives in the "
            "world at this moment",
            "living",
        )


def cancels_settle(sample: Sample) -> None:
    """What is being ended has ended after a settle."""
    lab, harness, handle = sample.lab, sample.harness, sample.second.handle
    lab.cancel(sample.second)
    accepted = harness.truth(handle).stopping
    harness.settle()
    truth = harness.truth(handle)
    if accepted and truth.state is not None and not truth.state.terminal:
        fault(
            harness,
            f"settle() returned while a cancel is still under way ({truth}): it must let everything that has begun come "
            "to its end, however long that takes in this world",
            "settle",
        )


def days_pass(sample: Sample) -> None:
    """By the time of the records."""
    harness = sample.harness
    if not sample.lab.can(Ability.AGE):
        return
    day = 86_400.0
    before = harness.now()
    harness.age(day)
    if not (passed := harness.now() - before) >= 0.9 * day:
        fault(
            harness,
            f"age({day:g}) let {passed:g} s pass by now(): it must let that time pass, with what the platform forgets then",
            "age",
        )


def what_expires_is_gone(sample: Sample) -> None:
    """Of the run of the sample, which has ended."""
    harness, run = sample.harness, sample.first.run
    truths = [harness.truth(handle) for handle in run.handles]
    if not sample.lab.can(Ability.EXPIRE) or not all(
        truth.state is not None and truth.state.terminal for truth in truths
    ):
        return
    harness.expire(run.handles)
    for replica in run.replicas:
        replica.gone = True
    if (truth := harness.truth(run.handles[0])).state is not None:
        fault(
            harness,
            f"after expire(handles) the world still tells {truth}: it must have the platform forget the run",
            "expire",
        )


WORLD_CHECKS: list[Callable[[Sample], None]] = [prints_are_recorded, ends_are_counted]

#: After those of the faults.
LAST_CHECKS: list[Callable[[Sample], None]] = [cancels_settle, days_pass, what_expires_is_gone]
