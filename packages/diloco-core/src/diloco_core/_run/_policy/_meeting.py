"""The beginning of a fixed run: no replica trains before all are there and the state is uploaded.

The replica that begins a run uploads the initial state. An outer loop that was loaded has outer
state, of which each rank holds only its own shards. So each rank uploads these, under a name that
follows from what was loaded, and rank 0 writes the manifest when all of them are there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial

from diloco_protocol.telemetry import Phase

from ..._errors import CorruptedObjectError, MismatchError, RendezvousTimeoutError, ReplicaLostError
from ..._exchange._base import Schema
from ..._exchange._endings import named_ranks
from ..._exchange._resumable import ResumableJob
from ..._store._patient import Patient
from ..._store._reread import in_parallel, read_again
from ..._wire._published import Sums, end_sums, shard_metadata
from ..._wire._sections import fingerprint
from .._claims import claim, claimed_settings, newest_epoch
from .._incarnation._incarnation import Incarnation
from .._incarnation._progress import published_shard
from .._records._attendance import concluded, farewell, read_farewell
from .._records._keys import Hint, deltas, farewells, highest_epochs, shard_key
from .._records._rules import former_farewells
from .._settings import Joiner

#: What to look at while ranks are missing: before a rank has claimed its place, nothing in the
#: store tells of it.
_ABSENT = (
    "A rank that is missing is still starting, or it failed before it could leave word in the "
    "store, for instance because DiLoCo(...) refused an argument: look at its log"
)

#: How long a replica that fails waits for the store to tell the others: they find out in any case,
#: only later.
TELL_SECONDS = 5.0

_log = logging.getLogger("diloco_core")


def meet(incarnation: Incarnation) -> None:
    """Wait until every rank has claimed an epoch.

    Raises:
        RendezvousTimeoutError: Some ranks did not come in time; the error names them.
        ReplicaLostError: A rank has failed.
        MismatchError: A rank was refused because of its model or settings.
    """
    store, first = incarnation.store, incarnation.manifest.first + 1
    size = incarnation.manifest.world_size
    here: dict[int, int] = {}
    # Those that have failed together with an earlier process of this rank may be back in a moment,
    # as it is.
    former = former_farewells(store.list(deltas(first)), incarnation.rank, incarnation.epoch)

    def has_followed(hint: Hint) -> bool:
        is_past = incarnation.others is not None and incarnation.others.is_past(hint)
        return is_past or hint.key in former or hint.epoch < here.get(hint.rank, 0)

    def missing() -> list[int]:
        here.update(highest_epochs(store.list("claims/")))
        absent = [rank for rank in range(size) if rank not in here]
        incarnation.doing.now(Phase.WAITING if absent else Phase.IDLE, absent)
        return absent

    def has_met(hint: Hint) -> bool:
        """Say whether the incarnation of a hint had met all others, so that it may have trained."""
        return claimed_settings(store, hint.rank, hint.epoch) is not None

    look_around = partial(check_failures, store, incarnation.rank, first, has_followed)
    await_all(store, incarnation.rank, size, missing, look_around)
    check_failures(store, incarnation.rank, first, has_followed, has_met)


def await_ranks(
    store: Patient,
    missing: Callable[[], list[int]],
    late: Callable[[list[int]], str],
    look_around: Callable[[], None] = lambda: None,
    notice: Callable[[list[int], float], str] = lambda *_: "",
) -> None:
    """Wait until no rank is missing.

    Args:
        store: Where the ranks are waited for.
        missing: Looks which ranks are missing.
        late: What the error says, given the ranks that are missing after ``join_timeout``.
        look_around: Called from time to time; raises an error if waiting any longer is of no use.
        notice: What the log says meanwhile, given the missing ranks and the seconds so far.

    Raises:
        RendezvousTimeoutError: Some ranks did not come in time; the error names them.
    """
    ranks: list[int] = []
    wait = store.wait(
        store.timing.join_timeout,
        lambda: RendezvousTimeoutError(late(ranks), ranks),
        look_around,
        notice=lambda seconds: notice(ranks, seconds),
    )
    while ranks := missing():
        wait.pause()


def await_all(
    store: Patient,
    rank: int,
    size: int,
    missing: Callable[[], list[int]],
    look_around: Callable[[], None],
) -> None:
    """Wait until all ranks of a run are there, as :func:`await_ranks` does.

    ``rank`` is that of this replica.
    """
    limit = store.timing.join_timeout
    said = False

    def looked() -> list[int]:
        nonlocal said
        if (ranks := missing()) and not said:
            said = True
            where = named_ranks(ranks), store.uri, limit
            _log.info("rank %d: waits for %s at %s, for up to %g s (join_timeout)", rank, *where)
        return ranks

    await_ranks(
        store,
        looked,
        lambda ranks: (
            f"only {size - len(ranks)} of {size} replicas met at {store.uri} within {limit:g} s; "
            f"missing: {named_ranks(ranks)}. {_ABSENT}, and check that it was given the same URI "
            "and world size. If the ranks only need longer to start, raise join_timeout."
        ),
        look_around,
        lambda ranks, seconds: (
            f"rank {rank}: {size - len(ranks)} of {size} replicas have met at {store.uri} after "
            f"{seconds:.0f} s; waiting for {named_ranks(ranks)}, for up to {limit:g} s. {_ABSENT}."
        ),
    )


def check_failures(
    store: Patient,
    rank: int,
    sync: int,
    has_followed: Callable[[Hint], bool] = lambda _: False,
    has_met: Callable[[Hint], bool] = lambda _: False,
) -> None:
    """Refuse to go on if a rank has failed before the first sync.

    Args:
        store: The run's prefix.
        rank: The rank of this replica.
        sync: The number of the first sync.
        has_followed: Whether another process follows the one that has left this hint, so that it
            says nothing any more.
        has_met: Whether an incarnation had met the others before it failed. What that means shows
            at the sync that lacks its part.

    Raises:
        ReplicaLostError: A rank has failed.
        MismatchError: A rank was refused because of its model or settings.
    """
    for hint in farewells(store.list(deltas(sync))):
        if hint.rank == rank or has_followed(hint):
            continue
        said = read_farewell(hint.key, store.peek)
        if said.event != "failed":
            continue
        if said.reason.startswith("MismatchError: "):
            raise MismatchError(said.reason.removeprefix("MismatchError: "))
        if has_met(hint):
            continue
        lost, why = concluded(rank, hint.rank, said, 0)
        raise ReplicaLostError(why, lost)


def tell_refusal(store: Patient, rank: int, run: str, sync: int, error: BaseException) -> None:
    """Tell the others not to wait for this replica, which fails or is refused before it has joined.

    Before it knows the run, it says so only if no other process holds the rank: for that one it
    does not speak.

    Args:
        store: The run's prefix.
        rank: The rank of this replica.
        run: Name of the run; empty if it has not begun.
        sync: The number of the first sync.
        error: Why it is refused.
    """
    store.patience = min(store.patience, TELL_SECONDS)
    if not run and newest_epoch(store, rank):
        return
    epoch = claim(store, rank, run)[0] if run else 0
    key = Hint(sync, rank, epoch, "leave").key
    store.put(key, lambda: [farewell(key, error, rank)])


def name_of(schema: Schema, run_id: str) -> str:
    """The name of a state that was loaded, the same on all ranks."""
    return fingerprint("loaded", run_id, dict(schema.settings), dict(schema.tensors))[:16]


def shards_of_all(jobs: Sequence[ResumableJob]) -> list[tuple[int, int]]:
    """The shards of all fragments, each as the fragment's index and the shard's number."""
    counts = (job.layout.shards for job in jobs)
    return [(index, number) for index, count in enumerate(counts) for number in range(count)]


def upload(
    store: Patient,
    jobs: Sequence[ResumableJob],
    nonce: str,
    numbers: Sequence[tuple[int, int]],
    chunk_bytes: int,
) -> dict[tuple[int, int], Sums]:
    """Upload shards of the initial state, each given by its fragment and its number.

    Returns their checksums.
    """

    def publish(index: int, number: int) -> Sums:
        job = jobs[index]
        shard = published_shard(job, 0, number, nonce, chunk_bytes)
        written: list[Sums] = []
        parts = partial(shard.parts, shard_metadata(job, 0), written.append)
        key = shard_key(0, index, number, nonce)
        store.put(key, parts if store.near else lambda: list(parts()))
        return written[-1]

    uploads = (partial(publish, *number) for number in numbers)
    return dict(zip(numbers, in_parallel(store.store, uploads), strict=True))


def upload_own(
    store: Patient, jobs: Sequence[ResumableJob], nonce: str, joiner: Joiner
) -> dict[tuple[int, int], Sums]:
    """Upload the shards of a loaded state that this rank updates."""
    own = [at for at in shards_of_all(jobs) if at[1] % joiner.world_size == joiner.rank]
    for index, number in own:
        for piece in jobs[index].layout.chunks(number, joiner.chunk_bytes):
            jobs[index].prepare_outer(piece)
    return upload(store, jobs, nonce, own, joiner.chunk_bytes)


def sums_of_all(
    store: Patient, jobs: Sequence[ResumableJob], nonce: str, joiner: Joiner
) -> dict[tuple[int, int], Sums]:
    """Upload this rank's shards of a loaded state, and wait for those of the others.

    Returns the checksums of all.

    Raises:
        RendezvousTimeoutError: Some ranks did not upload theirs in time.
        CorruptedObjectError: A shard is damaged.
    """
    found = upload_own(store, jobs, nonce, joiner)
    others = [at for at in shards_of_all(jobs) if at not in found]
    keys = {at: shard_key(0, *at, nonce) for at in others}

    def missing() -> list[int]:
        listing = store.list(f"initial/{nonce}/")
        lost = [number for (_, number), key in keys.items() if key not in listing]
        return sorted({number % joiner.world_size for number in lost})

    await_ranks(
        store,
        missing,
        lambda ranks: (
            f"{named_ranks(ranks)} did not upload their part of the loaded state to {store.uri} "
            f"within {store.timing.join_timeout:g} s. Look at their logs. All ranks have to load "
            "the state that was saved at the same moment, each its own."
        ),
    )
    for at, key in keys.items():
        found[at] = read_again(store.timing, partial(_end, store, key))
    return found


def _end(store: Patient, key: str) -> Sums:
    sums = store.read(key, lambda reader: end_sums(reader, f"{store.uri}/{key}"))
    if sums is None:
        raise CorruptedObjectError(f"{store.uri}/{key} is gone")
    return sums
