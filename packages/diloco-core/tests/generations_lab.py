"""Runs with fixed membership, in virtual time, in a store that ignores the conditions of
conditional writes.
"""

from dataclasses import dataclass, field

from keys_lab import begun
from simulated import SimulatedStore
from strict_lab import Run

#: What may be written again with other bytes, by the same process.
_CHANGING = ("beats/", "beginning.json", "inner/")


class Overwriting(SimulatedStore):
    """Lets everything be created twice, and notes what was written twice with different bytes."""

    def __init__(self):
        super().__init__(exclusive=False)
        self.first = {}

    def write(self, key, data):
        super().write(key, data)
        written_once = key.startswith("generations/") and not key.split("/", 2)[2].startswith(
            _CHANGING
        )
        if written_once and self.first.setdefault(key, data) != data:
            self.differing.append(key)


@dataclass
class Generations(Run):
    """A run in such a store; see :class:`.strict_lab.Run`."""

    store: SimulatedStore = field(default_factory=Overwriting)

    def begun(self):
        """The folders of the generations that count, the newest first."""
        return begun(self.store.objects)

    def keys(self, kind="", generation=0):
        """The keys of a kind of objects in a generation; the newest one is number 0."""
        folder = self.begun()[generation] + kind
        return sorted(key for key in self.store.objects if key.startswith(folder))
