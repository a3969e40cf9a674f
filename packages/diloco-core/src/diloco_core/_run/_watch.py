"""Whether the run's manifest is still there, and still that of this run."""

from __future__ import annotations

from .._errors import RunExistsError, StoreError
from .._store._reread import copy_key
from ._incarnation._incarnation import LOST, Incarnation
from ._records._keys import MANIFEST
from ._records._manifest import Manifest


def watch_manifest(incarnation: Incarnation) -> None:
    """Make sure that the run's manifest and its copy are there.

    Without both no replica can join or resume the run.

    Raises:
        RunExistsError: Another run's manifest has taken its place.
        FormatError: Another run's manifest, written by another version, has taken its place.
    """
    # Reading sets the time before anything is written: the store calls check_run() before every
    # write, which would look again.
    before = incarnation.standing.checked
    try:
        _look(incarnation)
    except BaseException:
        incarnation.standing.checked = before
        raise


def _look(incarnation: Incarnation) -> None:
    store, own_manifest = incarnation.store, incarnation.manifest.to_json()
    origin = incarnation.origin(MANIFEST)
    other = incarnation.watch(MANIFEST, own_manifest, lambda data: Manifest.from_json(data, origin))
    if other is not None and other != incarnation.manifest:
        raise RunExistsError(
            f"the manifest at {store.uri} now belongs to another run (begun by run "
            f"{other.run_id!r}, rank {other.writer}): two runs share this prefix. This replica "
            f"(rank {incarnation.rank} of run {incarnation.manifest.run_id!r}) stops before the "
            "runs mix. Give every run a prefix of its own. To continue this run, put its manifest "
            "back."
        )
    _look_at_copy(incarnation, own_manifest)


def _look_at_copy(incarnation: Incarnation, own_manifest: bytes) -> None:
    """Write the manifest's copy again if it is lost or damaged.

    The manifest itself is there, so the prefix is this run's.
    """
    key = copy_key(MANIFEST)
    origin = incarnation.origin(key)
    try:
        data = incarnation.store.peek(key)
        if data == own_manifest:
            return
        incarnation.say.error(LOST, f"{origin} is {'gone' if data is None else 'damaged'}")
        incarnation.store.put(key, lambda: [own_manifest])
    except (StoreError, OSError) as error:
        incarnation.say.error(
            "%s cannot be checked or written again: %s. The run goes on without this copy of its "
            "manifest.",
            origin,
            str(error).rstrip("."),
        )


def check_run(incarnation: Incarnation) -> None:
    """Check that the prefix still belongs to the run, unless that was done less than a grace ago.

    An incarnation that has stood still may wake up when the prefix was emptied meanwhile and
    belongs to another run, whose objects it must leave alone. So this is called before everything
    that an incarnation writes or deletes, and while it waits.

    Raises:
        RunExistsError: Another run's manifest has taken the place of this run's.
        FormatError: Another run's manifest, written by another version, has taken its place.
    """
    if incarnation.timing.clock() - incarnation.standing.checked >= incarnation.settings.grace:
        watch_manifest(incarnation)
