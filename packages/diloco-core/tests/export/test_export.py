"""A model comes out of the store alone, under its own names."""

import copy
import dataclasses
import pathlib
import resource
import shutil

import pytest
import torch
from safetensors.torch import load_file

from diloco_core import (
    ConfigurationError,
    CorruptedObjectError,
    DiLoCo,
    Elastic,
    ObjectStoreAllReduce,
    RendezvousError,
    StoreExchange,
    export,
)
from diloco_core._export import _choice, _run_states
from diloco_core._run._records._records import Done
from diloco_core._store._open import open_store


class Net(torch.nn.Module):
    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.first = torch.nn.Linear(6, 5, dtype=dtype)
        self.norm = torch.nn.BatchNorm1d(5)
        self.last = torch.nn.Linear(5, 2)

    def forward(self, x):
        return self.last(self.norm(self.first(x.to(self.first.weight.dtype)).float()))


def _run(lab, uri, topology="sharded", dtype=torch.float32, syncs=6, **options):
    def replica(exchange):
        torch.manual_seed(exchange.rank)
        net = lab.fill(Net(dtype))
        inner = torch.optim.SGD(net.parameters(), lr=0.1)
        with DiLoCo(net, inner, exchange, sync_every=2, fragments=2) as outer:
            while outer.committed < syncs:
                net(torch.randn(8, 6, generator=generators[exchange.rank])).pow(2).mean().backward()
                inner.step()
        return lab.values(net)

    generators = [torch.Generator().manual_seed(rank) for rank in range(3)]
    settings = Elastic(
        2,
        grace=20.0,
        topology=topology,
        publish_every=2 if topology == "gather" else None,
        **options,
    )
    return lab.run(
        replica, [StoreExchange(open_store(uri), rank, 3, settings) for rank in range(3)]
    )


@pytest.mark.parametrize("topology", ["sharded", "gather"])
def test_the_file_holds_what_the_replicas_hold(lab, tmp_path, topology):
    runs = _run(lab, str(tmp_path / "run"), topology)
    assert lab.identical(runs)
    target = tmp_path / "model.safetensors"
    assert export(str(tmp_path / "run"), target) >= 6
    found = load_file(target)
    assert found.keys() == runs[0].keys()
    assert all(torch.equal(found[name], runs[0][name]) for name in found)
    Net().load_state_dict(found)
    assert {path.name for path in tmp_path.iterdir()} == {"run", "model.safetensors"}


def test_dtypes_are_the_models_or_what_is_asked_for(lab, tmp_path):
    _run(lab, str(tmp_path / "run"), dtype=torch.bfloat16)
    export(str(tmp_path / "run"), tmp_path / "a")
    assert load_file(tmp_path / "a")["first.weight"].dtype is torch.bfloat16
    export(str(tmp_path / "run"), tmp_path / "b", dtype=torch.float32)
    found = load_file(tmp_path / "b")
    assert found["first.weight"].dtype is torch.float32
    assert found["norm.num_batches_tracked"].dtype is torch.int64
    with pytest.raises(ConfigurationError, match="floating-point"):
        export(str(tmp_path / "run"), tmp_path / "c", dtype=torch.int64)


def test_instead_of_a_damaged_shard_an_older_state_is_taken(lab, tmp_path):
    _run(lab, str(tmp_path / "run"))
    whole = export(str(tmp_path / "run"), tmp_path / "model")
    shard = sorted((tmp_path / "run" / "state").glob("*/*.safetensors"))[-1]
    data = bytearray(shard.read_bytes())
    data[-100 if len(data) > 900 else -10] ^= 1
    for position in range(len(data) // 2, len(data), 16):
        data[position] ^= 1
    shard.write_bytes(data)
    assert export(str(tmp_path / "run"), tmp_path / "model") < whole


def test_instead_of_a_whole_shard_of_other_values_an_older_state_is_taken(lab, tmp_path):
    """Its own checksum is right; the record of its sync has another."""
    _run(lab, str(tmp_path / "run"))
    whole = export(str(tmp_path / "run"), tmp_path / "model")
    records = sorted((tmp_path / "run" / "state").rglob("*.json"))
    sync, fragment = int(records[-1].parent.name), int(records[-1].name[:3])
    newest = Done.from_json(records[-1].read_bytes(), sync, fragment, "")
    records[-1].write_bytes(
        dataclasses.replace(newest, sums=(newest.sums[0] ^ 1, *newest.sums[1:])).to_json()
    )
    assert export(str(tmp_path / "run"), tmp_path / "model") < whole


@pytest.mark.parametrize("topology", ["sharded", "gather"])
def test_a_state_that_was_copied_from_another_run_is_no_state_of_this_one(
    lab, tmp_path, topology, caplog
):
    for name, syncs in (("run", 6), ("other", 6)):
        # With so many states kept, an older one is there whoever leaves first.
        _run(lab, str(tmp_path / name), topology, syncs=syncs, retention=6)
    whole = export(str(tmp_path / "run"), tmp_path / "model")
    newest = max(path.parent for path in (tmp_path / "run" / "state").glob("*/*.done.json"))
    for part in ("*.safetensors", "*.done.json"):
        for path in newest.glob(part):
            shutil.copyfile(tmp_path / "other" / path.relative_to(tmp_path / "run"), path)
        caplog.clear()
        older = export(str(tmp_path / "run"), tmp_path / "model")
        assert older < whole
        assert f"the state after outer step {whole} in " in caplog.text
    assert "is a record of another run" in caplog.text
    before = load_file(tmp_path / "model")
    assert export(str(tmp_path / "run"), tmp_path / "again", at=older) == older
    assert all(
        torch.equal(value, before[name]) for name, value in load_file(tmp_path / "again").items()
    )
    with pytest.raises(CorruptedObjectError, match="is a record of another run"):
        export(str(tmp_path / "run"), tmp_path / "again", at=whole)


@pytest.mark.parametrize("fragments", [1, 2])
def test_a_strict_run_too(lab, tmp_path, fragments):
    def replica(exchange):
        torch.manual_seed(exchange.rank)
        net = lab.fill(Net())
        inner = torch.optim.SGD(net.parameters(), lr=0.1)
        with DiLoCo(net, inner, exchange, sync_every=2, fragments=fragments) as outer:
            for _ in range(7):
                net(torch.randn(8, 6)).pow(2).mean().backward()
                inner.step()
        states[exchange.rank] = outer.state_dict()
        return lab.values(net)

    states = {}
    (values, *_) = runs = lab.run(replica, lab.store_exchanges(tmp_path, 3))
    assert lab.identical(runs)
    steps = export(str(tmp_path / "run"), tmp_path / "model")
    found = load_file(tmp_path / "model")
    assert steps == states[0]["committed"] >= 4
    assert found.keys() == values.keys()
    assert all(torch.equal(found[name], values[name]) for name in found)


def test_a_strict_run_that_went_on_from_a_saved_state(lab, tmp_path):
    def replica(exchange):
        net = lab.fill(Net())
        inner = torch.optim.SGD(net.parameters(), lr=0.1)
        outer = DiLoCo(net, inner, exchange, sync_every=2, fragments=2)
        if exchange.rank in saved:
            net.load_state_dict(saved[exchange.rank][0])
            outer.load_state_dict(saved[exchange.rank][1])
        with outer:
            for _ in range(3):
                net(torch.ones(8, 6)).pow(2).mean().backward()
                inner.step()
            saved[exchange.rank] = lab.values(net), copy.deepcopy(outer.state_dict())
        return lab.values(net)

    saved = {}
    lab.run(replica, lab.store_exchanges(tmp_path / "first", 2))
    assert saved[0][1]["committed"] == 3, "the next fragment is not the first"
    values, _ = lab.run(replica, lab.store_exchanges(tmp_path / "second", 2))
    assert export(str(tmp_path / "second" / "run"), tmp_path / "model") >= 6
    found = load_file(tmp_path / "model")
    assert all(torch.equal(found[name], values[name]) for name in found)


def test_a_strict_run_that_ended_in_the_middle_of_a_sync(lab, tmp_path):
    """Its newest state is incomplete: the one before is."""
    uri = tmp_path / "run"
    before = lab.train(lambda rank: lab.small_model(), lab.store_exchanges(tmp_path, 2))
    whole = sorted((uri / "state").iterdir())[-1]
    assert export(str(uri), tmp_path / "model") > 0
    expected = load_file(tmp_path / "model")
    begun = uri / "state" / f"{int(whole.name) + 1:08}"
    begun.mkdir()
    (begun / "00000.safetensors").write_bytes(b"whatever")
    export(str(uri), tmp_path / "again")
    assert before
    assert all(
        torch.equal(value, expected[name]) for name, value in load_file(tmp_path / "again").items()
    )


def test_a_store_without_a_model_is_named(lab, tmp_path):
    with pytest.raises(RendezvousError, match="holds no run"):
        export(str(tmp_path / "none"), tmp_path / "model")
    with ObjectStoreAllReduce(str(tmp_path / "mean"), rank=0, world_size=1) as reduce:
        reduce.mean([torch.ones(3)])
    with pytest.raises(RendezvousError, match="without a model"):
        export(str(tmp_path / "mean"), tmp_path / "model")
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "manifest.json").write_text("[]")
    with pytest.raises(CorruptedObjectError, match=r"manifest\.json is truncated or damaged"):
        export(str(tmp_path / "damaged"), tmp_path / "model")


@pytest.mark.parametrize("uri", ["{}/typo", "memory://{}/typo"])
def test_nothing_is_made_of_a_mistyped_uri(tmp_path, uri):
    uri = uri.format(tmp_path)
    with pytest.raises(RendezvousError, match=r"typo holds no run"):
        export(uri, tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_begins_meanwhile_is_not_taken_for_a_damaged_one(tmp_path, monkeypatch):
    read = _run_states.read_or_copy

    def begins_after(*arguments):
        manifest = read(*arguments)
        (tmp_path / "run" / "state").mkdir(parents=True)
        (tmp_path / "run" / "state" / "shard").touch()
        return manifest

    monkeypatch.setattr(_run_states, "read_or_copy", begins_after)
    with pytest.raises(RendezvousError, match="holds no run"):
        export(tmp_path / "run", tmp_path / "model")


def test_one_who_may_only_read_can_export(lab, tmp_path):
    def folders():
        return [
            tmp_path / "run",
            *(path for path in (tmp_path / "run").rglob("*") if path.is_dir()),
        ]

    def times():
        return [path.stat().st_mtime_ns for path in folders()]

    _run(lab, str(tmp_path / "run"))
    before = times()
    for path in folders():
        path.chmod(0o555)  # which does not hold root back: but their times tell
    try:
        assert export(str(tmp_path / "run"), tmp_path / "model") >= 6
    finally:
        for path in folders():
            path.chmod(0o755)
    assert times() == before


def test_a_folder_may_be_given_as_a_path(lab, tmp_path):
    _run(lab, str(tmp_path / "run"))
    assert export(tmp_path / "run", tmp_path / "a") == export(str(tmp_path / "run"), tmp_path / "b")
    with pytest.raises(
        ConfigurationError, match="uri must be the run's prefix, as text or a path, not 7"
    ):
        export(7, tmp_path / "c")


@pytest.mark.parametrize("everything", [True, False])
def test_a_state_that_is_collected_while_it_is_read_is_not_called_damaged(
    lab, tmp_path, monkeypatch, everything
):
    """The run is always faster, until somebody removes it; then there is nothing of it, and nothing
    is damaged.
    """
    _run(lab, str(tmp_path / "run"))
    reads = []

    def collected(store, table, files, dtype):
        reads.append(files)
        assert len(reads) < 20, "it would go on for ever"
        state = pathlib.Path(files[0].key).parent
        if everything:
            shutil.rmtree(tmp_path / "run" / "state")
            shutil.rmtree(tmp_path / "run" / "initial", ignore_errors=True)
        else:
            complete = [{int(state.name) + 2 if state.parts[0] == "state" else 1}] * 2
            states = _run_states.RunStates
            monkeypatch.setattr(states, "complete", lambda self: complete)
            monkeypatch.setattr(states, "states", lambda self, found: [max(found[0])])
            monkeypatch.setattr(states, "state", lambda self, step: [step, step])
            monkeypatch.setattr(states, "files", lambda self, index, step: one_file(step))
        raise CorruptedObjectError("its space was written over")

    def one_file(step):
        return [_run_states.PublishedFile(f"state/{step:08}/x", 0)]

    monkeypatch.setattr(_choice, "read_tensors", collected)
    with pytest.raises(
        CorruptedObjectError,
        match="is incomplete: .* missing" if everything else "were deleted while they were read",
    ):
        export(tmp_path / "run", tmp_path / "model")


class TestTargets:
    """They are refused before anything is read: there is no run at all."""

    @pytest.mark.parametrize("path", ["none/model", "file/model", "folder", ""])
    def test_what_cannot_be_written(self, tmp_path, monkeypatch, path):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "folder").mkdir()
        (tmp_path / "file").touch()
        with pytest.raises(
            ConfigurationError, match=r"cannot be written: .*Use a path in a folder that exists"
        ):
            export(str(tmp_path / "run"), path)
        assert {path.name for path in tmp_path.iterdir()} == {"folder", "file"}

    def test_a_disk_that_is_full(self, lab, tmp_path):
        _run(lab, str(tmp_path / "run"))
        (tmp_path / "model").write_bytes(b"the one before")
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
        try:
            with pytest.raises(
                ConfigurationError, match=r"'.*/model' cannot be written: .*has room"
            ):
                export(str(tmp_path / "run"), tmp_path / "model")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert (tmp_path / "model").read_bytes() == b"the one before"
        assert {path.name for path in tmp_path.iterdir()} == {"run", "model"}
