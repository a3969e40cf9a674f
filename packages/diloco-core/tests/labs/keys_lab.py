"""Say where a run keeps its objects: the only module of the tests that knows keys and records.

Tests ask for objects by what they are, so a change of the layout changes this file alone.
"""

import json
import re
from typing import NamedTuple

import xxhash

MANIFEST = "manifest.json"

_RANK = "(?P<rank>[0-9]{5})"
_SYNC = "(?P<sync>[0-9]{8})"
_INCARNATION = "(?P<incarnation>[0-9]{4,7})"
_FRAGMENT = "(?P<fragment>[0-9]{3})"
_SHARD = "(?P<shard>[0-9]{5})"
_COPY = r"(?P<copy>\.copy)?"
_GENERATION = re.compile(r"generations/[^/]*/(.*)")
_BEGUN = re.compile(rf"generations/[0-9]{{6}}-[0-9a-f]{{16}}/manifest{_COPY}\.json")
_PATTERNS = {
    "manifest": rf"manifest{_COPY}\.json",
    "claim": rf"claims/{_RANK}/{_INCARNATION}\.json",
    "beat": rf"beats/{_RANK}",
    "note": rf"deltas/{_SYNC}/hint\.{_RANK}\.{_INCARNATION}\.leave",
    "meeting": rf"meetings/{_RANK}\.json",
    "commit": rf"commits/{_SYNC}\.json",
    "contribution": rf"deltas/{_SYNC}/{_RANK}\.{_INCARNATION}\..*\.safetensors",
    "state": rf"(?:state/{_SYNC}|initial/[0-9a-f]{{16}})/{_FRAGMENT}\.{_SHARD}\.safetensors",
    "done": rf"state/{_SYNC}/{_FRAGMENT}\.done\.json",
    "inner": rf"inner/{_RANK}/{_INCARNATION}\.{_SYNC}\.safetensors",
    "unsynced": r"unsynced/[^/]*/[0-9]{5}\.safetensors",
}


class Kept(NamedTuple):
    """The facts that a key states about its object.

    Attributes:
        kind: What the object is; "" if the key says nothing.
        sync: The number of the sync that it belongs to; 0 for the initial values.
        rank: The rank that has written it, or that holds a shard, with as many shards as ranks.
        incarnation: The incarnation (epoch) that has written it, where the key says that.
        fragment: The fragment that it is of, where the key says that.
        copy: Whether it is the copy of another object.
    """

    kind: str
    sync: int | None = None
    rank: int | None = None
    incarnation: int | None = None
    fragment: int | None = None
    copy: bool = False


def kept(key):
    """Return what a key says. That it lies in a generation makes no difference."""
    inside = _GENERATION.fullmatch(key)
    key = inside[1] if inside else key
    for kind, pattern in _PATTERNS.items():
        if (match := re.fullmatch(pattern, key)) is not None:
            said = match.groupdict()
            if "shard" in said:
                said["rank"] = said["shard"]
            if key.startswith("initial/"):
                said["sync"] = 0
            sync, rank, incarnation, fragment = (
                None if said.get(name) is None else int(said[name])
                for name in ("sync", "rank", "incarnation", "fragment")
            )
            return Kept(kind, sync, rank, incarnation, fragment, bool(said.get("copy")))
    return Kept("")


def of(kind, **wanted):
    """Return whether a key is of such an object, as a function: ``of("state", sync=3, rank=1)``."""

    def fits(key):
        found = kept(key)
        return found.kind == kind and all(
            getattr(found, name) == value for name, value in wanted.items()
        )

    return fits


def keys_of(keys, kind, **wanted):
    """Those of the keys that are of such objects, in order."""
    return sorted(filter(of(kind, **wanted), keys))


def begun(keys):
    """The folders of the generations that have a manifest or its copy, the newest first."""
    manifests = [key for key in keys if _BEGUN.fullmatch(key)]
    return sorted({key[: key.rindex("/") + 1] for key in manifests}, reverse=True)


def newest(keys):
    """Return the keys in the newest generation, which are all keys where the store can decide."""
    folder = next(iter(begun(keys)), "")
    return [key for key in keys if key.startswith(folder)]


def copy_key(key):
    """The key of the copy of an object."""
    name, _, ending = key.rpartition(".")
    return f"{name}.copy.{ending}"


def claim_key(rank, incarnation=1):
    """The key of the claim of a rank by one of its incarnations."""
    return f"claims/{rank:05}/{incarnation:04}.json"


def beat_key(rank):
    """The key of the signs of life of a rank."""
    return f"beats/{rank:05}"


def note_key(sync, rank, incarnation=1):
    """The key of the note of how an incarnation ended that has adopted the sync before this one."""
    return f"deltas/{sync:08}/hint.{rank:05}.{incarnation:04}.leave"


def meeting_key(rank):
    """The key of what a rank says while all meet, in a store that cannot decide."""
    return f"meetings/{rank:05}.json"


def commit_key(sync):
    """The key of the record of a sync."""
    return f"commits/{sync:08}.json"


def state_key(sync, rank, fragment=0):
    """The key of the shard of a rank after a sync, which is not the initial one."""
    return f"state/{sync:08}/{fragment:03}.{rank:05}.safetensors"


def fields(key, record):
    """The fields of a record that is stored under a key."""
    body, _, _ = record.rpartition(b",\n")
    assert record == body + _seal(body, key), f"{key} is damaged, or of another key"
    found = json.loads(record)
    return {name: found[name] for name in found if name not in {"kind", "format", "xxh3_128"}}


def sealed_again(key, record, under=None, **changes):
    """A record with other fields (``...`` leaves one out), whole under its key or another one."""
    found = {**fields(key, record), **changes}
    left = {name: value for name, value in found.items() if value is not ...}
    before = json.loads(record)
    named = {"kind": before["kind"], "format": before["format"], **left}
    lines = [f" {json.dumps(name)}: {json.dumps(value)}" for name, value in named.items()]
    body = ("{\n" + ",\n".join(lines)).encode()
    return body + _seal(body, under or key)


def _seal(body, key):
    """Return what ends a record with this body under this key."""
    digest = xxhash.xxh3_128_hexdigest(body, seed=xxhash.xxh3_64_intdigest(key.encode()))
    return f',\n "xxh3_128": "{digest}"\n}}\n'.encode()


def later_beat(beat, count):
    """The sign of life that the same process gives some time later."""
    return beat.split()[0] + b" %d" % count
