"""How a replica continues a run that has stopped: it claims its rank again, and takes up the run's state with the others."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..._errors import RunExistsError
from ..._exchange._endings import Progress
from .._records._records import noted
from .._watch import Watch
from ._base import check_fits, find_run, read_manifest
from ._choosing import choose, wait_for_choice
from ._ended import check_ended, check_not_claimed, next_life
from ._loading import Loader
from ._meeting import Meeting, claim_again

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..._arithmetic._sync_job import SyncJob
    from ..._exchange._base import Schema
    from ..._exchange._resumable import ResumableJob, TakenUp
    from ..._store._patient import Patient
    from ..._timing import Timing
    from .._liveness import Liveness
    from .._participant import Participant
    from .._records._records import Claim


def claim_next(
    store: Patient,
    claim: Claim,
    schema: Schema,
    timing: Timing,
    liveness: Liveness,
    *,
    may_go_back: bool,
) -> Meeting:
    """Claim a rank of a run that has stopped. Returns where this replica meets the others; they have not met yet.

    Args:
        store: The run's prefix.
        claim: What this process declares, as if it began the run.
        schema: What all replicas must have in common.
        timing: Limits and clock.
        liveness: The beat of this replica, which it does not write yet.
        may_go_back: Whether to pass over later manifests that are damaged.

    Raises:
        RendezvousError: There is no run to resume.
        RunExistsError: A process of the run is alive, or another process resumes the rank, too.
        MismatchError: This replica does not fit the run.
        CorruptedObjectError: The manifest is damaged, or it is gone.
        FormatError: Another version of diloco-core has begun the run.
    """
    noted_before = noted(store.list("notes/"))
    manifest = find_run(store, timing, may_go_back=may_go_back)
    check_fits(manifest, schema, claim.rank, claim.world_size, store.uri)
    life = next_life(store, manifest, claim.rank)
    check_ended(store, timing, manifest, claim.rank, life)
    check_not_claimed(store, manifest, claim.rank, life)
    # Signs of life may have been watched for minutes.
    if read_manifest(store, timing, manifest.life) != manifest:
        raise RunExistsError(
            f"the run at {store.uri} was deleted or replaced while this process looked whether the earlier ones are still alive. "
            "This process stops. Nothing was changed."
        )
    own_claim = replace(claim, life=life)
    claim_again(store, own_claim, schema, timing)
    liveness.life = life
    return Meeting(store, own_claim, manifest, timing, liveness, noted_before)


@dataclass(frozen=True, slots=True)
class Resumed:
    """Where a replica stands that has taken up a run.

    Attributes:
        participant: This replica, which now knows the run's earlier names.
        progress: How many syncs the run has finished.
        taken: The state that was taken up.
        obsolete: Keys of this rank that are no longer needed when all replicas have taken up the run.
        previous: Keys of this rank that the last syncs have superseded; see :class:`._old_states.OldStates`.
        watch: For rank 0: what watches over the objects that it has stored.
    """

    participant: Participant
    progress: Progress
    taken: TakenUp
    obsolete: list[str]
    previous: list[list[str]]
    watch: Watch | None


def take_up(
    participant: Participant,
    meeting: Meeting,
    schema: Schema,
    jobs: Sequence[ResumableJob],
    initial: Sequence[SyncJob],
    *,
    may_go_back: bool,
) -> Resumed:
    """Load the state that rank 0 chooses.

    Args:
        participant: This replica, which has met the others.
        meeting: Where it has met them.
        schema: What all replicas have in common.
        jobs: All fragments, in the order in which they are synced.
        initial: The first sync of each fragment, for states that are older than any outer step.
        may_go_back: Whether rank 0 may choose an older state if the newest one is damaged.

    Raises:
        RendezvousError: The run has not published a state.
        CorruptedObjectError: The state is damaged; the error says which object.
        ReplicaLostError: Rank 0 has failed.
        RendezvousTimeoutError: Rank 0 has not chosen in time.
        RunExistsError: Other processes resume the run, too.
    """
    claims = meeting.claims
    loader = Loader(participant, jobs, initial)
    watch = None
    if participant.rank == 0:
        manifest = choose(
            participant,
            claims,
            meeting.manifest,
            schema,
            loader.is_whole,
            may_go_back=may_go_back,
        )
        watch = Watch(participant.store, participant.timing, claims[0], manifest, schema.unsynced)
    else:
        manifest = wait_for_choice(participant, claims[0].life, meeting)
    taken, obsolete, previous = loader.load(manifest)
    _, sync = manifest.earlier[-1]
    return Resumed(
        replace(participant, earlier=manifest.earlier, given_up=manifest.given_up),
        Progress(sync + 1, sync + 1 - len(jobs)),
        taken,
        obsolete,
        previous,
        watch,
    )
