"""What the tests of damaged objects share."""

from simulated import SimulatedStore

from diloco_core import CorruptedObjectError
from diloco_core._run._records._keys import MANIFEST
from diloco_core._run._records._records import digest
from diloco_core._store._api import ObjectReader


def flip(data, bit):
    """The same bytes but for one bit."""
    damaged = bytearray(data)
    damaged[bit // 8] ^= 1 << bit % 8
    return bytes(damaged)


def late_bit(data):
    """The same bytes but for one bit among the last values of a shard."""
    return flip(data, 8 * (len(data) - 60))


class InMemory(ObjectReader):
    """An open object that is what it was made of."""

    def __init__(self, data, key):
        self.data, self.key, self.size = data, key, len(data)

    def read_into(self, offset, buffer):
        if offset + len(buffer) > self.size:
            raise CorruptedObjectError(f"{self.key} is truncated")
        buffer[:] = self.data[offset : offset + len(buffer)]

    def close(self):
        pass


class Rotten(SimulatedStore):
    """A store that harms one of the objects of a kind while it is written.

    Args:
        folder: Where they lie.
        which: How many of them are written before.
        harm: What becomes of its bytes.
    """

    def __init__(self, folder, which, harm):
        super().__init__()
        self.folder, self.left, self.harm, self.harmed = folder, which, harm, ""

    def write(self, key, data):
        super().write(key, data)
        if key.startswith(self.folder) and key.endswith(".safetensors"):
            if not self.left:
                self.harmed = key
                self.damage(key, self.harm(data))
            self.left -= 1


def run_of(store):
    """The name of the run in a simulated store."""
    return digest(store.objects[MANIFEST])
