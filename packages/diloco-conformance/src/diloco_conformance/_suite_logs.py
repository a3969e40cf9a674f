"""Reading logs: G1, G2, G5 to G7."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from diloco_protocol import BackendError, InvalidRequestError, ReplicaNotFoundError

from ._harness import Ability, Fault, Operation, Step
from ._lab import Lab
from ._logs import check_everywhere, check_lines, check_log, read
from ._model import Replica
from ._refusals import must_raise
from ._scenes import RETRYABLE, check_error

UGLY = [
    "",
    "  two spaces  ",
    "tab\there",
    "naïve — ünï 漢字 🙂",
    "e\u0301 is not \xe9",
    "x" * 5000,
    *("the same again",) * 3,
    *("",) * 3,
    "diloco: a line of the program about diloco",
    '{"json": [1, 2]}',
    "last",
]

#: Every character that some code takes for the end of a line, and others that are changed on the
#: way.
STRANGE = [
    "10%\r50%\r100%",
    "carriage return at the end\r",
    "\rand at the begin",
    "a NUL\0inside",
    "form feed\x0c vertical tab\x0b",
    "separators\x1c\x1d\x1e\x1f",
    "next line\x85 line\u2028 paragraph\u2029",
    "\x1b[31mred\x1b[0m\x1b[2K",
    "\ufeffa byte order mark",
    "bell\a backspace\b delete\x7f",
    "2026-01-01T00:00:00.000000000Z this is no time stamp",
    "stdout F not a prefix",
    "",
    " ",
    "\t",
    "the end   ",
]


class Logs:
    """Fixed tests of G1, G2, G5 to G7."""

    def test_g1_a_log_has_what_the_replica_wrote(self, lab: Lab) -> None:
        """Read logs while replicas run and after every end; they have no line of a sibling."""
        lab.needs(Step.PRINT)
        run = lab.up(2)
        for number, replica in enumerate(run.replicas):
            lab.drive(replica, Step.PRINT, [f"rank {number}, line {line}" for line in range(20)])
        for replica in run.replicas:
            for n_lines in (1, 5, 20, 1000):
                check_log(lab, replica, n_lines)
        lab.drive(run.replicas[0], Step.SUCCEED)
        lab.cancel(run.replicas[1])
        lab.settle()
        lab.forget()
        for replica in run.replicas:
            check_log(lab, replica)

    def test_g1_lines_arrive_as_they_are(self, lab: Lab) -> None:
        """Write spaces, Unicode, and long and empty lines."""
        lab.needs(Step.PRINT)
        replica = lab.up().replicas[0]
        lab.drive(replica, Step.PRINT, UGLY)
        check_everywhere(lab, replica, "G1")
        lab.drive(replica, Step.SUCCEED)
        check_everywhere(lab, replica, "G1")

    def test_g1_no_log_is_no_text(self, lab: Lab) -> None:
        """Check that a replica that has written nothing has an empty log, with no text in it."""
        run = lab.launch()
        for _ in range(2):
            check_log(lab, run.replicas[0])
            check_lines(lab, run.replicas[0])
            lab.drive(run.replicas[0], Step.START)
        lab.drive(run.replicas[0], Step.SUCCEED)
        check_everywhere(lab, run.replicas[0], "G1")

    def test_g1_a_stream_that_is_not_there_is_an_error(self, lab: Lab) -> None:
        """Check that a number of lines below 1 is an error, too."""
        handle = lab.up().handles[0]
        executor = lab.executor
        for call in (
            lambda: executor.log_iter(handle, streams="no-such-stream"),
            lambda: executor.log_iter(handle, regex="("),
            lambda: executor.stream_logs(handle, n_lines=0),
        ):
            must_raise(lab, "G1", "it", call, InvalidRequestError, "an argument is wrong")

    # --- what a line is ---

    def test_g2_only_a_newline_ends_a_line(self, lab: Lab) -> None:
        """Write carriage returns, form feeds, U+0085 and U+2028: no line ends, and all arrive."""
        lab.needs(Ability.WRITE)
        replica = lab.up().replicas[0]
        lab.write(replica, "".join(f"{line}\n" for line in STRANGE).encode())
        self._while_it_runs_and_after(lab, replica)

    def test_g2_long_lines_arrive_whole(self, lab: Lab) -> None:
        """Write 100 KiB in characters of one byte or more, so that blocks end inside them."""
        lab.needs(Ability.WRITE)
        replica = lab.up().replicas[0]
        for line in ("x" * 102_400, "before " + "🙂" * 25_600, "é" * 51_200, "short"):
            lab.write(replica, f"{line}\n".encode())
        self._while_it_runs_and_after(lab, replica)

    def test_g2_characters_arrive_in_pieces(self, lab: Lab) -> None:
        """Write characters byte by byte."""
        lab.needs(Ability.WRITE)
        replica = lab.up().replicas[0]
        for byte in "é漢🙂\nü".encode():
            lab.write(replica, bytes([byte]))
        lab.write(replica, b"\n")
        self._while_it_runs_and_after(lab, replica)

    def test_g2_a_last_line_needs_no_newline(self, lab: Lab) -> None:
        """Check that an unfinished line is there at the end; until then it may be held back."""
        lab.needs(Ability.WRITE)
        replica = lab.up().replicas[0]
        lab.write(replica, b"one\ntwo\nunfinished \xf0\x9f\x99\x82")
        self._while_it_runs_and_after(lab, replica)

    def _while_it_runs_and_after(self, lab: Lab, replica: Replica) -> None:
        check_everywhere(lab, replica, "G2")
        lab.drive(replica, Step.SUCCEED)
        check_everywhere(lab, replica, "G2")

    # --- how many ---

    def test_g5_the_last_200_lines_by_default(self, lab: Lab) -> None:
        """Check any other number that is asked for as well."""
        lab.needs(Step.PRINT)
        replica = lab.up().replicas[0]
        lab.drive(replica, Step.PRINT, [f"line {number}" for number in range(250)])
        for n_lines in (None, 1, 199, 201, 250, 251):
            check_log(lab, replica, n_lines, promise="G5")
        lab.drive(replica, Step.SUCCEED)
        check_log(lab, replica, promise="G5")

    def test_g5_hundreds_of_lines(self, lab: Lab) -> None:
        """Write hundreds of lines in several goes; all must come, in order."""
        lab.needs(Step.PRINT)
        replica = lab.up().replicas[0]
        for begin in range(0, 1200, 100):
            lines = [
                f"line {number}: {'x' * (number % 97)}" for number in range(begin, begin + 100)
            ]
            lab.drive(replica, Step.PRINT, lines)
        check_everywhere(lab, replica, "G5")
        check_log(lab, replica, promise="G5")
        lab.drive(replica, Step.SUCCEED)
        check_everywhere(lab, replica, "G5")

    # --- what cannot be read ---

    def test_g6_a_log_that_is_gone_is_an_exception(self, lab: Lab) -> None:
        """Read a purged or forgotten log in every way, from this process and another one."""
        for ability in (None, Ability.EXPIRE):
            if ability is not None and not lab.can(ability):
                continue
            replica = lab.up().replicas[0]
            if lab.can(Step.PRINT):
                lab.drive(replica, Step.PRINT, ["this can no longer be read"])
            lab.drive(replica, Step.SUCCEED)
            check_log(lab, replica)
            if ability is None:
                lab.purge(replica.run)
            else:
                lab.expire(replica.run)
            for _ in range(2):
                self._unreadable(lab, replica)
                lab.forget()

    def _unreadable(self, lab: Lab, replica: Replica) -> None:
        executor, handle = lab.executor, replica.handle
        ways: dict[str, Callable[[], Any]] = {
            "stream_logs": lambda: executor.stream_logs(handle),
            "log_iter": lambda: list(executor.log_iter(handle)),
            "log_iter(follow=True)": lambda: list(executor.log_iter(handle, follow=True)),
            "log_iter(since=0)": lambda: list(executor.log_iter(handle, since=0.0)),
        }
        for name, call in ways.items():
            lab.note(f"{name} of {replica}", "logs")
            must_raise(lab, "G6", name, call, ReplicaNotFoundError, "there is no record of it")

    def test_g6_a_log_that_cannot_be_read_is_an_exception(self, lab: Lab) -> None:
        """Check that the answer is never an empty text, nor half of a log."""
        lab.needs(Operation.LOGS, Step.PRINT)
        replica = lab.up().replicas[0]
        lab.drive(replica, Step.PRINT, ["one", "two"])
        check_everywhere(lab, replica, "G6")  # what was read before must not be the answer later
        for fault in lab.faults(*RETRYABLE, Fault.FORBIDDEN):
            ways: dict[str, Callable[[], Any]] = {
                "stream_logs": lambda: lab.executor.stream_logs(replica.handle),
                "log_iter": lambda: list(lab.executor.log_iter(replica.handle)),
            }
            for name, call in ways.items():
                with lab.fault(Operation.LOGS, fault):
                    lab.note(f"{name} of {replica}", "logs")
                    try:
                        logs = lab.within("G6", call)
                    except BackendError as error:
                        check_error(lab, "G6", name, error, fault)
                        if isinstance(error, LookupError):
                            lab.broken("G6", f"{name} raised {error!r}", f"{fault}: who knows?")
                    else:
                        lab.broken("G6", f"{name} gave {logs!r}", f"{fault}: it could not be read")
        check_everywhere(lab, replica, "G6")

    def test_g6_a_backend_that_cannot_be_asked_has_no_empty_logs(self, lab: Lab) -> None:
        """Check this even if the log itself could be read."""
        lab.needs(Operation.OBSERVE, Step.PRINT)
        replica = lab.up().replicas[0]
        lab.drive(replica, Step.PRINT, ["one", "two"])
        for fault in lab.faults(*RETRYABLE, Fault.FORBIDDEN):
            with lab.fault(Operation.OBSERVE, fault):
                try:
                    lines = read(lab, replica, promise="G6")
                except BackendError as error:
                    check_error(lab, "G6", "log_iter", error, fault)
                else:
                    if lines != replica.lines:
                        lab.broken("G6", f"log_iter gave {lines}", f"it wrote {replica.lines}")

    # --- whose ---

    def test_g7_siblings_are_not_mixed(self, lab: Lab) -> None:
        """Read the logs of more than ten ranks, and of runs whose names begin alike."""
        lab.needs(Step.PRINT)
        name = f"{lab.harness.run_prefix}-alike"
        runs = [lab.up(1, run_id=name), lab.up(lab.harness.many_ranks, run_id=f"{name}-1")]
        for replica in lab.replicas():
            lab.drive(replica, Step.PRINT, [f"{replica} writes this", "and this"])
        lab.drive(runs[0].replicas[0], Step.SUCCEED)  # so that no more live than many_ranks and one
        (last,) = lab.up(1, run_id=f"{name}-1-0").replicas
        lab.drive(last, Step.PRINT, [f"{last} writes this", "and this"])
        for replica in lab.replicas():
            check_log(lab, replica, promise="G7")
            check_lines(lab, replica, promise="G7")

    def test_g7_attempts_are_not_mixed(self, lab: Lab) -> None:
        """Check that the second attempt does not continue an unfinished line of the first."""
        lab.needs(Step.PREEMPT, Ability.WRITE)
        replica = lab.up(2).replicas[1]
        lab.write(replica, b"first\nunfini")
        lab.drive(replica, Step.PREEMPT)
        check_log(lab, replica, promise="G7")
        lab.drive(replica, Step.START)
        check_log(lab, replica, promise="G7")
        lab.write(replica, b"shed\nsecond\n")
        check_everywhere(lab, replica, "G7")
        lab.drive(replica, Step.SUCCEED)
        check_everywhere(lab, replica, "G7")

    def test_g7_a_name_that_is_used_again_has_a_new_log(self, lab: Lab) -> None:
        """Check that the old handle has no log."""
        lab.needs(Step.PRINT)
        old = lab.up()
        lab.drive(old.replicas[0], Step.PRINT, ["of the first run"])
        lab.drive(old.replicas[0], Step.SUCCEED)
        check_log(lab, old.replicas[0], promise="G7")
        lab.purge(old)
        new = lab.up(run_id=old.run_id)
        check_log(lab, new.replicas[0], promise="G7")
        lab.drive(new.replicas[0], Step.PRINT, ["of the second run"])
        check_everywhere(lab, new.replicas[0], "G7")
        self._unreadable(lab, old.replicas[0])
