"""Finding out which run a store holds, and which files hold what it does not sync."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from .._errors import CorruptedObjectError, ObjectNotFoundError, RendezvousError
from .._model._unsynced import unsynced_key, unsynced_seed
from .._run._records._keys import MANIFEST
from .._run._records._manifest import Manifest
from .._store._reread import read_again, read_or_copy
from .._timing import Timing
from ._run_states import PublishedFile, RunStates

if TYPE_CHECKING:
    from .._store._api import Store

_NO_MANIFEST = (
    "The manifest describes all other objects, so nothing can be exported without it. If you have a backup, put it back. If the "
    "run is still going on, one of its replicas writes it again: try again later."
)


def find_source(store: Store) -> RunStates:
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


def _source(store: Store) -> RunStates:
    # Everything else is listed before the manifest is read: nothing is published before the manifest that names it is there.
    published = [*store.list("state/"), *store.list("commits/")]

    def read(key: str) -> Manifest | None:
        try:
            return Manifest.from_json(store.get(key), f"{store.uri}/{key}")
        except ObjectNotFoundError:
            return None

    def read_anew(key: str) -> Manifest | None:
        return read_again(Timing(), partial(read, key), most=2)

    manifest = read_or_copy(read_anew, MANIFEST, store.uri)
    if manifest is None and published:
        raise CorruptedObjectError(
            f"{store.uri}/{MANIFEST} and its copy are gone, while other objects of a run are there."
        )
    if manifest is None:
        raise RendezvousError(
            f"{store.uri} holds no run, since there is no {MANIFEST}: check the URI"
        )
    if not manifest.fragments:
        raise RendezvousError(
            f"{store.uri} holds a run without a model, such as plain means, so there is nothing to export"
        )
    return RunStates(store, manifest)


def unsynced_files(source: RunStates) -> list[PublishedFile]:
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


def without_unsynced(source: RunStates) -> str:
    """What to do if a file of tensors that are not synced cannot be read, as a text for errors."""
    names = [str(entry["name"]) for entry in source.unsynced.get("tensors", ())]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    remedy = (
        "A replica of the run whose model holds the same values writes it again: a running replica checks every few syncs, and "
        "when it leaves, whether it is there. If none is running, start all ranks of the run again on this prefix (if the run is "
        "finished, they leave at once): they also read it, and so find damage in it."
    )
    return (
        f"It holds tensors that the run does not sync ({', '.join(map(repr, names[:3]))}{more}), as they were when the run "
        f"began. {remedy} If no replica can write it again, export with synced_only=True, which writes all other tensors, and "
        "take these from the model that the run began with."
    )
