"""Following logs, and choosing lines from them: G3 and G4."""

from __future__ import annotations

import threading
from typing import Any
from unittest.mock import patch

import pytest

from ._harness import Ability, Fault, Operation, Step
from ._lab import Lab
from ._logs import Follower, check_lines, read
from ._model import Replica
from ._scenes import RETRYABLE

STREAMS = ("combined", "stdout", "stderr")
"""The streams that a caller may ask for, where a backend declares them."""


def check_streams(lab: Lab) -> None:
    """Check that no stream is declared but those that callers know."""
    declared = lab.capabilities.log_streams
    if unknown := [stream for stream in declared if stream not in STREAMS]:
        lab.broken(
            "D1",
            f"log_streams={declared!r}",
            (
                f"{', '.join(map(repr, unknown))} is none of the streams that there are: "
                f"{', '.join(STREAMS)}"
            ),
        )


class Following:
    """Fixed tests of G3 and G4."""

    def test_g3_what_has_ended_is_followed_to_its_end(self, lab: Lab) -> None:
        """Expect all lines once, or those that match, and then the end."""
        lab.needs(Step.PRINT)
        replica = lab.up().replicas[0]
        lab.drive(replica, Step.PRINT, ["one", "two", "three"])
        lab.drive(replica, Step.SUCCEED)
        check_lines(lab, replica, promise="G3", follow=True)
        check_lines(lab, replica, promise="G3", follow=True, regex="^t", lines=["two", "three"])
        check_lines(lab, replica, promise="G3", follow=True, regex="nothing", lines=[])

    def test_g3_what_lives_is_followed(self, lab: Lab) -> None:
        """Follow from before the start: each line comes while it lives, and none of its sibling."""
        lab.needs(Step.PRINT)
        replica, sibling = lab.launch(2).replicas
        with lab.harness.time.held():
            follower = Follower(lab, replica)
            chosen = Follower(lab, replica, regex="[24]")
            lab.drive(replica, Step.START)
            lab.drive(sibling, Step.START)
            lines: list[str] = []
            for number in range(1, 5):
                lab.drive(sibling, Step.PRINT, ["of the sibling"])
                lab.drive(replica, Step.PRINT, [f"line {number}", ""])
                lines += [f"line {number}", ""]
                follower.expect(*lines)
            chosen.expect("line 2", "line 4")
            lab.drive(replica, Step.PRINT, ["the last"])
            lab.drive(replica, Step.SUCCEED)
            follower.finish(*lines, "the last")
            chosen.finish("line 2", "line 4")

    def test_g3_it_ends_however_the_replica_ends(self, lab: Lab) -> None:
        """End the replica by a failure, and by a cancel."""
        lab.needs(Step.PRINT)
        for ending in ("fail", "cancel"):
            replica = lab.up().replicas[0]
            with lab.harness.time.held():
                follower = Follower(lab, replica)
                lab.drive(replica, Step.PRINT, ["so far"])
                follower.expect("so far")
                if ending == "fail":
                    lab.drive(replica, Step.FAIL, 3)
                else:
                    lab.cancel(replica)
                    lab.settle()
                follower.finish("so far")

    def test_g3_it_ends_where_the_replica_never_started(self, lab: Lab) -> None:
        """Cancel the replica while it is pending."""
        lab.needs(Step.PRINT)
        if lab.harness.starts_by_itself:
            pytest.skip(
                "here replicas start by themselves, so that the suite cannot make them wait"
            )
        replica = lab.launch(1).replicas[0]
        with lab.harness.time.held():
            follower = Follower(lab, replica)
            lab.cancel(replica)
            lab.settle()
            follower.finish_or_gone()

    def test_g3_who_stops_reading_leaves_nothing_behind(self, lab: Lab) -> None:
        """Check that no thread reads on, once the iterator and the executor are closed."""
        lab.needs(Step.PRINT)
        replica = lab.up().replicas[0]
        lab.drive(replica, Step.PRINT, ["one", "two"])
        executor = lab.harness.make_executor()
        begun: list[threading.Thread] = []
        start = threading.Thread.start

        def counted(thread: threading.Thread) -> None:
            # The world's own threads, such as a server's, are started by other threads.
            if threading.current_thread() in begun:
                begun.append(thread)
            start(thread)

        def read_one() -> None:
            begun.append(threading.current_thread())
            lines = executor.log_iter(replica.handle, follow=True)
            next(iter(lines))
            if (close := getattr(lines, "close", None)) is not None:
                close()
            executor.close()

        with patch.object(threading.Thread, "start", counted):
            lab.verb("G3", read_one)
            lab.until(lambda: not any(thread.is_alive() for thread in begun))
        if left := [thread.name for thread in begun if thread.is_alive()]:
            lab.broken("G3", f"the threads {left} run on", "no caller reads any more")

    def test_g3_a_last_line_without_a_newline_is_followed(self, lab: Lab) -> None:
        """Write the last line in pieces, too."""
        lab.needs(Ability.WRITE)
        replica = lab.up().replicas[0]
        with lab.harness.time.held():
            follower = Follower(lab, replica)
            lab.write(replica, b"one\ntw")
            follower.expect("one")
            lab.write(replica, b"o\nand a h")
            follower.expect("one", "two")
            lab.write(replica, b"alf")
            lab.drive(replica, Step.SUCCEED)
            follower.finish("one", "two", "and a half")

    def test_g3_it_goes_on_through_a_preemption(self, lab: Lab) -> None:
        """Expect the lines of the next attempt as well, and none of them twice."""
        lab.needs(Step.PREEMPT, Step.PRINT)
        replica = lab.up(2).replicas[0]
        with lab.harness.time.held():
            follower = Follower(lab, replica)
            lab.drive(replica, Step.PRINT, ["first attempt"])
            follower.expect("first attempt")
            lab.drive(replica, Step.PREEMPT)
            lab.drive(replica, Step.START)
            lab.drive(replica, Step.PRINT, ["second attempt"])
            follower.expect("first attempt", "second attempt")
            lab.drive(replica, Step.SUCCEED)
            follower.finish("first attempt", "second attempt")

    def test_g3_a_disturbance_loses_no_line(self, lab: Lab) -> None:
        """Check that a fault that passes is outlived, and that any other one raises.

        The log must not end as if that were all.
        """
        lab.needs(Operation.LOGS, Operation.OBSERVE, Ability.CALLS, Step.PRINT)
        for operation in (Operation.LOGS, Operation.OBSERVE):
            for fault in lab.faults(*sorted(RETRYABLE), Fault.FORBIDDEN):
                self._disturbed(lab, operation, fault)

    def _disturbed(self, lab: Lab, operation: Operation, fault: Fault) -> None:
        replica = lab.up().replicas[0]
        with lab.harness.time.held():
            follower = Follower(lab, replica)
            lab.drive(replica, Step.PRINT, ["before"])
            follower.expect("before")
            with lab.fault(operation, fault):
                lab.drive(replica, Step.PRINT, ["meanwhile"])
                lab.drive(replica, Step.SUCCEED)
                calls = lab.harness.calls()
                lab.until(lambda: follower.over or lab.harness.calls() > calls + 4)
            if fault in RETRYABLE:
                follower.finish("before", "meanwhile")
            else:
                follower.finish_disturbed("before", "meanwhile")

    def test_g3_it_ends_at_a_time_to_come(self, lab: Lab) -> None:
        """Check that the log ends once ``until`` has passed.

        The replica lives on, and may be silent.
        """
        lab.needs(Step.PRINT)
        replica = lab.up().replicas[0]
        lasts = 3 * lab.harness.resolution
        with lab.harness.time.held():
            follower = Follower(lab, replica, until=lab.harness.now() + lasts)
            lab.drive(replica, Step.PRINT, ["in time"])
            follower.expect("in time")
            lab.advance(2 * lasts)
            follower.finish("in time")
        lab.observe(replica)

    # --- choosing ---

    def test_g4_since_and_until(self, lab: Lab) -> None:
        """Check that the first moment counts and the second does not, alone and together."""
        lab.needs(Step.PRINT)
        replica = lab.up().replicas[0]
        times = []
        for line in ("early", "in the middle", "late"):
            lab.drive(replica, Step.PRINT, [line])
            lab.advance(1.5 * lab.harness.resolution)
            times.append(lab.harness.now())
            lab.advance(1.5 * lab.harness.resolution)
        first, second, third = times
        self._by_time(lab, replica, first, second, third)
        lab.drive(replica, Step.SUCCEED)
        self._by_time(lab, replica, first, second, third)
        chosen = {"since": first, "until": second, "follow": True}
        check_lines(lab, replica, promise="G4", lines=["in the middle"], **chosen)

    def _by_time(
        self, lab: Lab, replica: Replica, first: float, second: float, third: float
    ) -> None:
        early, middle, late = "early", "in the middle", "late"
        for options, lines in (
            ({"since": first}, [middle, late]),
            ({"since": second}, [late]),
            ({"since": third}, []),
            ({"since": first - 86_400}, [early, middle, late]),
            ({"until": first}, [early]),
            ({"until": second}, [early, middle]),
            ({"until": third + 86_400}, [early, middle, late]),
            ({"until": first - 86_400}, []),
            ({"since": first, "until": second}, [middle]),
            ({"since": second, "until": first}, []),
            ({"since": first, "regex": "l"}, [middle, late]),
            ({"since": first, "until": third, "regex": "^late$"}, [late]),
        ):
            check_lines(lab, replica, promise="G4", lines=lines, **options)

    def test_g4_an_expression_is_found_anywhere_in_a_line(self, lab: Lab) -> None:
        """Look for an expression at the start, in the middle and at the end of lines."""
        lab.needs(Step.PRINT)
        replica = lab.up().replicas[0]
        lines = ["alpha one", "one beta", "gamma", "ONE", "", "a.b", "naïve", "漢字"]
        lab.drive(replica, Step.PRINT, lines)
        for regex, wanted in (
            ("one", ["alpha one", "one beta"]),
            ("^one", ["one beta"]),
            ("one$", ["alpha one"]),
            ("m{2}", ["gamma"]),
            ("(?i)one", ["alpha one", "one beta", "ONE"]),
            ("beta|gamma", ["one beta", "gamma"]),
            (r"\.", ["a.b"]),
            ("^$", [""]),
            ("ï", ["naïve"]),
            ("(?i)^NAÏ", ["naïve"]),
            (r"^\w+$", ["gamma", "ONE", "naïve", "漢字"]),
            ("", lines),
            ("nowhere", []),
        ):
            check_lines(lab, replica, promise="G4", lines=wanted, regex=regex)

    def test_g4_the_streams_are_kept_apart(self, lab: Lab) -> None:
        """Check the declared streams; the combined one has both, each in its order."""
        lab.needs(Ability.WRITE)
        check_streams(lab)
        replica = lab.up().replicas[0]
        lab.write(replica, b"out 1\nout ")
        lab.write(replica, b"err 1\nerr 2\n", "stderr")
        lab.write(replica, b"2\nout 3\n")
        lab.write(replica, b"err 3\n", "stderr")
        for _ in range(2):
            self._by_stream(lab, replica)
            if replica.live:
                lab.drive(replica, Step.SUCCEED)

    def _by_stream(self, lab: Lab, replica: Replica) -> None:
        for stream in lab.capabilities.log_streams:
            options: dict[str, Any] = {"streams": stream}
            if stream != "combined":
                lines = replica.streams[stream]
                check_lines(lab, replica, promise="G4", lines=lines, **options)
                some = {"regex": "[13]", "since": 0.0, "until": lab.harness.now() + 3600.0}
                for follow in (False, True) if replica.state.terminal else (False,):
                    options["follow"] = follow
                    check_lines(lab, replica, promise="G4", lines=lines, **options)
                    matches = [line for line in lines if "1" in line or "3" in line]
                    check_lines(lab, replica, promise="G4", lines=matches, **options, **some)
                continue
            got = read(lab, replica, promise="G4", **options)
            for name, lines in replica.streams.items():
                if [line for line in got if line in lines] != lines or len(got) != 6:
                    lab.broken("G4", f"both streams: {got}", f"{name} has {lines}")
