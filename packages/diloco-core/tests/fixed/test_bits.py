"""Every kind of object with a flipped bit, or cut short: the same model, or an error by name."""

from functools import partial
from types import SimpleNamespace

import pytest
import strict_lab
import torch
from damage_lab import InMemory, flip
from keys_lab import kept, keys_of, of
from safetensors.torch import load_file
from training_lab import identical

from diloco_core import CorruptedObjectError, FormatError, ReplicaLostError, Timing, export
from diloco_core._arithmetic._layout import Group, Layout, Rule
from diloco_core._arithmetic._sharded import Scratch
from diloco_core._wire._published import Shard
from diloco_core._wire._sections import seed as wire_seed

KINDS = {
    "manifest": of("manifest", copy=False),
    "claim of rank 0": of("claim", rank=0),
    "claim of rank 1": of("claim", rank=1),
    "beat": of("beat", rank=1),
    "note": of("note", rank=1),
    "unsynced values": of("unsynced"),
    "contribution of rank 0": of("contribution", sync=2, rank=0),
    "contribution of rank 1": of("contribution", sync=2, rank=1),
    "record of the first sync": of("commit", sync=1),
    "record of a later sync": of("commit", sync=2),
    "record of a state": of("done", sync=2),
    "initial state": of("state", sync=0, rank=1),
    "state after a sync": of("state", sync=2, rank=1),
}


def damages(data, step):
    """Functions that flip a bit of every ``step``-th byte, or cut the bytes short."""
    flips = [
        partial(flip, bit=8 * place + place // step % 8)
        for place in range(step // 2, len(data), step)
    ]
    return flips + [
        lambda data, size=size: data[:size] for size in range(step // 3, len(data), 4 * step)
    ]


@pytest.fixture
def harming(new_store, monkeypatch):
    """A store one of whose objects is harmed, once, when it is written, or when rank 1 reads it."""

    class Harming(new_store):
        def __init__(self, wanted=None, harm=None, when=""):
            super().__init__()
            self.wanted, self.harm, self.when, self.written = wanted, harm, when, {}

        def harmed(self, key, data, when):
            if self.harm is None or self.when != when or not self.wanted(key):
                return data
            harm, self.harm = self.harm, None
            return harm(data)

        def write(self, key, data):
            self.written.setdefault(key, data)
            super().write(key, data)
            harmed = self.harmed(key, data, "written")
            if harmed is not data:
                self.damage(key, harmed)

    class Reading(strict_lab.Process):
        def get(self, key, *largest):
            data = super().get(key, *largest)
            return self._shared.harmed(key, data, "read") if self.rank else data

        def open(self, key, size=None):
            reader = super().open(key, size)
            shared = self._shared
            if (
                self.rank
                and shared.harm is not None
                and shared.when == "read"
                and shared.wanted(key)
            ):
                return InMemory(shared.harmed(key, shared.objects[key], "read"), key)
            return reader

    monkeypatch.setattr(strict_lab, "Process", Reading)
    return Harming


class Frozen(strict_lab.Run):
    """One of its two layers is frozen, so that something is not synced."""

    def net(self):
        net = super().net()
        net[1].requires_grad_(False)
        return net


def run(store, **options):
    """Outer steps of two replicas; what they hold at the end, or what they raised."""
    return Frozen(2, store=store, chunk=16, options=options).live(until=3)


@pytest.fixture(scope="module")
def ended():
    """Return what runs that nothing harms have written, and come to, by the kind of store."""
    return {}


def check(harming, ended, kind, when, step):
    store, kind_of_store = harming(), harming.__base__
    if kind_of_store not in ended:
        ended[kind_of_store] = run(store), store.written
    wanted, objects = ended[kind_of_store]
    assert identical(wanted)
    data = next(data for key, data in objects.items() if KINDS[kind](key))
    for harm in damages(data, step or max(1, 2 * len(data) // 3)):
        results = run(harming(KINDS[kind], harm, when))
        errors = {type(result) for result in results if isinstance(result, BaseException)}
        if errors:
            assert when == "written", results  # what is damaged on its way is read again
            assert CorruptedObjectError in errors, results
            assert errors <= {CorruptedObjectError, ReplicaLostError}, results
        else:
            assert identical([*results, *wanted])


@pytest.mark.sampled
@pytest.mark.parametrize("step", [None, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("when", ["written", "read"])
@pytest.mark.parametrize("kind", KINDS)
def test_in_a_run(harming, ended, kind, when, step):
    """Some bits; every single one is tried without a run, below and beside this file."""
    check(harming, ended, kind, when, step)


@pytest.fixture
def healthy(harming):
    store = harming()
    values = run(store)[0]
    return SimpleNamespace(values=values, objects=store.objects)


class TestExport:
    """Test what a fixed run leaves: the manifest, the newest states, and what is not synced."""

    @pytest.fixture
    def exported(self, healthy, tmp_path, monkeypatch):
        """Return what ``export`` makes of the run when an object is harmed."""
        at_once = Timing(sleep=lambda seconds: None)  # where it is read again
        monkeypatch.setattr("diloco_core._export._stored._TIMING", at_once)
        folder, target = tmp_path / "run", tmp_path / "model"
        for key, data in healthy.objects.items():
            (folder / key).parent.mkdir(parents=True, exist_ok=True)
            (folder / key).write_bytes(data)

        def act(key=None, harm=bytes, at=None):
            key = key or keys_of(healthy.objects, "manifest", copy=False)[0]
            (folder / key).write_bytes(harm(healthy.objects[key]))
            try:
                step = export(str(folder), target, at=at)
                return step, load_file(target)
            finally:
                (folder / key).write_bytes(healthy.objects[key])

        return act

    def check(self, healthy, exported, step):
        newest, values = exported()
        assert identical([values, healthy.values])
        states = {newest: values, newest - 1: exported(at=newest - 1)[1]}
        for key, data in sorted(healthy.objects.items()):
            for harm in damages(data, step or max(1, 2 * len(data) // 3)):
                try:
                    found, values = exported(key, harm)
                except (CorruptedObjectError, FormatError):
                    assert kept(key).kind in {"manifest", "state", "unsynced"}, key
                else:
                    assert found == newest or kept(key).kind in {"state", "done"}, key
                    assert identical([values, states[found]]), key

    @pytest.mark.parametrize("step", [None, pytest.param(4, marks=pytest.mark.slow)])
    def test_one_object_is_harmed(self, healthy, exported, step):
        self.check(healthy, exported, step)


class Job:
    """As much of a job as published shards need: a group that takes outer steps, with momentum."""

    def __init__(self):
        self.layout = Layout((Group(torch.float32, 40, Rule.OUTER),), 2)
        self.values, self.momentum = torch.arange(40.0), torch.arange(40.0) + 100

    def must_be_finite(self, piece):
        return True

    def published(self, piece):
        return self.values[piece.start : piece.stop]

    def outer_state(self, piece):
        return {"momentum_buffer": self.momentum[piece.start : piece.stop]}

    def keeps_outer(self, piece, name):
        return True

    def outer_scalars(self, piece):
        return {"step": 3.0}

    def destination(self, piece):
        return self.adopted[piece.start : piece.stop]

    def adopt(self, piece, values):
        pass


@pytest.mark.parametrize("step", [13, pytest.param(1, marks=pytest.mark.slow)])
def test_every_bit_of_a_published_state(step):
    """It is read by those that adopt it, go on with its outer state, or verify it as a whole."""
    job, scratch = Job(), Scratch(32)
    shard = Shard(job, 1, partial(wire_seed, "state"), 32)
    data = b"".join(map(bytes, shard.parts({"diloco": "state"})))
    (piece,) = job.layout.shard(1)

    def adopt(reader):
        job.adopted = torch.zeros(40)
        shard.adopt(reader, "x", scratch)
        return [job.adopted[piece.start :]]

    def outer_state(reader):
        _, chunks, scalars = shard.described(reader, "x")
        return [
            torch.cat([chunk["momentum_buffer"] for chunk in chunks.values()]),
            torch.tensor(scalars["step"]),
        ]

    harmed = [partial(flip, bit=bit) for bit in range(0, 8 * len(data), step)]
    harmed += [lambda data, size=size: data[:size] for size in range(0, len(data), step)]
    seen = range(len(data) - 24 - 4 * piece.numel, len(data))  # the values and all checksums
    for use, wanted, bits in (
        (adopt, [job.values[piece.start :]], seen),
        (outer_state, [job.momentum[piece.start :], torch.tensor(3.0)], range(seen.start)),
        (lambda reader: [shard.check(reader, "x", scratch)], None, range(len(data))),
    ):
        assert use(InMemory(data, "x"))
        for harm in harmed:
            damaged = harm(data)
            try:
                found = use(InMemory(damaged, "x"))
            except CorruptedObjectError:
                continue
            assert len(damaged) == len(data)
            assert wanted is not None
            assert all(map(torch.equal, found, wanted))
            assert not any(damaged[place] != data[place] for place in bits)
