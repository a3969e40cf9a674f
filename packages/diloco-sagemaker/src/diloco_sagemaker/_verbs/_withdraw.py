"""Take back the jobs of a failed launch.

They would cost money, and prevent the next try.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from diloco_protocol import (
    BackendError,
    InvalidRequestError,
    ReplicaNotFoundError,
    retry,
)

from .._client._errors import EndedError, MissingError, TakenError
from .._client._parallel import outcomes
from ._launch import Launch, Made
from ._results import remove_checkpoints
from ._runs import Runs

_SECONDS_TO_END = 600.0
"""Seconds to wait: SageMaker gives a job 120 s after SIGTERM, and then uploads its files."""
_SECONDS_TO_APPEAR = 60.0
"""Seconds for which a job may still appear.

It may not be visible yet, and a create whose answer was lost may still be under way.
"""


_ANOTHER = (
    "the training job %s is another launch's by now, and was stopped: it has taken the name "
    "between a look and the stop, or another user has stopped it"
)
_KEPT = (
    "what the training job %s of a launch that failed has left in %s was not deleted, and the next "
    "job of that name will go on from it: %s"
)
_log = logging.getLogger("diloco_sagemaker")


def withdraw(runs: Runs, launch: Launch) -> tuple[list[str], BaseException | None]:
    """End the jobs that a launch may have created, and delete them.

    Jobs of the same names that another launch has created are left alone.

    Args:
        runs: The runs of its account and region.
        launch: The launch, no create of which is under way any more.

    Returns:
        The jobs that are running or may be, with those of an earlier try, which are not ended; and
        the exception that has interrupted this, such as a second Ctrl-C.
    """
    client, backoff = runs.client, runs.backoff
    mine = alive = launch.mine()
    kept: list[str] = []  # jobs that have ended or are being ended, whose records still exist
    interrupted: BaseException | None = None
    appears_until = backoff.clock() + _SECONDS_TO_APPEAR

    def stop(name: str) -> bool:
        """Stop a job; return whether it exists, is of this launch, and is being ended now."""

        def once() -> bool:
            try:
                # Even of a job that was certainly created: it may have been purged meanwhile, and
                # its name taken.
                if client.describe(name).launch != launch.launch_id:
                    return False
                client.stop(name)
            except EndedError:
                return True
            except MissingError as error:
                if backoff.clock() >= appears_until:  # even a created job may appear late
                    return False
                error.retryable = True
                raise
            return True

        try:
            return retry(once, backoff, timeout=max(runs.options.retry_timeout, _SECONDS_TO_APPEAR))
        except MissingError:
            return False

    try:
        stopped = dict(zip(mine, outcomes(stop, mine), strict=True))
        alive = [name for name, answer in stopped.items() if isinstance(answer, BaseException)]
        ended = kept = [name for name, answer in stopped.items() if answer is True]
        # If several creates of a job may have been sent, its record must stay for a while: it
        # blocks the name for a create that arrives late.
        until = {name: appears_until for name in kept if launch.of(name) is not Made.OURS}
        kept = _delete(runs, launch.launch_id, ended, until)
        for name in set(ended) - set(kept):
            uri = launch.requests[name].get("CheckpointConfig", {}).get("S3Uri", "")
            try:
                remove_checkpoints(client, name, uri)
            except BackendError as error:
                _log.warning(_KEPT, name, uri, error)
    except (KeyboardInterrupt, SystemExit) as again:
        interrupted = again
    for name in kept:
        _log.warning(
            (
                "the training job %s of a launch that failed is being ended, and was not deleted: "
                "its name is taken until it is"
            ),
            name,
        )
    return [*alive, *launch.met], interrupted


def _delete(runs: Runs, launch_id: str, ending: list[str], until: Mapping[str, float]) -> list[str]:
    """Delete jobs of a launch as soon as they have ended, but not before their times in ``until``.

    Returns the jobs that were not deleted.
    """
    client, backoff = runs.client, runs.backoff
    deadline = backoff.clock() + _SECONDS_TO_END
    left, refused = list(ending), list[str]()
    for delay in backoff.delays():
        waiting = []
        for name in left:
            if backoff.clock() < until.get(name, 0.0):
                waiting.append(name)
                continue
            try:
                job = client.describe(name)
                if job.launch != launch_id:
                    if job.status in {"Stopping", "Stopped"}:
                        _log.warning(_ANOTHER, name)
                    continue
                client.delete(name)
                waiting.append(name)  # until a try shows that it is gone
            except ReplicaNotFoundError:
                continue
            except (TakenError, InvalidRequestError):  # it has not ended yet
                waiting.append(name)
            except BackendError as error:
                (waiting if error.retryable else refused).append(name)
        left = waiting
        if not left or backoff.clock() >= deadline:
            break
        backoff.sleep(delay)
    return left + refused
