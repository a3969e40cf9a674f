"""How a replica's part in a strict run ends: it tells the other replicas, if it may speak for its rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._errors import RunExistsError
from .._exchange._endings import Ending
from ._claims import watch_own
from ._records._records import claim_key

if TYPE_CHECKING:
    from .._exchange._endings import Progress
    from .._store._patient import Patient
    from .._timing import Timing
    from ._liveness import Liveness
    from ._records._records import Claim
    from ._watch import Watch

_TELL_SECONDS = 10.0


def leave_run(
    store: Patient,
    own_claim: Claim,
    timing: Timing,
    liveness: Liveness,
    progress: Progress,
    watch: Watch | None,
) -> None:
    """Tell the other replicas that this one is done. Rank 0 also checks the manifest, and the objects that are not synced."""
    if not _holds_rank(store, own_claim, timing):
        return
    if watch is not None:
        # Before the run may be resumed, which needs it.
        watch.look_at_manifest()
    liveness.tell(Ending(own_claim.rank, "left", progress))
    if watch is not None:
        watch.look()


def tell_failure(
    store: Patient,
    own_claim: Claim | None,
    timing: Timing,
    liveness: Liveness,
    ending: Ending,
    error: BaseException,
    watch: Watch | None,
    *,
    resumes: bool,
) -> None:
    """Tell the other replicas that this one has failed, if it may write a note for its rank. Never raises.

    Args:
        store: The run's prefix.
        own_claim: The claim of this process; None if it has not claimed its rank yet.
        timing: Limits and clock.
        liveness: Writes the note.
        ending: What the note says.
        error: Why it has failed. If the others cannot be told, that is noted there.
        watch: For rank 0: also writes the manifest again, if it is lost.
        resumes: Whether this process was to resume a run.
    """
    # If the store cannot be reached, waiting for it once more would only delay the error.
    store.patience = min(store.patience, _TELL_SECONDS)
    try:
        if own_claim is not None:
            may_tell = _holds_rank(store, own_claim, timing)
        else:
            may_tell = not resumes and _is_free(store, ending.rank, error)
        if may_tell:
            liveness.tell(ending)
        if watch is not None and not isinstance(error, RunExistsError):
            watch.look_at_manifest()
    except Exception as telling_error:  # noqa: BLE001 - the first error is the one to report
        error.add_note(f"the other replicas could not be told of this failure: {telling_error}")


def _holds_rank(store: Patient, own_claim: Claim, timing: Timing) -> bool:
    """Whether this process still holds its rank: a process of an earlier run must not end a later one."""
    try:
        watch_own(store, own_claim, timing)
    except RunExistsError:
        return False
    return True


def _is_free(store: Patient, rank: int, error: BaseException) -> bool:
    """Whether no process holds a rank. A note must not end a run that another process takes part in."""
    return not isinstance(error, RunExistsError) and store.peek(claim_key(rank)) is None
