"""Compare what describe says besides the state with what is true."""

from __future__ import annotations

import re
from signal import Signals
from typing import TYPE_CHECKING

from diloco_protocol import Reason, ReplicaState

from ._blame import line_of

if TYPE_CHECKING:
    from diloco_protocol import ReplicaStatus

    from ._check_calls import Calls
    from ._harness import Truth
    from ._model import Replica

#: The reasons of a replica that is being ended, before it has ended.
ENDING = {
    Reason.CANCEL_REQUESTED,
    Reason.STOPPED_EXTERNALLY,
    Reason.GANG_FAILED,
    Reason.TIMEOUT,
    Reason.PREEMPTED,
    Reason.EVICTED,
}

#: The reasons that each state may have.
REASONS: dict[ReplicaState, set[Reason | None]] = {
    ReplicaState.PENDING: {
        None,
        Reason.QUEUED,
        Reason.UNSCHEDULABLE,
        Reason.IMAGE,
        Reason.STARTING,
        Reason.PREEMPTED,
    },
    ReplicaState.RUNNING: {None},
    ReplicaState.SUCCEEDED: {Reason.COMPLETED},
    ReplicaState.FAILED: {
        Reason.ERROR,
        Reason.OOM,
        Reason.TIMEOUT,
        Reason.EVICTED,
        Reason.START_FAILED,
        Reason.GANG_FAILED,
        Reason.PLATFORM,
    },
    ReplicaState.CANCELLED: {Reason.CANCEL_REQUESTED, Reason.STOPPED_EXTERNALLY},
}

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Characters that make a terminal, or a reader of logs, show something else."""
YEAR = 366 * 86_400.0


def check_texts(lab: Calls, words: str, *texts: str | None) -> None:
    """Check that texts for people may be printed as they are."""
    for text in texts:
        if text is not None and CONTROL.search(text):
            lab.broken(
                "S16",
                f"{words}, in the words {text[:200]!r}",
                "it is printed on terminals and in logs",
            )


def check_details(
    lab: Calls, replica: Replica, status: ReplicaStatus, truth: Truth, words: str
) -> None:
    """Check the texts, attempt, stopping, reason, exit code, signal and times."""
    check_texts(lab, words, status.message, status.signal, status.native)
    if not lab.capabilities.counts_attempts and status.attempt != 1:
        lab.broken("D2", words, "the backend declares that it does not count attempts")
    if attempt_is_known(lab, status) and status.attempt != truth.attempt:
        lab.broken("S8", words, f"it is attempt {truth.attempt}")
    _stopping(lab, replica, status, truth, words)
    _reason(lab, replica, status, words, truth)
    _exit(lab, replica, status, words, truth)
    _times(lab, replica, status, words)


def attempt_is_known(lab: Calls, status: ReplicaStatus) -> bool:
    """Say whether the reported attempt counts; a backend may declare that it forgets attempts."""
    # A replica that is being ended may be gone before the backend says that it is over.
    ended = (
        status.stopping
        or status.state is ReplicaState.CANCELLED
        or status.reason is Reason.GANG_FAILED
    )
    return lab.capabilities.counts_attempts and (lab.capabilities.remembers_ended or not ended)


def forgotten_timeout(lab: Calls, replica: Replica, reason: str | None) -> bool:
    """Say whether a rank that is past its timeout may be said to have ended with its gang.

    If several ranks of a gang are too late at once, a platform may count one, and remove the others
    with all that they said. An executor that has not seen the others run knows about that one, and
    otherwise only that the others were ended.
    """
    capabilities = lab.capabilities
    removed = capabilities.failure_scope == "gang" and not capabilities.remembers_ended
    if not removed or reason != Reason.GANG_FAILED or replica.watcher is lab.executor:
        return False
    others = (one.handle for one in replica.run.replicas if one is not replica)
    statuses = (lab.within("S7", lambda one=one: lab.executor.describe(one)) for one in others)  # type: ignore[misc]
    return any(status.reason is Reason.TIMEOUT for status in statuses)


def _stopping(
    lab: Calls, replica: Replica, status: ReplicaStatus, truth: Truth, words: str
) -> None:
    if status.stopping and status.state.terminal:
        lab.broken("S8", words, "what has ended is not stopping")
    if truth.stopping and not status.stopping:
        lab.broken("S8", f"{words}, not stopping", f"{replica} is being ended")
    ending = truth.stopping or replica.doomed or replica.overdue(lab.harness.clock())
    if status.stopping and not ending:
        lab.broken("S8", words, f"{replica} is not being ended")


def _or_the_hand(lab: Calls, fact: object) -> str:
    """Return a hint that drive() may be wrong, where only the harness says how a program ended."""
    if fact is not ...:
        return ""
    line = line_of(type(lab.harness).drive)
    return (
        ". Or drive() did not have it end so, which no test sees since truth() tells no "
        f"exit_code{line}"
    )


def _reason(lab: Calls, replica: Replica, status: ReplicaStatus, words: str, truth: Truth) -> None:
    allowed = REASONS[status.state]
    if status.reason not in allowed and not (status.stopping and status.reason in ENDING):
        names = ", ".join(str(reason or "none") for reason in sorted(allowed, key=str))
        lab.broken("S10", words, f"the reasons of what is {status.state} are: {names}")
    has_reason = replica.reason not in {None, Reason.TIMEOUT}  # S7 is about that one
    if status.state.terminal and has_reason and status.reason != replica.reason:
        hand = _or_the_hand(lab, truth.out_of_memory) if replica.reason is Reason.OOM else ""
        lab.broken("S8", words, f"the reason is {replica.reason}{hand}")


def _exit(lab: Calls, replica: Replica, status: ReplicaStatus, words: str, truth: Truth) -> None:
    if not status.state.terminal:
        if status.exit_code is not None or status.signal is not None:
            lab.broken("S10", f"{words}, signal {status.signal}", f"{replica} has not ended")
        return
    if (status.exit_code == 0) != (status.state is ReplicaState.SUCCEEDED):
        wanted = "exactly 0" if status.state is ReplicaState.SUCCEEDED else "not 0"
        lab.broken("R4", words, f"the exit code of what has {status.state} is {wanted}")
    if replica.reason in {Reason.ERROR, Reason.OOM} and status.exit_code != replica.exit_code:
        promise = "S11" if replica.signal else "S8"
        hand = _or_the_hand(lab, truth.exit_code)
        lab.broken(promise, words, f"its program ended with {replica.exit_code}{hand}")
    if replica.signal is not None and status.signal != replica.signal:
        lab.broken("S11", f"{words}, signal {status.signal}", f"{replica.signal} has ended it")
    if status.signal is None:
        return
    if status.signal not in Signals.__members__:
        lab.broken("S11", f"{words}, signal {status.signal!r}", "a signal's name is like 'SIGKILL'")
    if status.exit_code != 128 + Signals[status.signal]:
        number = 128 + Signals[status.signal]
        lab.broken("S11", f"{words}, signal {status.signal}", f"128 + {status.signal} is {number}")


def _times(lab: Calls, replica: Replica, status: ReplicaStatus, words: str) -> None:
    words = f"{words}, started_at={status.started_at}, finished_at={status.finished_at}"
    known = attempt_is_known(lab, status)
    if status.started_at is not None and status.state is ReplicaState.PENDING:
        lab.broken("S12", words, "what is pending has not started")
    if status.finished_at is not None and not status.state.terminal:
        lab.broken("S12", words, f"{replica} has not ended")
    ran = status.state is not ReplicaState.PENDING and status.state is not ReplicaState.CANCELLED
    if status.started_at is None and known and ran and replica.started is not None:
        lab.broken("S12", words, f"{replica} was started")
    if status.finished_at is None and known and status.state.terminal:
        lab.broken("S12", words, f"{replica} has ended")
    for name, value, window in (
        ("started", status.started_at, replica.started),
        ("ended", status.finished_at, replica.ended),
    ):
        if value is None or window is None:
            continue
        least, most = (
            end + sign * lab.harness.resolution for end, sign in zip(window, (-1, 1), strict=True)
        )
        if not least <= value <= most:
            lab.broken("S12", words, f"{replica} {name} from {window[0]:.1f} to {window[1]:.1f}")
    times = status.started_at, status.finished_at
    if None not in times and times[0] > times[1]:  # type: ignore[operator]
        lab.broken("S12", words, "nothing ends before it has started")
