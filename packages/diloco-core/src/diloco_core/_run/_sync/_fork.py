"""Whether the last record that an incarnation has obeyed is still the one in the log.

A record that is lost without a trace can be decided again, with other members, by incarnations that
have not read it. An incarnation that has obeyed the first record then holds a state that is not the
run's, and must neither decide nor publish anything based on it.
"""

from __future__ import annotations

from .._claims import check_claim, fenced
from .._incarnation._incarnation import Incarnation
from .._records._keys import commit_key
from .._records._records import Commit, Rollback
from .._repair import read_commit, readable_log
from .._round._reload import ReloadError, Why


def look_back(incarnation: Incarnation) -> None:
    """Check that the last record that this incarnation has obeyed is still there.

    This is done before an incarnation decides or publishes after a long time. If the record is
    gone, it is written again, unless another record has its number.

    Raises:
        ReloadError: Something else was decided in its place, or the run went back there.
    """
    has_obeyed = incarnation.sync > incarnation.manifest.first and incarnation.standing.previous
    if not incarnation.late or not has_obeyed:
        return
    record: Commit | Rollback | None
    try:
        if incarnation.sync == incarnation.rollback:
            record = incarnation.log(incarnation.sync)
            if record is None:
                # Another incarnation that has obeyed it writes it again, or reports it missing.
                return
        else:
            record = read_commit(incarnation, incarnation.sync, decided=True)
        if record is None or record.digest != incarnation.standing.previous:
            raise ReloadError(Why.REPLACED)
    except ReloadError:
        _say(incarnation)
        raise


def check_not_later(incarnation: Incarnation, commit: Commit) -> None:
    """Fixed: refuse to go on if the record names a later incarnation of this rank.

    Raises:
        FencedError: It does.
    """
    for member in commit.members:
        if member.rank == incarnation.rank and member.epoch > incarnation.epoch:
            raise fenced(incarnation, f"a newer incarnation (epoch {member.epoch})")


def look_ahead(incarnation: Incarnation, commit: Commit) -> None:
    """Look whether the run is past this sync already, in a run with fixed membership.

    This comes when all shards are read and before anything uses them. A shard that was deleted long
    ago may have been created again, with other bytes, by an incarnation that was replaced.

    Raises:
        FencedError: The next sync is decided, which takes a newer incarnation of this rank.
        ReloadError: The run has ended, or went back to older states.
    """
    record = incarnation.log(commit.sync + 1)
    if isinstance(record, Rollback):
        raise ReloadError(Why.WENT_BACK, record)
    if record is not None:
        check_claim(incarnation)


def not_next(incarnation: Incarnation, commit: Commit) -> ReloadError:
    """Return the error for a record that does not follow the last one that was obeyed.

    The incarnation loads again if the record that it has obeyed was replaced, and the new record
    follows the replacement.

    Raises:
        CorruptedObjectError: It was not: the records of the log do not follow each other.
    """
    error, previous = incarnation.does_not_follow(commit), incarnation.standing.previous
    if previous and commit.previous != previous and incarnation.sync:
        last = readable_log(incarnation, incarnation.sync)
        if last is not None and last.digest == commit.previous:
            _say(incarnation)
            return ReloadError(Why.REPLACED, damage=error)
    raise error


def _say(incarnation: Incarnation) -> None:
    incarnation.say.error(
        "%s is no longer the record that this replica has obeyed: that record was lost, and "
        "another one was decided in its place while this replica stood still. It drops what it "
        "holds, and reloads. Something outside this run deletes its objects: stop it.",
        incarnation.origin(commit_key(incarnation.sync)),
    )
