"""The choice of the state that is exported: the newest whole one, or the one that was asked for."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import islice, takewhile
from typing import Any, NamedTuple, TypeVar

import torch

from .._arithmetic._layout import CHUNK_BYTES, Group, Layout, Piece, Rule
from .._errors import ConfigurationError, CorruptedObjectError, ObjectNotFoundError, RendezvousError
from .._run._records._keys import commit_key
from .._store._api import ObjectReader, Store
from .._store._reread import copy_key, list_folders, open_ahead, read_again
from .._timing import Timing
from .._wire._coded import EncodedUpdate
from .._wire._published import ValuesReader, end_sums
from .._wire._sections import Section, section_bytes
from .._wire._tables import DTYPES
from ._run_states import PublishedFile, RunStates, sentence

_TRIES = 8
# How many numbers of the log are looked at, from the newest one on, for a state that is not
# complete.
_MOST_EXPECTED = 1000

INCOMPLETE = (
    "If the run is going on, this is normal: a replica is about to write what is missing. If no "
    "replica is running, the run ended before it was written, or something has deleted it."
)


class Choice(NamedTuple):
    """The state that is chosen.

    Attributes:
        number: Its number in the log.
        step: The number of outer steps after which it was saved.
        damaged: For each newer state that is damaged, the number of outer steps after which it was
            saved; the newest first.
        errors: The errors of these states.
    """

    number: int
    step: int
    damaged: list[int]
    errors: list[CorruptedObjectError]


def newest_whole(
    store: Store, source: RunStates, dtype: torch.dtype | None, at: int | None
) -> tuple[Choice, dict[str, torch.Tensor]]:
    """Choose a state and read its values. The run may go on in the meantime."""
    damaged: dict[tuple[int, int], CorruptedObjectError] = {}
    vanished = 0
    while vanished < _TRIES:
        choice = _choose(store, source, at, damaged)
        tensors: dict[str, torch.Tensor] = {}
        for index, sync in enumerate(source.state(choice.number)):
            try:
                tensors.update(
                    read_tensors(store, source.fragments[index], source.files(index, sync), dtype)
                )
            except (ObjectNotFoundError, CorruptedObjectError) as error:
                # Either the object is damaged, or the run has gone on and deleted it. Its space may
                # have been written over while it was read.
                if sync in source.complete()[index]:
                    damaged[index, sync] = as_damage(error)
                else:
                    vanished += 1
                break
        else:
            return choice, tensors
    raise CorruptedObjectError(
        f"the published states in {store.uri} were deleted while they were read, {_TRIES} times: "
        "the run is going on faster than it can be read from here. Try again, or from a machine "
        "closer to the store."
    )


def _choose(
    store: Store,
    source: RunStates,
    at: int | None,
    damaged: Mapping[tuple[int, int], CorruptedObjectError],
) -> Choice:
    """The state ``at``; without that, the newest one that is whole."""
    numbers = source.states(reading_again(source.complete))
    steps = {number: source.outer_steps(number) for number in numbers}
    whole = [
        number
        for number in numbers
        if not any(part in damaged for part in enumerate(source.state(number)))
    ]
    wanted = [number for number in whole if at in {None, steps[number]}]
    if wanted and at is not None:
        return Choice(wanted[0], at, [], [])
    newest = max(whole, default=-1)
    expected = source.expected()
    if wanted:
        harmed = [steps[number] for number in numbers if number > newest]
        return Choice(newest, steps[newest], harmed, list(damaged.values()))
    complete_states = (
        f"Complete states in {store.uri}: {_listed([steps[number] for number in whole])}."
    )
    if damaged and (at is None or at in steps.values()):
        error = next(iter(damaged.values()))
        raise CorruptedObjectError(f"{sentence(error)} {complete_states}") from error
    for number in islice(takewhile(lambda each: each > newest, expected), _MOST_EXPECTED):
        step = source.outer_steps(number)
        is_wanted = number not in steps and at in {None, step} and number > source.initial_steps
        if is_wanted and (missing := source.missing(number)):
            more = len(missing) - 1
            missed = f"{missing[0]} and {more} more are" if more else f"{missing[0]} is"
            raise CorruptedObjectError(
                f"{the_states([step])} in {store.uri} is incomplete: {missed} missing. "
                f"{INCOMPLETE} {complete_states}"
            )
    if source.unknown:
        raise CorruptedObjectError(
            f"{store.uri}/{commit_key(source.unknown)} is damaged or gone. It is the record with "
            "which the run went back to older states. Without it, it is not known which of the "
            "states before it were given up, so none of them is exported. Start the replicas "
            "again: they write again what can be written again, and newer states do not need this "
            f"record. {complete_states}"
        )
    if at is not None:
        present = f"the states {_listed(list(steps.values()))}" if steps else "no complete state"
        raise RendezvousError(
            f"{store.uri} does not hold the state after outer step {at}. It holds {present}. A run "
            "keeps only its newest states."
        )
    raise RendezvousError(
        f"the run at {store.uri} has not published a whole model yet: try again later"
    )


def the_states(steps: list[int]) -> str:
    *others, last = map(str, sorted(steps))
    if not others:
        return f"the state after outer step {last}"
    return f"the states after outer steps {', '.join(others)} and {last}"


def _listed(steps: list[int]) -> str:
    return "after outer steps " + ", ".join(map(str, sorted(steps))) if steps else "none"


_TIMING = Timing()
_log = logging.getLogger("diloco_core")

T = TypeVar("T")


def reading_again(read: Callable[[], T]) -> T:
    """Like :func:`read_again`, but with only two further readings, since a person is waiting."""
    return read_again(_TIMING, read, most=2)


def as_damage(error: ObjectNotFoundError | CorruptedObjectError) -> CorruptedObjectError:
    if isinstance(error, CorruptedObjectError):
        return error
    return CorruptedObjectError(f"an object that the run's records name is gone: {error}")


def read_tensors(
    store: Store, table: Mapping[str, Any], files: list[PublishedFile], dtype: torch.dtype | None
) -> dict[str, torch.Tensor]:
    """Read and verify the tensors in some files.

    Each file is read again before it counts as damaged.
    """
    if not files:
        return {}
    layout = Layout(tuple(map(_group, table["groups"])), table["shards"], table.get("block", 1))
    listing = list_folders(store.list, (file.key for file in files))
    _check_sizes(store, layout, files, listing)
    flat = [torch.empty(group.numel, dtype=group.dtype, device="cpu") for group in layout.groups]
    reading = Reading(store, layout, flat)
    by_key = {file.key: file for file in files}

    def announce(key: str, reader: ObjectReader) -> None:
        reading.announce(by_key[key], reader)

    with open_ahead(store, {key: listing.get(key) for key in by_key}, announce) as readers:
        for file, opened in zip(files, readers, strict=True):
            try:
                reading.read(file, opened)
            except (CorruptedObjectError, ObjectNotFoundError) as error:
                if copy_key(file.key) not in listing:
                    raise
                _log.warning("%s. Its copy is read instead.", str(as_damage(error)).rstrip("."))
                reading.read(replace(file, key=copy_key(file.key)), None)
    return {entry["name"]: _tensor(flat, entry, dtype) for entry in table["tensors"]}


def _check_sizes(
    store: Store, layout: Layout, files: list[PublishedFile], listing: Mapping[str, int]
) -> None:
    """Refuse files that are too short for their values, before memory is reserved for these.

    Only the manifest says how many values there are.
    """
    for file in files:
        if file.update is not None:
            continue  # it is added to the values of a whole file
        sizes = [listing[key] for key in (file.key, copy_key(file.key)) if key in listing]
        section = Section("values", layout.shard(file.shard), file.seed)
        if sizes and max(sizes) < (least := section_bytes(layout, section)):
            raise CorruptedObjectError(
                f"{store.uri}/{file.key} has {max(sizes)} bytes, but the values that the manifest "
                f"says are in it have {least}"
            )


@dataclass(frozen=True, slots=True)
class Reading:
    """Reads files into their places in the flat vectors of the groups of a layout."""

    store: Store
    layout: Layout
    flat: list[torch.Tensor]

    def read(self, file: PublishedFile, opened: ObjectReader | None) -> None:
        """Read a file, again if it is damaged; ``opened`` serves only the first reading."""

        def read() -> None:
            nonlocal opened
            reader, opened = opened or self.store.open(file.key), None
            with reader:
                if file.update is not None:
                    checksum = self._add_update(file, reader)
                else:
                    values = self.values(file, reader)
                    for piece in self.layout.shard(file.shard):
                        values.read(self._part(piece))
                    checksum = values.verified_sums().values
            self._check(file, checksum)

        reading_again(read)

    def announce(self, file: PublishedFile, reader: ObjectReader) -> None:
        """Announce what will be read of a file."""
        if file.update is not None:
            self._update(file).announce(reader)
        else:
            self.values(file, reader)

    def values(self, file: PublishedFile, reader: ObjectReader) -> ValuesReader:
        """A reader of a file's values. Making it announces what it will read."""
        section = Section("values", self.layout.shard(file.shard), file.seed)
        return ValuesReader(reader, self.layout, section, f"{self.store.uri}/{file.key}")

    def _add_update(self, file: PublishedFile, reader: ObjectReader) -> int:
        """Add the update in a file to the values before it.

        Returns the checksum of the new values.
        """
        origin = f"{self.store.uri}/{file.key}"
        expected = end_sums(reader, origin).values
        self._check(file, expected)  # before anything is added, as the update itself is
        if self._update(file).add(reader, origin, CHUNK_BYTES, self._part) != expected:
            raise CorruptedObjectError(
                f"{origin} does not fit the files before it: the values after its update do not "
                "have the checksum that it says"
            )
        return expected

    def _check(self, file: PublishedFile, checksum: int) -> None:
        if file.checksum not in {None, checksum}:
            raise CorruptedObjectError(
                f"{self.store.uri}/{file.key} does not have the checksum that the record of its "
                "sync says"
            )

    def _update(self, file: PublishedFile) -> EncodedUpdate:
        assert file.update is not None
        codec, seed = file.update
        return EncodedUpdate(self.layout, file.shard, codec, seed, Section("values", (), file.seed))

    def _part(self, piece: Piece) -> torch.Tensor:
        return self.flat[piece.group][piece.start : piece.stop]


def _tensor(
    flat: list[torch.Tensor], entry: Mapping[str, Any], dtype: torch.dtype | None
) -> torch.Tensor:
    shape, start, group = torch.Size(entry["shape"]), int(entry["start"]), int(entry["group"])
    values = flat[group][start : start + shape.numel()].view(shape)
    model_dtype = DTYPES[entry["dtype"]]
    if dtype is None or not model_dtype.is_floating_point:
        return values.to(model_dtype, copy=True)
    largest = torch.finfo(dtype).max
    too_large = values.isfinite() & (values.abs() > largest)
    if bool(too_large.any()):
        raise ConfigurationError(
            f"dtype={dtype} cannot hold the values of {entry['name']!r}: they go up to "
            f"{values[too_large].abs().max():.6g}, and it can hold up to {largest:.6g}. Leave "
            f"dtype out (the file then has {model_dtype}), or pass one with a larger range."
        )
    return values.to(dtype, copy=True)


def _group(entry: Mapping[str, Any]) -> Group:
    return Group(DTYPES[entry["dtype"]], entry["numel"], Rule(entry["rule"]))
