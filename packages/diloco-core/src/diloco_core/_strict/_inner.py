"""Saving the inner state of a replica in a strict run, for the process that resumes the run in its place."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from .._errors import CorruptedObjectError
from .._inner._file import SavedInner, check_inner
from .._store._reread import read_again
from .._wire._safetensors import check_extent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from .._store._api import Buffer
    from ._participant import Participant

_INNER = re.compile(r"inner/[0-9]{5}/([0-9]{8})\.([0-9a-f]{16})\.([0-9]{4,7})\.safetensors")
_KEPT = 2


def save_inner(
    participant: Participant, sync: int, parts: Callable[[str], Iterable[Buffer]]
) -> None:
    """Save the state that belongs to this replica alone after a sync, and delete all but those of the newest two syncs.

    Two, since a run whose newest state is damaged may continue from the state before it. A life never touches what a later life
    of its rank has saved, even if it wakes up late: no two lives share a key.

    Raises:
        RunExistsError: A later process has resumed the run in the place of this one.
    """
    participant.check_not_resumed()
    key = _key(participant, sync)
    participant.store.put(key, lambda: parts(_identity(participant, sync, key)))
    listed = participant.store.list(_folder(participant))
    known = _known(participant, listed)
    newest: dict[int, str] = {}
    for number, counts, _, own in known:
        if counts:
            newest.setdefault(number, own)
    kept = [*newest.values()][:_KEPT]
    participant.store.delete(sorted({own for *_, own in known}.difference(kept)))


def saved_inner(participant: Participant, initial: int) -> Iterator[SavedInner]:
    """What this rank has saved in all of its lives until now, the newest first; of the same sync, that of the newest life first.

    What was saved after syncs that do not count is unread.

    Args:
        participant: This replica.
        initial: How many syncs of the run only shared the initial values.
    """
    for sync, counts, _, key in _known(participant, participant.store.list(_folder(participant))):
        identity, origin = _identity(participant, sync, key), f"{participant.store.uri}/{key}"
        if not counts:
            yield GivenUp(sync + 1 - initial, identity, origin, b"")
            continue
        data = _read(participant, key, identity, origin)
        if data is not None:
            yield SavedInner(sync + 1 - initial, identity, origin, data)


class GivenUp(SavedInner):
    """An inner state that was saved after a sync that the run has since given up. Its data is not read."""


def inner_listed(key: str) -> tuple[str, int] | None:
    """The beginning of the run's name, and the sync, in the key of an inner state; None if it is not such a key."""
    match = _INNER.fullmatch(key)
    return (match[2], int(match[1])) if match else None


def _known(participant: Participant, listed: Iterable[str]) -> list[tuple[int, bool, int, str]]:
    """What this life of the rank and those before it have saved, the newest first.

    Returns:
        For each state, the number of the sync after which it was saved, whether that sync counts, the life, and the key.
    """
    runs = (participant.run, *(name for name, _ in participant.earlier), *participant.given_up)
    names = {run[:16] for run in runs}
    matches = filter(None, map(_INNER.fullmatch, listed))
    return sorted(
        (
            (
                int(match[1]),
                participant.run_of(int(match[1])).startswith(match[2]),
                int(match[3]),
                match[0],
            )
            for match in matches
            if match[2] in names and int(match[3]) <= participant.life
        ),
        reverse=True,
    )


def _folder(participant: Participant) -> str:
    return f"inner/{participant.rank:05}/"


def _key(participant: Participant, sync: int) -> str:
    run, life = participant.run_of(sync)[:16], participant.life
    return f"{_folder(participant)}{sync:08}.{run}.{life:04}.safetensors"


def _identity(participant: Participant, sync: int, key: str) -> str:
    return f"{participant.run_of(sync)} {key}"


def _read(participant: Participant, key: str, identity: str, origin: str) -> bytes | None:
    """The saved state, read again if it is not as it was written; if it never is, the bytes that were read last."""
    data: bytes | None = None

    def read() -> bytes | None:
        nonlocal data
        # Its size is believed once the file itself bears it out.
        size = participant.store.read(key, lambda reader: check_extent(reader, origin))
        data = None if size is None else participant.store.get(key, largest=size)
        if data is not None:
            check_inner(data, identity, origin)
        return data

    try:
        return read_again(participant.timing, read)
    except CorruptedObjectError:
        return data or b""
