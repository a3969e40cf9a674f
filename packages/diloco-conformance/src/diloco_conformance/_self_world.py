"""Check that a world does what its harness is told."""

from __future__ import annotations

from collections.abc import Callable

from ._blame import fault
from ._harness import Ability, Harness, Step
from ._self_sample import Sample
from ._self_told import calls_are_counted

NEAR = 600.0
"""Seconds by which two clocks may differ without one having been mistaken for the other."""


def prints_are_recorded(sample: Sample) -> None:
    """Check that what is printed is in the replica's log, each stream in its own."""
    lab, harness, handle = sample.lab, sample.harness, sample.second.handle
    if lab.can(Step.PRINT):
        for replica in (sample.first, sample.second):  # some executors read the log of another
            lab.drive(replica, Step.PRINT, ["self-check"])
        if not (log := sample.ask(lambda: lab.executor.stream_logs(handle))):
            fault(
                harness,
                "after drive(…, Step.PRINT, ['self-check']) the log is empty. Either drive writes "
                "where the executor does not read, or the executor reads no logs: mend what is "
                "wrong, or declare Step.PRINT in cannot",
                "drive",
            )
        if lab.can(Ability.WRITE):
            for replica in (sample.first, sample.second):
                lab.write(replica, b"to write\n")
            with sample.fresh() as executor:
                now = sample.ask(lambda: executor.stream_logs(handle))
            if now == log:
                fault(
                    harness,
                    "after write(…, b'to write\\n') there is no such line in the log, although "
                    "drive(…, Step.PRINT, …) is seen there: it must have the program write these "
                    "very bytes",
                    "write",
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
    """Check that a replica that succeeds does not live any more, and that nothing else changes."""
    harness = sample.harness
    before = harness.living()
    sample.lab.drive(sample.first, Step.SUCCEED, "self-check")
    after = harness.living()
    if after != before - 1:
        fault(
            harness,
            f"living() was {before}, one replica was made to succeed, and it is {after}: it must "
            "count what lives in the world at this moment",
            "living",
        )


def failures_are_as_asked(sample: Sample) -> None:
    """Check that replicas fail as asked, as far as the records say.

    They end with this code, by this signal, or for want of memory.
    """
    lab = sample.lab
    for step, value in (
        (Step.FAIL, 3),
        (Step.FAIL, 42),
        (Step.KILL, "SIGABRT"),
        (Step.OOM, None),
    ):
        if lab.can(step):
            replica = lab.up(1).replicas[0]
            lab.drive(replica, step, value)
            if sample.harness.truth(replica.handle).exit_code is ...:
                return  # the records say nothing


def moments_are_those_of_the_records(sample: Sample) -> None:
    """Check that what starts and prints now is dated now by the platform."""
    lab, harness = sample.lab, sample.harness
    if not lab.can(Step.PRINT):
        return
    replica = lab.up(1).replicas[0]
    before = harness.now()
    lab.drive(replica, Step.PRINT, ["self-check"])
    with sample.fresh() as executor:
        started = sample.ask(lambda: executor.describe(replica.handle)).started_at
        if not isinstance(started, (int, float)):
            return
        off = started - before

        def printed(moment: float) -> bool:
            return "self-check" in sample.ask(
                lambda: list(
                    executor.log_iter(replica.handle, since=moment - NEAR, until=moment + NEAR)
                )
            )

        # An executor alone may be wrong about a start, but it is hardly wrong by the same amount in
        # its logs.
        if abs(off) > 2 * NEAR and printed(before + off) and not printed(before):
            fault(
                harness,
                f"now() is {-off:+.0f} s off: what was started and printed at {before:.0f} by "
                f"now() is dated about {before + off:.0f} by the platform. It must be the Unix "
                "time by which the platform dates its records",
                "now",
            )


def lives_are_counted(sample: Sample) -> None:
    """Check that the attempt after a preemption is the second."""
    lab, harness = sample.lab, sample.harness
    if not lab.can(Step.PREEMPT) or not lab.capabilities.counts_attempts:
        return
    replica = lab.up(1).replicas[0]
    lab.drive(replica, Step.PREEMPT)
    lab.drive(replica, Step.START)
    if (truth := harness.truth(replica.handle)).attempt != 2:
        fault(
            harness,
            f"after drive(…, Step.PREEMPT) and START, truth() returned {truth}: attempt must be "
            "2. If the platform itself does not count, the executor declares counts_attempts=False",
            "truth",
        )


def what_is_lost_is_gone(sample: Sample) -> None:
    """Check that a lost result is gone for an executor that has seen nothing."""
    lab, harness = sample.lab, sample.harness
    if not lab.can(Ability.LOSE):
        return
    replica = lab.up(1).replicas[0]
    lab.drive(replica, Step.SUCCEED, "self-check")
    lab.lose(replica)
    with sample.fresh() as executor:
        (entry,) = sample.ask(lambda: executor.collect([replica.handle], timeout=0))
    if entry["result"] == "self-check":
        fault(
            harness,
            "after lose(handle) an executor that had seen nothing still finds the result: it must "
            "be gone from wherever the platform keeps it",
            "lose",
        )


def what_is_removed_goes(sample: Sample) -> None:
    """Check that a run that is being removed is gone when all has settled."""
    lab, harness = sample.lab, sample.harness
    if not lab.can(Ability.REMOVE):
        return
    replica = lab.up(1).replicas[0]
    lab.drive(replica, Step.SUCCEED)
    harness.remove(replica.handle)
    if type(harness).sleep is Harness.sleep and harness.truth(replica.handle).state is None:
        fault(
            harness,
            "after remove(handle) the run is gone at once: it must only begin to remove it, so "
            "that it is seen what others do meanwhile, and settle() must bring that to its end",
            "remove",
        )
    harness.settle()
    if (truth := harness.truth(replica.handle)).state is not None:
        fault(
            harness,
            f"after remove(handle) and settle() the world still tells {truth}: it must have begun "
            "to remove the run, and settle() must bring that to its end",
            "remove",
        )
    replica.gone = True


def cancels_settle(sample: Sample) -> None:
    """Check that a replica that is being ended has ended after a settle."""
    lab, harness = sample.lab, sample.harness
    # Not the sample's: while disturbances were waited out, that may have passed its timeout.
    replica = lab.up(1).replicas[0]
    handle = replica.handle
    lab.cancel(replica)
    at_once = harness.truth(handle)
    accepted = at_once.stopping
    harness.settle()
    truth = harness.truth(handle)
    over = truth.state is None or truth.state.terminal
    if over and not accepted and at_once.state is not None and not at_once.state.terminal:
        fault(
            harness,
            f"truth() returned {at_once} of a replica whose cancel was accepted, and that had "
            "ended after settle(): stopping must say that its end was asked for",
            "truth",
        )
    if accepted and truth.state is not None and not truth.state.terminal:
        fault(
            harness,
            f"settle() returned while a cancel is still under way ({truth}): it must let "
            "everything that has begun come to its end, however long that takes in this world",
            "settle",
        )


def days_pass(sample: Sample) -> None:
    """Check that days pass by the clock of the records."""
    harness = sample.harness
    if not sample.lab.can(Ability.AGE):
        return
    day = 86_400.0
    before = harness.now()
    harness.age(day)
    if not (passed := harness.now() - before) >= 0.9 * day:
        fault(
            harness,
            (
                f"age({day:g}) let {passed:g} s pass by now(): it must let that time "
                "pass, with what "
                "the platform forgets then"
            ),
            "age",
        )


def what_expires_is_gone(sample: Sample) -> None:
    """Check that a run that has ended is gone once it has expired, and no other."""
    lab, harness = sample.lab, sample.harness
    if not lab.can(Ability.EXPIRE):
        return
    # Not the sample's: the world may have forgotten that by itself.
    run = lab.up(2)
    for replica in run.replicas:
        lab.drive(replica, Step.SUCCEED)
    other = lab.launch(1).handles[0]
    harness.expire(run.handles)
    for replica in run.replicas:
        replica.gone = True
        if (truth := harness.truth(replica.handle)).state is not None:
            fault(
                harness,
                (
                    f"after expire(handles) the world still tells {truth} of {replica}: "
                    "it must have "
                    "the platform forget the run"
                ),
                "expire",
            )
    if harness.truth(other).state is None:
        fault(
            harness,
            (
                "after expire(handles) another run is gone too: it must have the "
                "platform forget the "
                "run of these handles alone"
            ),
            "expire",
        )


def between_waits(sample: Sample) -> None:
    """Check that between() waits for the next page of a list, and no longer."""
    if not sample.lab.can(Ability.BETWEEN):
        return
    done: list[bool] = []
    sample.harness.between(lambda: done.append(True))
    early = len(done)
    with sample.fresh() as executor:
        sample.ask(executor.list_runs)
        sample.ask(executor.list_runs)
    if early or len(done) > 1:
        fault(
            sample.harness,
            f"between(action) called action {'at once' if early else f'{len(done)} times'}: it "
            "must be called once, after the platform has answered the next call for a page of the "
            "runs",
            "between",
        )


WORLD_CHECKS: list[Callable[[Sample], None]] = [
    prints_are_recorded,
    ends_are_counted,
    moments_are_those_of_the_records,
    failures_are_as_asked,
    lives_are_counted,
    what_is_lost_is_gone,
]

#: The checks that come after those of the faults.
LAST_CHECKS: list[Callable[[Sample], None]] = [
    cancels_settle,
    what_is_removed_goes,
    between_waits,
    calls_are_counted,
    days_pass,
    what_expires_is_gone,
]
