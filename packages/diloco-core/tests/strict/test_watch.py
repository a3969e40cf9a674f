"""Rank 0 of a living strict run writes its manifest again when that is lost or damaged, and nobody else's."""

import re

import pytest
import torch
from damage_lab import flip
from strict_lab import Run, claim
from training_lab import Clock, fill, identical, push

from diloco_core import DiLoCo, Elastic, ReplicaLostError, RunExistsError, Timing, connect
from diloco_core._exchange._base import Schema
from diloco_core._store._copies import copy_key
from diloco_core._store._open import open_store
from diloco_core._store._patient import Patient
from diloco_core._strict._records._manifest import MANIFEST, Manifest, manifest_key, manifest_keys
from diloco_core._strict._records._records import claim_key
from diloco_core._strict._watch import Watch, write_manifest
from diloco_core.testing import SimulatedStore

HARM = {
    "gone": lambda data: None,
    "damaged": lambda data: flip(data, 4 * len(data)),
    "empty": lambda data: b"",
}


@pytest.fixture(autouse=True)
def _at_once(monkeypatch):
    monkeypatch.setattr("diloco_core._store._reread.REREADS", (0.0, 0.0))


class TestInALivingRun:
    @pytest.fixture
    def harmed(self, stopped, monkeypatch):
        """Harms the manifest of the second life when sync 4 is published. For each later sync: whether the manifest was whole."""
        write, key, found, whole = SimulatedStore.write, manifest_key(2), [], []

        def harmful(harm):
            def writing(store, written, data):
                write(store, written, data)
                if written == key and not whole:
                    whole.append(bytes(data))
                published = re.match("state/([0-9]{8})/00000[.]", written)
                sync = int(published[1]) if published else 0
                if sync == 4:
                    store.remove(key)
                    if (harmed := HARM[harm](whole[0])) is not None:
                        write(store, key, harmed)
                if sync > 4:
                    found.append(store.objects.get(key) == whole[0])

            monkeypatch.setattr(SimulatedStore, "write", writing)
            return found

        return harmful

    def is_whole(self, run):
        return identical(run.live(resume=True, until=10))

    @pytest.mark.parametrize("harm", HARM)
    @pytest.mark.parametrize("every", [0, 1], ids=["nothing saved", "inner state saved"])
    def test_at_every_eighth_sync(self, stopped, harmed, harm, every, caplog):
        found = harmed(harm)
        assert identical(stopped.live(resume=True, until=9, save_inner_every=every))
        assert found == [False, False, False, True, True], "eight syncs are done after sync 7"
        assert "manifests/0002.json" in caplog.text
        assert "It is written again with the same content" in caplog.text
        assert self.is_whole(stopped)

    def test_when_it_leaves(self, stopped, harmed):
        found = harmed("gone")
        assert identical(stopped.live(resume=True))
        assert found == [False, False]
        assert self.is_whole(stopped)

    def test_when_it_fails(self, stopped, harmed, monkeypatch):
        harmed("gone")
        train = type(stopped).train

        def loses_rank_1(run, exchange, until, **more):
            if exchange.rank:
                exchange._liveness.tell = lambda ending: None  # as if it were killed
                until = 5
            return train(run, exchange, until, **more)

        with monkeypatch.context() as patch:
            patch.setattr(type(stopped), "train", loses_rank_1)
            result, _ = stopped.live(resume=True)
        with pytest.raises(ReplicaLostError, match="rank 1"):
            raise result
        assert self.is_whole(stopped)


class TestWhatIsWrittenAgain:
    @pytest.fixture(params=[1, 2])
    def watched(self, request, tmp_path):
        clock, schema, life = Clock(), Schema({}, {}), request.param
        timing = Timing(clock=clock, sleep=clock.sleep)
        store = Patient(open_store(str(tmp_path / "run")), timing)
        own_claim = claim(0, "mine", life, world_size=1)
        earlier = [(32 * "a", 3)] if life > 1 else []
        manifest = Manifest(
            "", 32 * "c", 1, {"committed": "0"}, {}, [], {}, [(life, "mine")], earlier
        )
        store.put(claim_key(0, life), lambda: [own_claim.to_bytes()])
        return (
            store,
            own_claim,
            manifest,
            Watch(store, timing, own_claim, manifest, schema.unsynced),
        )

    def look(self, watched):
        store, _, manifest, watch = watched
        watch.look_at_manifest()
        return store.get(manifest_key(manifest.life))

    def test_it_is_written_where_nothing_speaks_against_it(self, watched):
        assert self.look(watched) == watched[2].to_bytes()

    def test_what_is_whole_stays_untouched(self, watched, caplog):
        self.look(watched)
        caplog.clear()
        watched[0].put = None
        self.look(watched)
        assert caplog.text == ""

    def test_after_the_prefix_was_emptied(self, watched):
        store, own_claim, *_ = watched
        store.delete([claim_key(0, own_claim.life)])
        assert self.look(watched) is None

    @pytest.mark.parametrize("later", [0, 1], ids=["of another run", "by a later process"])
    def test_after_the_rank_was_claimed(self, watched, later):
        store, own_claim, *_ = watched
        life = own_claim.life + later
        other = claim(0, "another", life, world_size=1)
        store.put(claim_key(0, life), lambda: [other.to_bytes()])
        assert self.look(watched) is None

    def test_over_that_of_another_version(self, watched):
        store, _, manifest, _ = watched
        store.put(manifest_key(manifest.life), lambda: [b'{"kind": "manifest", "format": 2}'])
        assert self.look(watched) == manifest.to_bytes()

    def test_over_that_of_another_run(self, watched):
        store, _, manifest, _ = watched
        other = Manifest(
            "", 32 * "d", 1, {"committed": "0"}, {}, [], {}, manifest.members, manifest.earlier
        )
        store.put(manifest_key(manifest.life), lambda: [other.to_bytes()])
        store.put(copy_key(manifest_key(manifest.life)), lambda: [other.to_bytes()])
        assert self.look(watched) == manifest.to_bytes(), "the claims say whose the prefix is"
        assert store.get(copy_key(manifest_key(manifest.life))) == manifest.to_bytes()


def test_who_was_replaced_meanwhile_writes_none(tmp_path):
    """Its upload of what is not synced, or its check of a state, has taken so long that a later process has resumed the run."""
    store = Patient(open_store(str(tmp_path / "run")), Timing())
    own_claim, later = (claim(0, nonce, life, world_size=1) for nonce, life in (("a", 1), ("b", 2)))
    manifest = Manifest("", 32 * "c", 1, {"committed": "0"}, {}, [], {}, [(1, "a")])
    for rank_0 in (own_claim, later):
        store.put(claim_key(0, rank_0.life), lambda: [rank_0.to_bytes()])  # noqa: B023 - called at once
    with pytest.raises(RunExistsError):
        write_manifest(store, manifest, own_claim, Timing())
    assert not any(map(store.get, manifest_keys(1)))


def test_a_first_life_writes_manifest_json_again(monkeypatch):
    run, write = Run(2), SimulatedStore.write

    def harmful(store, written, data):
        write(store, written, data)
        if written.startswith("state/00000001/00000."):
            store.remove(MANIFEST)

    with monkeypatch.context() as patch:
        patch.setattr(SimulatedStore, "write", harmful)
        assert identical(run.live(until=3))
    assert identical(run.live(resume=True))


@pytest.mark.parametrize("kind", ["strict", "elastic"])
def test_a_run_goes_on_without_a_copy_that_cannot_be_written(kind, tmp_path, caplog):
    clock, folder = Clock(), tmp_path / "run"
    timing = Timing(clock=clock, sleep=clock.sleep)
    options = {"elastic": Elastic(1, grace=600.0)} if kind == "elastic" else {}
    net = fill(torch.nn.Linear(2, 1))
    inner = torch.optim.SGD(net.parameters(), lr=0.5)
    exchange = connect(folder, rank=0, world_size=1, timing=timing, **options)
    with DiLoCo(net, inner, exchange, sync_every=1) as outer:
        copy = folder / copy_key(MANIFEST)
        copy.unlink()
        (copy / "something").mkdir(parents=True)
        for step in range(9):
            push(net, inner, 0, step)
    assert outer.committed == 9
    assert "goes on without this copy of its manifest" in caplog.text
