"""Claims: which life of a rank is the rightful one.

A life claims the epoch after all that the rank has had, and its predecessors stop. Claims are never deleted by a run, but one
may be lost all the same, so a life counts on other traces of earlier ones too, and sees to its own.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
from functools import partial
from typing import TYPE_CHECKING

from .._errors import CorruptedObjectError, FencedError, FormatError, RunExistsError
from .._wire._sealed import seal, unseal
from ._log._keys import Delta, Hint, claim_key, commit_key, epochs, parse_inner
from ._log._records import Rollback, of_run, read_record

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .._store._patient import Patient
    from ._life._life import Life

_MOST = 1000

_log = logging.getLogger("diloco_core")


def claim(store: Patient, rank: int, run: str) -> tuple[int, bytes]:
    """Claim the next epoch of a rank; the rank's earlier lives will stop. Returns the epoch and the claim's record.

    A claim counts by its key alone, also one that cannot be read: it was taken, and nobody else may take it. What it holds
    tells a life whether it is its own.

    Args:
        store: The run's prefix.
        rank: Whose.
        run: Name of the run: records of another one tell nothing of its lives.
    """
    claimed = epochs(store.list(f"claims/{rank:05}/"), rank)
    highest = max([*claimed, *_traces(store, rank, run)], default=0)
    who: dict[str, int | str] = {
        "rank": rank,
        "nonce": secrets.token_hex(8),
        "host": socket.gethostname(),
        "pid": os.getpid(),
    }
    # An earlier life looks for the claim after its own only, so there may be no gaps.
    lost = sorted(set(range(max(1, highest - _MOST), highest + 1)) - set(claimed))
    if lost:
        _log.warning(
            "rank %d: the claims of earlier lives %s are gone from %s. Writing claims in their place. Something else deletes "
            "objects of this run.",
            rank,
            lost,
            store.uri,
        )
    for epoch in lost:
        store.create(claim_key(rank, epoch), partial(bytes, _record(epoch, who)))
    for epoch in range(highest + 1, highest + 1 + _MOST):
        key, record = claim_key(rank, epoch), _record(epoch, who)
        if store.create(key, partial(bytes, record)) or store.get(key) == record:
            return epoch, record
    raise RunExistsError(
        f"rank {rank} of {store.uri} is claimed over and over again: something starts it in a loop"
    )


def check_claim(life: Life) -> None:
    """See whether this life is still the rightful one of its rank.

    That the next epoch is not claimed is looked for every time. The own claim is read where nothing else shows that this
    epoch is taken: before the first contribution, and where this life has stood still or was passed over.

    Raises:
        FencedError: A newer life of this rank has taken over.
    """
    if life.late or life.members.get(life.rank) != life.epoch:
        watch_claim(life)
    # Last, right before what the caller is about to write.
    if life.store.get(claim_key(life.rank, life.epoch + 1)) is not None:
        raise _fenced(life, "a newer life")


def watch_claim(life: Life) -> None:
    """See to it that the own claim is there: without it another life could take the same epoch.

    Raises:
        FencedError: One has.
    """
    key, own = claim_key(life.rank, life.epoch), life.claim

    def read() -> bytes | None:
        data = life.store.get(key)
        if data is not None and data != own:
            unseal("claim", key, data, life.origin(key))  # damage is not another life
        return data

    text = "rank %d: %s. Writing the claim again with the same content. Something else deletes or changes objects of this run."
    try:
        stored = life.again(read)
    except CorruptedObjectError as error:
        _log.error(text, life.rank, str(error).rstrip("."))
        life.store.put(key, lambda: [own])
        return
    if stored is None:
        _log.error(text, life.rank, f"{life.origin(key)} is gone")
        if life.store.create(key, partial(bytes, own)):
            return
        stored = life.again(read)
    if stored is not None and stored != own:
        raise _fenced(life, "another life")


def _record(epoch: int, who: dict[str, int | str]) -> bytes:
    return seal("claim", claim_key(int(who["rank"]), epoch), {"epoch": epoch, **who})


def _fenced(life: Life, who: str) -> FencedError:
    return FencedError(
        f"{who} of rank {life.rank} has joined the run at {life.store.uri}: this one (epoch {life.epoch}) stops",
        life.rank,
        life.epoch,
    )


def _traces(store: Patient, rank: int, run: str) -> Iterator[int]:
    """Epochs of a rank that something else than a claim speaks of."""
    for written in filter(None, map(parse_inner, store.list(f"inner/{rank:05}/"))):
        yield written[0]
    newest = 0
    for key in store.list("deltas/"):
        payload = Delta.parse(key) or Hint.parse(key)
        if payload is not None:
            newest = max(newest, payload.sync)
            if payload.rank == rank:
                yield payload.epoch
    # The newest record is of the newest contributions, or of those before them.
    for sync in range(max(1, newest - 1), newest + 1):
        data = store.get(commit_key(sync))
        if data is None:
            continue
        try:
            origin = f"{store.uri}/{commit_key(sync)}"
            record = of_run(read_record(data, sync, origin), run, origin)
        except (CorruptedObjectError, FormatError, RunExistsError):
            continue
        lives = (
            record.fence
            if isinstance(record, Rollback)
            else {m.rank: m.epoch for m in record.members}
        )
        yield lives.get(rank, 0)
