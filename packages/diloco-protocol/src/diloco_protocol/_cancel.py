"""Ending several replicas at once: cancelling them, and taking back a launch that failed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ._errors import BackendError, InvalidRequestError
from ._handle import ReplicaHandle

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from ._handle import ReplicaHandle


MAX_THREADS = 32


def cancel_all(handles: Sequence[ReplicaHandle], stop: Callable[[ReplicaHandle], None]) -> None:
    """Ask the backend to end every replica of a run, in several threads at once.

    Args:
        handles: The replicas of one run.
        stop: Asks the backend to end one replica; called from up to 32 threads.

    Raises:
        BackendError: The backend refused to end some replicas; the others are being ended. The
            error names the ranks that were refused, and is retryable if all refusals are.
    """
    from concurrent.futures import ThreadPoolExecutor  # slow to import

    refused: dict[int, BackendError] = {}
    with ThreadPoolExecutor(min(len(handles), MAX_THREADS)) as threads:
        futures = [(handle.rank, threads.submit(stop, handle)) for handle in handles]
        for rank, answer in futures:
            try:
                answer.result()
            except BackendError as error:
                refused[rank] = error
    if refused:
        first, cause = next(iter(refused.items()))
        ranks = ", ".join(map(str, refused))
        others = "; the cancel of the others was accepted" if len(refused) < len(handles) else ""
        raise BackendError(
            f"{len(refused)} of the {len(handles)} replicas of run {handles[0].run_id!r} could "
            f"not be cancelled (rank {ranks}){others}. Rank {first}: {cause}",
            retryable=all(refusal.retryable for refusal in refused.values()),
        ) from cause


def check_ended(run_id: str, alive: Collection[Any], what: str = "rank ") -> None:
    """Refuse to remove a run of which some replicas have not ended.

    Args:
        run_id: The run.
        alive: Those replicas, such as their ranks.
        what: What stands before one of them in the error.

    Raises:
        InvalidRequestError: There are such replicas; says how to end them.
    """
    if alive:
        raise InvalidRequestError(
            f"{len(alive)} replicas of run {run_id!r} have not ended, such as {what}{min(alive)}: "
            f"cancel them with cancel_run({run_id!r}), and wait with collect"
        )


class LaunchError(BackendError):
    """Raised when a launch failed after it began.

    Attributes:
        survivors: Replicas that were started and could not be stopped again. Empty if nothing is
            left running.
    """

    def __init__(self, message: str, survivors: Sequence[ReplicaHandle] = ()) -> None:
        super().__init__(message)
        self.survivors = tuple(survivors)


@contextlib.contextmanager
def all_or_nothing(
    take_back: Callable[[BaseException], tuple[Sequence[ReplicaHandle], str]],
) -> Iterator[None]:
    """Take back what the block has started if it fails or is interrupted.

    Args:
        take_back: Called with the error. Ends what this launch has started; returns the replicas
            that may still be running, and what to say of them.

    Raises:
        LaunchError: The block failed, and replicas may be running.
        BaseException: The block's own error, if no replica is left or the block was interrupted. A
            LaunchError of the block is raised as it is, and nothing is taken back.
    """
    try:
        yield
    except LaunchError:
        raise
    except BaseException as error:
        survivors, words = take_back(error)
        if survivors and isinstance(error, Exception):
            raise LaunchError(f"{error}. {words}", survivors) from error
        if survivors:
            error.add_note(words)
        raise
