"""What a sync writes and reads besides contributions and published state: how large its records are, and how long keys are.

They are written here as the exchange writes them (:mod:`.._run._records`), with numbers as they are in the middle of a run.
``tests/planner/test_records.py`` compares them with those of the exchange, byte by byte.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .._wire._sealed import seal
from .._wire._sections import CHECKSUM_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping

SYNC = 1000
STEPS = 4950, 5000
"""The first of a rank's inner steps that a contribution covers, and one past the last of them."""
HEX = "0123456789abcdef"
"""As long as most digests in keys and records."""
RATE = "3fe6666666666666"
"""An outer learning rate."""

_MANIFEST = 1130
"""Bytes of a manifest without its shards and tensors: the settings of the run, and what all runs have."""
_TENSOR = 180
"""Bytes that a manifest has for a tensor: its name and its shape twice, and where it lies."""
BEAT = 26
"""Bytes of a sign of life."""


@dataclass(frozen=True, slots=True)
class Records:
    """Sizes in bytes.

    Attributes:
        contribution_key: The key of a contribution.
        published_key: The key of a published shard.
        record_key: The key of the record of a sync. Those of other records are about as long.
        commit: The record of a sync.
        done: The record which says that all shards of a state are there.
        manifest: The manifest.
        claim: The claim of a replica, where it is read again during a run.
    """

    contribution_key: int
    published_key: int
    record_key: int
    commit: float
    done: float
    manifest: float
    claim: float


def records(
    *, replicas: int, shards: int, tensors: int, full: bool, fixed: bool = False
) -> Records:
    """The records of a run.

    Args:
        replicas: The number of replicas.
        shards: The number of shards.
        tensors: The number of tensors that are synced.
        full: Whether all syncs publish whole values.
        fixed: Whether membership is fixed.
    """
    rank = replicas // 2
    contribution, record = contribution_key_of(rank), f"commits/{SYNC:08}.json"
    listed = (replicas, _member(rank)), (replicas, [rank, STEPS[1]])
    fields = commit_fields()
    whole = _repeated(len(seal("commit", record, fields)), *listed)
    # A published shard has two checksums in its record, with quotes and commas.
    done = seal("done", f"state/{SYNC:08}/000.done.json", done_fields(fields, full=full))
    sums = 2 * shards, 2 * CHECKSUM_BYTES * "0"
    return Records(
        len(contribution),
        len(f"state/{SYNC:08}/000.{shards // 2:05}.safetensors"),
        len(record),
        whole,
        # Two lists of checksums have one separator less than one that is as long as both.
        _repeated(len(done), *listed, sums) - 2,
        _MANIFEST + _repeated(0, sums) + _TENSOR * (tensors - 1),
        len(seal("claim", "claims/00010/0001.json", {**CLAIM, **(_SETTINGS if fixed else {})})),
    )


def contribution_key_of(rank: int) -> str:
    """The key of a contribution."""
    start, stop = STEPS
    return f"deltas/{SYNC:08}/{rank:05}.0001.{start}-{stop}.{HEX}.{HEX}.1.safetensors"


def commit_fields() -> dict[str, Any]:
    """The fields of the record of a sync, without members."""
    return {
        "run": HEX,
        "sync": SYNC,
        "fragment": 0,
        "base": HEX,
        "previous": HEX,
        "rollback": 0,
        "members": [],
        "positions": [],
        "outer_steps": SYNC,
        "outer_lr": [RATE],
        "lr_wish": {"n": 0, "rank": 0, "epoch": 0},
    }


def done_fields(commit: Mapping[str, Any], *, full: bool) -> dict[str, Any]:
    """The fields of the record of a complete state, without the checksums of its shards."""
    return {
        "sync": SYNC,
        "fragment": 0,
        **({} if full else {"full": False}),
        "sums": [],
        "rests": [],
        "commit_digest": HEX,
        "commit": commit,
    }


CLAIM = {"epoch": 1, "rank": 0, "nonce": HEX, "host": f"replica-0 ({HEX[:12]})", "pid": 10_000}
"""The fields of the claim of a replica."""
_SETTINGS = {"settings": {"flush": "partial", "sync_every": "500"}}
"""With fixed membership, they come with it."""


def _member(rank: int) -> dict[str, Any]:
    start, stop = STEPS
    key = contribution_key_of(rank)
    return {"rank": rank, "epoch": 1, "from": start, "to": stop, "key": key}


def _repeated(size: float, *lists: tuple[int, Any]) -> float:
    """The size of a record whose empty lists hold as many entries; each entry is given once, with its number.

    The entries are not written out, since a run may have many replicas.
    """
    for count, entry in lists:
        size += count * len(json.dumps(entry)) + 2 * (count - 1)
    return size
