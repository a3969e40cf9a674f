"""What is exported loads strictly into the plain model: whatever wraps it, and whatever of it is frozen, tied or left alone."""

import json
import logging
import re
import shutil
import warnings

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from diloco_core import (
    ConfigurationError,
    CorruptedObjectError,
    DiLoCo,
    Elastic,
    ElasticExchange,
    ObjectStoreExchange,
    RendezvousError,
    _export,
    _unsynced,
    export,
    in_process,
)
from diloco_core._elastic_records import MANIFEST, Rollback, commit_key, digest
from diloco_core._names import plain_name
from diloco_core._store import open_store
from diloco_core._unsynced import Unsynced


class Everything(nn.Module):
    """Tied across modules, frozen, BatchNorm, odd shapes and layouts, dtypes, a submodule that is called ``module``."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.module = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 5, dtype=torch.bfloat16)
        self.again = self.module
        self.out = nn.Linear(3, 5)
        self.out.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.arange(12.0).reshape(3, 4).t().half(), requires_grad=False)
        self.frozen_again = self.frozen
        self.frozen_turned = nn.Parameter(torch.arange(20.0, 40.0).reshape(4, 5).t().half(), requires_grad=False)
        self.scalar = nn.Parameter(torch.tensor(2.0))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.frozen_scalar = nn.Parameter(torch.tensor(3.0), requires_grad=False)
        self.frozen_empty = nn.Parameter(torch.empty(2, 0), requires_grad=False)
        self.strided = nn.Parameter(torch.arange(12.0).reshape(3, 4).t())
        self.register_buffer("mask", torch.full((4, 4), -float("inf")).triu(1))
        self.register_buffer("same_mask", self.mask)
        self.register_buffer("flags", torch.tensor([True, False, True]))
        self.register_buffer("cache", torch.ones(3), persistent=False)


class Adapted(nn.Module):
    """A frozen layer with a trainable adapter beside it."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(40, 30, dtype=torch.bfloat16).requires_grad_(False)
        self.down = nn.Linear(40, 2, bias=False)
        self.up = nn.Linear(2, 30, bias=False)


def compiled_by_torch(model):
    with warnings.catch_warnings():  # of the compiler's own imports
        warnings.simplefilter("ignore")
        return torch.compile(model, backend="eager")


class Wrapped(nn.Module):
    """A model whose inner part is compiled by itself."""

    def __init__(self, compiled=False):
        super().__init__()
        self.inner = compiled_by_torch(nn.Linear(3, 3)) if compiled else nn.Linear(3, 3)
        self.outer = nn.Linear(3, 1)


class Distributed(nn.parallel.DistributedDataParallel):
    """The real class without the process group that it asks for."""

    def __init__(self, module):
        nn.Module.__init__(self)
        self.module = module


WRAPPERS = {
    "plain": lambda model: model,
    "compiled": compiled_by_torch,
    "DDP": Distributed,
    "compiled DDP": lambda model: compiled_by_torch(Distributed(model)),
    "DDP of compiled": lambda model: Distributed(compiled_by_torch(model)),
    "DataParallel": nn.DataParallel,
}


def exchanges(folder, kind, count=2):
    stores = [open_store(str(folder)) for _ in range(count)]
    if kind == "strict":
        return [ObjectStoreExchange(store, rank, count) for rank, store in enumerate(stores)]
    elastic = Elastic(count, topology=kind, publish_every=1)
    return [ElasticExchange(store, rank, count, elastic) for rank, store in enumerate(stores)]


def trained(lab, folder, kind, make, wrap=lambda model: model, syncs=3, **options):
    """What rank 0's plain model holds after some syncs; parameters of other ranks begin elsewhere."""

    def replica(exchange):
        plain = lab.fill(make())
        model = wrap(plain)
        inner = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
        with DiLoCo(model, inner, exchange, **{"sync_every": 1, **options}) as outer:
            step = 0
            while outer.committed < syncs:
                lab.push(plain, inner, exchange.rank, step)
                step += 1
        return {name: value.clone() for name, value in plain.state_dict().items() if isinstance(value, torch.Tensor)}

    values, *_ = lab.run(replica, exchanges(folder, kind))
    return values


def loads_exactly(path, make, values):
    model = make()
    model.load_state_dict(load_file(path), strict=True)
    found = model.state_dict()
    for name, value in values.items():
        assert found[name].dtype is value.dtype
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("make", [Everything, Adapted, Wrapped], ids=lambda make: make.__name__)
@pytest.mark.parametrize("kind", ["strict", "sharded", "gather"])
@pytest.mark.parametrize("buffers", ["mean", "none"])
def test_the_whole_model_comes_back(lab, tmp_path, make, kind, buffers):
    values = trained(lab, tmp_path / "run", kind, make, buffers=buffers)
    assert export(str(tmp_path / "run"), tmp_path / "model") == 3
    loads_exactly(tmp_path / "model", make, values)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_names_are_those_of_the_plain_model(lab, tmp_path, wrapper):
    values = trained(lab, tmp_path / "run", "strict", Everything, WRAPPERS[wrapper])
    export(str(tmp_path / "run"), tmp_path / "model")
    loads_exactly(tmp_path / "model", Everything, values)
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert "module.weight" in manifest["tensors"], "a module that is called so keeps its name"


def test_a_part_that_is_compiled_by_itself(lab, tmp_path):
    trained(lab, tmp_path / "run", "strict", lambda: Wrapped(compiled=True))
    export(str(tmp_path / "run"), tmp_path / "model")
    Wrapped().load_state_dict(load_file(tmp_path / "model"), strict=True)


def test_only_wrappers_lose_their_part_of_the_name():
    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self._orig_mod = nn.Linear(1, 1)
            self.module = Distributed(nn.Linear(1, 1))

    model = Distributed(Holder())
    names = [plain_name(model, name) for name in model.state_dict()]
    assert names == ["_orig_mod.weight", "_orig_mod.bias", "module.weight", "module.bias"]


@pytest.mark.parametrize("wrapper", [name for name in WRAPPERS if name != "plain"])
def test_one_who_wraps_and_one_who_does_not_agree(lab, wrapper):
    def replica(exchange):
        plain = lab.fill(Everything())
        model = WRAPPERS[wrapper](plain) if exchange.rank else plain
        inner = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
        with DiLoCo(model, inner, exchange, sync_every=1):
            lab.push(plain, inner, exchange.rank, 0)
        return lab.values(plain)

    assert lab.identical(lab.run(replica, in_process(2)))


@pytest.mark.parametrize("kind", ["strict", "sharded"])
def test_what_is_not_synced_is_stored_once_in_small_objects(lab, tmp_path, monkeypatch, kind):
    monkeypatch.setattr(_unsynced, "OBJECT_BYTES", 1000)
    values = trained(lab, tmp_path / "run", kind, Adapted, syncs=8)
    sizes = [path.stat().st_size for path in (tmp_path / "run" / "unsynced").rglob("*.safetensors")]
    assert len(sizes) == 3, "30 x 40 and 30 values of two bytes, never collected"
    assert max(sizes) < 1400
    export(str(tmp_path / "run"), tmp_path / "model")
    loads_exactly(tmp_path / "model", Adapted, values)


def test_it_is_streamed():
    """No second copy of the model: a chunk at a time, and one tensor that is not contiguous."""
    model = nn.Module()
    model.first = nn.Parameter(torch.randn(3000, 1000), requires_grad=False)
    model.second = nn.Parameter(torch.randn(500, 1000).t(), requires_grad=False)
    sizes = []
    table = Unsynced(model, []).publish(lambda key, parts: sizes.extend(len(part) for part in parts()))
    assert sum(sizes) >= 4 * 3_500_000
    assert max(sizes) <= 2**20
    assert len(table["sums"]) == 1


def test_a_damaged_part_of_it_is_named(lab, tmp_path):
    trained(lab, tmp_path / "run", "strict", Adapted)
    (path,) = (tmp_path / "run" / "unsynced").rglob("*.safetensors")
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptedObjectError, match="unsynced"):
        export(str(tmp_path / "run"), tmp_path / "model")
    path.unlink()
    with pytest.raises(CorruptedObjectError, match="unsynced"):
        export(str(tmp_path / "run"), tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_what_no_file_of_tensors_can_hold_is_left_out_and_named(lab, tmp_path, caplog):
    class Odd(nn.Linear):
        def __init__(self):
            super().__init__(2, 2)
            self.register_buffer("spectrum", torch.ones(2, dtype=torch.complex128))
            self.register_buffer("phase", torch.ones(2, dtype=torch.complex64))

        def get_extra_state(self):
            return {"calls": 3}

        def set_extra_state(self, state):
            pass

    trained(lab, tmp_path / "run", "strict", Odd, buffers="none")
    with caplog.at_level(logging.WARNING):
        export(str(tmp_path / "run"), tmp_path / "model")
    assert "does not hold: spectrum, _extra_state" in caplog.text
    assert load_file(tmp_path / "model").keys() == {"weight", "bias", "phase"}


class TestEarlierStates:
    """A run keeps its newest states, and each can be had."""

    def history(self, lab, folder, kind, fragments=1, syncs=6, committed=0):
        """What the model held after every sync that this replica saw."""
        held = {}

        def replica(exchange):
            net = lab.fill(Adapted())
            inner = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=1.0)

            def seen(report):
                if exchange.rank == 0:
                    held[report.sync] = lab.values(net)

            options = {"sync_every": fragments, "fragments": fragments, "on_sync": seen}
            with DiLoCo(net, inner, exchange, **options) as outer:
                while outer.committed < syncs:
                    lab.push(net, inner, exchange.rank, outer.committed)

        lab.run(replica, exchanges(folder, kind))
        return held

    @pytest.mark.parametrize("kind", ["strict", "sharded", "gather"])
    @pytest.mark.parametrize("fragments", [1, 2])
    def test_each_that_is_there_is_what_the_model_was(self, lab, tmp_path, kind, fragments):
        held = self.history(lab, tmp_path / "run", kind, fragments)
        found = []
        for step in range(8):
            try:
                assert export(str(tmp_path / "run"), tmp_path / f"model{step}", at=step) == step
            except RendezvousError as error:
                message = str(error)
                assert f"does not hold the state after outer step {step}. It holds: after outer steps " in message
                continue
            found.append(step)
            if step and fragments == 1:  # with fragments the model is further on with those that were not synced
                loads_exactly(tmp_path / f"model{step}", Adapted, held[step])
        last = 5 + fragments  # at the end the other fragments are synced once more
        assert found[-1] == last
        assert f"It holds: after outer steps {', '.join(map(str, found))}." in message
        assert export(str(tmp_path / "run"), tmp_path / "model") == last

    @pytest.mark.parametrize("fragments", [1, 2])
    def test_after_a_rollback_it_is_what_the_run_goes_on_from(self, lab, tmp_path, fragments):
        """States that were given up are whole, and no longer of the run."""
        self.history(lab, tmp_path / "run", "sharded", fragments)
        last = 5 + fragments
        store = open_store(str(tmp_path / "run"))
        before = load_file((export(str(tmp_path / "run"), tmp_path / "a", at=last - 1), tmp_path / "a")[1])
        kept = {1: (last - 1,), 2: (last - 2, last - 1)}[fragments]  # seven is of the first of two fragments
        record = Rollback(last + 1, kept, (last,), {0: 1, 1: 1}, run=digest(store.get(MANIFEST)))
        assert store.create(f"commits/{last + 1:08}.json", record.to_json())
        assert export(str(tmp_path / "run"), tmp_path / "model") == last - 1
        found = load_file(tmp_path / "model")
        assert all(torch.equal(value, before[name]) for name, value in found.items())
        with pytest.raises(RendezvousError, match=f"does not hold the state after outer step {last}"):
            export(str(tmp_path / "run"), tmp_path / "again", at=last)

    @pytest.mark.parametrize("damaged", [False, True])
    def test_of_several_rollbacks_each_is_obeyed(self, lab, tmp_path, damaged):
        """The second one goes back to a state that is newer than what the first one gave up."""
        uri = str(tmp_path / "run")
        self.history(lab, uri, "sharded")
        store = open_store(uri)
        store.create(commit_key(7), Rollback(7, (5,), (6,), {0: 1, 1: 1}, run=digest(store.get(MANIFEST))).to_json())
        shutil.copytree(tmp_path / "run" / "state" / "00000006", tmp_path / "given up")
        held = self.history(lab, uri, "sharded", syncs=7)
        assert sorted(held) == [6, 7]
        shutil.copytree(tmp_path / "given up", tmp_path / "run" / "state" / "00000006", dirs_exist_ok=True)
        store.create(
            commit_key(10), Rollback(10, (8,), (9,), {0: 2, 1: 2}, 7, run=digest(store.get(MANIFEST))).to_json()
        )
        if damaged:  # what goes on from there names the first one
            (tmp_path / "run" / commit_key(10)).write_text("torn")
            assert export(uri, tmp_path / "model") == 7
        else:
            assert export(uri, tmp_path / "model") == 6
            loads_exactly(tmp_path / "model", Adapted, held[6])
            with pytest.raises(
                RendezvousError, match=r"does not hold the state after outer step 7\. It holds: after outer steps 6\."
            ):
                export(uri, tmp_path / "again", at=7)
        export(uri, tmp_path / "model", at=6)
        loads_exactly(tmp_path / "model", Adapted, held[6])

    @pytest.mark.parametrize("done", [True, False])
    def test_a_damaged_record_of_the_newest_sync_is_made_up_for(self, lab, tmp_path, caplog, done):
        self.history(lab, tmp_path / "run", "sharded")
        (tmp_path / "run" / "commits" / "00000006.json").write_text("torn")
        if not done:
            (tmp_path / "run" / "state" / "00000006" / "000.done.json").unlink()
        with caplog.at_level(logging.WARNING):
            assert export(str(tmp_path / "run"), tmp_path / "model") == 5 + done
        assert ("00000006.json" in caplog.text) is not done

    def test_stray_files_are_passed_over(self, lab, tmp_path):
        self.history(lab, tmp_path / "run", "strict")
        state = tmp_path / "run" / "state"
        (state / "notes.txt").write_text("mine")
        (state / "00000009").mkdir()
        for name in ("00000.safetensors.bak", "00002.safetensors", "x"):
            (state / "00000009" / name).write_text("mine")
        assert export(str(tmp_path / "run"), tmp_path / "model") == 6

    @pytest.mark.parametrize("at", [-1, 1.0, "1", True])
    def test_what_is_no_number_of_steps_is_refused(self, tmp_path, at):
        with pytest.raises(ConfigurationError, match="at must be a number of outer steps"):
            export(str(tmp_path), tmp_path / "model", at=at)

    # A strict run has no record that says that a shard was there.
    @pytest.mark.parametrize(
        ("kind", "harm"),
        [("strict", "damage"), *((k, harm) for k in ("sharded", "gather") for harm in ("damage", "remove"))],
    )
    def test_where_the_newest_is_damaged_it_is_the_one_before(self, lab, tmp_path, caplog, kind, harm):
        held = self.history(lab, tmp_path / "run", kind)
        complete = "*.safetensors" if kind == "strict" else "*.done.json"
        folders = {path.parent for path in (tmp_path / "run" / "state").rglob(complete)}
        newest, before = sorted(folders, reverse=True)[:2]
        steps = int(newest.name), int(before.name)
        shard = sorted(newest.glob("*.safetensors"))[0]
        if harm == "damage":
            data = bytearray(shard.read_bytes())
            data[-30] ^= 1  # before the checksums
            shard.write_bytes(data)
        else:
            shard.unlink()
        with caplog.at_level(logging.WARNING):
            assert export(str(tmp_path / "run"), tmp_path / "model") == steps[1]
        record = next(record.getMessage() for record in caplog.records if record.name == "diloco_core")
        assert record.startswith(f"the state after outer step {steps[0]} in ")
        assert shard.name in record
        assert record.endswith(f". This is the state after outer step {steps[1]}.")
        loads_exactly(tmp_path / "model", Adapted, held[steps[1]])
        with safe_open(tmp_path / "model", "pt") as file:
            assert (file.metadata()["sync"], file.metadata()["damaged"]) == (str(steps[1]), str(steps[0]))
        with pytest.raises(CorruptedObjectError) as caught:
            export(str(tmp_path / "run"), tmp_path / "again", at=steps[0])
        assert re.search(rf"\. Whole states in .*[ ,]{steps[1]}\.$", str(caught.value))

    @pytest.mark.parametrize(
        ("kind", "gone"),
        [
            ("strict", ["state/{:08}/00000.*"]),
            ("strict", ["state/{:08}/00000.*", "commits/{:08}.json", "notes/*"]),
            ("strict", ["state/{:08}/*"]),
            ("strict", ["state/{:08}/*", "commits/{:08}.json"]),
            *(
                (kind, gone)
                for kind in ("sharded", "gather")
                for gone in (
                    ["state/{:08}/000.done.json"],
                    ["state/{:08}/000.done.json", "commits/{:08}.json"],
                    ["state/{:08}/000.00000.safetensors", "state/{:08}/000.done.json"],
                    ["state/{:08}/*"],
                    ["state/{:08}/*", "commits/{:08}.json"],
                )
            ),
        ],
    )
    def test_a_newest_state_of_which_something_is_gone_is_named(self, lab, tmp_path, caplog, kind, gone):
        held = self.history(lab, tmp_path / "run", kind)
        removed = [path for part in gone for path in (tmp_path / "run").glob(part.format(6))]
        assert len(removed) >= len(gone)
        for path in removed:
            path.unlink()
        with caplog.at_level(logging.WARNING):
            before = export(tmp_path / "run", tmp_path / "model")
        assert before < 6
        text = caplog.text
        assert f"the state after outer step 6 in {(tmp_path / 'run').as_uri()} is not whole: state/00000006/" in text
        assert f"This is the state after outer step {before}." in text
        loads_exactly(tmp_path / "model", Adapted, held[before])
        with safe_open(tmp_path / "model", "pt") as file:
            assert (file.metadata()["sync"], file.metadata()["incomplete"]) == (str(before), "6")
        with pytest.raises(
            CorruptedObjectError, match=r"the state after outer step 6 .*is not whole: .*Whole states in"
        ):
            export(tmp_path / "run", tmp_path / "again", at=6)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert export(tmp_path / "run", tmp_path / "model", at=before) == before
        assert not caplog.text, "it is what was asked for"

    @pytest.mark.parametrize("kind", ["strict", "sharded", "gather"])
    @pytest.mark.parametrize("fragments", [1, 2])
    def test_of_a_run_that_is_whole_nothing_is_said(self, lab, tmp_path, caplog, kind, fragments):
        with caplog.at_level(logging.WARNING):
            self.history(lab, tmp_path / "run", kind, fragments)
            caplog.clear()
            export(tmp_path / "run", tmp_path / "model")
        assert not caplog.text

    @pytest.mark.parametrize("kind", ["strict", "sharded", "gather"])
    def test_where_nothing_is_whole_the_error_says_what_is_missing(self, lab, tmp_path, kind):
        self.history(lab, tmp_path / "run", kind)
        for folder in (*(tmp_path / "run" / "state").iterdir(), *(tmp_path / "run").glob("initial/*")):
            for path in folder.glob("*00000.*"):
                path.unlink()
            for path in folder.glob("*.done.json"):
                path.unlink()
        with pytest.raises(CorruptedObjectError) as caught:
            export(tmp_path / "run", tmp_path / "model")
        text = str(caught.value)
        assert re.match(r"the state after outer step 6 in \S+ is not whole: state/00000006/0\S* is not there", text)
        assert text.endswith(f"Whole states in {(tmp_path / 'run').as_uri()}: none.")
        assert "try again later" not in text

    def test_a_state_that_is_complete_in_a_moment_is_not_complained_of(self, lab, tmp_path, caplog, monkeypatch):
        """A run that goes on was just publishing it."""
        self.history(lab, tmp_path / "run", "sharded")
        done = tmp_path / "run" / "state" / "00000006" / "000.done.json"
        data, read = done.read_bytes(), _export._read
        done.unlink()

        def published_meanwhile(*arguments):
            done.write_bytes(data)
            return read(*arguments)

        monkeypatch.setattr(_export, "_read", published_meanwhile)
        with caplog.at_level(logging.WARNING):
            assert export(tmp_path / "run", tmp_path / "model") < 6
        assert not caplog.text


@pytest.mark.parametrize("kind", ["strict", "sharded"])
@pytest.mark.parametrize("harm", ["torn", "not JSON", "gone"])
def test_without_a_manifest_the_error_says_what_to_do(lab, tmp_path, kind, harm):
    trained(lab, tmp_path / "run", kind, Adapted)
    manifest = tmp_path / "run" / "manifest.json"
    text = manifest.read_text()
    manifest.unlink() if harm == "gone" else manifest.write_text("{" if harm == "not JSON" else text.replace("e", "a"))
    with pytest.raises(CorruptedObjectError, match=r"manifest\.json.*\. It says what .*Put a copy of it back"):
        export(tmp_path / "run", tmp_path / "model")


def test_padding_is_covered_too(lab, tmp_path, monkeypatch):
    """Three truth values are followed by five bytes that nobody needs: whatever changes there is noticed all the same."""
    monkeypatch.setattr("diloco_core._export._PAUSES", (0.0, 0.0))
    model = lab.fill(nn.Linear(2, 2))
    model.register_buffer("mask", torch.tensor([True, False, True]))
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    exchange = ElasticExchange(open_store(str(tmp_path / "run")), 0, 1, Elastic(1, grace=1.0))
    with DiLoCo(model, inner, exchange, sync_every=1, buffers="none"):
        lab.push(model, inner, 0, 0)
    (path,) = (tmp_path / "run" / "unsynced").rglob("*.safetensors")
    data = path.read_bytes()
    values = data.index(b"\x01\x00\x01", 8 + int.from_bytes(data[:8], "little"))
    assert data[values + 3 : values + 8] == bytes(5)
    for place in range(values, len(data)):
        path.write_bytes(data[:place] + bytes([data[place] ^ 16]) + data[place + 1 :])
        with pytest.raises(CorruptedObjectError, match="unsynced"):
            export(tmp_path / "run", tmp_path / "model")
    path.write_bytes(data)
    export(tmp_path / "run", tmp_path / "model")
    assert load_file(tmp_path / "model")["mask"].tolist() == [True, False, True]
