"""Find the published states of a run, according to its records."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import xxhash

from .._arithmetic._coded import CodedUpdates
from .._arithmetic._layout import CHUNK_BYTES
from .._codecs._codec import Codec
from .._codecs._named import CODECS
from .._errors import (
    CorruptedObjectError,
    FormatError,
    ObjectNotFoundError,
    RendezvousError,
    RunExistsError,
)
from .._model._unsynced import unsynced_header, unsynced_key, unsynced_seed
from .._run._incarnation._progress import published_shard
from .._run._records._keys import MANIFEST, Delta, commit_key, commit_sync, done_key, shard_key
from .._run._records._manifest import Manifest
from .._run._records._records import Commit, Done, Rollback, of_run, read_record
from .._run._records._rules import done_states, made_of
from .._run._records._rules import states as published_states
from .._store._api import Store
from .._store._reread import list_folders, read_or_copy
from .._wire._published import Shard, Sums
from ._stored import PublishedFile, StoredFragment, reading_again

T = TypeVar("T", bound="Commit | Rollback | Done")

_log = logging.getLogger("diloco_core")


class RunStates:
    """The published states of a run, by their numbers in its log.

    The records of the run say which are complete, and which were given up.

    Attributes:
        manifest: What the run has recorded about itself.
        fragments: For each fragment, the table from the manifest that describes its files.
        initial_steps: Number of outer steps that had been taken when the run began.
        rollbacks: The records that say from which older states the run went on, the oldest first;
            as of the last call of :meth:`complete`.
        newest: The newest number of the log that the store shows, as of the last call of
            :meth:`begun`.
        unknown: Number of the newest rollback whose record cannot be read, as of the last call of
            :meth:`complete`; 0 if all can. It is then not known which of the states before it were
            given up, so all of them are left out.
    """

    def __init__(self, store: Store, manifest: Manifest) -> None:
        self.rollbacks: Sequence[Rollback] = []
        self.unknown = self.newest = 0
        self.fragments = manifest.fragments
        self.initial_steps = manifest.first
        self._store = store
        self.manifest = manifest
        self._run = manifest.run()
        self._whole_every = int(manifest.settings.get("full_state_every", "1"))
        codec = _state_codec(manifest.settings, store.uri)
        self._coded = (
            CodedUpdates(codec, self._whole_every, len(manifest.fragments)) if codec else None
        )

    def state(self, number: int) -> list[int]:
        """Return the state after a number of the log: each fragment's last sync up to then."""
        count, first = len(self.fragments), self.initial_steps
        syncs = [max(first, number - (number - 1 - index) % count) for index in range(count)]
        rollback = next((each for each in self.rollbacks[::-1] if each.sync <= number), None)
        if rollback is None:
            return syncs
        return [
            sync if sync > rollback.sync else kept
            for sync, kept in zip(syncs, rollback.states, strict=True)
        ]

    def states(self, complete: Sequence[set[int]]) -> list[int]:
        """The numbers of the log after which the whole model is there, the newest first."""
        # The number of a rollback stands for the older states from which the run went on.
        numbers = {rollback.sync for rollback in self.rollbacks}.union(*complete)
        number_by_state: dict[tuple[int, ...], int] = {}
        for number in sorted(numbers):
            syncs = self.state(number)
            if all(sync in each for sync, each in zip(syncs, complete, strict=True)):
                number_by_state.setdefault(tuple(syncs), number)
        return sorted(number_by_state.values(), reverse=True)

    def complete(self) -> list[set[int]]:
        """Return, for each fragment, the syncs whose state is complete and was not given up."""
        self.rollbacks = self._read_rollbacks()
        listing = self._store.list("state/")
        complete = done_states(listing, len(self.fragments), self.rollbacks)
        listing.update(self._store.list(f"initial/{self.manifest.initial}/"))
        # An encoded state is made of earlier objects, too; of those before the newest whole ones,
        # some are deleted already.
        complete = [
            {
                sync
                for sync in {self.initial_steps, *syncs}
                if listing.keys() >= set(self._keys(index, sync, before=sync > self.initial_steps))
            }
            for index, syncs in enumerate(complete)
        ]
        if self.unknown:  # it is not known which of the states before it were given up
            complete = [{sync for sync in syncs if sync > self.unknown} for syncs in complete]
        return complete

    def outer_steps(self, number: int) -> int:
        """The number of outer steps that the model had taken after a number of the log."""
        if not self.unknown:
            # Rollbacks, and the syncs that they gave up, have numbers in the log but are not outer
            # steps of the model.
            return number - len(self._given_up(number))
        # It is not known how many syncs were given up, but each record of a sync says how many
        # outer steps counted up to it.
        steps = 0
        for sync in self.state(number):
            try:
                record = self._record(sync)
            except ObjectNotFoundError as error:
                raise CorruptedObjectError(
                    f"{self._store.uri}/{commit_key(sync)} is gone"
                ) from error
            if isinstance(record, Rollback):
                raise CorruptedObjectError(
                    f"{self._store.uri}/{commit_key(sync)} is the record of a rollback, not of a "
                    "sync"
                )
            steps += record.outer_steps
        return steps

    def files(self, index: int, sync: int) -> tuple[StoredFragment, list[PublishedFile]]:
        """Return a fragment, and the files of its state after a sync in the order of reading."""
        begun = sync > self.initial_steps
        done = self._done(sync, index) if begun else self.manifest.done(index)
        fragment = StoredFragment(self.fragments[index], self._coded)
        initial = self.manifest.initial
        parts = self._made_of(index, sync)
        return fragment, [
            PublishedFile(
                shard_key(part, index, number, initial),
                published_shard(
                    fragment.job, part, number, self._run if part else initial, CHUNK_BYTES
                ),
                Sums(done.sums[number], done.rests[number]) if part == parts[-1] else None,
            )
            for part in parts
            for number in range(fragment.layout.shards)
        ]

    def _made_of(self, index: int, sync: int) -> list[int]:
        # The initial state has the number 0 in keys.
        last = sync if sync > self.initial_steps else 0
        return made_of(last, index, len(self.fragments), self._whole_every, self.rollbacks)

    def _keys(self, index: int, sync: int, *, before: bool = False) -> list[str]:
        """Return the keys of the files of a fragment's state.

        With ``before``, these are only files of earlier syncs.
        """
        shards = range(self.fragments[index]["shards"])
        initial = self.manifest.initial
        return [
            shard_key(part, index, number, initial)
            for part in self._made_of(index, sync)
            if not before or part != sync
            for number in shards
        ]

    def begun(self) -> list[int]:
        """Return the numbers of states of which the store holds something, the newest first.

        Old states may have been deleted since, by the rules of the run. The newest number that any
        object shows is among them; rollbacks are known as of the last call of :meth:`complete`.
        """
        numbers = {sync for sync, _ in published_states(self._written("state/"))}
        committed = {sync for sync in map(commit_sync, self._written("commits/")) if sync}
        # A replica that contributes to a sync has the state before it.
        deltas = filter(None, map(Delta.parse, self._written("deltas/")))
        before = {delta.sync - 1 for delta in deltas}
        self.newest = max({self.initial_steps}.union(numbers, committed, before))
        begun = {*numbers, self.newest} - self._given_up(sys.maxsize)
        return sorted((number for number in begun if number > self.unknown), reverse=True)

    def missing(self, number: int) -> list[str]:
        """Return the keys of objects that the whole state after a number of the log lacks."""
        keys: list[str] = []
        for index, sync in enumerate(self.state(number)):
            keys += self._keys(index, sync)
            keys += [done_key(sync, index)] if sync > self.initial_steps else []
        listing = list_folders(self._store.list, keys)
        return [key for key in keys if key not in listing]

    def _given_up(self, number: int) -> set[int]:
        """The rollbacks up to a number of the log, and the syncs that they gave up."""
        rollbacks = (rollback for rollback in self.rollbacks if rollback.sync <= number)
        return {sync for rollback in rollbacks for sync in (rollback.sync, *rollback.given_up)}

    def _written(self, folder: str) -> list[str]:
        """The keys below a folder that a run may have written: it writes nothing that is empty."""
        return [key for key, size in self._store.list(folder).items() if size]

    def _read_rollbacks(self) -> list[Rollback]:
        """All rollbacks that can be read, the oldest first.

        Each record of the log names the newest rollback before it.
        """
        rollbacks: list[Rollback] = []
        self.unknown = 0
        # The record to read next; None stands for the newest one before `limit` that can be read.
        following: int | None = None
        limit = sys.maxsize
        listed = sorted(filter(None, map(commit_sync, self._store.list("commits/"))), reverse=True)
        while following != 0:
            sync = following or next((number for number in listed if number < limit), 0)
            if not sync:
                break
            limit = sync
            try:
                record = self._record(sync)
            except (CorruptedObjectError, ObjectNotFoundError) as error:
                if following:
                    self.unknown = sync
                    break
                _log.warning(
                    "%s This record is ignored, and the one before it is read instead.",
                    str(error).rstrip(".") + ".",
                )
                continue
            if isinstance(record, Rollback):
                rollbacks.append(record)
            following = record.rollback
        return rollbacks[::-1]

    def _record(self, sync: int) -> Commit | Rollback:
        key, fragment = commit_key(sync), (sync - 1) % len(self.fragments)
        origin = f"{self._store.uri}/{key}"
        try:
            record = read_record(self._store.get(key), sync, origin, len(self.fragments))
            return self._of_this_run(record, origin)
        except (CorruptedObjectError, ObjectNotFoundError):
            if done_key(sync, fragment) not in self._store.list(f"state/{sync:08}/"):
                raise
            commit = self._done(sync, fragment).commit
            if commit is None:
                raise
            return commit

    def _done(self, sync: int, index: int) -> Done:
        key = done_key(sync, index)
        origin = f"{self._store.uri}/{key}"
        done = Done.from_json(self._store.get(key), sync, index, origin)
        done.check_shards(self.fragments[index]["shards"], origin)
        return self._of_this_run(done, origin)

    def _of_this_run(self, record: T, origin: str) -> T:
        """The record, if it belongs to this run.

        One of another run counts as damaged, since an older state may be whole.
        """
        try:
            return of_run(record, self._run, origin)
        except RunExistsError as error:
            raise CorruptedObjectError(str(error)) from error


def _state_codec(settings: Mapping[str, str], uri: str) -> Codec | None:
    """Return the codec with which a run publishes its state; None if it publishes it as it is.

    Raises:
        FormatError: This version does not know the codec.
    """
    name = settings.get("state_codec")
    if name is None:
        return None
    if name not in CODECS:
        raise FormatError(
            f"the run at {uri} has published its state with the codec {name!r}, which this version "
            f"of diloco-core does not know: it knows {', '.join(CODECS)}. Export with the version "
            "that the run has used."
        )
    return CODECS[name]


_NO_MANIFEST = (
    "The manifest describes all other objects, so nothing can be exported without it. If you have "
    "a backup, put it back. If the run is still going on, one of its replicas writes it again: try "
    "again later."
)


def find_source(store: Store) -> RunStates:
    """The published states of the run that a store holds.

    Raises:
        RendezvousError: The store holds no run, or one without a model.
        CorruptedObjectError: The manifest is damaged, or it is gone while other objects of a run
            are there, or objects of two runs are there.
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
    # Everything else is listed before the manifest is read: nothing is published before the
    # manifest that names it is there.
    published = [*store.list("state/"), *store.list("commits/")]

    def read(key: str) -> Manifest | None:
        try:
            return Manifest.from_json(store.get(key), f"{store.uri}/{key}")
        except ObjectNotFoundError:
            return None

    manifest = read_or_copy(lambda key: reading_again(partial(read, key)), MANIFEST, store.uri)
    if manifest is None and published:
        raise CorruptedObjectError(
            f"{store.uri}/{MANIFEST} and its copy are gone, while other objects of a run are there."
        )
    if manifest is None:
        raise RendezvousError(
            f"{store.uri} holds no run, since there is no {MANIFEST}: check the URI, which is the "
            "run's prefix in its store, and not its name"
        )
    if not manifest.fragments:
        raise RendezvousError(
            f"{store.uri} holds a run without a model, such as plain means, so there is nothing to "
            "export"
        )
    return RunStates(store, manifest)


def unsynced_files(table: Mapping[str, Any]) -> tuple[StoredFragment, list[PublishedFile]]:
    """Return the unsynced tensors that a table of the manifest describes, and their files."""
    fragment, files, folder = StoredFragment(table), [], table["folder"]

    def seed(_: str, number: int) -> int:
        return unsynced_seed(folder, number)

    for number, checksum in enumerate(table["sums"]):
        shard = Shard(fragment.job, number, seed, CHUNK_BYTES)
        beginning = unsynced_header(fragment.layout, shard.values(), number)
        expected = Sums(int(checksum, 16), xxhash.xxh3_64_intdigest(beginning))
        files.append(PublishedFile(unsynced_key(folder, number), shard, expected))
    return fragment, files


def without_unsynced(table: Mapping[str, Any]) -> str:
    """Return the advice of errors for a file of unsynced tensors that cannot be read."""
    names = [str(entry["name"]) for entry in table.get("tensors", ())]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return (
        f"It holds tensors that the run does not sync ({', '.join(map(repr, names[:3]))}{more}), "
        "as they were when the run began. If you have a copy of it, put it back. Otherwise export "
        "with synced_only=True, which writes all other tensors, and take these from the model that "
        "the run began with."
    )
