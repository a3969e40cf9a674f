"""A model comes out of the store alone, under its own names."""

import copy
import dataclasses
import itertools
import resource
import shutil

import pytest
import torch
from export_lab import Adapted, Everything, history, meddled, trained
from safetensors.torch import load_file
from training_lab import identical

from diloco_core import (
    ConfigurationError,
    CorruptedObjectError,
    DiLoCo,
    ObjectNotFoundError,
    ObjectStoreAllReduce,
    RendezvousError,
    export,
)
from diloco_core._run._records._records import Done


def test_nothing_is_left_beside_the_file(lab, tmp_path, run, model):
    history(lab, run, "sharded")
    assert export(str(run), tmp_path / "again") == export(run, model) == 6
    assert {path.name for path in tmp_path.iterdir()} == {"run", "model", "again"}
    with pytest.raises(ConfigurationError, match="uri must be the run's prefix"):
        export(7, model)


def test_dtypes_are_the_models_or_what_is_asked_for(lab, run, model):
    trained(lab, run, "sharded", Everything)
    export(run, model)
    assert load_file(model)["head.weight"].dtype is torch.bfloat16
    export(run, model, dtype=torch.float32)
    tensors = load_file(model)
    assert tensors["head.weight"].dtype is torch.float32
    assert tensors["norm.num_batches_tracked"].dtype is torch.int64
    with pytest.raises(ConfigurationError, match="floating-point"):
        export(run, model, dtype=torch.int64)


def test_instead_of_a_shard_of_other_values_an_older_state_is_taken(lab, run, model):
    """Its own checksum is right; the record of its sync has another."""
    history(lab, run, "sharded")
    record = sorted((run / "state").rglob("*.json"))[-1]
    sync, fragment = int(record.parent.name), int(record.name[:3])
    newest = Done.from_json(record.read_bytes(), sync, fragment, "")
    sums = (newest.sums[0] ^ 1, *newest.sums[1:])
    record.write_bytes(dataclasses.replace(newest, sums=sums).to_json())
    assert export(run, model) < 6


@pytest.mark.sampled
@pytest.mark.parametrize("topology", ["fixed", "sharded", "gather"])
def test_a_state_of_another_run_is_no_state_of_this_one(
    lab, tmp_path, run, model, topology, caplog
):
    for name in ("run", "other"):
        # With so many states kept, an older one is there whoever leaves first.
        history(lab, tmp_path / name, topology, retention=6)
    whole = export(run, model)
    newest = max(path.parent for path in (run / "state").glob("*/*.done.json"))
    for part in ("*.safetensors", "*.done.json"):
        for path in newest.glob(part):
            shutil.copyfile(tmp_path / "other" / path.relative_to(run), path)
        caplog.clear()
        older = export(run, model)
        assert older < whole
        assert f"the state after outer step {whole} in " in caplog.text
    assert "is a record of another run" in caplog.text
    before = load_file(model)
    assert export(run, model, at=older) == older
    assert identical([load_file(model), before])
    with pytest.raises(CorruptedObjectError, match="is a record of another run"):
        export(run, model, at=whole)


@pytest.mark.parametrize("fragments", [1, 2])
def test_a_strict_run_that_went_on_from_a_saved_state(lab, tmp_path, model, fragments):
    def replica(exchange):
        net = lab.fill(Adapted())
        inner = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=1.0)
        outer = DiLoCo(net, inner, exchange, sync_every=2, fragments=fragments)
        if exchange.rank in saved:
            net.load_state_dict(saved[exchange.rank][0])
            outer.load_state_dict(saved[exchange.rank][1])
        with outer:
            for step in range(3):
                lab.push(net, inner, exchange.rank, step)
            saved[exchange.rank] = lab.values(net), copy.deepcopy(outer.state_dict())
        steps.append(outer.committed)
        return lab.values(net)

    saved, steps = {}, []
    for name in ("first", "second"):
        values = lab.run(replica, lab.store_exchanges(tmp_path / name, 2))
        assert export(tmp_path / name / "run", model) == steps[-1]
        assert identical([load_file(model), *values])
        if name == "first":
            assert saved[0][1]["committed"] % 2 == 1, "the next fragment is not the first of two"


def test_a_store_without_a_model_is_named(tmp_path, model):
    for uri in (f"{tmp_path}/typo", f"memory://{tmp_path}/typo"):
        with pytest.raises(RendezvousError, match=r"typo holds no run"):
            export(uri, model)
        assert list(tmp_path.iterdir()) == []
    with ObjectStoreAllReduce(str(tmp_path / "mean"), rank=0, world_size=1) as reduce:
        reduce.mean([torch.ones(3)])
    with pytest.raises(RendezvousError, match="without a model"):
        export(tmp_path / "mean", model)
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "manifest.json").write_text("[]")
    with pytest.raises(CorruptedObjectError, match=r"manifest\.json is truncated or damaged"):
        export(tmp_path / "damaged", model)


def test_a_run_that_begins_meanwhile_is_not_taken_for_a_damaged_one(run, model, monkeypatch):
    def begins_after(real, key, *largest):
        try:
            return real(key, *largest)
        finally:
            (run / "state").mkdir(parents=True, exist_ok=True)
            (run / "state" / "shard").touch()

    meddled(monkeypatch, get=begins_after)
    with pytest.raises(RendezvousError, match="holds no run"):
        export(run, model)


def test_one_who_may_only_read_can_export(lab, run, model):
    history(lab, run, "sharded")
    folders = [run, *(path for path in run.rglob("*") if path.is_dir())]
    before = [path.stat().st_mtime_ns for path in folders]
    for path in folders:
        path.chmod(0o555)  # which does not hold root back: but their times tell
    try:
        assert export(run, model) == 6
    finally:
        for path in folders:
            path.chmod(0o755)
    assert [path.stat().st_mtime_ns for path in folders] == before


class TestStatesThatAreCollectedWhileTheyAreRead:
    """They are not called damaged."""

    def test_since_the_run_is_always_faster(self, lab, run, model, monkeypatch):
        history(lab, run, "sharded")
        hidden = itertools.cycle(("state/00000005/", "state/00000006/"))
        at_the_moment, reads = [next(hidden)], []

        def listed(real, prefix):
            found = real(prefix)
            return {key: size for key, size in found.items() if not key.startswith(*at_the_moment)}

        def opened(real, key, *size):
            if not key.endswith(".safetensors"):
                return real(key, *size)
            reads.append(key)
            assert len(reads) < 20, "it would go on for ever"
            at_the_moment[:] = [next(hidden)]
            raise ObjectNotFoundError(key)

        meddled(monkeypatch, list=listed, open=opened)
        with pytest.raises(CorruptedObjectError, match="were deleted while they were read"):
            export(run, model)
        assert len(reads) > 1

    def test_since_somebody_removes_the_run(self, lab, run, model, monkeypatch):
        def removed(real, key, *size):
            if key.endswith(".safetensors"):
                shutil.rmtree(run / "state", ignore_errors=True)
                shutil.rmtree(run / "initial", ignore_errors=True)
            return real(key, *size)

        history(lab, run, "sharded")
        meddled(monkeypatch, open=removed)
        with pytest.raises(CorruptedObjectError, match=r"is incomplete\. Missing: state"):
            export(run, model)


class TestTargets:
    """They are refused before anything is read: there is no run at all."""

    @pytest.mark.parametrize("path", ["none/model", "file/model", "folder", ""])
    def test_what_cannot_be_written(self, tmp_path, run, monkeypatch, path):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "folder").mkdir()
        (tmp_path / "file").touch()
        with pytest.raises(
            ConfigurationError, match=r"be written: .*a path in a folder that exist"
        ):
            export(run, path)
        assert {path.name for path in tmp_path.iterdir()} == {"folder", "file"}

    def test_a_disk_that_is_full(self, lab, tmp_path, run, model):
        history(lab, run, "sharded")
        model.write_bytes(b"the one before")
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
        try:
            with pytest.raises(ConfigurationError, match=r"/model' cannot be written: .*has room"):
                export(run, model)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert model.read_bytes() == b"the one before"
        assert {path.name for path in tmp_path.iterdir()} == {"run", "model"}
