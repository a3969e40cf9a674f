"""Finding out which run a store holds, and which files hold what it does not sync."""

from __future__ import annotations

import json
import logging
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from .._elastic._records._keys import MANIFEST
from .._elastic._records._manifest import Manifest
from .._errors import CorruptedObjectError, ObjectNotFoundError, RendezvousError
from .._model._unsynced import unsynced_key, unsynced_seed
from .._store._copies import read_or_copy
from .._store._reread import read_again
from .._strict._records._manifest import Manifest as StrictManifest
from .._strict._records._manifest import check_descent, lives_listed, manifest_key
from .._strict._states import lost_manifest
from .._timing import Timing
from ._elastic import ElasticSource
from ._source import PublishedFile
from ._strict import StrictSource

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from .._store._api import Store
    from ._source import Source

T = TypeVar("T")

_NO_MANIFEST = (
    "The manifest describes all other objects, so nothing can be exported without it. If you have a backup, put it back. If the "
    "run is still going on, one of its replicas writes it again: try again later."
)
_log = logging.getLogger("diloco_core")


def find_source(store: Store) -> Source:
    """The published states of the run that a store holds.

    Raises:
        RendezvousError: The store holds no run, or one without a model.
        CorruptedObjectError: The manifest is damaged, or it is gone while other objects of a run are there, or objects of two
            runs are there.
    """
    try:
        return _source(store)
    except CorruptedObjectError as error:
        raise CorruptedObjectError(f"{sentence(error)} {_NO_MANIFEST}") from error


def sentence(error: Exception) -> str:
    """The message of an error as a whole sentence, to which another one can be added."""
    message = str(error)
    return message if message.endswith((".", "!", "?")) else f"{message}."


def _source(store: Store) -> Source:
    # Everything else is listed before the manifests are read: nothing is published before the manifest that names it is there.
    claims = store.list("claims/")
    published = [*store.list("state/"), *store.list("commits/")]
    lives = lives_listed(store.list("manifests/"))
    try:
        first = _first(store, use_copy=not lives)
        if first is None and (published or lives):
            which = " is" if lives else " and its copy are"
            raise CorruptedObjectError(
                f"{store.uri}/{MANIFEST}{which} gone, while other objects of a run are there."
            )
    except CorruptedObjectError as error:
        if not lives:
            raise
        # The later manifests of a strict run repeat what the first one says.
        _log.warning("%s %s is read instead.", sentence(error), manifest_key(lives[0]))
        first = None
    if isinstance(first, Manifest):
        return ElasticSource(store, first)
    manifest = _later(store, lives[0], first) if lives else first
    if manifest is None:
        raise RendezvousError(
            f"{store.uri} holds no run, since there is no {MANIFEST}: check the URI"
        )
    lost = lost_manifest(manifest, published, claims, store.uri)
    if lost:
        raise CorruptedObjectError(lost)
    if not manifest.fragments:
        raise RendezvousError(
            f"{store.uri} holds a run without a model, such as plain means, so there is nothing to export"
        )
    return StrictSource(store, manifest)


def _first(store: Store, *, use_copy: bool) -> Manifest | StrictManifest | None:
    """The manifest with which the run was begun, or its copy; None if there is none."""

    def parse(data: bytes, origin: str) -> Manifest | StrictManifest:
        try:
            record: Mapping[str, Any] = json.loads(data)
            strict = record.get("membership") == "strict"
        except (ValueError, AttributeError, RecursionError):
            raise CorruptedObjectError(f"{origin} is damaged: it is not a JSON object") from None
        if strict:
            return StrictManifest.from_bytes(data, 1, origin)
        return Manifest.from_json(data, origin)

    read = _reader(store, parse)
    return read_or_copy(read, MANIFEST, store.uri) if use_copy else read(MANIFEST)


def _later(store: Store, life: int, first: StrictManifest | None) -> StrictManifest:
    """The manifest that a later life of a strict run has written."""
    key = manifest_key(life)
    read = _reader(store, lambda data, origin: StrictManifest.from_bytes(data, life, origin))
    manifest = read_or_copy(read, key, store.uri)
    if manifest is None:
        raise CorruptedObjectError(f"{store.uri}/{key} and its copy are gone, although listed")
    check_descent(first, manifest, store.uri)
    return manifest


def _reader(store: Store, parse: Callable[[bytes, str], T]) -> Callable[[str], T | None]:
    """Reads the object with a key, and again if it is damaged; None if there is none. ``parse`` is also given its origin."""

    def read(key: str) -> T | None:
        try:
            return parse(store.get(key), f"{store.uri}/{key}")
        except ObjectNotFoundError:
            return None

    return lambda key: read_again(Timing(), partial(read, key), most=2)


def unsynced_files(source: Source) -> list[PublishedFile]:
    """The files of the tensors that are not synced."""
    table = source.unsynced
    return [
        PublishedFile(
            unsynced_key(table["folder"], number),
            unsynced_seed(table["folder"], number),
            int(checksum, 16),
            number,
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
