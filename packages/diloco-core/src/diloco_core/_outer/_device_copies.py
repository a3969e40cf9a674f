"""Copies between accelerators and the CPU for which the training does not wait.

They use pinned memory, side streams and events.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

VALUES = "values"
_ALIGNMENT = 64  # bytes; a view as any dtype must begin at a multiple of its size
_WITHOUT_STREAMS = {"cpu", "meta", "mps"}


class Accelerator:
    """The few calls of torch that depend on the device.

    Tests replace them. Streams and events are those of torch.
    """

    def __init__(self) -> None:
        self._side_streams: dict[torch.device, Any] = {}

    def has_streams(self, device: torch.device) -> bool:
        """Say whether copies to and from this device can run on a stream of their own."""
        return device.type not in _WITHOUT_STREAMS

    def pinned(self, size: int) -> torch.Tensor:
        """Return ``size`` bytes of pinned memory of the CPU.

        A device can exchange data with it while the CPU does something else.
        """
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)

    def side_stream(self, device: torch.device) -> Any:
        """The stream for copies.

        There is one for all fragments, since each stream keeps its own free memory.
        """
        if device not in self._side_streams:
            self._side_streams[device] = torch.Stream(device)
        return self._side_streams[device]

    def current_stream(self, device: torch.device) -> Any:
        """The stream on which this thread computes on a device."""
        return torch.accelerator.current_stream(device)

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        """Compute and allocate on another stream of a device."""
        # Setting a stream also makes its device the current one, so both are set back, the current
        # device last.
        before = torch.accelerator.current_stream(), torch.accelerator.current_stream(stream.device)
        torch.accelerator.set_stream(stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before[1])
            torch.accelerator.set_stream(before[0])

    def record(self, stream: Any) -> Any:
        """An event that has happened as soon as a stream has done all that it was given so far."""
        return stream.record_event()

    def let_wait(self, stream: Any, event: Any) -> None:
        """Make a stream wait for an event. The CPU does not wait."""
        stream.wait_event(event)

    def wait(self, event: Any) -> None:
        """Make this thread of the CPU wait for an event."""
        event.synchronize()

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy between a device and pinned memory, on the current stream. The CPU does not wait."""
        target.copy_(source, non_blocking=True)


ACCELERATOR = Accelerator()


class DeviceCopies:
    """Takes the values of one fragment from their devices, and brings new ones to them.

    The pinned buffers are made when they are first used, and kept. One thread at a time may use
    them. Before the CPU writes to a buffer it waits for the last copy out of it. Copies into a
    buffer and out of it follow each other on one stream.

    Args:
        values: Flat tensors with the devices, dtypes and sizes to be copied; on the CPU, too.
        accelerator: The calls that depend on the device.
    """

    def __init__(self, values: Sequence[torch.Tensor], accelerator: Accelerator) -> None:
        self._kinds = [_kind(tensor) for tensor in values]
        self._lanes = [
            _Lane(device, values, accelerator)
            for device in dict.fromkeys(tensor.device for tensor in values)
            if accelerator.has_streams(device)
        ]

    def fits(self, values: Sequence[torch.Tensor]) -> bool:
        """Say whether tensors have the devices, dtypes and sizes for which this was made."""
        return self._kinds == [_kind(tensor) for tensor in values]

    def take(self, values: Sequence[torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
        """Copy values as they are at this point of the current streams.

        Does not wait for devices with streams.

        Returns:
            A function that waits until the values are there, and returns them: flat, on the CPU,
            and right until the next use of the buffers.
        """
        waits = [(lane, *lane.take(values)) for lane in self._lanes]
        taken = {number: each for lane in self._lanes for number, each in lane.pinned_parts(VALUES)}
        for number, tensor in enumerate(values):
            if number not in taken:  # on the CPU already, or on a device without streams
                taken[number] = tensor.to("cpu", copy=True)

        def wait() -> list[torch.Tensor]:
            for lane, event, _ in waits:
                lane.accelerator.wait(event)
            return [taken[number] for number in range(len(values))]

        return wait

    def pack(self, which: str, values: Sequence[torch.Tensor | None]) -> None:
        """Write values into a pinned buffer, rounded to the dtypes on the devices.

        Args:
            which: The name of the buffer. ``VALUES`` is the one that :meth:`take` uses, too.
            values: Flat tensors on the CPU; None for those that are not needed on a device.
        """
        for lane in self._lanes:
            lane.pack(which, values)

    @contextmanager
    def unpacked(self, *which: str) -> Iterator[dict[tuple[str, int], torch.Tensor]]:
        """Yield what was packed, on its devices, by buffer and number.

        It may be used on the current streams inside the context.

        The current streams wait for the copies, the CPU does not.
        """
        parts: dict[tuple[str, int], torch.Tensor] = {}
        for lane in self._lanes:
            for name in which:
                parts.update({(name, number): part for number, part in lane.unpack(name)})
        try:
            yield parts
        finally:
            for lane in self._lanes:
                lane.let_go()
            parts.clear()  # not earlier: another thread could be given the memory


class _Lane:
    """The part of the values that is on one device.

    There they lie one after the other in one piece of memory, as here.
    """

    def __init__(
        self, device: torch.device, values: Sequence[torch.Tensor], accelerator: Accelerator
    ) -> None:
        self.accelerator = accelerator
        self._device = device
        self._side = accelerator.side_stream(device)
        self._size = 0
        self._places: list[tuple[int, int, int, torch.dtype]] = []
        for number, tensor in enumerate(values):
            if tensor.device == device:
                size = tensor.numel() * tensor.itemsize
                self._places.append((number, self._size, size, tensor.dtype))
                self._size += -(-size // _ALIGNMENT) * _ALIGNMENT
        self._pinned: dict[str, torch.Tensor] = {}
        self._last: dict[str, Any] = {}  # for each buffer, the event after its last copy

    def take(self, values: Sequence[torch.Tensor]) -> tuple[Any, torch.Tensor]:
        """Return the event after which the values are in the pinned buffer, and memory to keep.

        The memory must be kept until that event.
        """
        calls, pinned = self.accelerator, self._buffer(VALUES)
        buffer = torch.empty(self._size, dtype=torch.uint8, device=self._device)
        for number, part in self._parts(buffer):
            part.copy_(values[number])
        calls.let_wait(self._side, calls.record(calls.current_stream(self._device)))
        with calls.on(self._side):
            calls.copy(pinned, buffer)
        event = self._last[VALUES] = calls.record(self._side)
        return event, buffer

    def pack(self, which: str, values: Sequence[torch.Tensor | None]) -> None:
        if which in self._last:
            self.accelerator.wait(self._last[which])
        for number, part in self.pinned_parts(which):
            source = values[number]
            if source is not None:
                part.copy_(source)

    def unpack(self, which: str) -> list[tuple[int, torch.Tensor]]:
        calls = self.accelerator
        with calls.on(self._side):
            # Memory of the side stream: it need not wait for the current stream's work.
            brought = torch.empty(self._size, dtype=torch.uint8, device=self._device)
            calls.copy(brought, self._buffer(which))
        self._last[which] = calls.record(self._side)
        calls.let_wait(calls.current_stream(self._device), self._last[which])
        return self._parts(brought)

    def let_go(self) -> None:
        """Let the side stream use the memory of :meth:`unpack` again.

        It does so after what the current stream was given so far.
        """
        calls = self.accelerator
        calls.let_wait(self._side, calls.record(calls.current_stream(self._device)))

    def pinned_parts(self, which: str) -> list[tuple[int, torch.Tensor]]:
        return self._parts(self._buffer(which))

    def _parts(self, memory: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
        return [
            (number, memory[start : start + size].view(dtype))
            for number, start, size, dtype in self._places
        ]

    def _buffer(self, which: str) -> torch.Tensor:
        if which not in self._pinned:
            self._pinned[which] = self.accelerator.pinned(self._size)
        return self._pinned[which]


def _kind(values: torch.Tensor) -> tuple[torch.device, torch.dtype, int]:
    return values.device, values.dtype, values.numel()
