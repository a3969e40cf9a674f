"""What rank 0 of a strict run watches over: the manifest that it has written, and the objects that are not synced."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from .._errors import CorruptedObjectError, FormatError, RunExistsError
from .._model._unsynced_watch import UnsyncedWatch
from .._store._reread import read_again
from ._claims import check_not_resumed, read_claim
from ._manifest import Manifest, manifest_key

if TYPE_CHECKING:
    from .._model._unsynced import Unsynced
    from .._store._patient import Patient
    from .._timing import Timing
    from ._records import Claim

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
        """Check the manifest, and write it again if it is lost or damaged. If it is whole, this costs one small request."""
        damage = self._damage()
        if not damage or not self._holds_rank():
            return
        _log.error(
            "rank 0: %s. It is written again with the same content. Something outside the run deletes or changes its objects.",
            damage,
        )
        self._store.put(manifest_key(self._manifest.life), lambda: [self._manifest.to_bytes()])

    def _damage(self) -> str:
        """What has become of the manifest; "" if there is a whole one, even that of another run."""
        life = self._manifest.life
        origin = f"{self._store.uri}/{manifest_key(life)}"

        def read() -> str:
            data = self._store.get(manifest_key(life))
            if data is None:
                return f"{origin} is gone"
            Manifest.from_bytes(data, life, origin)
            return ""

        try:
            return read_again(self._timing, read, most=2)
        except CorruptedObjectError as error:
            return str(error).rstrip(".")
        except FormatError:
            return ""

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
