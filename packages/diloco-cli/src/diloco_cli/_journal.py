"""The journal in a run's store: what an executor has recorded there, or a stranger.

It is bounded, shown as what the journal says, and never above what a backend says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from diloco_protocol import (
    InvalidRequestError,
    RecordedRun,
    ReplicaHandle,
    ReplicaStatus,
    SpecVersionError,
    StoreJournal,
)
from diloco_protocol.backend import redact_json
from diloco_protocol.telemetry import Live

from ._facts import place_of, replica_facts
from ._store import Store
from ._texts import clean

_FOLDER = "journal/"
_MOST_RUNS, _MOST_LAUNCHES = 16, 64  # that are read, and that are shown
_MOST_RANKS = 100_000  # as replicas may tell
_CLOCK = 60.0  # seconds by which clocks may differ without a word


@dataclass(frozen=True)
class Recorded:
    """What the journal in a store says.

    Attributes:
        journal: The journal.
        runs: The records of its runs.
        handles: The replica that counts for each rank, in rank order.
        ends: How these have ended, as far as that is recorded.
        disproved: Ranks that have told something after their recorded end, which does not count.
        skipped: How many objects and replicas are not such records.
        left_out: How many records or runs were not read since there are too many.
    """

    journal: StoreJournal
    runs: tuple[RecordedRun, ...]
    handles: Mapping[int, ReplicaHandle]
    ends: Mapping[ReplicaHandle, ReplicaStatus]
    disproved: tuple[int, ...]
    skipped: int
    left_out: int

    def log(self, handle: ReplicaHandle | None) -> str | None:
        """Return the end of a log; None if the journal keeps none that can be read."""
        if handle is None or not any(handle in run.logged for run in self.runs):
            return None
        try:
            return self.journal.log(handle)
        except (InvalidRequestError, SpecVersionError):  # anyone may have written it
            return None

    def facts(self) -> dict[str, Any]:
        """Return this as a JSON value."""
        launches = [(run.run_id, launch) for run in self.runs for launch in run.launches]
        return {
            "launches": [
                {
                    "run_id": clean(run_id),
                    "backend": clean(launch.handles[0].backend_name),
                    "place": place_of(launch.handles),
                    "replicas": len(launch.handles),
                    "options": redact_json(launch.options),
                }
                for run_id, launch in launches[:_MOST_LAUNCHES]
                if launch.handles
            ],
            "ends": [replica_facts(handle, end) for handle, end in self.ends.items()],
            "disproved": list(self.disproved),
            "skipped": self.skipped,
            "left_out": self.left_out,
        }


def read_journal(store: Store, told: Mapping[int, Live]) -> Recorded:
    """Return what the journal in a store says of the ranks of its run.

    Args:
        store: The store.
        told: What the ranks themselves tell. The records of the launch that a rank names count;
            where it names none, those of the launch of which a replica ended last.

    Raises:
        UnavailableError: The store cannot be read.
    """
    journal = StoreJournal(
        "the store",
        list_keys=lambda folder: (
            key.removeprefix(_FOLDER) for key, _ in store.list_keys(_FOLDER + folder)
        ),
        read=lambda key, most: store.read(_FOLDER + key, most),
    )
    named = {live.run for live in told.values()}
    names = sorted(journal.runs(), key=lambda name: (name in named, name))
    runs = tuple(map(journal.look, names[-_MOST_RUNS:]))
    skipped = sum(run.skipped for run in runs)
    counts: dict[int, tuple[ReplicaHandle, ReplicaStatus | None]] = {}
    for run in sorted(runs, key=_last_end):
        for handle in run.handles:
            if not handle.rank < handle.world_size <= _MOST_RANKS:
                skipped += 1
            elif handle.rank not in told or told[handle.rank].run in {"", run.run_id}:
                counts[handle.rank] = handle, run.ends.get(handle, (None,))[0]
    ends = {handle: end for _, (handle, end) in sorted(counts.items()) if end is not None}
    disproved = {each for each, end in ends.items() if _is_later(told.get(each.rank), end)}
    return Recorded(
        journal,
        runs,
        handles={rank: counts[rank][0] for rank in sorted(counts)},
        ends={handle: end for handle, end in ends.items() if handle not in disproved},
        disproved=tuple(sorted(handle.rank for handle in disproved)),
        skipped=skipped,
        left_out=sum(run.left_out for run in runs) + len(names[:-_MOST_RUNS]),
    )


def _last_end(run: RecordedRun) -> float:
    return max((end.finished_at or 0.0 for end, _ in run.ends.values()), default=0.0)


def _is_later(live: Live | None, end: ReplicaStatus) -> bool:
    """Return whether a replica goes on to tell after its end, so that it has not ended."""
    at = end.finished_at
    return live is not None and not live.ended and at is not None and live.time > at + _CLOCK
