"""How a life ends: it tells the other replicas, and makes sure that the run can be resumed from the store."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from .._errors import FencedError, RunExistsError
from ._policy._meeting import TELL_SECONDS
from ._records._farewell import farewell
from ._records._keys import Hint
from ._states._publish import finish
from ._sync._fork import look_back
from ._watch import watch_manifest

if TYPE_CHECKING:
    from .._model._unsynced import UnsyncedWatch
    from ._life._life import Life


def leave_run(life: Life, unsynced: UnsyncedWatch | None) -> None:
    """Tell the other replicas that this life is done, and make sure that the run can start again from the state that it holds."""
    watch_manifest(life)
    _say_goodbye(life, None)
    if unsynced is not None:
        unsynced.look()
    # If this life's state is no longer the run's, there is nothing to publish.
    if look_back(life) is None:
        finish(life)


def tell_failure(life: Life, error: BaseException) -> None:
    """Tell the other replicas not to wait for this life, which has failed."""
    # If the store cannot be reached, waiting for it once more would only delay the error.
    life.store.patience = min(life.store.patience, TELL_SECONDS)
    # A life that was replaced has not failed: its rank goes on.
    reason = None if isinstance(error, FencedError) else error
    # If the prefix belongs to another run by now, the replicas of that run must not be told.
    with suppress(RunExistsError):
        if isinstance(error, RunExistsError):
            watch_manifest(life)
        _say_goodbye(life, reason)
        # The sync in which it failed may be committed already, so the sync after it is told too.
        _say_goodbye(life, reason, 2)


def _say_goodbye(life: Life, error: BaseException | None, ahead: int = 1) -> None:
    key = Hint(life.sync + ahead, life.rank, life.epoch, "leave").key
    life.store.put(key, lambda: [farewell(key, error, life.rank)])
