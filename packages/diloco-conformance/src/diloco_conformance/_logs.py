"""What is read of a log, held against what was written."""

from __future__ import annotations

from diloco_protocol import ReplicaNotFoundError, ReplicaState

from ._lab import Lab
from ._model import Replica


def check_log(lab: Lab, replica: Replica, n_lines: int = 200) -> None:
    """The last lines are those of the replica, of this attempt or of all of them."""
    lab.note(f"stream_logs({replica}, n_lines={n_lines})", "logs")
    if replica.state is ReplicaState.CANCELLED and not lab.capabilities.remembers_ended:
        _gone(lab, replica)
        return
    text = lab.within("G1", lambda: lab.executor.stream_logs(replica.handle, n_lines=n_lines))
    if not isinstance(text, str):
        lab.broken("G1", repr(text), "stream_logs returns text")
    written = [lines[-n_lines:] for lines in (replica.lines, [*replica.before, *replica.lines])]
    if text not in {"\n".join(lines) for lines in written}:
        lab.broken("G1", repr(text[-400:]), f"the replica wrote {written[-1][-10:]}")


def _gone(lab: Lab, replica: Replica) -> None:
    try:
        text = lab.within("G1", lambda: lab.executor.stream_logs(replica.handle))
    except ReplicaNotFoundError:
        return
    lab.broken(
        "G1", repr(text[-400:]), "the backend declares that it keeps no log of what it has ended"
    )
