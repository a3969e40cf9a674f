"""A pretended accelerator, in whose memory the tensors of the CPU lie.

Its side stream copies as late as it may, or at once.
"""

import threading
from contextlib import contextmanager

import torch

from diloco_core._outer._delayed import DelayedFragment
from diloco_core._outer._device_copies import Accelerator

SIDE, CURRENT = "side", "current"


class PretendedAccelerator(Accelerator):
    """Several replicas may share it. What it was asked to do is in ``asked``.

    The current stream computes at once, since that is what a CPU does.

    Args:
        late: Whether copies on the side stream are made only when somebody waits for them.
        current_is_late: Whether the current stream has still so much to do that it does not get to
            its waits.
    """

    def __init__(self, *, late=True, current_is_late=False):
        super().__init__()
        self.asked = []
        self.late, self.current_is_late = late, current_is_late
        self._state = threading.local()
        self._copies = []  # on the side stream, None for those that are made
        self._lock = threading.Lock()

    def has_streams(self, device):
        return device.type == "cpu"

    def pinned(self, size):
        self.asked.append("pinned memory")
        return torch.full(
            [size], 0xFF, dtype=torch.uint8
        )  # floating-point values made of it are NaN

    def side_stream(self, device):
        return SIDE

    def current_stream(self, device):
        return CURRENT

    @contextmanager
    def on(self, stream):
        self._state.stream = stream
        try:
            yield
        finally:
            self._state.stream = CURRENT

    def record(self, stream):
        self.asked.append(f"{stream}: record")
        return stream, len(self._copies)

    def let_wait(self, stream, event):
        self.asked.append(f"{stream}: wait for {event[0]}")
        if stream == CURRENT and not self.current_is_late:
            self.reach(event)

    def wait(self, event):
        self.asked.append("CPU: wait")
        self.reach(event)

    def copy(self, target, source):
        self.asked.append(f"{getattr(self._state, 'stream', CURRENT)}: copy")
        self._copies.append((target, source))
        if not self.late:
            self.reach((SIDE, len(self._copies)))

    def reach(self, event):
        """Make all copies before an event."""
        with self._lock:
            for number in range(event[1]):
                if self._copies[number] is not None:
                    target, source = self._copies[number]
                    target.copy_(source)
                    self._copies[number] = None


def use(monkeypatch, accelerator):
    """Let all fragments take a pretended accelerator for the one that their model is on."""
    monkeypatch.setattr(DelayedFragment, "_accelerator", accelerator)
    return accelerator
