"""What rank 0 of a strict run watches over: the manifest that it has written, and the objects that are not synced."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from .._errors import CorruptedObjectError, FormatError, RunExistsError, StoreError
from .._model._unsynced_watch import UnsyncedWatch
from .._store._reread import read_again
from ._claims import check_not_resumed, check_own, read_claim
from ._records._manifest import Manifest, manifest_keys

if TYPE_CHECKING:
    from .._model._unsynced import Unsynced
    from .._store._patient import Patient
    from .._timing import Timing
    from ._records._records import Claim

_log = logging.getLogger("diloco_core")


class Watch:
    """Writes again what rank 0 has stored when its life of the run began, if it is lost or damaged. Not thread-safe.

    Args:
        store: The run's prefix.
        timing: Its ``sleep`` is used before an object is read again.
        own_claim: The claim of rank 0.
        manifest: The manifest that it has written.
        own_tensors: The tensors of its model that are not synced.
    """

    def __init__(
        self,
        store: Patient,
        timing: Timing,
        own_claim: Claim,
        manifest: Manifest,
        own_tensors: Unsynced | None,
    ) -> None:
        self._store = store
        self._timing = timing
        self._own_claim = own_claim
        self._manifest = manifest
        self._unsynced = UnsyncedWatch(store, timing, 0, manifest.unsynced, own_tensors)

    def look(self) -> None:
        """Check the objects that are not synced; see :meth:`.UnsyncedWatch.look`."""
        self._unsynced.look()

    def look_at_manifest(self) -> None:
        """Check the manifest and its copy, and write again what is lost or damaged. This costs two small requests."""
        copy, main = manifest_keys(self._manifest.life)
        self._look_at(main)
        try:
            self._look_at(copy)
        except (StoreError, OSError) as error:
            _log.error(
                "rank 0: %s/%s cannot be checked or written again: %s. The run goes on without this copy of its manifest.",
                self._store.uri,
                copy,
                str(error).rstrip("."),
            )

    def _look_at(self, key: str) -> None:
        damage = self._damage(key)
        if not damage or not self._holds_rank():
            return
        _log.error(
            "rank 0: %s. It is written again with the same content. Something outside the run deletes or changes its objects.",
            damage,
        )
        self._store.put(key, lambda: [self._manifest.to_bytes()])

    def _damage(self, key: str) -> str:
        """What has become of the manifest with this key; "" if it is as this process has written it."""
        life, whole = self._manifest.life, self._manifest.to_bytes()
        origin = f"{self._store.uri}/{key}"

        def read() -> str:
            data = self._store.get(key)
            if data is None:
                return f"{origin} is gone"
            if data == whole:
                return ""
            Manifest.from_bytes(data, life, origin)
            # The claims say whose the prefix is. A process that was late has overwritten what is theirs.
            return f"{origin} is that of another run"

        try:
            return read_again(self._timing, read, most=2)
        except (CorruptedObjectError, FormatError) as error:
            return str(error).rstrip(".")

    def _holds_rank(self) -> bool:
        """Whether the claim of this process is there, and no later one.

        If the claim is gone, the whole prefix may have been emptied. Then nothing of this run may appear there again.
        """
        own_claim = self._own_claim
        try:
            stored = read_claim(self._store, own_claim.rank, self._timing, own_claim.life)
            check_not_resumed(self._store, own_claim)
        except (CorruptedObjectError, FormatError, RunExistsError):
            return False
        return stored is not None and stored.nonce == own_claim.nonce


def write_manifest(store: Patient, manifest: Manifest, own_claim: Claim, timing: Timing) -> None:
    """Store a manifest and its copy, if the prefix is still that of the run, and nobody has resumed it since.

    Much may have happened before: the upload of what is not synced, or the check of a whole state.

    Raises:
        RunExistsError: The claim of rank 0 is gone, or another process holds the rank.
        CorruptedObjectError: The claim is damaged.
    """
    for key in manifest_keys(manifest.life):
        check_own(store, own_claim, timing)
        check_not_resumed(store, own_claim)
        store.put(key, lambda: [manifest.to_bytes()])
