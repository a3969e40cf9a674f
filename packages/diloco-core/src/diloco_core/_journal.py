"""The journal of a run in the store where its replicas meet, for its launcher."""

from __future__ import annotations

from diloco_protocol import StoreJournal

from ._errors import ObjectNotFoundError
from ._store._api import read_bytes
from ._store._open import open_store

_FOLDER = "journal/"


def open_journal(uri: str) -> StoreJournal:
    """Open the journal in a run's store, to give it to an executor as ``journal=``.

    The executor then writes its launch, the ends of the replicas and the last lines of their logs
    below ``<uri>/journal/``, and ``diloco status URI`` shows them on any machine.

    Args:
        uri: Where the replicas meet: the ``rendezvous_uri`` of the launch.

    Raises:
        ConfigurationError: The URI is not one of a store.
        StoreUnavailableError: The store cannot be reached.
        MissingDependencyError: The driver of the store is not installed.
    """
    store = open_store(uri)

    def read(key: str, most: int) -> bytes | None:
        try:
            with store.open(_FOLDER + key) as reader:
                return read_bytes(reader, 0, min(most, reader.size))
        except ObjectNotFoundError:
            return None

    return StoreJournal(
        f"{store.uri}/{_FOLDER.rstrip('/')}",
        put=lambda key, data: store.put(_FOLDER + key, [data]),
        create=lambda key, data: store.create(_FOLDER + key, data),
        read=read,
        list_keys=lambda folder: [
            key.removeprefix(_FOLDER) for key in store.list(_FOLDER + folder)
        ],
        delete=lambda key: store.delete([_FOLDER + key]),
    )
