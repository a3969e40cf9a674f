"""What is not synced is stored once; where it is lost, a replica with the same values writes it."""

from collections import Counter
from pathlib import Path

import pytest
import torch
from damage_lab import flip
from loop_lab import exchanges
from safetensors.torch import load_file
from simulated import Schedule, SimulatedStore, simulate
from torch import nn

from diloco_core import CorruptedObjectError, DiLoCo, Elastic, export

_SETTINGS = Elastic(2, grace=5.0, topology="sharded")
_AGAIN = (
    "It is written again with the same content. Something outside the run deletes or changes its "
    "objects."
)


class Part(nn.Module):
    """A parameter that is trained, some that are not, and a second name for one of these."""

    def __init__(self, lab):
        super().__init__()
        self.trained = nn.Parameter(torch.zeros(40))
        self.frozen = nn.ParameterList(
            nn.Parameter(torch.zeros(200), requires_grad=False) for _ in range(3)
        )
        lab.fill(self)
        self.alias = self.frozen[1]
        self.register_buffer("seen", torch.zeros(3))


def _train(lab, syncs, buffers="mean"):
    def train(node):
        model = Part(lab)
        inner = torch.optim.SGD([model.trained], lr=0.1)
        with DiLoCo(model, inner, node.exchange, sync_every=1, buffers=buffers) as outer:
            while outer.committed < syncs:
                node.sleep(1.0)
                model.trained.grad = torch.ones(40)
                model.seen += 1
                inner.step()
        return node.exchange.counted

    return train


class Watched(SimulatedStore):
    """Counts writes; loses or damages some objects when another one is written."""

    def __init__(self, moment="", spoil=None):
        super().__init__()
        self.written, self.moment, self.spoil = Counter(), moment, spoil

    def write(self, key, data):
        super().write(key, data)
        self.written[key] += 1
        if self.spoil is not None and key == self.moment:
            spoil, self.spoil = self.spoil, None
            for name in self.unsynced():
                spoil(self, name)

    def unsynced(self):
        return {key: data for key, data in self.objects.items() if key.startswith("unsynced/")}


def _lose(store, key):
    store.remove(key)


def _cut(store, key):
    store.damage(key, store.objects[key][:-30])


def _flipped(place):
    def spoil(store, key):
        data = store.objects[key]
        store.damage(key, flip(data, 8 * (place % len(data))))

    return spoil


@pytest.fixture
def small(monkeypatch):
    """Several objects: 600 values of four bytes and three."""
    torch.set_num_threads(1)
    monkeypatch.setattr("diloco_core._model._unsynced.OBJECT_BYTES", 900)


def _live(lab, store, syncs, buffers="mean"):
    train = _train(lab, syncs, buffers)
    assert simulate(train, Schedule(2, latency=0.01), _SETTINGS, store=store).errors() == {}


def _stopped(lab):
    store = Watched()
    _live(lab, store, 2)
    assert set(Counter(store.written[key] for key in store.unsynced())) == {1}
    return store


_HARM = [_lose, _cut, *map(_flipped, (0, 20, -12, -20, -100))]
_NAMES = ["gone", "cut", "length", "header", "checksums", "checksum of the values", "values"]


@pytest.mark.parametrize("spoil", _HARM, ids=_NAMES)
@pytest.mark.usefixtures("small")
def test_a_run_that_is_resumed_has_all_of_it_again(lab, spoil, caplog):
    """Every rank looks at a part, also where the run is finished, so that nothing else is done."""
    store = _stopped(lab)
    whole = store.unsynced()
    assert len(whole) == 3
    for key in whole:
        spoil(store, key)
    _live(lab, store, 2)
    assert store.unsynced() == whole
    said = [record for record in caplog.records if _AGAIN in record.getMessage()]
    named = [key for key in whole for record in said if key in record.getMessage()]
    assert sorted(named) == sorted(whole), "every one by one of them"
    assert {record.levelname for record in said} == {"ERROR"}


@pytest.mark.parametrize("spoil", [_lose, _cut], ids=["gone", "cut"])
@pytest.mark.usefixtures("small")
def test_while_a_run_goes_on_one_member_writes_it_again_at_the_eighth_sync(lab, spoil, caplog):
    store, seen, whole = Watched("commits/00000003.json", spoil), [], {}
    write = store.write

    def look(key, data):
        if key == "commits/00000001.json":
            whole.update(store.unsynced())
        write(key, data)
        if key in {"commits/00000007.json", "commits/00000010.json"}:
            seen.append(sum(data == whole.get(key) for key, data in store.unsynced().items()))

    store.write = look
    _live(lab, store, 11)
    assert seen == [0, 3]
    assert {store.written[key] for key in store.unsynced()} == {2}, (
        "once at the beginning, and once by one member"
    )
    assert caplog.text.count(_AGAIN) == 3


def test_who_holds_other_values_writes_nothing_and_says_so_once(lab, caplog):
    """Buffers that are left alone have changed since the run began."""
    torch.set_num_threads(1)
    store = Watched("commits/00000003.json", _lose)
    _live(lab, store, 20, "none")
    assert store.unsynced() == {}
    said = [text for text in caplog.messages if "cannot write it again" in text]
    assert sorted(text[:6] for text in said) == ["rank 0", "rank 1"]
    assert all(
        "is gone. It holds tensors that are not synced" in text and "synced_only=True" in text
        for text in said
    )


def test_a_rank_of_a_fixed_run_looks_when_it_leaves(lab, tmp_path, caplog):
    def train(exchange):
        model = Part(lab)
        inner = torch.optim.SGD([model.trained], lr=0.1)

        def lose(report):
            if exchange.rank == 0 and report.sync == 2:
                for path in _objects(tmp_path):
                    path.unlink()

        with DiLoCo(model, inner, exchange, sync_every=1, on_sync=lose):
            for step in range(2):
                lab.push(model, inner, exchange.rank, step)

    lab.run(train, lab.store_exchanges(tmp_path, 2))
    assert len(_objects(tmp_path)) == 1
    assert f": file://{_objects(tmp_path)[0]} is gone. {_AGAIN}" in caplog.text
    assert export(tmp_path / "run", tmp_path / "model") == 2


def _objects(folder):
    return sorted(Path(folder, "run", "unsynced").rglob("*.safetensors"))


def _alone(lab, folder):
    """One incarnation of a run with one replica, and the values that it ended with."""
    model = Part(lab)
    inner = torch.optim.SGD([model.trained], lr=0.1)
    resume = (folder / "run").exists()
    (exchange,) = exchanges("elastic", 1, folder / "run", grace=1.0, resume=resume)
    with DiLoCo(model, inner, exchange, sync_every=1) as outer:
        if not outer.committed:
            lab.push(model, inner, 0, 0)
    return lab.values(model)


@pytest.mark.parametrize("harm", ["gone", "damaged"])
def test_export_says_what_to_do_and_that_helps(lab, tmp_path, harm):
    values = _alone(lab, tmp_path)
    (path,) = _objects(tmp_path)
    data = path.read_bytes()
    path.unlink() if harm == "gone" else path.write_bytes(flip(data, 8 * (len(data) - 200)))
    with pytest.raises(CorruptedObjectError, match=path.name) as caught:
        export(tmp_path / "run", tmp_path / "model")
    text = str(caught.value)
    assert (
        "does not sync ('alias', 'frozen.0', 'frozen.2'), as they were when the run began" in text
    )
    assert "start all ranks of the run again on this prefix" in text
    assert "export with synced_only=True, which writes all other tensors" in text
    assert export(tmp_path / "run", tmp_path / "synced", synced_only=True) == 1
    synced = load_file(tmp_path / "synced")
    assert sorted(synced) == ["seen", "trained"]
    assert all(torch.equal(synced[name], values[name]) for name in synced)
    _alone(lab, tmp_path)
    assert path.read_bytes() == data
    assert export(tmp_path / "run", tmp_path / "model") == 1
    assert load_file(tmp_path / "model").keys() == values.keys()
