"""Reading logs: G1."""

from __future__ import annotations

from diloco_protocol import BackendError

from ._harness import Step
from ._lab import Lab
from ._logs import check_log

UGLY = [
    "",
    "  two spaces  ",
    "tab\there",
    "naïve — ünï 漢字 🙂",
    "x" * 5000,
    '{"json": [1, 2]}',
    "last",
]


class Logs:
    """Fixed tests of G1."""

    def test_g1_a_log_has_what_the_replica_wrote(self, lab: Lab) -> None:
        """While it runs and after every end; the last n lines; nothing of the siblings."""
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
        """Spaces, unicode, long and empty lines."""
        lab.needs(Step.PRINT)
        replica = lab.up().replicas[0]
        lab.drive(replica, Step.PRINT, UGLY)
        check_log(lab, replica)
        lab.drive(replica, Step.SUCCEED)
        check_log(lab, replica)

    def test_g1_no_log_is_no_text(self, lab: Lab) -> None:
        """A replica that has written nothing has an empty log, not a sentence about it."""
        run = lab.launch()
        try:
            text = lab.within("G1", lambda: lab.executor.stream_logs(run.handles[0]))
        except BackendError:
            text = ""
        if text:
            lab.broken("G1", repr(text), "it has not written anything")
        lab.drive(run.replicas[0], Step.START)
        check_log(lab, run.replicas[0])

    def test_g1_following_ends_with_the_replica(self, lab: Lab) -> None:
        """log_iter gives all lines once, those that match, and comes to an end."""
        lab.needs(Step.PRINT)
        replica = lab.up().replicas[0]
        lab.drive(replica, Step.PRINT, ["one", "two", "three"])
        lab.drive(replica, Step.SUCCEED)
        for options, wanted in (
            ({"follow": True}, ["one", "two", "three"]),
            ({"follow": False}, ["one", "two", "three"]),
            ({"regex": "^t"}, ["two", "three"]),
            ({"follow": True, "regex": "nothing"}, []),
        ):
            lab.note(f"log_iter({replica}, {options})", "logs")
            lines = lab.within(
                "G1",
                lambda options=options: list(lab.executor.log_iter(replica.handle, **options)),  # type: ignore[misc]
            )
            if lines != wanted:
                lab.broken("G1", repr(lines), repr(wanted))

    def test_g1_a_stream_that_is_not_there_is_an_error(self, lab: Lab) -> None:
        """So is a number of lines that is not from 1."""
        handle = lab.up().handles[0]
        executor = lab.executor
        for call in (
            lambda: executor.log_iter(handle, streams="no-such-stream"),
            lambda: executor.log_iter(handle, regex="("),
            lambda: executor.stream_logs(handle, n_lines=0),
        ):
            try:
                lab.within("G1", call)
            except ValueError:
                continue
            lab.broken("G1", "a wrong argument was taken", "it is a ValueError")
