"""The processes of one replica, and what they tell each other."""

from __future__ import annotations

import datetime
import pickle
from typing import Any

import torch
from torch import distributed

from .._errors import ConfigurationError


class Inside:
    """The processes of one replica, as one of them sees them. Not thread-safe.

    They talk over a gloo group of their own: the training's group may use GPUs, and its timeout is
    too short for processes that wait while the leader waits for the store.

    Args:
        timeout: Seconds for which a process waits for the others.

    Attributes:
        process: The number of this process in the replica, from 0. Number 0 is the leader, which
            alone talks to the store.
        processes: How many there are.
    """

    def __init__(self, timeout: float) -> None:
        if not (distributed.is_available() and distributed.is_initialized()):
            raise ConfigurationError(
                "this process is one of several that are one replica, and they have not met: call "
                "torch.distributed.init_process_group() before DiLoCo(...)"
            )
        self.process = distributed.get_rank()
        self.processes = distributed.get_world_size()
        limit = datetime.timedelta(seconds=timeout)
        self._group: distributed.ProcessGroup | None = distributed.new_group(
            backend="gloo", timeout=limit
        )

    @property
    def leads(self) -> bool:
        """Say whether this process talks to the store."""
        return self.process == 0

    def share(self, message: Any = None) -> Any:
        """Return what the leader passes, on every process.

        None costs a single small broadcast, so it may be passed after every step.
        """
        data = pickle.dumps(message) if message is not None else b""
        length = torch.tensor([len(data)])
        self.broadcast(length)
        if not length.item():
            return None
        box = torch.frombuffer(bytearray(data or bytes(int(length))), dtype=torch.uint8)
        self.broadcast(box)
        # From a process of this replica, over torch's own group, whose object collectives do the
        # same: nothing that a store or another replica holds comes here.
        return message if self.leads else pickle.loads(box.numpy().tobytes())

    def collect(self, message: Any) -> list[Any]:
        """Return what every process passes, in their order."""
        found: list[Any] = [None] * self.processes
        distributed.all_gather_object(found, message, group=self._group)
        return found

    def broadcast(self, values: torch.Tensor) -> None:
        """Replace values, on the CPU, by those of the leader."""
        distributed.broadcast(values, src=0, group=self._group)

    def close(self) -> None:
        """Leave the group of their own."""
        if self._group is not None:
            distributed.destroy_process_group(self._group)
            self._group = None
