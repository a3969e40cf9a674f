"""Whether the last record that a life has obeyed is still the one in the log.

A record that is lost without a trace can be decided again, with other members, by lives that have not read it. A life that has
obeyed the first record then holds a state that is not the run's, and must neither decide nor publish anything based on it.
"""

from __future__ import annotations

from ..._errors import CorruptedObjectError
from .._claims import check_claim, fenced
from .._life._life import Life
from .._records._keys import commit_key
from .._records._records import Commit, Rollback
from .._repair import read_commit
from .._round._reload import ReloadError, Why


def look_back(life: Life) -> None:
    """Check, before a life decides or publishes after a long time, that the last record that it has obeyed is still there.

    If it is gone, it is written again, unless another record has its number.

    Raises:
        ReloadError: Something else was decided in its place, or the run went back to older states there.
    """
    if not (life.late and life.sync > life.manifest.first and life.standing.previous):
        return
    entry: tuple[object, str] | None
    try:
        if life.sync == life.rollback:
            entry = life.log(life.sync)
            if entry is None:
                return  # another life that has obeyed it writes it again, or reports that it is missing
        else:
            entry = read_commit(life, life.sync, decided=True)
        if entry is None or entry[1] != life.standing.previous:
            raise ReloadError(Why.REPLACED)
    except ReloadError:
        _say(life)
        raise


def check_not_later(life: Life, commit: Commit) -> None:
    """Fixed: refuse to go on if the record names a later life of this rank.

    Raises:
        FencedError: It does.
    """
    later = [each for each in commit.members if each.rank == life.rank and each.epoch > life.epoch]
    if later:
        raise fenced(life, f"a newer life (epoch {later[0].epoch})")


def look_ahead(life: Life, commit: Commit) -> None:
    """Fixed: look whether the run is past this sync already, when all shards are read and before anything uses them.

    A shard that was deleted long ago may have been created again, with other bytes, by a life that was replaced.

    Raises:
        FencedError: The next sync is decided, and only with a newer life of this rank can it be.
        ReloadError: The run has ended, or went back to older states.
    """
    entry = life.log(commit.sync + 1)
    if entry is not None and isinstance(entry[0], Rollback):
        raise ReloadError(Why.WENT_BACK, entry[0])
    if entry is not None:
        check_claim(life)


def not_next(life: Life, commit: Commit) -> ReloadError:
    """What a life does that has read a record which does not follow the last one that it has obeyed.

    It loads again if the record that it has obeyed was replaced, and the new record follows the replacement.

    Raises:
        CorruptedObjectError: It was not: the records of the log do not follow each other.
    """
    error = life.does_not_follow(commit)
    if (
        life.standing.previous
        and commit.previous != life.standing.previous
        and _digest_in_log(life) == commit.previous
    ):
        _say(life)
        return ReloadError(Why.REPLACED, damage=error)
    raise error


def _digest_in_log(life: Life) -> str | None:
    """Digest of the record in the log that has the number of the last one that this life has obeyed; None if there is none."""
    try:
        entry = life.log(life.sync) if life.sync else None
    except CorruptedObjectError:
        return None
    return entry[1] if entry is not None else None


def _say(life: Life) -> None:
    life.say.error(
        "%s is no longer the record that this replica has obeyed: that record was lost, and another one was decided in "
        "its place while this replica stood still. This replica drops what it holds, which is no longer a state of the run, and "
        "reloads. Something outside this run deletes its objects: find out what does, and stop it.",
        life.origin(commit_key(life.sync)),
    )
