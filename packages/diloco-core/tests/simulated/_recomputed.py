"""The states of a simulated run with encoded state, computed once more from what its store was
given, and from nothing else.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from diloco_core._arithmetic._clip import Clipping
from diloco_core._arithmetic._coded import CodedUpdates
from diloco_core._arithmetic._contribution import shares
from diloco_core._arithmetic._layout import CHUNK_BYTES
from diloco_core._arithmetic._reduction import reduce_shards
from diloco_core._arithmetic._sharded import Scratch, Source, as_sent
from diloco_core._arithmetic._sync_job import SyncJob
from diloco_core._codecs import _codec
from diloco_core._codecs._named import find_codec
from diloco_core._outer._delayed import DelayedFragment
from diloco_core._outer._fragment import Fragment
from diloco_core._run._incarnation._progress import published_shard, publishes_whole
from diloco_core._run._records._keys import MANIFEST, Delta, claim_key, shard_key
from diloco_core._run._records._manifest import Manifest
from diloco_core._run._records._records import Commit, Rollback
from diloco_core._run._states._kept import InMemory
from diloco_core._wire._delta import DeltaFormat
from diloco_core._wire._delta_reader import DeltaReader
from diloco_core._wire._published import WITHOUT, shard_metadata

from ._store import SimulatedStore


@dataclass(slots=True)
class Recomputed:
    """The findings of :func:`recompute`.

    Attributes:
        values: For every sync, the values of all fragments after it, if they are known.
        wrong: Published shards that are not what follows from the objects before them.
    """

    values: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)


Own = Mapping[tuple[int, int, int], torch.Tensor]
"""What incarnations of fixed runs hold of their contributions, as others would read them, by (rank,
epoch, sync).
"""


def recompute(
    store: SimulatedStore, log: Sequence[Commit | Rollback], fragments: Sequence[Fragment], own: Own
) -> Recomputed:
    """Compute every published shard again from the state before it and the contributions, as they
    were published.

    So no incarnation has used anything that is not in the store, such as values or residuals that
    only it knew: a shard that is made again, by whomever and however late, has the same bytes. In
    fixed runs the owner of a shard adds its own contribution, which it does not send.

    Args:
        store: The store, which remembers what was written to it. What was written elsewhere, to a
            store of which it is a copy, is not known; then values are known again from the next
            whole state on.
        log: The log of the run.
        fragments: Fragments of a replica that has ended. What they hold is replaced.
        own: What is not sent.
    """
    manifest = Manifest.from_json(store.decided[MANIFEST], MANIFEST)
    found = Recomputed()
    now = [0] * len(fragments)  # the last sync of every fragment
    values: dict[tuple[int, int], list[torch.Tensor]] = {}  # by sync and fragment
    for index, fragment in enumerate(fragments):
        if isinstance(fragment, DelayedFragment):
            fragment.attach()
        fragment.begin()
        if _load_whole(store, manifest, 0, index, fragment):
            values[0, index] = [copy.clone() for copy in fragment.copy]
    for record in log:
        if isinstance(record, Rollback):
            now = list(record.states)
        else:
            index, before = record.fragment, now[record.fragment]
            fragment, now[index] = fragments[index], record.sync
            inputs = [member.key for member in record.members]
            inputs += _keys(manifest, before, index, fragment) if before else []
            known = (before, index) in values and store.contents.keys() >= set(inputs)
            if manifest.membership == "fixed":
                known &= all(
                    (member.rank, member.epoch, record.sync) in own for member in record.members
                )
            if known:
                for copy, value in zip(fragment.copy, values[before, index], strict=True):
                    copy.copy_(value)
                found.wrong += _wrong_shards(store, manifest, record, before, fragment, own)
            if known or _load_whole(store, manifest, record.sync, index, fragment):
                values[record.sync, index] = [copy.clone() for copy in fragment.copy]
        if all((sync, index) in values for index, sync in enumerate(now)):
            found.values[record.sync] = [
                copy for index, sync in enumerate(now) for copy in values[sync, index]
            ]
    return found


def contributed(
    store: SimulatedStore, log: Sequence[Commit | Rollback], fragments: Sequence[Fragment]
) -> dict[str, torch.Tensor]:
    """Return what all replicas read of the contributions that count, by key.

    Those that were not written to this store are left out.

    Args:
        store: The store.
        log: The log of the run.
        fragments: Fragments of any replica, of one parameter each.
    """
    manifest = Manifest.from_json(store.decided[MANIFEST], MANIFEST)
    return {
        member.key: _read(store, manifest, fragments[record.fragment], member, {})[1]
        for record in log
        if isinstance(record, Commit)
        for member in record.members
        if member.key in store.contents
    }


def _keys(manifest: Manifest, sync: int, index: int, fragment: Fragment) -> list[str]:
    shards = range(fragment.layout.shards)
    return [shard_key(sync, index, number, manifest.initial) for number in shards]


def _load_whole(
    store: SimulatedStore, manifest: Manifest, sync: int, index: int, fragment: Fragment
) -> bool:
    """Load the values of a state if it is whole and was written here."""
    keys = _keys(manifest, sync, index, fragment)
    if not (publishes_whole(fragment, sync) or not sync) or not store.contents.keys() >= set(keys):
        return False
    origin = manifest.run() if sync else manifest.initial
    for number, key in enumerate(keys):
        shard = published_shard(fragment, sync, number, origin, CHUNK_BYTES)
        shard.load(InMemory(store.contents[key], key), key, Scratch(CHUNK_BYTES))
    return True


def _wrong_shards(
    store: SimulatedStore,
    manifest: Manifest,
    commit: Commit,
    before: int,
    fragment: Fragment,
    own: Own,
) -> list[str]:
    """Compute all shards of a sync. Returns what is wrong with those that were published."""
    assert fragment.coded is not None
    run, wrong = manifest.run(), []
    numbers = range(fragment.layout.shards)
    # Nothing of an earlier sync is left, wherever it may be kept.
    fragment.coded = CodedUpdates(
        fragment.coded.codec, fragment.coded.full_every, fragment.coded.fragments
    )
    fragment.rate = commit.rate
    readers, contributions = zip(
        *(_read(store, manifest, fragment, member, own) for member in commit.members), strict=True
    )
    for number in numbers:
        key = shard_key(commit.sync, commit.fragment, number, manifest.initial)
        without = _without(store.contents.get(key, b""))
        sources = [
            _source(values.zero_() if f"{member.rank}.{member.epoch}" == without else values)
            for member, values in zip(commit.members, map(torch.clone, contributions), strict=True)
        ]
        if fragment.terms.clip:
            clipping = Clipping(fragment, [reader.norms() for reader in readers])
            sources = [clipping.clipped(place, source) for place, source in enumerate(sources)]
        fragment.forget_outer(fragment.layout.chunks(number, CHUNK_BYTES))
        if before:
            older = shard_key(before, commit.fragment, number, manifest.initial)
            stored = published_shard(fragment, before, number, run, CHUNK_BYTES)
            data = InMemory(store.contents[older], older)
            fragment.install_outer(*stored.described(data, older)[1:])
        reduce_shards(
            fragment,
            [number],
            sources,
            CHUNK_BYTES,
            Scratch(CHUNK_BYTES),
            sync=commit.sync,
            shares=shares(fragment.terms.weighting, [member.amount for member in commit.members]),
        )
        shard = published_shard(fragment, commit.sync, number, run, CHUNK_BYTES)
        parts = shard.parts(shard_metadata(fragment, commit.sync, without))
        content = b"".join(map(bytes, parts))
        if store.contents.get(key, content) != content:
            wrong.append(
                f"{key} is not what follows from the state before it and the contributions"
            )
    return wrong


def _read(
    store: SimulatedStore, manifest: Manifest, fragment: Fragment, member: Delta, own: Own
) -> tuple[DeltaReader, torch.Tensor]:
    """The reader of a contribution, and all of its values: what was not sent is taken from ``own``,
    or is zero.
    """
    layout, form = fragment.layout, DeltaFormat(fragment)
    numbers, size = range(layout.shards), manifest.world_size
    if manifest.membership == "fixed":
        form = DeltaFormat(
            fragment, lambda rank: numbers[rank::size], sends_first=lambda rank: not rank
        )
    sent = [number for number in numbers if number not in form.omit(member.rank)]
    data, group = InMemory(store.contents[member.key], member.key), layout.groups[0]
    reader = form.reader(member, sent, member.key, lambda _: data)
    zeros = torch.zeros(group.numel, dtype=group.dtype, device="cpu")
    values = own.get((member.rank, member.epoch, member.sync), zeros).clone()
    for number in sent:
        for chunk in layout.chunks(number, CHUNK_BYTES):
            reader.read(values[chunk.start : chunk.stop])
    return reader, values


def held(job: SyncJob) -> torch.Tensor:
    """Return what a replica is about to contribute, as others would read all of it."""
    layout, source = job.layout, as_sent(job)
    values = torch.empty(layout.groups[0].numel, dtype=layout.groups[0].dtype, device="cpu")
    for number in range(layout.shards):
        for chunk in layout.chunks(number, CHUNK_BYTES):
            part = values[chunk.start : chunk.stop]
            part.copy_(source(chunk, part))
    return values


def _source(values: torch.Tensor) -> Source:
    return lambda piece, out: out.copy_(values[piece.start : piece.stop])


def _without(shard: bytes) -> str:
    """Return the contribution that a published shard lacks, by rank and epoch; empty if none."""
    size = int.from_bytes(shard[:8], "little")
    header = json.loads(shard[8 : 8 + size])["__metadata__"] if shard else {}
    return str(header.get(WITHOUT, ""))


def was_passed(store: SimulatedStore, key: str) -> bool:
    """Whether a shard was published without what an earlier incarnation had not sent, and has been
    deleted since.

    When that incarnation wakes up after this, it may publish the shard with its own part. Others
    look at the log before they use it.
    """
    deleted = any(changed == key and size is None for _, changed, size in store.history)
    return deleted and bool(_without(store.contents[key]))


def lost_parts(
    store: SimulatedStore, log: Sequence[Commit | Rollback], fragments: Sequence[Fragment]
) -> dict[str, torch.Tensor]:
    """Return which elements of contributions were lost with those who made them, by the key of the
    contribution.

    The headers of the shards of their ranks say so. These shards hold the mean with a zero in their
    place. Nothing may be lost as long as no newer incarnation has taken the rank of the one that
    holds it.
    """
    since: dict[str, float] = {}
    for time, key, _ in store.history:
        since.setdefault(key, time)
    manifest = Manifest.from_json(store.decided[MANIFEST], MANIFEST)
    lost: dict[str, torch.Tensor] = {}
    if manifest.membership != "fixed":
        return lost
    for commit in (record for record in log if isinstance(record, Commit)):
        layout = fragments[commit.fragment].layout
        for shard in range(layout.shards):
            key = shard_key(commit.sync, commit.fragment, shard, manifest.initial)
            without = _without(store.contents.get(key, b""))
            for member in commit.members:
                claim = claim_key(member.rank, member.epoch + 1)
                held = since.get(claim, math.inf) > since.get(key, 0.0)
                if f"{member.rank}.{member.epoch}" != without or held:
                    continue
                mask = lost.setdefault(
                    member.key, torch.zeros(layout.groups[0].numel, dtype=torch.bool)
                )
                for piece in layout.shard(shard):
                    mask[piece.start : piece.stop] = True
    return lost


_ROUNDING = 1e-4  # of sums that replicas have computed in another order


def is_plain(codec: str) -> bool:
    """Return whether a codec changes nothing."""
    return find_codec(codec).plain


def is_sparse(codec: str) -> bool:
    """Return whether a codec sends few values."""
    return _codec.is_sparse(find_codec(codec))


def decoded(codec: str, values: torch.Tensor) -> torch.Tensor:
    """Return what is read of values, fp32, that were sent with a codec."""
    read, found = torch.empty_like(values), find_codec(codec)
    found.decode(found.encode(values), read)
    return read


def sent_of(codec: str, values: torch.Tensor, read: torch.Tensor) -> torch.Tensor:
    """What a codec sends of values: what was read, if it may be that, and otherwise what the codec
    would send here.

    Args:
        codec: A sparse one.
        values: What was to be sent, fp32.
        read: What was read, of the same shape.
    """
    sent = decoded(codec, values)
    # If it had been chosen of nothing but what was read, the codec would have made the same of it.
    chosen = values.where(read != 0, 0.0)
    again = decoded(codec, chosen)
    # Of equal values any may be chosen, but all that are chosen are the largest ones.
    is_as_large = abs(float(chosen.norm() - values.where(sent != 0, 0.0).norm())) < _ROUNDING
    return read if is_as_large and is_near(read, again) else sent


def is_near(values: torch.Tensor, others: torch.Tensor) -> bool:
    """Return whether values differ by rounding only."""
    return float((values - others).abs().max()) < _ROUNDING
