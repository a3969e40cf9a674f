"""How a process enters a fixed run in a store that cannot decide: it meets the others, and they begin the next generation."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

from ..._errors import (
    ConfigurationError,
    CorruptedObjectError,
    RendezvousError,
    RendezvousTimeoutError,
    RunExistsError,
)
from ..._exchange._endings import named_ranks
from ..._store._below import below
from ..._store._copies import copy_key, read_or_copy
from ..._store._patient import Patient
from ..._store._reread import read_again
from ..._timing import Wait
from .._compare import check_same_run
from .._joining import reader_of
from .._policy._meeting import check_failures
from .._records._keys import MANIFEST
from .._start import committed_in, stored_manifest
from ._carrying import (
    GO_BACK,
    Choice,
    carry,
    newest_state,
    not_carried,
    read_choice,
    write_choice,
)
from ._gathering import Gathering
from ._names import FOLDER, before, begun, folder, headless, next_number, without_manifest
from ._stopped import check_stopped

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from ..._exchange._base import Schema
    from ..._exchange._resumable import ResumableJob
    from ..._store._api import Store
    from ..._timing import Timing
    from .._life._life import Life
    from .._records._manifest import Manifest
    from .._settings import Fixed


_log = logging.getLogger("diloco_core")


def holds_generations(store: Patient) -> bool:
    """Whether a run lies here that cannot be decided by creating objects."""
    return bool(store.list(FOLDER))


class Entrance:
    """Where one process enters a run. To be used by one thread, and once.

    Args:
        store: The prefix.
        schema: What all replicas must have in common.
        rank: The rank of this process.
        world_size: Number of ranks.
        run_id: The launch to which it belongs.
        settings: How membership behaves.
        timing: Limits and clock.

    Raises:
        RunExistsError: There is a run and this process does not resume it, or a process of it is alive.
        RendezvousError: There is no run to resume.
        MismatchError: This process does not fit the run.
    """

    def __init__(
        self,
        store: Patient,
        schema: Schema,
        *,
        rank: int,
        world_size: int,
        run_id: str,
        settings: Fixed,
        timing: Timing,
    ) -> None:
        self._store = store
        self._rank = rank
        self._size = world_size
        self._settings = settings
        self._timing = timing
        self._schema = schema
        self._check_undecided()
        keys = store.list(FOLDER)
        self._begun = begun(keys)
        self._obsolete = before(keys, self._begun[0]) if self._begun else []
        self._manifest: Manifest | None = None
        self._gathering: Gathering | None = None
        self._check_manifests(keys)
        if self._begun and not settings.resume:
            raise RunExistsError(
                f"{store.uri} holds an earlier run, and this store cannot decide between two processes of a rank, so no rank can "
                "come back by itself. To continue that run, start all of its ranks again with resume=True. To begin another run, "
                "use another prefix, or delete everything under this one."
            )
        if settings.resume and not self._begun:
            raise RendezvousError(
                f"{store.uri} holds no run to resume. Check the URI, or leave resume out to begin a new run."
            )
        if self._begun:
            self._manifest = self._readable_manifest()
            check_same_run(
                self._manifest,
                schema,
                rank=rank,
                world_size=world_size,
                run_id=run_id,
                settings=settings,
                uri=store.uri,
                first=False,
            )
            check_stopped(self._generation(self._begun[0]), timing, rank)

    def meet(self) -> Store:
        """Wait until all processes are there. Returns the folder of the generation that they begin.

        Raises as :meth:`._gathering.Gathering.meet`.
        """
        self._gathering = gathering = Gathering(self._store, self._rank, self._size, self._timing)
        # Whoever met while this process watched the earlier ones, or waited for its turn, has gone on with the run by now.
        keys = self._store.list(FOLDER)
        if begun(keys) != self._begun:
            raise RunExistsError(
                f"the run at {self._store.uri} was continued by other processes while this one (rank {self._rank}) began to. "
                "Start every rank only once."
            )
        number, nonces = gathering.meet(next_number(keys), self._check_undecided)
        self._new = self._generation(folder(number, nonces))
        return self._new.store

    def carry(self, jobs: Sequence[ResumableJob], chunk_bytes: int) -> None:
        """Carry the run's newest whole state into that folder, together with the others. Nothing is done for a new run.

        Raises:
            CorruptedObjectError: There is no whole state, or the newest one is damaged.
            RendezvousTimeoutError: Other ranks have not done their part in time.
            ReplicaLostError: Another rank has failed.
        """
        manifest = self._manifest
        if manifest is None:
            return

        def life(source: str) -> Life:
            return reader_of(
                self._generation(source),
                jobs,
                manifest,
                rank=self._rank,
                settings=self._settings,
                timing=self._timing,
                chunk_bytes=chunk_bytes,
            )

        new, choice = self._new, None
        if self._rank == 0:
            choice = self._choose(life)
            write_choice(new, choice)
        while choice is None:
            self._wait(
                lambda: [] if new.read("carried.json", lambda _: True) else [0],
                "has not chosen the state to continue from",
            )
            choice = read_choice(new, self._timing)
        carry(life(choice.source), new, choice.sync, self._rank)
        if self._rank == 0:
            self._wait(
                lambda: not_carried(new, self._size), "did not carry their part of the state"
            )
            if self._gathering is not None:
                self._gathering.check()
            for key in (copy_key(MANIFEST), MANIFEST):
                new.put(key, lambda: [manifest.to_json()])
            # The generation before this one stays, for resume="newest-whole".
            self._store.delete(self._obsolete)
        else:
            self._wait(
                lambda: [] if new.read(MANIFEST, lambda _: True) else [0],
                "has not begun the run again",
            )

    def stop(self) -> None:
        """Say nothing more, since all have met; repeatable."""
        if self._gathering is not None:
            self._gathering.stop()

    def _choose(self, life: Callable[[str], Life]) -> Choice:
        may_go_back = self._settings.resume == "newest-whole"
        for source in self._begun:
            sync = newest_state(life(source), may_go_back=may_go_back)
            if sync is not None:
                return Choice(source, sync)
        raise CorruptedObjectError(
            f"{self._store.uri} holds no whole state any more. If you have a copy, put it back. Otherwise, begin a new run on "
            "another prefix."
        )

    def _wait(self, missing: Callable[[], list[int]], what: str) -> None:
        timing, new = self._timing, self._new

        def expired() -> Exception:
            ranks = missing() or [0]
            return RendezvousTimeoutError(
                f"{named_ranks(ranks)} {what} at {new.uri} within {timing.join_timeout:g} s. Look at their logs.",
                ranks,
            )

        wait = Wait(
            timing,
            new.near,
            timing.join_timeout,
            partial(check_failures, new, self._rank, committed_in(self._schema) + 1),
            expired,
            downtime=lambda: new.downtime,
        )
        while missing():
            wait.pause()

    def _check_manifests(self, keys: Iterable[str]) -> None:
        """Refuse to pass over a generation in silence that has gone on with the run, and whose manifest is gone."""
        for lost in headless(keys):
            message = f"{without_manifest(self._store.store, lost)} {GO_BACK}"
            if self._settings.resume != "newest-whole" or not self._begun:
                raise CorruptedObjectError(message)
            _log.error("rank %d: %s", self._rank, message)

    def _readable_manifest(self) -> Manifest:
        """The run's manifest, which is the same in all generations."""
        damage: CorruptedObjectError | None = None
        for source in self._begun:
            try:
                manifest = read_or_copy(partial(self._stored, source), MANIFEST, self._store.uri)
            except CorruptedObjectError as error:
                damage = damage or error
            else:
                if manifest is not None:
                    return manifest
        raise damage or CorruptedObjectError(
            f"the manifest of the run at {self._store.uri} is gone"
        )

    def _stored(self, source: str, key: str) -> Manifest | None:
        return read_again(self._timing, partial(stored_manifest, self._generation(source), key))

    def _generation(self, source: str) -> Patient:
        return Patient(below(self._store.store, source), self._timing)

    def _check_undecided(self) -> None:
        """Refuse to go on if another replica has found that the store can decide."""
        if self._store.read(MANIFEST, lambda _: True):
            raise ConfigurationError(
                f"this replica (rank {self._rank}) finds that {self._store.uri} lets an object be created twice, but another one "
                "has found that it does not, and has begun a run there. Use the same driver and the same endpoint for all ranks."
            )
