"""Where a run that all ranks take part in keeps its objects: the only module of the tests that knows the keys and records.

Tests ask for objects by what they are, so a change of the layout changes this file alone.
"""

import json
import re
from typing import NamedTuple

from diloco_core._wire._sealed import seal, unseal

MANIFEST = "manifest.json"
LATER_MANIFESTS = "manifests/"

_RANK = "(?P<rank>[0-9]{5})"
_SYNC = "(?P<sync>[0-9]{8})"
_LIFE = "(?P<life>[0-9]{4,7})"
_RUN = "(?P<run>[0-9a-f]{16})"
_COPY = r"(?P<copy>\.copy)?"
_PATTERNS = {
    "manifest": rf"manifest{_COPY}\.json|manifests/{_LIFE}(?P<later_copy>\.copy)?\.json",
    "claim": rf"claims/{_RANK}(?:\.{_LIFE})?\.json",
    "beat": rf"beats/{_RANK}(?:\.{_LIFE})?",
    "note": rf"notes/{_RANK}(?:\.{_LIFE})?\.json",
    "meeting": rf"meetings/{_RANK}\.{_LIFE}\.json",
    "table": r"schemas/[0-9a-f]{32}\.json",
    "commit": rf"commits/{_SYNC}\.{_RUN}\.json",
    "contribution": rf"deltas/{_SYNC}/{_RANK}\.{_RUN}\..*\.safetensors",
    "state": rf"state/{_SYNC}/{_RANK}\.{_RUN}{_COPY}\.safetensors",
    "inner": rf"inner/{_RANK}/{_SYNC}\.{_RUN}\.{_LIFE}\.safetensors",
    "unsynced": r"unsynced/[^/]*/[0-9]{5}\.safetensors",
    "request": rf"requests/{_SYNC}/{_RANK}\.[0-9]{{5}}",
}


class Kept(NamedTuple):
    """What a key says about its object.

    Attributes:
        kind: What the object is; "" if the key says nothing.
        sync: The number of the sync that it belongs to; the initial values are sync 0 of their fragment.
        rank: The rank that has written it, or that holds a shard, with as many shards as ranks.
        life: The life that has written it, where the key says that; 1 if the key of another life would say so.
        run: The beginning of the name of the run.
        copy: Whether it is the copy of another object.
    """

    kind: str
    sync: int | None = None
    rank: int | None = None
    life: int | None = None
    run: str | None = None
    copy: bool = False


def kept(key):
    """What a key says."""
    for kind, pattern in _PATTERNS.items():
        if (match := re.fullmatch(pattern, key)) is not None:
            said = match.groupdict()
            sync, rank, life = (
                None if said.get(name) is None else int(said[name])
                for name in ("sync", "rank", "life")
            )
            copy = bool(said.get("copy") or said.get("later_copy"))
            life = 1 if life is None and "life" in said else life
            return Kept(kind, sync, rank, life, said.get("run"), copy)
    return Kept("")


def of(kind, **wanted):
    """Whether a key is of such an object, as a function of the key: ``of("state", sync=3, rank=1)``."""

    def fits(key):
        found = kept(key)
        return found.kind == kind and all(
            getattr(found, name) == value for name, value in wanted.items()
        )

    return fits


def keys_of(keys, kind, **wanted):
    """Those of the keys that are of such objects, in order."""
    return sorted(filter(of(kind, **wanted), keys))


def copy_key(key):
    """The key of the copy of an object."""
    name, _, ending = key.rpartition(".")
    return f"{name}.copy.{ending}"


def manifest_key(life=1):
    """The key of the manifest that a life of rank 0 writes."""
    return MANIFEST if life == 1 else f"{LATER_MANIFESTS}{life:04}.json"


def claim_key(rank, life=1):
    """The key of the claim of a rank by one of its lives."""
    return f"claims/{_life_of(rank, life)}.json"


def beat_key(rank, life=1):
    """The key of the signs of life of a rank."""
    return f"beats/{_life_of(rank, life)}"


def note_key(rank, life=1):
    """The key of the note that says how a rank has ended."""
    return f"notes/{_life_of(rank, life)}.json"


def meeting_key(rank, life):
    """The key of what a rank says while a run is resumed."""
    return f"meetings/{rank:05}.{life:04}.json"


def commit_key(run, sync):
    """The key of the record of a sync."""
    return f"commits/{sync:08}.{run}.json"


def contribution_key(run, sync, rank):
    """A key that a contribution of a rank to a sync could have."""
    return f"deltas/{sync:08}/{rank:05}.{run}.{16 * '0'}.1.safetensors"


def state_key(run, sync, rank):
    """The key of the shard of a rank after a sync."""
    return f"state/{sync:08}/{rank:05}.{run}.safetensors"


def inner_key(run, sync, rank, life):
    """The key of what a life of a rank has saved of its inner state after a sync."""
    return f"inner/{rank:05}/{sync:08}.{run}.{life:04}.safetensors"


def name_in(manifest, life=1):
    """The name of the run in the keys of its objects, from the manifest of a life of rank 0."""
    return fields(manifest_key(life), manifest)["run"][:16]


def fields(key, record):
    """The fields of a record that is stored under a key."""
    return unseal(json.loads(record)["kind"], key, record, key)


def sealed_again(key, record, under=None, **changes):
    """A record with other fields (``...`` leaves one out), which is whole under its key, or ``under`` another one."""
    found = {**fields(key, record), **changes}
    left = {name: value for name, value in found.items() if value is not ...}
    return seal(json.loads(record)["kind"], under or key, left)


def later_beat(beat, count):
    """The sign of life that the same process gives some time later."""
    return beat.split()[0] + b" %d" % count


def _life_of(rank, life):
    return f"{rank:05}" if life == 1 else f"{rank:05}.{life:04}"
