"""Compare what is read of a log with what was written."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from diloco_protocol import BackendError, ReplicaNotFoundError, ReplicaState

from ._lab import Lab
from ._model import Replica


def allowed(lab: Lab, replica: Replica) -> list[list[str]]:
    """Return the logs that a replica may have: of its newest attempt, or of all attempts.

    An unfinished line may be held back. A carriage return at the end of a line may be missing where
    the platform takes it for a part of the line's end.
    """
    begun = [rest.decode(errors="replace") for rest in replica.rest.values() if rest]
    logs = [replica.lines, [*replica.before, *replica.lines]]
    logs += [[*lines, *begun] for lines in logs if begun]
    if lab.harness.keeps_carriage_returns:
        return logs
    return logs + [[line.removesuffix("\r") for line in lines] for lines in logs]


def check_log(
    lab: Lab, replica: Replica, n_lines: int | None = None, *, promise: str = "G1"
) -> None:
    """Check that the last lines are those of the replica; without a number, the default number."""
    options = {} if n_lines is None else {"n_lines": n_lines}
    lab.note(f"stream_logs({replica}, {options})", "logs")
    if replica.state is ReplicaState.CANCELLED and not lab.capabilities.remembers_ended:
        _gone(lab, replica)
        return
    text = lab.verb(promise, lambda: lab.executor.stream_logs(replica.handle, **options))
    if not isinstance(text, str):
        lab.broken("G1", repr(text), "stream_logs returns text")
    written = [lines[-(n_lines or 200) :] for lines in allowed(lab, replica)]
    if text not in {"\n".join(lines) for lines in written}:
        _wrong(lab, promise, text.split("\n") if text else [], written[0])


def check_lines(lab: Lab, replica: Replica, *, promise: str = "G1", **options: Any) -> None:
    """Check that log_iter gives all lines of the replica, or those in ``lines``."""
    wanted = [options.pop("lines")] if "lines" in options else allowed(lab, replica)
    got = read(lab, replica, promise=promise, **options)
    if got not in wanted:
        _wrong(lab, promise, got, wanted[0])


def check_everywhere(lab: Lab, replica: Replica, promise: str) -> None:
    """Check that both verbs give what the replica has written, also followed if it has ended."""
    check_log(lab, replica, 10_000, promise=promise)
    for follow in (False, True) if replica.state.terminal else (False,):
        check_lines(lab, replica, promise=promise, follow=follow)


def read(lab: Lab, replica: Replica, *, promise: str = "G1", **options: Any) -> list[str]:
    """Return the lines that log_iter gives."""
    lab.note(f"log_iter({replica}, {options})", "logs")
    return lab.verb(promise, lambda: list(lab.executor.log_iter(replica.handle, **options)))


def _gone(lab: Lab, replica: Replica) -> None:
    try:
        text = lab.within("G1", lambda: lab.executor.stream_logs(replica.handle))
    except ReplicaNotFoundError:
        return
    lab.broken(
        "G1", repr(text[-400:]), "the backend declares that it keeps no log of what it has ended"
    )


def _wrong(lab: Lab, promise: str, got: Sequence[str], wanted: Sequence[str]) -> None:
    """Report the broken promise, with the place where the two logs first differ."""
    place = next(
        (
            number
            for number, pair in enumerate(zip(got, wanted, strict=False))
            if pair[0] != pair[1]
        ),
        min(len(got), len(wanted)),
    )

    def shown(lines: Sequence[str]) -> str:
        near = [line if len(line) < 200 else f"{line[:200]}…" for line in lines[place : place + 3]]
        return f"{len(lines)} lines; from line {place + 1} on: {near}"

    true = f"the replica wrote {shown(wanted)}"
    writers = [
        str(one)
        for one in lab.replicas()
        if place < len(got) and got[place] in {*one.lines, *one.before}
    ]
    if writers and (place >= len(wanted) or got[place] not in wanted):
        true += f". What was read at line {place + 1} was written by {', '.join(writers[:3])}"
    lab.broken(promise, f"{lab.history[-1]} gave {shown(got)}", true)


class Follower:
    """A thread that follows a log while the test goes on; meanwhile, hold :attr:`Harness.time`."""

    def __init__(self, lab: Lab, replica: Replica, **options: Any) -> None:
        lab.note(f"log_iter({replica}, follow=True, {options}) begins", "logs")
        self._lab, self._replica, self._options = lab, replica, options
        self._changed = threading.Condition()
        self._lines: list[str] = []
        self._error: BaseException | None = None
        self.over = False
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        try:
            lines = self._lab.executor.log_iter(self._replica.handle, follow=True, **self._options)
            for line in lines:
                with self._changed:
                    self._lines.append(line)
                    self._changed.notify_all()
        except BaseException as error:  # noqa: BLE001 - looked at by the test
            self._error = error
        with self._changed:
            self.over = True
            self._changed.notify_all()

    def expect(self, *lines: str) -> None:
        """Check that these lines and no others have come so far, and that the log goes on."""
        self._wait(lambda: len(self._lines) >= len(lines), lines)
        if self.over:
            self._lab.broken(
                "G3",
                f"log_iter ended after {self._lines[-3:]} ({self._error!r})",
                f"{self._replica} has not ended",
            )
        self._compare(lines)

    def finish(self, *lines: str) -> None:
        """Check that the log ends, and that these are all of its lines."""
        self._wait(lambda: False, lines)
        if self._error is not None:
            self._lab.broken("G3", f"log_iter raised {self._error!r}", "the backend is well")
        self._compare(lines)

    def finish_or_gone(self) -> None:
        """Check that the log ends without a line, or with the error that there is no such log."""
        self._wait(lambda: False, ())
        if not isinstance(self._error, ReplicaNotFoundError):
            self.finish()

    def finish_disturbed(self, *lines: str) -> None:
        """Check that the log ends with all lines, or with an error that reports a fault."""
        self._wait(lambda: False, lines)
        if not isinstance(self._error, BackendError) or isinstance(self._error, LookupError):
            self.finish(*lines)

    def _wait(self, condition: Callable[[], bool], lines: Sequence[str]) -> None:
        patience = self._lab.harness.patience
        with self._changed:
            if not self._changed.wait_for(lambda: self.over or condition(), patience):
                self._lab.broken(
                    "G3",
                    f"{self._lines[-3:]}, and then nothing for {patience:g} s",
                    f"{self._replica} is {self._replica.state} and wrote {lines[-3:]}",
                )

    def _compare(self, lines: Sequence[str]) -> None:
        if self._lines != list(lines):
            _wrong(self._lab, "G3", self._lines, lines)
