"""Whether the record that a life stands at is still the one that it has obeyed.

A record that is lost without a trace can be decided again by lives that have not read it, with other members. Whoever stands
at the first one then has a state that is not the run's, and must neither decide nor publish anything on top of it.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ..._errors import CorruptedObjectError
from .._log._keys import commit_key
from .._repair import read_commit
from .._round._reload import Reload, Why

if TYPE_CHECKING:
    from .._life._life import Life
    from .._log._records import Commit

_log = logging.getLogger("diloco_core")


def look_back(life: Life) -> None:
    """A life that decides or publishes after a long time sees first whether the record that it stands at is still there.

    Where it is gone it is written again, as long as nothing else has its number.

    Raises:
        Reload: Something else was decided in its place, or the run went back to older states there.
    """
    if not (life.late and life.sync and life.previous):
        return
    if life.sync == life.rollback:
        entry = life.log(life.sync)
        if (
            entry is None
        ):  # another life that has obeyed it writes it again, or says what is missing
            return
    else:
        try:
            entry = read_commit(life, life.sync, decided=True)
        except Reload:
            _say(life)
            raise
    if entry is None or entry[1] != life.previous:
        _say(life)
        raise Reload(Why.REPLACED)


def not_next(life: Life, commit: Commit) -> Exception:
    """What a life raises that has read a record which is not the next one of the log.

    Returns:
        ``Reload`` where it follows another record than the one that this life stands at, which was decided in that one's
        place; otherwise the error that the log does not hang together.
    """
    error = life.does_not_follow(commit)
    if (
        life.previous
        and commit.previous != life.previous
        and _digest_in_log(life) == commit.previous
    ):
        _say(life)
        reload = Reload(Why.REPLACED)
        reload.__cause__ = error
        return reload
    return error


def _digest_in_log(life: Life) -> str | None:
    """Digest of the record that has the number of the one that this life stands at."""
    try:
        entry = life.log(life.sync) if life.sync else None
    except CorruptedObjectError:
        return None
    return entry[1] if entry is not None else None


def _say(life: Life) -> None:
    _log.error(
        "rank %d: %s is not the record any more that this replica has obeyed: that one was lost, and something else was decided "
        "in its place while this replica stood still. What it holds is not a state of the run any more, and is dropped. "
        "Something else deletes objects of this run.",
        life.rank,
        life.origin(commit_key(life.sync)),
    )
