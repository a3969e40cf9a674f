"""What is exported loads strictly into the plain model: whatever wraps it, and whatever of it is
frozen, tied or left alone.
"""

import json
import logging
import os
import subprocess
import sys

import pytest
import torch
from export_lab import (
    WRAPPERS,
    Adapted,
    Distributed,
    Everything,
    Wrapped,
    exchanges,
    loads_exactly,
    trained,
)
from keys_lab import fields, sealed_again
from safetensors.torch import load_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from diloco_core import ConfigurationError, CorruptedObjectError, DiLoCo, export, in_process


@pytest.fixture
def no_pause(monkeypatch):
    """A damaged object is read again at once."""
    monkeypatch.setattr("diloco_core._store._reread.REREADS", (0.0, 0.0))


@pytest.mark.sampled
@pytest.mark.parametrize("make", [Everything, Adapted, Wrapped], ids=lambda make: make.__name__)
@pytest.mark.parametrize("kind", ["fixed", "sharded", "gather"])
@pytest.mark.parametrize("buffers", ["mean", "none"])
def test_the_whole_model_comes_back(lab, run, model, make, kind, buffers):
    values = trained(lab, run, kind, make, buffers=buffers)
    assert export(run, model) == 3
    loads_exactly(model, make, values)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("dtype", "most", "says"),
    [
        (torch.float16, 65504.0, "it can hold up to 65504"),
        (torch.bfloat16, torch.finfo(torch.bfloat16).max, "it can hold up to 3.38953e+38"),
        (torch.float8_e5m2, 57344.0, "it can hold up to 57344"),
        (torch.float8_e4m3fn, 448.0, "it can hold up to 448"),
    ],
)
def test_a_dtype_that_cannot_hold_a_value_is_refused(lab, tmp_path, model, dtype, most, says):
    def make(value):
        model = nn.Linear(2, 1)
        model.register_buffer("mask", torch.tensor([value, -float("inf")]))
        return model

    trained(lab, tmp_path / "fits", "fixed", lambda: make(-most), buffers="none")
    export(str(tmp_path / "fits"), model, dtype=dtype)
    assert load_file(model)["mask"][0].float().item() == -most
    larger = torch.finfo(torch.float32).min if dtype == torch.bfloat16 else -2 * most
    trained(lab, tmp_path / "does not", "fixed", lambda: make(larger), buffers="none")
    with pytest.raises(ConfigurationError, match="cannot hold the values of 'mask'") as caught:
        export(str(tmp_path / "does not"), tmp_path / "other", dtype=dtype)
    assert says in str(caught.value)
    assert not (tmp_path / "other").exists()


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["manifest.json", "model.safetensors", "state/model"])
def test_nothing_is_written_into_the_runs_own_folder(lab, tmp_path, run, name):
    trained(lab, run, "fixed", Adapted)
    before = (run / "manifest.json").read_bytes()
    (tmp_path / "link").symlink_to(run)
    for folder in ("run", "link", "run/../run"):
        with pytest.raises(ConfigurationError, match="is in the run's own folder"):
            export(run, tmp_path / folder / name)
    assert (run / "manifest.json").read_bytes() == before
    assert not list(run.rglob(".*"))


@pytest.mark.sampled
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_names_are_those_of_the_plain_model(lab, run, model, wrapper):
    values = trained(lab, run, "fixed", Everything, WRAPPERS[wrapper])
    export(run, model)
    loads_exactly(model, Everything, values)
    manifest = json.loads((run / "manifest.json").read_text())
    assert "module.weight" in manifest["tensors"], "a module that is called so keeps its name"


def test_only_wrappers_lose_their_part_of_the_name(lab, tmp_path, model):
    class Holder(nn.Module):
        def __init__(self, wrap=lambda module: module):
            super().__init__()
            self._orig_mod = nn.Linear(1, 1)
            self.module = wrap(nn.Linear(1, 1))

    makes = (
        (lambda: Wrapped(compiled=True), Wrapped),
        (lambda: Distributed(Holder(Distributed)), Holder),
        (Checkpointed, lambda: Checkpointed(lambda layer: layer)),
    )
    for number, (make, plain) in enumerate(makes):
        trained(lab, tmp_path / str(number), "fixed", make)
        export(tmp_path / str(number), model)
        plain().load_state_dict(load_file(model), strict=True)


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


@pytest.mark.parametrize("kind", ["fixed", "sharded"])
def test_what_is_not_synced_is_stored_once_in_small_objects(lab, run, model, monkeypatch, kind):
    monkeypatch.setattr("diloco_core._model._unsynced.OBJECT_BYTES", 1000)
    values = trained(lab, run, kind, Adapted, syncs=8)
    sizes = [path.stat().st_size for path in (run / "unsynced").rglob("*.safetensors")]
    assert len(sizes) == 3, "30 x 40 and 30 values of two bytes, never collected"
    assert max(sizes) < 1400
    export(run, model)
    loads_exactly(model, Adapted, values)


def test_it_is_streamed(lab, run):
    """No second copy of the model: a chunk at a time, and one tensor that is not contiguous."""
    model = nn.Linear(2, 2)
    model.first = nn.Parameter(torch.randn(3000, 1000), requires_grad=False)
    model.second = nn.Parameter(torch.randn(500, 1000).t(), requires_grad=False)
    (exchange,) = exchanges(run, "fixed", 1)
    put, sizes = exchange.store.put, []

    def watched(key, parts):
        parts = list(parts)
        sizes.extend(len(part) for part in parts if key.startswith("unsynced/"))
        return put(key, parts)

    exchange.store.put = watched
    inner = torch.optim.SGD([model.weight, model.bias], lr=1.0)
    with DiLoCo(model, inner, exchange, sync_every=1):
        pass
    assert sum(sizes) >= 4 * 3_500_000
    assert max(sizes) <= 2**20


def test_a_damaged_part_of_it_is_named(lab, run, model, no_pause):
    trained(lab, run, "fixed", Adapted)
    (path,) = (run / "unsynced").rglob("*.safetensors")
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)
    for harm in ("unsynced.*checksum", "gone.*unsynced"):
        with pytest.raises(CorruptedObjectError, match=harm) as caught:
            export(run, model)
        text = str(caught.value)
        assert "does not sync ('base.weight', 'base.bias'), as they were when the run began" in text
        assert "export with synced_only=True, which writes all other tensors" in text
        path.unlink(missing_ok=True)
    assert not model.exists()
    export(run, model, synced_only=True)
    assert "base.weight" not in load_file(model)


class Quantised(torch.Tensor):
    """Stands for the tensors of quantised layers: a class of its own."""

    @staticmethod
    def __new__(cls, values):
        return torch.Tensor._make_subclass(cls, values, False)


def test_what_no_file_can_hold_is_left_out_and_named(lab, run, model, caplog):
    class Odd(nn.Linear):
        def __init__(self):
            super().__init__(2, 2)
            self.register_buffer("spectrum", torch.ones(2, dtype=torch.complex128))
            self.register_buffer("phase", torch.ones(2, dtype=torch.complex64))
            self.base = nn.Parameter(Quantised(torch.ones(3)), requires_grad=False)

        def get_extra_state(self):
            return {"calls": 3}

        def set_extra_state(self, state):
            pass

    trained(lab, run, "fixed", Odd, buffers="none")
    with caplog.at_level(logging.WARNING):
        export(run, model)
    assert "which get_extra_state() or hooks of the model add: _extra_state\n" in caplog.text
    assert "quantised ones, for instance) or dtypes that a safetensors file cannot" in caplog.text
    assert all(text in caplog.text for text in ("base (", "spectrum (Tensor, torch.complex128)"))
    assert load_file(model).keys() == {"weight", "bias", "phase"}


def test_a_manifest_that_promises_too_much_takes_no_memory(lab, run, model, no_pause):
    """Anyone who may write to the store can seal a manifest: its sizes are compared."""
    trained(lab, run, "fixed", lambda: nn.Linear(2, 2, bias=False), syncs=0)
    path = run / "manifest.json"
    (table,) = fields("manifest.json", path.read_bytes())["fragments"]
    table["groups"][0]["numel"], table["tensors"][0]["shape"] = 10**12, [10**6, 10**6]
    path.write_bytes(sealed_again("manifest.json", path.read_bytes(), fragments=[table]))
    with pytest.raises(CorruptedObjectError, match=r"has \d+ bytes, but the values .* \d{13}"):
        export(run, model)


@pytest.mark.sampled
@pytest.mark.parametrize("kind", ["fixed", "sharded"])
@pytest.mark.parametrize("harm", ["torn", "not JSON", "gone", "damaged, and the copy gone"])
def test_without_a_manifest_the_error_says_what_to_do(lab, run, model, no_pause, kind, harm):
    trained(lab, run, kind, Adapted)
    manifest, copy = (run / name for name in ("manifest.json", "manifest.copy.json"))
    text = r"manifest\.json.*\. The manifest describes .*put it back"
    if harm == "damaged, and the copy gone":
        manifest.write_text("{")
        copy.unlink()
        text = r"json is truncated or damaged.* Its copy manifest\.copy\.json is gone\. The manif"
    else:
        for path in (manifest, copy):
            broken = "{" if harm == "not JSON" else path.read_text().replace("e", "a")
            path.unlink() if harm == "gone" else path.write_text(broken)
    with pytest.raises(CorruptedObjectError, match=text):
        export(run, model)


def test_padding_is_covered_too(lab, run, model, no_pause):
    """Three truth values are followed by five bytes that nobody needs: changes show there, too."""

    def make():
        model = nn.Linear(2, 2)
        model.register_buffer("mask", torch.tensor([True, False, True]))
        return model

    trained(lab, run, "sharded", make, buffers="none")
    (path,) = (run / "unsynced").rglob("*.safetensors")
    data = path.read_bytes()
    values = data.index(b"\x01\x00\x01", 8 + int.from_bytes(data[:8], "little"))
    assert data[values + 3 : values + 8] == bytes(5)
    for place in range(values, len(data)):
        path.write_bytes(data[:place] + bytes([data[place] ^ 16]) + data[place + 1 :])
        with pytest.raises(CorruptedObjectError, match="unsynced"):
            export(run, model)
    path.write_bytes(data)
    export(run, model)
    assert load_file(model)["mask"].tolist() == [True, False, True]


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["model.pt", "model.bin", "model.safetensors.gz"])
def test_a_file_of_another_kind_is_refused(lab, tmp_path, run, name):
    trained(lab, run, "fixed", Adapted)
    with pytest.raises(ConfigurationError, match=r"must end in \.safetensors, not in '\.\w+'"):
        export(run, tmp_path / name)
    assert not (tmp_path / name).exists()


@pytest.mark.slow
def test_the_same_state_gives_the_same_bytes(lab, tmp_path, run):
    trained(lab, run, "sharded", Everything)
    script = f"import sys; from diloco_core import export; export({str(run)!r}, sys.argv[1])"
    files = [tmp_path / f"{number}.safetensors" for number in range(3)]
    for file in files[:2]:
        export(run, file)
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    subprocess.run([sys.executable, "-c", script, files[2]], check=True, env=environment)
    assert len({file.read_bytes() for file in files}) == 1


class Checkpointed(nn.Module):
    """Its activations are made again; torch names such a layer's parameters in two ways."""

    def __init__(self, wrap=checkpoint_wrapper):
        super().__init__()
        self.first = wrap(nn.Linear(3, 3))
        self.second = nn.Linear(3, 3)
