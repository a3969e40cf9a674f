"""The beginning and the end of an incarnation of a rank.

A new one claims its epoch and has loaded nothing. One that ends tells the others.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from .._arithmetic._sharded import Scratch
from .._errors import FencedError, RunExistsError
from .._exchange._resumable import ResumableJob
from .._model._unsynced import UnsyncedWatch
from .._store._patient import Patient
from ._claims import claim
from ._incarnation._incarnation import Incarnation
from ._incarnation._progress import Progress
from ._incarnation._standing import Standing
from ._policy._meeting import TELL_SECONDS
from ._policy._others import Beats, Others
from ._records._farewell import farewell
from ._records._keys import MANIFEST, Hint, highest_epochs
from ._records._manifest import Manifest
from ._round._reload import ReloadError
from ._settings import Joiner
from ._start import read_manifest
from ._states._publish import collect, finish
from ._sync._fork import look_back
from ._watch import watch_manifest


def new_incarnation(
    reader: Incarnation,
    passed_over: Collection[int] = (),
    changeable: Mapping[str, str] | None = None,
) -> Incarnation:
    """Make the next incarnation of a rank.

    The rank's earlier incarnations will stop. The new incarnation has loaded nothing yet.

    Args:
        reader: What :func:`reader_of` has made, with the manifest that was just read.
        passed_over: In fixed runs: the ends that were seen before.
        changeable: In fixed runs: the settings that may change when the run is resumed, in which
            all ranks must agree.
    """
    store, timing, settings, rank = reader.store, reader.timing, reader.settings, reader.rank
    manifest = reader.manifest
    run, reader.standing.checked = reader.run, timing.clock()
    earlier = highest_epochs(store.list("claims/")) if settings.fixed else {}

    def check() -> None:
        """Refuse to go on if another run has taken the prefix since the manifest was read.

        The incarnations of that run are left alone.
        """
        if not settings.fixed or store.peek(MANIFEST) in {manifest.to_json(), None, b""}:
            return
        current = read_manifest(store)  # a bit may have flipped on its way
        if current is not None and current.run() != run:
            raise RunExistsError(
                f"the manifest at {store.uri} has changed while this replica (rank {rank}) was "
                "joining the run: another run may use this prefix by now. Give every run a prefix "
                "of its own, and start this replica again."
            )

    epoch, record = claim(store, rank, run, changeable, check)
    others = None
    if settings.fixed:
        beats = Beats(store.store, rank, f"{epoch}", run, timing)
        beats.start()
        others = Others(beats, changeable or {}, earlier if settings.resume or epoch > 1 else {})
    return replace(reader, epoch=epoch, claim=record, others=others, passed_over=passed_over)


def reader_of(
    store: Patient, jobs: Sequence[ResumableJob], manifest: Manifest, joiner: Joiner
) -> Incarnation:
    """Make what reads a run without a claim, and so must not write there.

    Args:
        store: The run's prefix.
        jobs: All fragments, in the order in which they are synced.
        manifest: The run's manifest.
        joiner: This replica.
    """
    clock, fragments = store.timing.clock, [Progress(job, n) for n, job in enumerate(jobs)]
    return Incarnation(
        store=store,
        timing=store.timing,
        settings=joiner.settings,
        manifest=manifest,
        run=manifest.run(),
        rank=joiner.rank,
        epoch=0,
        claim=b"",
        chunk_bytes=joiner.chunk_bytes,
        scratch=Scratch(joiner.chunk_bytes),
        standing=Standing(fragments, manifest, store.uri, clock),
    )


def leave_run(incarnation: Incarnation, unsynced: UnsyncedWatch | None) -> None:
    """Tell the other replicas that this incarnation is done.

    This also makes sure that the run can start again from the state that it holds.
    """
    watch_manifest(incarnation)
    _say_goodbye(incarnation, None, incarnation.sync)
    if unsynced is not None:
        unsynced.look()
    # If this incarnation's state is no longer the run's, there is nothing to publish.
    with suppress(ReloadError):
        look_back(incarnation)
        finish(incarnation)
        if incarnation.deletes_own:
            collect(incarnation)


def tell_failure(incarnation: Incarnation, error: BaseException) -> None:
    """Tell the other replicas not to wait for this incarnation, which has failed."""
    # If the store cannot be reached, waiting for it once more would only delay the error.
    incarnation.store.patience = min(incarnation.store.patience, TELL_SECONDS)
    # An incarnation that was replaced has not failed: its rank goes on.
    reason = None if isinstance(error, FencedError) else error
    # If the prefix belongs to another run by now, the replicas of that run must not be told.
    with suppress(RunExistsError):
        if isinstance(error, RunExistsError):
            watch_manifest(incarnation)
        # One that fails while it loads stands at no sync: the others wait for it at the next one.
        loading = incarnation.settings.fixed and not incarnation.sync
        sync = max(incarnation.recorded(), default=0) if loading else incarnation.sync
        # The sync in which it failed may be committed already, so the sync after it is told too.
        for number in (sync, sync + 1):
            _say_goodbye(incarnation, reason, number)


def _say_goodbye(incarnation: Incarnation, error: BaseException | None, sync: int) -> None:
    key = Hint(sync + 1, incarnation.rank, incarnation.epoch, "leave").key
    incarnation.store.put(key, lambda: [farewell(key, error, incarnation.rank)])
