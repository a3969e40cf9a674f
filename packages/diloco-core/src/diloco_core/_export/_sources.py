"""Finding out which run a store holds, and which files hold what it does not sync."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from .._elastic._log._keys import MANIFEST
from .._elastic._log._records import Manifest
from .._errors import CorruptedObjectError, ObjectNotFoundError, RendezvousError
from .._model._unsynced import unsynced_key, unsynced_seed
from .._strict._manifest import Manifest as StrictManifest
from .._strict._manifest import lives_listed, manifest_key
from .._strict._states import of_unknown_names
from ._elastic import ElasticSource
from ._source import PublishedFile
from ._strict import StrictSource

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .._store._api import Store
    from ._source import Source

_NO_MANIFEST = (
    "The manifest describes all other objects, so nothing can be exported without it. If you have a copy, put it back. In an "
    "elastic run, a replica that is still running writes it again: try again later."
)


def find_source(store: Store) -> Source:
    """The published states of the run that a store holds.

    Raises:
        RendezvousError: The store holds no run, or one without a model.
        CorruptedObjectError: The manifest is damaged, or it is gone while other objects of a run are there.
    """
    origin = f"{store.uri}/{MANIFEST}"
    try:
        data = store.get(MANIFEST)
    except ObjectNotFoundError:
        # No replica commits or publishes anything before the manifest is there.
        if store.list("commits/") or store.list("state/"):
            raise CorruptedObjectError(
                f"{origin} is gone, while other objects of a run are there. {_NO_MANIFEST}"
            ) from None
        raise RendezvousError(
            f"{store.uri} holds no run, since there is no {MANIFEST}: check the URI"
        ) from None
    except CorruptedObjectError as error:
        raise CorruptedObjectError(f"{sentence(error)} {_NO_MANIFEST}") from error
    try:
        return _source(store, data, origin)
    except CorruptedObjectError as error:
        raise CorruptedObjectError(f"{sentence(error)} {_NO_MANIFEST}") from error


def sentence(error: Exception) -> str:
    """The message of an error as a whole sentence, to which another one can be added."""
    message = str(error)
    return message if message.endswith((".", "!", "?")) else f"{message}."


def _source(store: Store, data: bytes, origin: str) -> Source:
    try:
        record: Mapping[str, Any] = json.loads(data)
        strict = record.get("membership") == "strict"
    except (ValueError, AttributeError, RecursionError):
        raise CorruptedObjectError(f"{origin} is damaged: it is not a JSON object") from None
    if not strict:
        return ElasticSource(store, Manifest.from_json(data, origin))
    manifest = _newest(store, StrictManifest.from_bytes(data, 1, origin))
    _check_newest(store, manifest)
    if not manifest.fragments:
        raise RendezvousError(
            f"{store.uri} holds a run without a model, such as plain means, so there is nothing to export"
        )
    return StrictSource(store, manifest)


def _newest(store: Store, first: StrictManifest) -> StrictManifest:
    """The newest manifest of a strict run."""
    lives = lives_listed(store.list("manifests/"))
    if not lives:
        return first
    key = manifest_key(lives[0])
    return StrictManifest.from_bytes(store.get(key), lives[0], f"{store.uri}/{key}")


def _check_newest(store: Store, manifest: StrictManifest) -> None:
    """Refuse to export an older state because a later manifest is gone.

    Raises:
        CorruptedObjectError: One is gone.
    """
    claims = store.list("claims/")
    keys = [*store.list("state/"), *store.list("commits/")]
    unknown = of_unknown_names(manifest, keys, claims)
    if unknown:
        raise CorruptedObjectError(
            f"{store.uri} holds {unknown[0]}, which the run has published after it was resumed, but no manifest says so: "
            "something else has deleted an object under manifests/"
        )


def unsynced_files(source: Source) -> list[PublishedFile]:
    """The files of the tensors that are not synced."""
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
    """What to do if a file of tensors that are not synced cannot be read, as a text for errors."""
    names = [str(entry["name"]) for entry in source.unsynced.get("tensors", ())]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    remedy = (
        "A replica of the run whose model holds the same values writes it again: a running replica checks every few syncs, and "
        "when it leaves, whether it is there. If none is running, start all ranks of the run again on this prefix (if the run is "
        "finished, they leave at once): they also read it, and so find damage in it."
        if isinstance(source, ElasticSource)
        else "If the run is still going on: rank 0 writes it again when it leaves, if it is gone or has another size."
    )
    return (
        f"It holds tensors that the run does not sync ({', '.join(map(repr, names[:3]))}{more}), as they were when the run "
        f"began. {remedy} If no replica can write it again, export with synced_only=True, which writes all other tensors, and "
        "take these from the model that the run began with."
    )
