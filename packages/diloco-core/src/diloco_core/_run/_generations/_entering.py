"""Entering a fixed run in a store that cannot decide which process creates an object first.

A process meets the others, and they begin the next generation.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from ..._errors import ConfigurationError, CorruptedObjectError, RunExistsError
from ..._exchange._base import Schema
from ..._exchange._endings import named_ranks
from ..._exchange._resumable import ResumableJob
from ..._store._api import Below
from ..._store._patient import Patient
from ..._store._reread import copy_key, read_or_copy
from .._compare import check_same_run
from .._incarnation._incarnation import Incarnation
from .._policy._ends import nothing_to_resume
from .._policy._meeting import await_ranks, check_failures
from .._records._keys import MANIFEST
from .._records._manifest import Manifest
from .._settings import Joiner
from .._start import committed_in, stored_manifest
from .._states._load import mend_initial
from ._carrying import GO_BACK, Choice, carry, newest_state, not_carried, read_choice, write_choice
from ._gathering import Gathering, check_stopped
from ._names import FOLDER, before, begun, folder, headless, next_number, without_manifest

_log = logging.getLogger("diloco_core")


class Entrance:
    """Where one process enters a run. To be used by one thread, and once.

    Args:
        store: The prefix.
        schema: What all replicas must have in common.
        joiner: This process, with fixed membership.

    Raises:
        RunExistsError: There is a run that this process does not resume, or with a live process.
        RendezvousError: There is no run to resume.
        MismatchError: This process does not fit the run.
    """

    def __init__(self, store: Patient, schema: Schema, joiner: Joiner) -> None:
        self._store = store
        self._joiner = joiner
        self._rank = joiner.rank
        self._may_go_back = joiner.settings.resume == "newest-whole"
        self._schema = schema
        self._check_undecided()
        keys = store.list(FOLDER)
        self._begun = begun(keys)
        self._obsolete = before(keys, self._begun[0]) if self._begun else []
        self._manifest: Manifest | None = None
        self._gathering: Gathering | None = None
        self._check_manifests(keys)
        if self._begun and not joiner.settings.resume:
            raise RunExistsError(
                f"{store.uri} holds an earlier run, and this store cannot decide between two "
                "processes of a rank, so no rank can come back by itself. To continue that run, "
                "start all of its ranks again with resume=True. To begin another run, use another "
                "prefix, or delete everything under this one."
            )
        if joiner.settings.resume and not self._begun:
            raise nothing_to_resume(store)
        if self._begun:
            self._manifest = self._readable_manifest()
            check_same_run(self._manifest, schema, joiner, uri=store.uri, first=False)
            check_stopped(self._generation(self._begun[0]), joiner.rank)

    def meet(self) -> Patient:
        """Wait until all processes are there. Returns the folder of the generation that they begin.

        Raises as :meth:`._gathering.Gathering.meet`.
        """
        self._gathering = gathering = Gathering(self._store, self._rank, self._joiner.world_size)
        # Processes that met while this one watched the earlier ones, or waited for its turn, have
        # gone on with the run by now.
        keys = self._store.list(FOLDER)
        if begun(keys) != self._begun:
            raise RunExistsError(
                f"the run at {self._store.uri} was continued by other processes while this one "
                f"(rank {self._rank}) began to. Start every rank only once."
            )
        number, nonces = gathering.meet(next_number(keys), self._check_undecided)
        self._new = self._generation(folder(number, nonces))
        return self._new

    def carry(self, jobs: Sequence[ResumableJob]) -> None:
        """Carry the run's newest whole state into that folder, together with the others.

        Nothing is done for a new run.

        Raises:
            CorruptedObjectError: There is no whole state, or the newest one is damaged.
            RendezvousTimeoutError: Other ranks have not done their part in time.
            ReplicaLostError: Another rank has failed.
        """
        manifest = self._manifest
        if manifest is None:
            return

        def incarnation(source: str) -> Incarnation:
            return Incarnation.reading(self._generation(source), jobs, manifest, self._joiner)

        new = self._new
        if self._rank == 0:
            # No other process writes there any more.
            mend_initial(incarnation(self._begun[0]), gone=False)
            write_choice(new, self._choose(incarnation))
        while (choice := read_choice(new)) is None:
            self._wait(
                lambda: [] if new.read("carried.json", lambda _: True) else [0],
                "has not chosen the state to continue from",
            )
        carry(incarnation(choice.source), new, choice.sync, self._rank)
        if self._rank == 0:
            self._wait(
                lambda: not_carried(new, self._joiner.world_size),
                "did not carry their part of the state",
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

    def _choose(self, incarnation: Callable[[str], Incarnation]) -> Choice:
        for source in self._begun:
            sync = newest_state(incarnation(source), may_go_back=self._may_go_back)
            if sync is not None:
                return Choice(source, sync)
        raise CorruptedObjectError(
            f"{self._store.uri} holds no whole state any more. If you have a copy, put it back. "
            "Otherwise, begin a new run on another prefix."
        )

    def _wait(self, missing: Callable[[], list[int]], what: str) -> None:
        new = self._new
        await_ranks(
            new,
            missing,
            lambda ranks: (
                f"{named_ranks(ranks)} {what} at {new.uri} within {new.timing.join_timeout:g} s. "
                "Look at their logs."
            ),
            partial(check_failures, new, self._rank, committed_in(self._schema) + 1),
        )

    def _check_manifests(self, keys: Iterable[str]) -> None:
        """Refuse to ignore a generation that continued the run and has lost its manifest."""
        for lost in headless(keys):
            message = f"{without_manifest(self._store.store, lost)} {GO_BACK}"
            if not self._may_go_back or not self._begun:
                raise CorruptedObjectError(message)
            _log.error("rank %d: %s", self._rank, message)

    def _readable_manifest(self) -> Manifest:
        """The run's manifest, which is the same in all generations."""
        damage: CorruptedObjectError | None = None
        for source in self._begun:
            try:
                stored = partial(stored_manifest, self._generation(source))
                manifest = read_or_copy(stored, MANIFEST, self._store.uri)
            except CorruptedObjectError as error:
                damage = damage or error
            else:
                if manifest is not None:
                    return manifest
        raise damage or CorruptedObjectError(
            f"the manifest of the run at {self._store.uri} is gone"
        )

    def _generation(self, source: str) -> Patient:
        return Patient(Below(self._store.store, source), self._store.timing)

    def _check_undecided(self) -> None:
        """Refuse to go on if another replica has found that the store can decide."""
        if self._store.read(MANIFEST, lambda _: True):
            raise ConfigurationError(
                f"this replica (rank {self._rank}) finds that {self._store.uri} lets an object be "
                "created twice, but another one has found that it does not, and has begun a run "
                "there. Use the same driver and the same endpoint for all ranks."
            )
