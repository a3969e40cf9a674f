"""Logs in which it is hard to cut: large results, pages, moments. G1, G2, G4."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from diloco_protocol.backend import LINE_BYTES

from ._harness import Ability, Step
from ._lab import Lab
from ._logs import Follower, check_everywhere, check_lines, check_log, read
from ._model import Replica

EXTRA = 200_000
"""The number of bytes by which a line is longer than what is kept of it."""
NOTE = 200
"""The number of characters that may say that a line was cut."""
PREFIX = 100
"""The number of bytes of a line that a platform may need for itself, such as for a time."""


class LongLogs:
    """Fixed tests of G1, G2 and G4."""

    def test_g1_a_large_result_is_no_part_of_the_log(self, lab: Lab) -> None:
        """Check this however the result travels; the last lines are as many as were asked for."""
        lab.needs(Step.PRINT)
        most = min(300_000, lab.capabilities.max_result_bytes or 300_000)
        for size in (5_000, most // 2, most):
            replica = lab.up().replicas[0]
            lines = [f"line {number}" for number in range(30)]
            lab.drive(replica, Step.PRINT, lines)
            lab.drive(replica, Step.SUCCEED, "x" * (size - len(json.dumps(""))))
            check_everywhere(lab, replica, "G1")
            for n_lines in (1, 7, 30):
                check_log(lab, replica, n_lines)
            check_lines(lab, replica, regex="^", lines=lines)

    def test_g1_it_is_not_followed_either(self, lab: Lab) -> None:
        """Check that a caller that follows the log does not see the result being reported."""
        lab.needs(Step.PRINT)
        size = min(100_000, lab.capabilities.max_result_bytes or 100_000)
        replica = lab.up().replicas[0]
        with lab.harness.time.held(), lab.part_of("G1"):
            follower = Follower(lab, replica)
            lab.drive(replica, Step.PRINT, ["one", "two"])
            follower.expect("one", "two")
            lab.drive(replica, Step.SUCCEED, "x" * (size - len(json.dumps(""))))
            follower.finish("one", "two")

    def test_g2_a_line_that_fills_the_memory_is_cut(self, lab: Lab) -> None:
        """Keep the first MiB of a longer line, and a note; others, even of a MiB, stay whole."""
        lab.needs(Ability.WRITE)
        if lab.harness.long_log < LINE_BYTES + EXTRA:
            pytest.skip("the harness says that so much is too much for this world")
        whole, kept = LINE_BYTES - PREFIX, LINE_BYTES - PREFIX
        for line, most in (("x" * whole, whole), ("y" * (LINE_BYTES + EXTRA), LINE_BYTES + NOTE)):
            replica = lab.up().replicas[0]
            lab.write(replica, f"before\n{line}\nafter\n".encode())
            for _ in range(2):
                lines = read(lab, replica, promise="G2")
                texts = [f"{one[:20]}… ({len(one)} characters)" for one in lines]
                if len(lines) != 3 or (lines[0], lines[2]) != ("before", "after"):
                    lab.broken(
                        "G2", f"log_iter gave {texts}", "three lines: before, a long one, after"
                    )
                if lines[1][:kept] != line[:kept] or len(lines[1]) > most:
                    lab.broken(
                        "G2", f"log_iter gave {texts}", f"a line of {len(line)} bytes was written"
                    )
                if replica.live:
                    lab.drive(replica, Step.SUCCEED)

    def test_g2_lines_go_on_over_the_edges_of_pages(self, lab: Lab) -> None:
        """Read a log longer than the platform gives at once, with lines of all lengths."""
        lab.needs(Ability.WRITE)
        replica = lab.up().replicas[0]
        data, number = b"", 0
        while len(data) < lab.harness.long_log:
            number += 1
            data += f"{number}:{'é' * (number * 7919 % 45_000)}\n".encode()
        step = 100_003  # in the middle of lines, and of characters
        for begin in range(0, len(data), step):
            lab.write(replica, data[begin : begin + step])
        check_everywhere(lab, replica, "G2")
        lab.drive(replica, Step.SUCCEED)
        check_everywhere(lab, replica, "G2")
        check_log(lab, replica, 3, promise="G2")

    # --- moments ---

    def test_g4_since_counts_its_moment_and_until_does_not(self, lab: Lab) -> None:
        """Check this to the second, where a second can be hit."""
        lab.needs(Step.PRINT)
        replica = lab.up().replicas[0]
        times = [self._at_a_second(lab, replica, line) for line in ("early", "exact", "late")]
        self._moments(lab, replica, times, follow=False)
        lab.drive(replica, Step.SUCCEED)
        for follow in (False, True):
            self._moments(lab, replica, times, follow=follow)

    def _at_a_second(self, lab: Lab, replica: Replica, line: str) -> float:
        """Have a line written at a whole second, and not in the same second as another line."""
        lab.advance(2 * max(1.0, lab.harness.resolution))
        for _ in range(3):
            lab.advance(math.ceil(lab.harness.now()) - lab.harness.now())
        now = lab.harness.now()
        lab.drive(replica, Step.PRINT, [line])
        if lab.harness.now() != now or now != int(now):
            pytest.skip("here time does not stand still at a second")
        return now

    def _moments(self, lab: Lab, replica: Replica, times: list[float], *, follow: bool) -> None:
        early, exact, late = "early", "exact", "late"
        _, second, third = times
        cases: list[tuple[dict[str, Any], list[str]]] = [
            ({"since": second}, [exact, late]),
            ({"until": second}, [early]),
            ({"since": second, "until": third}, [exact]),
            ({"since": second, "until": second}, []),
            ({"since": third}, [late]),
            ({"until": third}, [early, exact]),
        ]
        for options, lines in cases:
            check_lines(lab, replica, promise="G4", lines=lines, follow=follow, **options)
