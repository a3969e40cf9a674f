"""Hold what the tests of damaged objects share."""

from simulated import SimulatedStore

from diloco_core import CorruptedObjectError
from diloco_core._run._records._keys import MANIFEST, commit_key
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


class Watched(SimulatedStore):
    """A store that calls ``after(key, data)`` after each write."""

    def __init__(self, after):
        super().__init__()
        self.after = after

    def write(self, key, data):
        super().write(key, data)
        self.after(key, data)


def asleep_after(sync, meddle, seconds=20.0):
    """Prepares nodes to stand still after a sync; ``meddle(node)`` is called meanwhile."""

    def prepare(node):
        begin = node.exchange.begin

        def slow(*args, **options):
            written = node.connection._shared.objects
            if commit_key(sync) in written and commit_key(sync + 1) not in written:
                node.sleep(seconds)
                meddle(node)
            return begin(*args, **options)

        node.exchange.begin = slow

    return prepare


def store_of(objects):
    """A store that holds these objects."""
    store = SimulatedStore()
    for key, data in objects.items():
        store.write(key, data)
    return store


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
