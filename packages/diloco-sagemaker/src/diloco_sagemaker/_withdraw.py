"""Taking back what a failed launch has created, so that nothing of it costs money or stands in the way of the next try."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from diloco_protocol import (
    BackendError,
    Backoff,
    ForbiddenError,
    ReplicaNotFoundError,
    retry,
)

from ._client import Client
from ._errors import EndedError, MissingError, TakenError
from ._facts import ENDED
from ._many import outcomes
from ._results import remove_checkpoints

_SECONDS_TO_END = 600.0
"""SageMaker gives a job 120 s after SIGTERM; then it uploads what there is."""
_SECONDS_TO_APPEAR = 60.0
"""For so long a create whose answer was lost may still be under way, and a job that was created may not be seen yet."""


class _NotYetError(BackendError):
    """Raised when a job is not there that may still appear."""

    retryable = True


@dataclass(slots=True)
class Withdrawal:
    """What became of the jobs of a failed launch.

    Attributes:
        alive: Jobs that live, or of which nobody can say whether they do; those of an earlier try
            are not ended.
        kept: Jobs that are ended or being ended, whose records are still there.
        interrupted: What has interrupted the withdrawal itself, such as a second Ctrl-C.
    """

    alive: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    interrupted: BaseException | None = None


def withdraw(
    client: Client,
    launch_id: str,
    checkpoints: Mapping[str, str],
    certain: Collection[str],
    backoff: Backoff,
    patience: float,
) -> Withdrawal:
    """End jobs and delete them; jobs of the same names that another launch has created are left alone.

    Args:
        client: To ask.
        launch_id: What the jobs of this launch carry, and those of no other.
        checkpoints: Where they keep checkpoints, by name; empty for a job that keeps none.
        certain: Those that this launch has certainly created, so that nobody has to look first.
        backoff: Pauses between tries.
        patience: Seconds for which each call is tried again.
    """
    result = Withdrawal(alive=list(checkpoints))
    appears_until = backoff.clock() + _SECONDS_TO_APPEAR

    def stop(name: str) -> bool:
        """Whether there is such a job of ours, which is being ended now."""

        def once() -> bool:
            try:
                if name not in certain and client.describe(name).launch != launch_id:
                    return False
                client.stop(name)
            except EndedError:
                return True
            except MissingError as error:
                if backoff.clock() >= appears_until:  # also one that was created may appear later
                    return False
                raise _NotYetError(str(error)) from error
            return True

        try:
            return retry(once, backoff, timeout=max(patience, _SECONDS_TO_APPEAR))
        except _NotYetError:
            return False

    try:
        stopped = dict(zip(checkpoints, outcomes(stop, list(checkpoints)), strict=True))
        result.alive = [
            name for name, answer in stopped.items() if isinstance(answer, BaseException)
        ]
        result.kept = [name for name, answer in stopped.items() if answer is True]
        # The record of a job of which several creates were sent keeps its name from those that come
        # late.
        until = {name: appears_until for name in result.kept if name not in certain}
        ended = result.kept
        result.kept = _delete(client, ended, until, backoff)
        for name in set(ended) - set(result.kept):
            _forget_checkpoints(client, name, checkpoints[name])
    except (KeyboardInterrupt, SystemExit) as again:
        result.interrupted = again
    for name in result.kept:
        logging.getLogger("diloco_sagemaker").warning(
            (
                "the training job %s of a launch that failed is being ended, and was not deleted: its "
                "name is taken until it is"
            ),
            name,
        )
    return result


def _forget_checkpoints(client: Client, name: str, uri: str) -> None:
    try:
        remove_checkpoints(client, name, uri)
    except BackendError as error:
        logging.getLogger("diloco_sagemaker").warning(
            "what the training job %s of a launch that failed has left in %s was not deleted, and "
            "the next job of that name will go on from it: %s",
            name,
            uri,
            error,
        )


def _delete(
    client: Client, ending: list[str], until: Mapping[str, float], backoff: Backoff
) -> list[str]:
    """Delete jobs as soon as they have ended, and no sooner than ``until`` says; returns those that were not deleted."""
    deadline = backoff.clock() + _SECONDS_TO_END
    left, refused = list(ending), []
    for delay in backoff.delays():
        waiting = []
        for name in left:
            if backoff.clock() < until.get(name, 0.0):
                waiting.append(name)
                continue
            try:
                client.delete(name)
                waiting.append(name)  # until it is seen to be gone
            except ReplicaNotFoundError:
                continue
            except TakenError:
                waiting.append(name)
            except ForbiddenError:
                refused.append(name)
            except BackendError as error:
                # One that is not retryable says that it has not ended yet, or that nobody may
                # delete it.
                (waiting if error.retryable or _lives(client, name) else refused).append(name)
        left = waiting
        if not left or backoff.clock() >= deadline:
            break
        backoff.sleep(delay)
    return left + refused


def _lives(client: Client, name: str) -> bool:
    try:
        return client.describe(name).status not in ENDED
    except BackendError:
        return False
