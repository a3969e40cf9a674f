"""The state that a resumed run continues with: rank 0 chooses it and writes it down, and the others read what it has chosen."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from ..._errors import (
    CorruptedObjectError,
    RendezvousError,
    RendezvousTimeoutError,
    RunExistsError,
)
from ..._exchange._endings import Progress
from ..._timing import Wait
from .._claims import check_own
from .._records._manifest import Manifest, cut, manifest_key, manifest_keys
from .._states import (
    finished_syncs,
    lost_manifest,
    missing_keys,
    states,
    syncs_before,
    unknown_names,
)
from .._watch import write_manifest
from ._base import GO_BACK, manifest_if_written, newest_manifest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ..._exchange._base import Schema
    from ..._store._patient import Patient
    from .._participant import Participant
    from .._records._records import Claim
    from ._meeting import Meeting

_log = logging.getLogger("diloco_core")


def choose(
    participant: Participant,
    claims: Sequence[Claim],
    resumed: Manifest,
    schema: Schema,
    is_whole: Callable[[Manifest, int, dict[str, int]], bool],
    *,
    may_go_back: bool,
) -> Manifest:
    """Choose the state, and write the new manifest, which names it. Rank 0 does this.

    Args:
        participant: This replica, which has met the others.
        claims: The claims of all ranks, in rank order.
        resumed: The newest manifest when this process began.
        schema: What the replicas have in common.
        is_whole: Whether every byte of the state after a sync is as it was written; given the manifest, the number of the sync,
            and the listing of ``state/``.
        may_go_back: Whether an older state may be taken if the newest one is damaged. It is verified then.

    Raises:
        RendezvousError: The run has not published a state.
        CorruptedObjectError: The newest state is damaged or incomplete.
        RunExistsError: A later process has resumed the run, or another one is resuming it at the same time.
    """
    store, timing, life = participant.store, participant.timing, claims[0].life
    check_own(store, claims[0], timing)
    if any(store.read(key, lambda _: True) for key in manifest_keys(life)):
        # Only a store that ignores conditional writes lets two processes claim the same life.
        raise RunExistsError(
            f"two processes of rank 0 resume the run at {store.uri} at the same time, and the other one has already chosen "
            "the state to continue from. Start every rank only once. When all of these processes have ended, the run can be "
            "resumed."
        )
    # Read again: since this process began, another attempt may have got as far as choosing a state. It has ended.
    base = newest_manifest(store, timing, life, may_go_back=may_go_back)
    if base is None:
        raise CorruptedObjectError(f"the manifest in {store.uri} is gone")
    if base.first != resumed.first:
        raise RunExistsError(
            f"{store.uri} holds another run by now than the one that this process was to resume: the prefix was emptied and used "
            "again. This process stops and leaves that run alone."
        )
    sync, given_up = _choose(store, base, life, is_whole, may_go_back=may_go_back)
    settings = {**schema.settings, "committed": base.settings["committed"]}
    manifest = replace(
        base,
        run_id=claims[0].run_id,
        run=participant.run,
        settings=settings,
        members=[(claim.life, claim.nonce) for claim in claims],
        earlier=cut(base, sync),
        given_up=given_up,
    )
    write_manifest(store, manifest, claims[0], timing)
    return manifest


def wait_for_choice(participant: Participant, life: int, meeting: Meeting) -> Manifest:
    """Wait until rank 0 has chosen the state. Returns the new manifest.

    Args:
        participant: This replica, which has met the others.
        life: The life of rank 0.
        meeting: Where this replica has met the others. Rank 0 may still have to read what it said there.

    Raises:
        ReplicaLostError: Rank 0 has failed.
        RendezvousTimeoutError: Rank 0 has not chosen in time.
        RunExistsError: Another process of rank 0 has written the manifest than the one that this replica has met.
    """
    store, timing = participant.store, participant.timing

    def look_around() -> None:
        participant.check_not_resumed()
        meeting.write_again()
        participant.liveness.check([0], Progress(), "the choice of the state to continue from")

    wait = Wait(
        timing,
        store.near,
        timing.join_timeout,
        look_around,
        lambda: RendezvousTimeoutError(
            f"rank 0 did not choose the state to continue from within {timing.join_timeout:g} s: look at its logs",
            [0],
        ),
        downtime=lambda: store.downtime,
    )
    while (manifest := manifest_if_written(store, timing, life)) is None:
        wait.pause()
    if manifest.run != participant.run:
        raise RunExistsError(
            f"{store.uri}/{manifest_key(life)} was written by another process of rank 0 than the one that this replica has met: "
            "start all ranks again with resume=True"
        )
    return manifest


def _choose(
    store: Patient,
    base: Manifest,
    life: int,
    is_whole: Callable[[Manifest, int, dict[str, int]], bool],
    *,
    may_go_back: bool,
) -> tuple[int, list[str]]:
    """The number of the sync after which the run continues, and the names of which nothing counts from then on."""
    listing, commits = store.list("state/"), store.list("commits/")
    published = [*listing, *commits]
    lost = lost_manifest(base, published, store.list("claims/"), store.uri, life)
    if lost and not may_go_back:
        raise CorruptedObjectError(f"{lost} {GO_BACK}")
    if lost:
        _log.error("%s", lost)
    notes = store.list("notes/")
    finished = finished_syncs(base, store.uri, lambda key: store.get(key) if key in notes else None)
    finished += syncs_before(base, store.list("deltas/"), store.list("inner/"))
    found = states(base, listing, commits, finished)
    whole = [sync for sync in found.whole if not may_go_back or is_whole(base, sync, listing)]
    if not whole and found.least < 0 and not found.whole:
        raise RendezvousError(
            f"the run at {store.uri} ended before it had published its initial state, so there is nothing to resume. Begin a "
            "new run on another prefix, without resume=."
        )
    missing = missing_keys(base, listing, max(found.least, 0))
    was_there = "although later objects show that it was there. Something else has deleted it."
    damage = f"{_named(missing)} missing" if missing else "its objects are damaged"
    if not whole and lost:
        raise CorruptedObjectError(
            f"{lost} Newer states may be there and whole, but only that object describes them. {store.uri} holds no whole state "
            f"any more that {manifest_key(base.life)} describes: {damage}. Without a copy, begin a new run on another prefix."
        )
    if not whole:
        reason = f"{damage}, {was_there}" if missing else f"{damage}."
        raise CorruptedObjectError(
            f"{store.uri} holds no whole state any more: {reason} If you have a copy, put it back. Otherwise, begin a new run on "
            "another prefix."
        )
    if whole[0] < found.least and missing:  # what is only damaged has been named by is_whole
        text = (
            f"the state after outer step {base.outer_steps(found.least)} in {store.uri} is incomplete: {damage}, "
            f"{was_there}"
        )
        if not may_go_back:
            raise CorruptedObjectError(f"{text} {GO_BACK}")
        _log.error("%s", text)
    if whole[0] < max(found.least, found.whole[0]):
        _log.error(
            "the run at %s continues from outer step %d, since no newer state is whole. What it had learned since is lost.",
            store.uri,
            base.outer_steps(whole[0]),
        )
    return whole[0], sorted({*base.given_up, *unknown_names(base, published)})


def _named(keys: Sequence[str]) -> str:
    return f"{keys[0]} and {len(keys) - 1} more" if len(keys) > 1 else keys[0]
