"""The processes of one replica, and what they tell each other."""

from __future__ import annotations

import datetime
import pickle
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import torch
from torch import distributed

from .._errors import ConfigurationError, ProcessFailedError, SyncError
from ._moves import Failed, failed

T = TypeVar("T")

_PIECE_BYTES = 64 * 2**20  # the most that one message between processes carries
_INTERVAL = datetime.timedelta(seconds=0.2)
_SHORT_BYTES = 4096  # a message is passed on in one round if it is no longer than this


class Inside:
    """The processes of one replica, as one of them sees them. Not thread-safe.

    They talk over a gloo group of their own: the training's group may use GPUs, and its timeout is
    too short for processes that wait while the leader waits for the store.

    Args:
        timeout: Seconds for which a process waits for the others.
        group: The group of these processes; None for torch's default one.

    Attributes:
        process: The number of this process in the replica, from 0. Number 0 is the leader, which
            alone talks to the store.
        processes: How many there are.
        leads: Whether this process talks to the store.
        ranks: Their numbers in torch's default group.
        failure: Returns an error that names the process that has failed (`Ending.broken_by`).
        common: The last error that all of them have had together; None if there is none.
    """

    def __init__(self, timeout: float, group: Any = None) -> None:
        if not (distributed.is_available() and distributed.is_initialized()):
            raise ConfigurationError(
                "this process is one of several that are one replica, and they have not met: call "
                "torch.distributed.init_process_group() before DiLoCo(...). If torchrun has not "
                "started it, unset LOCAL_WORLD_SIZE and TORCHELASTIC_RUN_ID"
            )
        self.ranks = distributed.get_process_group_ranks(group)
        self.process, self.processes = distributed.get_rank(group), len(self.ranks)
        self.leads = self.process == 0
        self.failure: Callable[..., ProcessFailedError | None] = lambda **_: None
        self.common: BaseException | None = None
        limit = datetime.timedelta(seconds=timeout)
        self._group: distributed.ProcessGroup = distributed.new_group(
            self.ranks, backend="gloo", timeout=limit, use_local_synchronization=group is not None
        )

    def share(self, message: Any = None) -> Any:
        """Return what the leader passes, on every process; what others pass is not looked at.

        A short message costs a single small broadcast, so it may be passed after every step.

        Raises:
            ProcessFailedError: Another process has ended, or does not answer.
        """
        data = pickle.dumps(message) if self.leads else b""
        # Of a short message, this is all; torch's broadcast_object_list always takes two rounds.
        first = len(data).to_bytes(8, "little") + data[:_SHORT_BYTES]
        self.broadcast(box := _box(first, 8 + _SHORT_BYTES))
        length, box = int.from_bytes(box[:8].numpy().tobytes(), "little"), box[8:]
        if length > _SHORT_BYTES:
            self.broadcast(box := _box(data, length))
        # From a process of this replica, over torch's own group, whose object collectives do the
        # same: nothing that a store or another replica holds comes here.
        return message if self.leads else pickle.loads(box.numpy().tobytes())

    def collect(self, message: Any) -> list[Any]:
        """Return what every process passes, in their order.

        Raises:
            ProcessFailedError: Another process has ended, or does not answer.
        """
        # Torch's all_gather_object takes six times as long, and nearly all messages are short.
        data = pickle.dumps([message])
        box = _box(data if len(data) <= _SHORT_BYTES else pickle.dumps(None), _SHORT_BYTES)
        boxes = [torch.empty_like(box) for _ in self.ranks]
        self._do(lambda: distributed.all_gather(boxes, box, self._group))
        messages = [pickle.loads(each.numpy().tobytes()) for each in boxes]
        if None in messages:
            self._do(lambda: distributed.all_gather_object(messages, [message], self._group))
        return [each for (each,) in messages]

    def broadcast(self, values: torch.Tensor) -> None:
        """Replace values, on the CPU, by those of the leader.

        Raises:
            ProcessFailedError: Another process has ended, or does not answer.
        """

        def act() -> None:
            work = distributed.broadcast(values, self.ranks[0], self._group, async_op=True)
            while not work.is_completed():
                with suppress(RuntimeError):  # not yet; or for good, which is raised below
                    work.wait(_INTERVAL)  # after each of these, Python handles signals
            work.wait()

        self._do(act)

    def together(self, act: Callable[[], T]) -> T:
        """Do something on every process, and return what it returns here.

        Raises:
            Exception: The first error of any process, on all of them.
            ProcessFailedError: Another process has ended, or does not answer.
        """
        results: list[T] = []
        self.each(lambda: results.append(act()))
        return results[0]

    def each(self, act: Callable[[], T]) -> list[T]:
        """Do something on every process, and return what it returns on each, in their order.

        Raises:
            Exception: The first error of any process, on all of them.
            ProcessFailedError: Another process has ended, or does not answer.
        """
        outcome: T | Failed
        try:
            outcome = act()
        except Exception as error:  # noqa: BLE001 - raised below, on every process
            outcome = failed(error)
        outcomes = self.collect(outcome)
        for each in outcomes:
            if isinstance(each, Failed):
                self.common = each.error()
                raise self.common
        return outcomes

    def gather_bytes(self, file: torch.Tensor) -> list[torch.Tensor]:
        """Return what every process passes (uint8, on the CPU) on the leader; nothing elsewhere."""
        sizes = self.collect(file.numel())
        if not self.leads:
            self._pass_on(distributed.send, file, 0)
            return []
        files = [file, *(torch.empty(n, dtype=torch.uint8, device="cpu") for n in sizes[1:])]
        for process, each in enumerate(files[1:], 1):
            self._pass_on(distributed.recv, each, process)
        return files

    def scatter_bytes(self, files: Sequence[torch.Tensor] | None) -> torch.Tensor:
        """Return the part for this process of what the leader passes, one for each (uint8)."""
        sizes = self.share([file.numel() for file in files] if files is not None else None)
        if files is None:
            file = torch.empty(sizes[self.process], dtype=torch.uint8, device="cpu")
            self._pass_on(distributed.recv, file, 0)
            return file
        for process, each in enumerate(files[1:], 1):
            self._pass_on(distributed.send, each, process)
        return files[0]

    def _pass_on(self, act: Callable[..., object], file: torch.Tensor, process: int) -> None:
        for piece in file.split(_PIECE_BYTES):  # type: ignore[no-untyped-call] # so in torch
            self._do(partial(act, piece, self.ranks[process], self._group))

    def _do(self, act: Callable[[], object]) -> None:
        try:
            act()
        except (RuntimeError, ValueError) as error:  # torch raises the latter for an ended group
            if not distributed.is_initialized():
                raise SyncError(
                    "torch's process groups were destroyed before the block was left: call "
                    "destroy_process_group() after it"
                ) from error
            late = "imed out" in str(error)  # torch has no class of its own for it
            raise self.failure(late=late) or ProcessFailedError(
                "another process of this replica has ended, or does not answer. Its own log says "
                f"why, or whatever has started it does ({error})"
            ) from error

    def close(self) -> None:
        """Leave the group of their own: whoever waits in it for this process gets an error."""
        with suppress(ValueError):  # the program may have ended all groups
            distributed.destroy_process_group(self._group)
        del self._group  # its connections end with it


def _box(data: bytes, size: int) -> torch.Tensor:
    """Return bytes with zeros after them, as a tensor that a message of this size fills."""
    return torch.frombuffer(bytearray(data.ljust(size, b"\0")), dtype=torch.uint8)
