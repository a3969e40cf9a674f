"""What is known of the published states of a run, whatever its membership."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from .._codecs._named import CODECS
from .._errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from .._codecs._codec import Codec
    from .._run._records._records import Rollback


@dataclass(frozen=True, slots=True)
class PublishedFile:
    """The file of a shard of a fragment's state.

    Attributes:
        key: The key of the file.
        seed: Seed of the checksum of its values.
        checksum: What this checksum must be; None if no record says it.
        shard: The number of the shard.
        update: If the file holds an update of the values in the files before it: how that is encoded, and the seed of its
            checksum.
    """

    key: str
    seed: int
    checksum: int | None = None
    shard: int = 0
    update: tuple[Codec, int] | None = None


class Source(Protocol):
    """The published states of a run, by their numbers in its log.

    Attributes:
        run_id: The launch that the run belongs to.
        fragments: For each fragment, the table from the manifest that describes its files.
        unsynced: The same table for the tensors that are not synced; empty if there are none.
        initial_steps: Number of outer steps that had been taken when the run began.
        rollbacks: The records that say from which older states the run went on, the oldest first; as of the last call of
            :meth:`complete`.
        seldom: Whether the run publishes its state only after some of its syncs.
        newest: The newest number of the log that the store shows, as of the last call of :meth:`expected`.
        unknown: Number of the newest rollback whose record cannot be read, as of that call; 0 if all can. States before it
            are then left out.
    """

    run_id: str
    fragments: Sequence[Mapping[str, Any]]
    unsynced: Mapping[str, Any]
    initial_steps: int
    rollbacks: Sequence[Rollback]
    unknown: int
    newest: int
    seldom: bool

    def complete(self) -> list[set[int]]:
        """For each fragment, the syncs after which its state is completely published, and was not given up."""
        ...

    def outer_steps(self, number: int) -> int:
        """The number of outer steps that the model had taken after a number of the log."""
        ...

    def files(self, index: int, sync: int) -> list[PublishedFile]:
        """The files that hold a fragment's state after a sync, in the order in which they are to be read."""
        ...

    def expected(self) -> Iterator[int]:
        """Numbers of the log whose states must have been published once, or are being published now; the newest first.

        Any object that shows that a sync took place counts, not only its records. Old states may have been deleted since, by
        the rules of the run. Rollbacks are known as of the last call of :meth:`complete`.
        """
        ...

    def missing(self, index: int, sync: int) -> list[str]:
        """Keys of the objects that are missing from a fragment's state after a sync."""
        ...


def written(listing: Mapping[str, int]) -> dict[str, int]:
    """What of a listing a run may have written: it writes nothing that is empty."""
    return {key: size for key, size in listing.items() if size}


def state_codec(settings: Mapping[str, str], uri: str) -> Codec | None:
    """The codec with which a run publishes its state, by its settings; None if it publishes it as it is.

    Raises:
        FormatError: This version does not know the codec.
    """
    name = settings.get("state_codec")
    if name is None:
        return None
    if name not in CODECS:
        raise FormatError(
            f"the run at {uri} has published its state with the codec {name!r}, which this version of diloco-core does not know: "
            f"it knows {', '.join(CODECS)}. Export with the version that the run has used."
        )
    return CODECS[name]


def missing_keys(source: Source, number: int) -> list[str]:
    """Keys of the objects that are missing from the whole model's state after a number of the log."""
    return [
        key
        for index, sync in enumerate(state(source, number))
        for key in source.missing(index, sync)
    ]


def states(source: Source, complete: Sequence[set[int]]) -> list[int]:
    """The numbers of the log after which the whole model is there, the newest first."""
    # The number of a rollback stands for the older states from which the run went on.
    numbers = {rollback.sync for rollback in source.rollbacks}.union(*complete)
    number_by_state: dict[tuple[int, ...], int] = {}
    for number in sorted(numbers):
        fragment_syncs = state(source, number)
        if all(sync in syncs for sync, syncs in zip(fragment_syncs, complete, strict=True)):
            number_by_state.setdefault(tuple(fragment_syncs), number)
    return sorted(number_by_state.values(), reverse=True)


def state(source: Source, number: int) -> list[int]:
    """The state after a number of the log: for each fragment, the last sync of this fragment up to then."""
    count = len(source.fragments)
    syncs = [
        max(source.initial_steps, number - (number - 1 - index) % count) for index in range(count)
    ]
    earlier_rollbacks = [rollback for rollback in source.rollbacks if rollback.sync <= number]
    if earlier_rollbacks:
        rollback = earlier_rollbacks[-1]
        syncs = [
            sync if sync > rollback.sync else kept
            for sync, kept in zip(syncs, rollback.states, strict=True)
        ]
    return syncs


def outer_steps(source: Source, number: int) -> int:
    """The number of outer steps that the model had taken after a number of the log.

    Rollbacks, and the syncs that they gave up, have numbers in the log but are not outer steps of the model.
    """
    earlier_rollbacks = [rollback for rollback in source.rollbacks if rollback.sync <= number]
    not_counted = {
        sync for rollback in earlier_rollbacks for sync in (rollback.sync, *rollback.given_up)
    }
    return number - len(not_counted)
