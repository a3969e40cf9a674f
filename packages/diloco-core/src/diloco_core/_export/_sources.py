"""Which run a store holds, and what of it is not synced."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from .._elastic._log._keys import MANIFEST
from .._elastic._log._records import Manifest
from .._errors import CorruptedObjectError, ObjectNotFoundError, RendezvousError
from .._model._unsynced import unsynced_key, unsynced_seed
from .._strict._records import read_manifest
from ._elastic import ElasticSource
from ._source import PublishedFile
from ._strict import StrictSource

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .._store._api import Store
    from ._source import Source

_NO_MANIFEST = (
    "It says what the other objects are, and nothing can be exported without it. Put a copy of it back if you have one. In an "
    "elastic run, a replica that is still running puts it back: try again later."
)


def find_source(store: Store) -> Source:
    """The run that a store holds.

    Raises:
        RendezvousError: There is none, or one without a model.
    """
    origin = f"{store.uri}/{MANIFEST}"
    try:
        data = store.get(MANIFEST)
    except ObjectNotFoundError:
        # Whoever commits or publishes has seen a manifest.
        if store.list("commits/") or store.list("state/"):
            raise CorruptedObjectError(
                f"{origin} is gone, and other objects of a run are there. {_NO_MANIFEST}"
            ) from None
        raise RendezvousError(f"{store.uri} holds no run: there is no {MANIFEST}") from None
    except CorruptedObjectError as error:
        raise CorruptedObjectError(f"{sentence(error)} {_NO_MANIFEST}") from error
    try:
        return _source(store, data, origin)
    except CorruptedObjectError as error:
        raise CorruptedObjectError(f"{sentence(error)} {_NO_MANIFEST}") from error


def sentence(error: Exception) -> str:
    """What an error says, so that more can be said after it."""
    text = str(error)
    return text if text.endswith((".", "!", "?")) else f"{text}."


def _source(store: Store, data: bytes, origin: str) -> Source:
    try:
        record: Mapping[str, Any] = json.loads(data)
        strict = record.get("membership") == "strict"
    except (ValueError, AttributeError, RecursionError):
        raise CorruptedObjectError(f"{origin} is damaged: it is no JSON object") from None
    if not strict:
        return ElasticSource(store, Manifest.from_json(data, origin))
    record = read_manifest(data, origin)
    if not record.get("fragments"):
        raise RendezvousError(
            f"{store.uri} holds a run without a model, such as plain means: nothing can be exported"
        )
    return StrictSource(store, record)


def unsynced_files(source: Source) -> list[PublishedFile]:
    """The objects of what is not synced."""
    table = source.unsynced
    return [
        PublishedFile(
            unsynced_key(table["folder"], number),
            unsynced_seed(table["folder"], number),
            int(checksum, 16),
        )
        for number, checksum in enumerate(table.get("sums", ()))
    ]


def without_unsynced(source: Source) -> str:
    """What can be done where what is not synced cannot be read."""
    names = [str(entry["name"]) for entry in source.unsynced.get("tensors", ())]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    who = (
        "A replica of the run whose model holds the same values writes it again: one that is running looks every few syncs "
        "whether it is there, and when it leaves. Otherwise start all ranks of the run again on this prefix (if it is finished, "
        "they leave at once): they also read it."
        if isinstance(source, ElasticSource)
        else "While the run goes on: rank 0 writes it again when it leaves, if it is gone or has another size."
    )
    return (
        f"It belongs to what the run does not sync: {', '.join(map(repr, names[:3]))}{more}, as they were when it began. {who} "
        "If nobody can write it again, synced_only=True writes all other tensors; take these from the model that the run began "
        "with."
    )
