"""Claims: which incarnation of a rank is the rightful one, and which run the prefix belongs to.

An incarnation claims the epoch after all earlier epochs of its rank, and its predecessors stop. A
run never deletes claims, but a claim may still be lost. So a new incarnation also looks for other
traces of earlier incarnations, and restores its own claim if it is lost.

The manifest is the run's claim to the prefix. A process that finds another one there stops.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, TypeVar

from .._errors import CorruptedObjectError, FencedError, FormatError, RunExistsError, StoreError
from .._host import host_name, is_gone
from .._store._patient import Patient
from .._store._reread import copy_key
from .._wire._sealed import Fields, seal, unseal, unsealed_fields
from ._incarnation._incarnation import LOST, Incarnation
from ._records._keys import MANIFEST, Delta, Hint, Wish, claim_key, commit_key, epochs, parse_inner
from ._records._manifest import Manifest
from ._records._records import Rollback, of_run, read_record

T = TypeVar("T")

_MOST = 1000

_log = logging.getLogger("diloco_core")


def claim(
    store: Patient,
    rank: int,
    run: str,
    settings: Mapping[str, str] | None = None,
    check: Callable[[], object] = bool,
) -> tuple[int, bytes]:
    """Claim the next epoch of a rank; the rank's earlier incarnations will stop.

    Returns the epoch and the claim's record.

    A claim counts by its key alone, even if it cannot be read: the epoch is taken, and no other
    incarnation may take it. The content of a claim says whose claim it is.

    Args:
        store: The run's prefix.
        rank: The rank.
        run: Name of the run. Records of another run say nothing about the incarnations of this one.
        settings: In fixed runs: settings that may change when the run is resumed, in which all
            ranks must agree.
        check: Called right before the claim; raises an error if the rank must not be claimed.

    Raises:
        RunExistsError: Other incarnations have claimed epoch after epoch before this one could.
    """
    claimed = epochs(store.list(f"claims/{rank:05}/"), rank)
    highest = max([*claimed, *_traces(store, rank, run)], default=0)
    identity: dict[str, Any] = {
        "rank": rank,
        "nonce": secrets.token_hex(8),
        "host": host_name(),
        "pid": os.getpid(),
        **({} if settings is None else {"settings": dict(settings)}),
    }
    # An earlier incarnation looks only for the claim right after its own, so there must be no gaps.
    lost = sorted(set(range(max(1, highest - _MOST), highest + 1)) - set(claimed))
    if lost:
        _log.warning(
            "rank %d: the claims of earlier incarnations (epochs %s) are gone from %s, so others "
            "take their place. Something outside this run deletes its objects: stop it.",
            rank,
            lost,
            store.uri,
        )
    for epoch in lost:
        store.create(claim_key(rank, epoch), partial(bytes, _record(epoch, identity)))
    for epoch in range(highest + 1, highest + 1 + _MOST):
        key, record = claim_key(rank, epoch), _record(epoch, identity)
        check()
        if store.create(key, partial(bytes, record)) or store.peek(key) == record:
            return epoch, record
    raise RunExistsError(
        f"rank {rank} could not join the run at {store.uri}: for each of the {_MOST} epochs that "
        f"it tried, another process had just claimed rank {rank}. Something starts replicas of "
        "this rank again and again: stop it, then start one replica."
    )


def newest_epoch(store: Patient, rank: int) -> int:
    """The highest epoch that incarnations of a rank have claimed; 0 if there is none."""
    return max(epochs(store.list(f"claims/{rank:05}/"), rank), default=0)


def check_claim(incarnation: Incarnation) -> None:
    """Check whether this incarnation is still the rightful one of its rank.

    Every call checks that the next epoch is not claimed. This incarnation's own claim is read only
    if nothing else shows that its epoch is taken: before its first contribution, and after it has
    stood still or was left out of a sync.

    Raises:
        FencedError: A newer incarnation of this rank has taken over.
    """
    if incarnation.late or incarnation.standing.members.get(incarnation.rank) != incarnation.epoch:
        watch_claim(incarnation)
    # This check comes last, as close as possible to what the caller is about to write.
    if incarnation.store.peek(claim_key(incarnation.rank, incarnation.epoch + 1)) is not None:
        raise fenced(incarnation, "a newer incarnation")


def watch_claim(incarnation: Incarnation) -> None:
    """Make sure that this incarnation's claim is in the store.

    Without it another incarnation could take the same epoch.

    Raises:
        FencedError: Another incarnation has taken it.
    """
    key = claim_key(incarnation.rank, incarnation.epoch)

    def parse(data: bytes) -> bytes:
        # Raises if the claim is damaged, so that damage does not pass for another's claim.
        unseal("claim", key, data, incarnation.origin(key))
        return data

    if incarnation.watch(key, incarnation.claim, parse) is not None:
        raise fenced(incarnation, "another incarnation")


def read_claim(store: Patient, rank: int, epoch: int, parse: Callable[[Fields], T]) -> T | None:
    """Return what ``parse`` makes of an incarnation's claim; None if the claim cannot be read."""
    key = claim_key(rank, epoch)
    data, origin = store.peek(key), f"{store.uri}/{key}"
    try:
        return parse(unsealed_fields("claim", key, data, origin)) if data else None
    except (CorruptedObjectError, FormatError):
        return None


def claimed_settings(store: Patient, rank: int, epoch: int) -> Mapping[str, str] | None:
    """Return the settings in an incarnation's claim in a fixed run; None if it cannot be read."""
    return read_claim(store, rank, epoch, lambda fields: fields.texts_by_name("settings"))


def incarnation_is_gone(store: Patient, rank: int, epoch: int) -> bool:
    """Say whether the process that claimed an epoch is certainly gone from this machine."""

    def parse(fields: Fields) -> bool:
        return is_gone(fields.whole("pid"), fields.text("host"))

    return read_claim(store, rank, epoch, parse) or False


def _record(epoch: int, identity: dict[str, Any]) -> bytes:
    return seal("claim", claim_key(int(identity["rank"]), epoch), {"epoch": epoch, **identity})


def fenced(incarnation: Incarnation, successor: str) -> FencedError:
    return FencedError(
        f"{successor} of rank {incarnation.rank} has joined the run at {incarnation.store.uri} "
        f"and takes its place, so this incarnation (epoch {incarnation.epoch}) stops. A launch "
        "with resume=True takes a run over that still goes on: it is for one that has ended. If "
        "two replicas were started with this rank by mistake, give each a rank of its own.",
        incarnation.rank,
        incarnation.epoch,
    )


def _traces(store: Patient, rank: int, run: str) -> Iterator[int]:
    """Yield the epochs of a rank that appear in objects other than claims.

    Some may be 0 or occur more than once.
    """
    for epoch_and_sync in filter(None, map(parse_inner, store.list(f"inner/{rank:05}/"))):
        yield epoch_and_sync[0]
    newest = 0
    for key in store.list("deltas/"):
        payload = Delta.parse(key) or Hint.parse(key) or Wish.parse(key)
        if payload is not None:
            newest = max(newest, payload.sync)
            writer = payload.rate if isinstance(payload, Wish) else payload
            if writer.rank == rank:
                yield writer.epoch
    # The newest record belongs to the sync of the newest contributions, or to the sync before it.
    for sync in range(max(1, newest - 1), newest + 1):
        data = store.peek(commit_key(sync))
        if data is None:
            continue
        try:
            origin = f"{store.uri}/{commit_key(sync)}"
            record = of_run(read_record(data, sync, origin), run, origin)
        except (CorruptedObjectError, FormatError, RunExistsError):
            continue
        if isinstance(record, Rollback):
            yield record.fence.get(rank, 0)
        else:
            yield from (member.epoch for member in record.members if member.rank == rank)


def watch_manifest(incarnation: Incarnation) -> None:
    """Make sure that the run's manifest and its copy are there.

    Without both no replica can join or resume the run.

    Raises:
        RunExistsError: Another run's manifest has taken its place.
        FormatError: Another run's manifest, written by another version, has taken its place.
    """
    # Reading sets the time before anything is written: the store calls check_run() before every
    # write, which would look again.
    before, manifest = incarnation.standing.checked, incarnation.manifest
    own, origin = manifest.to_json(), incarnation.origin(MANIFEST)
    try:
        other = incarnation.watch(MANIFEST, own, lambda data: Manifest.from_json(data, origin))
        if other is not None and other != manifest:
            raise RunExistsError(
                f"the manifest at {incarnation.store.uri} now belongs to another run (begun by run "
                f"{other.run_id!r}, rank {other.writer}): two runs share this prefix. This replica "
                f"(rank {incarnation.rank} of run {manifest.run_id!r}) stops before the runs mix. "
                "Give every run a prefix of its own. To continue this run, put its manifest back."
            )
        _look_at_copy(incarnation, own)
    except BaseException:
        incarnation.standing.checked = before
        raise


def _look_at_copy(incarnation: Incarnation, own_manifest: bytes) -> None:
    """Write the manifest's copy again if it is lost or damaged.

    The manifest itself is there, so the prefix is this run's.
    """
    key = copy_key(MANIFEST)
    origin = incarnation.origin(key)
    try:
        data = incarnation.store.peek(key)
        if data == own_manifest:
            return
        incarnation.say.error(LOST, f"{origin} is {'gone' if data is None else 'damaged'}")
        incarnation.store.put(key, lambda: [own_manifest])
    except (StoreError, OSError) as error:
        incarnation.say.error(
            "%s cannot be checked or written again: %s. The run goes on without this copy of its "
            "manifest.",
            origin,
            str(error).rstrip("."),
        )


def check_run(incarnation: Incarnation) -> None:
    """Check that the prefix still belongs to the run, unless that was done less than a grace ago.

    An incarnation that has stood still may wake up when the prefix was emptied meanwhile and
    belongs to another run, whose objects it must leave alone. So this is called before everything
    that an incarnation writes or deletes, and while it waits.

    Raises:
        RunExistsError: Another run's manifest has taken the place of this run's.
        FormatError: Another run's manifest, written by another version, has taken its place.
    """
    if incarnation.timing.clock() - incarnation.standing.checked >= incarnation.settings.grace:
        watch_manifest(incarnation)
