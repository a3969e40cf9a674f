"""Whether the run's manifest is still there, and still that of this run."""

from __future__ import annotations

from .._errors import RunExistsError, StoreError
from .._store._reread import copy_key
from ._life._life import LOST, Life
from ._records._keys import MANIFEST
from ._records._manifest import Manifest


def watch_manifest(life: Life) -> None:
    """Make sure that the run's manifest and its copy are there: without both no replica can join or resume the run.

    Raises:
        RunExistsError: Another run's manifest has taken its place.
        FormatError: Another run's manifest, written by another version, has taken its place.
    """
    # Reading sets the time before anything is written: the store calls check_run() before every write, which would look again.
    before = life.standing.checked
    try:
        _look(life)
    except BaseException:
        life.standing.checked = before
        raise


def _look(life: Life) -> None:
    store, own_manifest = life.store, life.manifest.to_json()
    origin = life.origin(MANIFEST)
    other = life.watch(MANIFEST, own_manifest, lambda data: Manifest.from_json(data, origin))
    if other is not None and other != life.manifest:
        raise RunExistsError(
            f"the manifest at {store.uri} now belongs to another run (begun by run {other.run_id!r}, rank {other.writer}): two "
            f"runs share this prefix. This replica (rank {life.rank} of run {life.manifest.run_id!r}) stops before the runs mix. "
            "Give every run a prefix of its own. To continue this run, put its manifest back."
        )
    _look_at_copy(life, own_manifest)


def _look_at_copy(life: Life, own_manifest: bytes) -> None:
    """Write the manifest's copy again if it is lost or damaged. The manifest itself is there, so the prefix is this run's."""
    key = copy_key(MANIFEST)
    origin = life.origin(key)
    try:
        data = life.store.peek(key)
        if data == own_manifest:
            return
        life.say.error(LOST, f"{origin} is {'gone' if data is None else 'damaged'}")
        life.store.put(key, lambda: [own_manifest])
    except (StoreError, OSError) as error:
        life.say.error(
            "%s cannot be checked or written again: %s. The run goes on without this copy of its manifest.",
            origin,
            str(error).rstrip("."),
        )


def check_run(life: Life) -> None:
    """Check that the prefix still belongs to the run, unless that was checked less than a grace ago.

    A life that has stood still may wake up when the prefix was emptied meanwhile and belongs to another run, whose objects it
    must leave alone. So this is called before everything that a life writes or deletes, and while it waits.

    Raises:
        RunExistsError: Another run's manifest has taken the place of this run's.
        FormatError: Another run's manifest, written by another version, has taken its place.
    """
    if life.timing.clock() - life.standing.checked >= life.settings.grace:
        watch_manifest(life)
