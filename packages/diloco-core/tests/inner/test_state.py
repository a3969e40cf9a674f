"""A rank that comes back has its inner optimizer, random numbers and place in the data again."""

import itertools
import random
import shutil

import numpy as np
import pytest
import torch
from damage_lab import run_of
from inner_lab import Loader
from safetensors import safe_open
from simulated import Schedule, SimulatedStore, simulate

from diloco_core import (
    CorruptedObjectError,
    DiLoCo,
    Elastic,
    FencedError,
    StoreExchange,
    connect,
)
from diloco_core._inner._file import check_inner
from diloco_core._inner._state import InnerState
from diloco_core._run._records._keys import claim_key, inner_key
from diloco_core._run._sync._sync import StoreSync
from diloco_core._store._open import open_store


def _train(uri, rank, syncs, loader, world_size=1, every=10, stop=None, reports=None, **settings):
    torch.manual_seed(5)
    net = torch.nn.Linear(3, 2)
    inner = torch.optim.AdamW(net.parameters(), lr=0.01)
    exchange = StoreExchange(open_store(uri), rank, world_size, Elastic(1, grace=1.0, **settings))
    options = {"sync_every": 2, "save_inner_every": every}
    if every:
        options["stateful"] = {"loader": loader}
    if reports is not None:
        options["on_sync"] = lambda report: reports.append(
            (report.sync, outer.committed, loader.position)
        )
    noise = []
    with DiLoCo(net, inner, exchange, **options) as outer:
        for _ in range(outer.batches_to_skip):
            next(loader)
        while outer.committed < syncs:
            if stop is not None and outer.inner_steps == stop:
                raise KeyboardInterrupt
            noise.append((torch.rand(1).item(), random.random(), np.random.rand()))
            net(next(loader)).pow(2).mean().backward()
            inner.step()
            inner.zero_grad()
    return net, inner, noise, outer


def test_a_run_in_two_parts_is_the_run_in_one(tmp_path):
    whole_loader, parts_loader = Loader(), Loader()
    random.seed(1), np.random.seed(1)
    whole, whole_inner, whole_noise, _ = _train(str(tmp_path / "a"), 0, 6, whole_loader)
    random.seed(1), np.random.seed(1)
    _, _, first_noise, _ = _train(str(tmp_path / "b"), 0, 3, Loader())
    net, inner, noise, outer = _train(str(tmp_path / "b"), 0, 6, parts_loader)
    assert outer.batches_to_skip == 0
    assert whole_noise == first_noise + noise
    assert parts_loader.seen == whole_loader.seen == list(range(1, 13))
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), net.parameters(), strict=True))
    for here, there in zip(inner.state.values(), whole_inner.state.values(), strict=True):
        assert all(torch.equal(here[name], there[name]) for name in there)


def test_what_was_counted_since_the_last_saving_is_to_be_passed_over(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        _train(
            str(tmp_path), 0, 9, Loader(), every=2, stop=9
        )  # killed after sync 4, saved at syncs 1 and 3
    loader = Loader()
    _, _, _, outer = _train(str(tmp_path), 0, 6, loader, every=2)
    assert outer.batches_to_skip == 2
    # Steps 7 and 8 are counted already; the 9th was never done.
    assert loader.seen == list(range(1, 13))


def test_what_is_counted_while_an_incarnation_begins_is_passed_over_and_its_state_is_saved_later(
    tmp_path, monkeypatch, caplog
):
    """The incarnation before it had contributed to sync 4, and ended before that was decided."""
    finish = StoreSync.finish

    def interrupted(self):
        if self._sync == 4:
            raise KeyboardInterrupt
        return finish(self)

    with monkeypatch.context() as patched:
        patched.setattr(StoreSync, "finish", interrupted)
        with pytest.raises(KeyboardInterrupt):
            _train(str(tmp_path), 0, 9, Loader())
    loader, reports = Loader(), []
    _, _, _, outer = _train(str(tmp_path), 0, 6, loader, reports=reports)
    assert outer.batches_to_skip == 6  # one sync was saved
    # Not (4, ...): the caller has no loop yet when that sync is adopted, and the loader does not
    # stand where it stood.
    assert reports == [(5, 5, 10), (6, 6, 12)]
    assert loader.seen == list(range(1, 13))
    assert "an earlier incarnation of this rank took and this one did not" not in caplog.text
    assert (tmp_path / inner_key(0, 2, 6)).exists(), (
        "the data loader stands where the counted steps end"
    )


def test_several_optimizers_are_all_saved(tmp_path):
    def incarnation(steps):
        net = torch.nn.Linear(3, 2)
        inner = [
            torch.optim.AdamW([net.weight], lr=0.1),
            torch.optim.SGD([net.bias], lr=0.1, momentum=0.9),
        ]
        exchange = StoreExchange(open_store(str(tmp_path)), 0, 1, Elastic(1, grace=1.0))
        with DiLoCo(net, inner, exchange, sync_every=1) as outer:
            restored = [
                [{k: v.clone() for k, v in state.items()} for state in o.state.values()]
                for o in inner
            ]
            while outer.inner_steps < steps:
                net(torch.ones(4, 3)).sum().backward()
                [optimizer.step() for optimizer in inner]
            saved = [[dict(state) for state in optimizer.state.values()] for optimizer in inner]
        return restored, saved

    _, saved = incarnation(3)
    restored, _ = incarnation(4)
    for wanted, found in zip(saved, restored, strict=True):
        assert wanted[0].keys() == found[0].keys()
        assert all(torch.equal(wanted[0][name], found[0][name]) for name in wanted[0])


@pytest.mark.parametrize("fused", [True, False])
def test_state_is_laid_out_in_memory_as_the_parameters_are(tmp_path, fused):
    def incarnation(name, steps):
        torch.manual_seed(5)
        net = torch.nn.Sequential(
            torch.nn.Conv2d(4, 8, 3), torch.nn.Flatten(), torch.nn.Linear(8, 3)
        )
        net.to(memory_format=torch.channels_last)
        net[2].weight = torch.nn.Parameter(net[2].weight.detach().t().contiguous().t())
        inner = torch.optim.AdamW(net.parameters(), lr=0.1, fused=fused)
        inner.state["calls"] = {
            "of": steps
        }  # some optimizers keep more than the state of parameters
        exchange = StoreExchange(open_store(str(tmp_path / name)), 0, 1, Elastic(1, grace=1.0))
        with DiLoCo(net, inner, exchange, sync_every=1, save_inner_every=1) as outer:
            while outer.inner_steps < steps:
                torch.manual_seed(outer.inner_steps)
                net(torch.randn(5, 4, 3, 3)).square().sum().backward()
                inner.step()
                inner.zero_grad()
        return net, inner

    incarnation("parts", 2)
    (whole, _), (parts, inner) = incarnation("whole", 6), incarnation("parts", 6)
    for wanted, found in zip(whole.parameters(), parts.parameters(), strict=True):
        assert torch.equal(wanted, found)
        assert inner.state[found]["exp_avg"].stride() == found.stride()


def test_settings_that_are_tensors_stay_on_their_device():
    """A capturable optimizer has its learning rate on the GPU, where a captured step reads it."""
    net = torch.nn.Linear(3, 2)
    inner = torch.optim.AdamW(net.parameters(), lr=torch.tensor(0.25))
    saved = b"".join(map(bytes, InnerState([inner], {}).parts(1, "run")))
    inner.param_groups[0]["lr"] = torch.tensor(0.5)
    InnerState([inner], {}).restore(saved, "run", "the file")
    assert inner.param_groups[0]["lr"] == 0.25
    inner.param_groups[0]["lr"] = torch.tensor(0.5, device="meta")
    InnerState([inner], {}).restore(saved, "run", "the file")
    assert inner.param_groups[0]["lr"].device.type == "meta"


def test_every_rank_has_its_own(tmp_path):
    _train(str(tmp_path), 0, 3, Loader(), world_size=2)
    other = Loader()
    _, _, _, outer = _train(str(tmp_path), 1, 6, other, world_size=2)
    assert other.seen[0] == 1
    assert outer.batches_to_skip == 0


def test_only_the_newest_is_kept(tmp_path):
    _train(str(tmp_path), 0, 6, Loader(), every=1)
    (kept,) = (tmp_path / "inner" / "00000").iterdir()
    assert kept.name == "0001.00000006.safetensors"
    with safe_open(kept, "pt") as file:
        assert "xxh3" in file.keys()  # noqa: SIM118 - no mapping


def test_never_means_never(tmp_path, caplog):
    _train(str(tmp_path), 0, 3, Loader(), every=0)
    _train(str(tmp_path), 0, 6, Loader(), every=0)
    assert not (tmp_path / "inner").exists()
    assert "fresh inner state" not in caplog.text


@pytest.mark.parametrize("gone", [False, True])
def test_where_none_is_there_it_is_said(tmp_path, caplog, gone):
    if gone:
        _train(str(tmp_path), 0, 3, Loader())
        shutil.rmtree(tmp_path / "inner")
    else:
        with pytest.raises(KeyboardInterrupt):
            _train(
                str(tmp_path), 0, 9, Loader(), every=0, stop=7
            )  # killed without ever having saved
    assert "fresh inner state" not in caplog.text
    _train(str(tmp_path), 0, 6, Loader())
    assert (
        "continues with a fresh inner state, because the store holds no inner state of this rank"
        in caplog.text
    )
    assert "has to skip the 6 batches" in caplog.text


class TestDamage:
    def _damage(self, path):
        data = bytearray(path.read_bytes())
        data[-20] ^= 1
        path.write_bytes(data)

    def test_it_is_said_and_the_rank_goes_on_where_it_was_with_a_fresh_one(self, tmp_path, caplog):
        _train(str(tmp_path), 0, 3, Loader())
        (kept,) = (tmp_path / "inner" / "00000").iterdir()
        self._damage(kept)
        loader = Loader()
        _, _, _, outer = _train(str(tmp_path), 0, 6, loader)
        assert "inner state is damaged" in caplog.text
        assert outer.batches_to_skip == 6
        assert loader.seen == list(range(1, 13)), "none is learned twice"

    def test_what_was_saved_before_is_taken_where_it_is_still_there(self, tmp_path, caplog):
        folder = tmp_path / "inner" / "00000"
        _train(str(tmp_path), 0, 2, Loader())
        (older,) = folder.iterdir()
        content = older.read_bytes()
        _train(str(tmp_path), 0, 4, Loader())
        (newer,) = folder.iterdir()
        self._damage(newer)
        older.write_bytes(content)  # as when a replica dies while it saves
        _, _, _, outer = _train(str(tmp_path), 0, 6, Loader())
        assert "inner state is damaged" in caplog.text
        assert (
            "rank 0: restored the inner state that was saved after sync 2 instead. Skip 4 batches"
            in caplog.text
        )
        assert outer.batches_to_skip == 4

    @pytest.mark.parametrize("step", [101, pytest.param(1, marks=pytest.mark.slow)])
    def test_every_bit_and_every_truncation_is_noticed(self, step):
        model = torch.nn.Linear(3, 2)
        data = bytearray().join(
            InnerState([torch.optim.SGD(model.parameters(), lr=0.1)], {}).parts(3, "inner/a")
        )
        check_inner(bytes(data), "inner/a", "x")
        for bit in range(0, 8 * len(data), step):
            data[bit // 8] ^= 1 << bit % 8
            with pytest.raises(CorruptedObjectError):
                check_inner(bytes(data), "inner/a", "x")
            data[bit // 8] ^= 1 << bit % 8
        for size in range(0, len(data), step):
            with pytest.raises(CorruptedObjectError):
                check_inner(bytes(data[:size]), "inner/a", "x")


def test_nothing_is_saved_while_what_was_learned_is_still_to_be_counted():
    """Else a loader that is restored would stand behind batches that were never counted."""
    incarnations = {}

    def train(node):
        net, loader = torch.nn.ParameterList([torch.zeros(4)]), Loader()
        inner = torch.optim.SGD(net.parameters(), lr=1.0)
        options = {"stateful": {"loader": loader}, "save_inner_every": 1}
        with DiLoCo(net, inner, node.exchange, sync_every=2, **options) as outer:
            incarnations[node.rank, node.incarnation] = (
                outer.inner_steps,
                outer.batches_to_skip,
                loader.position,
            )
            while outer.committed < 8:
                first = (node.rank, node.incarnation) == (1, 1)
                if first and outer.inner_steps == 7:
                    raise RuntimeError("crash")
                node.sleep(
                    9.0 if first and outer.inner_steps == 5 else 1.0
                )  # late: steps 5 and 6 are carried
                next(loader)
                net[0].grad = torch.ones(4)
                inner.step()

    simulate(train, Schedule(3, restart_after=1.0), Elastic(2, grace=4.0))
    steps, skip, position = incarnations[1, 2]
    assert steps == 4
    assert position + skip == steps, "the loader stands where the counted steps end"


def test_an_incarnation_with_a_successor_saves_nothing():
    """It would do no harm, but it is told, and its bytes would only lie there."""

    def train(node):
        exchange, net = node.exchange, torch.nn.ParameterList([torch.zeros(4)])
        exchange.leave, leave = lambda: None, exchange.leave
        with DiLoCo(net, torch.optim.SGD(net.parameters(), lr=1.0), exchange, sync_every=2):
            pass
        exchange.leave = leave
        exchange.save_inner(lambda identity: [identity.encode()])
        whole = len(f"{run_of(store)}/{inner_key(0, 1, 0)}")
        assert node.connection.list("inner/") == {inner_key(0, 1, 0): whole}
        node.connection.create(claim_key(0, 2), b"a newer incarnation")
        with pytest.raises(FencedError):
            exchange.save_inner(lambda identity: [b"x"])
        assert node.connection.list("inner/") == {inner_key(0, 1, 0): whole}
        return "seen"

    store = SimulatedStore()
    outcome = simulate(train, Schedule(1), Elastic(1, grace=4.0), store=store, most_incarnations=1)
    assert outcome.results == {(0, 1): "seen"}


class TestALoaderThatIsNotSaved:
    """``batches_to_skip`` counts from the restored state, so a loader that starts anew would give
    earlier batches again.
    """

    def _incarnation(self, tmp_path, caplog, **options):
        net = torch.nn.Linear(3, 2)
        inner = torch.optim.SGD(net.parameters(), lr=0.01)
        if options.pop("scheduled", False):
            scheduler = torch.optim.lr_scheduler.StepLR(inner, 1)
            options["stateful"] = {"scheduler": scheduler}
        exchange = StoreExchange(open_store(str(tmp_path)), 0, 1, Elastic(1, grace=1.0))
        with DiLoCo(net, inner, exchange, sync_every=2, **options) as outer:
            before = len(caplog.records)
            skip = outer.batches_to_skip, outer.batches_to_skip
            wanted = outer.committed + 3
            while outer.committed < wanted:
                net(torch.ones(4, 3)).sum().backward()
                inner.step()
        return skip[0], [record.getMessage() for record in caplog.records[before:]]

    @pytest.mark.parametrize("scheduled", [False, True])
    def test_is_warned_of_once_by_whoever_asks(self, tmp_path, caplog, scheduled):
        options = {"scheduled": scheduled}
        assert self._incarnation(tmp_path, caplog, **options) == (0, [])
        skip, (warning,) = self._incarnation(tmp_path, caplog, **options)
        assert skip == 0
        assert "The 6 batches before that are not counted" in warning
        assert "pass it in stateful=, or choose batches by outer.inner_steps" in warning

    @pytest.mark.parametrize(
        "options", [{"stateful": {"loader": Loader()}}, {"save_inner_every": 0}]
    )
    def test_is_not_warned_of_where_the_number_is_right(self, tmp_path, caplog, options):
        self._incarnation(tmp_path, caplog, **options)
        skip, warnings = self._incarnation(tmp_path, caplog, **options)
        assert skip == (0 if "stateful" in options else 6)
        assert not warnings


@pytest.mark.parametrize("options", [{"min_replicas": 1}, {}], ids=["elastic", "fixed"])
class TestTheFirstSave:
    def incarnation(self, tmp_path, stop, given=None, **options):
        """Trains until a sync, and is killed there, without a chance to save; returns the saves
        after each sync.
        """
        exchange = connect(str(tmp_path), rank=0, world_size=1, **options)
        model = torch.nn.Linear(3, 1)
        inner = torch.optim.AdamW(model.parameters(), lr=0.01)
        if given is not None:
            inner.load_state_dict(given)
        saves = []

        def on_sync(report):
            saves.append({path.name for path in tmp_path.glob("inner/*/*")})
            if report.sync == stop:
                raise KeyboardInterrupt

        def train():
            with DiLoCo(model, inner, exchange, sync_every=2, save_inner_every=3, on_sync=on_sync):
                for _ in range(100):
                    model(torch.ones(4, 3)).sum().backward()
                    inner.step()

        with pytest.raises(KeyboardInterrupt):
            train()
        return saves, inner.state_dict()

    def test_comes_at_the_first_sync(self, tmp_path, options):
        saves, _ = self.incarnation(tmp_path, 9, **options)
        changed = [bool(now - before) for before, now in itertools.pairwise(saves)]
        assert changed == [True, False, False, True, False, False, True, False], "syncs 1, 4 and 7"

    def test_an_optimizer_that_has_state_is_not_said_to_begin_anew(self, tmp_path, options, caplog):
        _, state = self.incarnation(tmp_path, 2, **options)
        shutil.rmtree(tmp_path / "inner")
        for given in (None, state):
            caplog.clear()
            self.incarnation(
                tmp_path, 4 if given is None else 6, given, **{**options, "resume": True}
            )
            shutil.rmtree(tmp_path / "inner")
            (said,) = [line for line in caplog.messages if "fresh inner state" in line]
            assert ("The optimizers keep the state that they were given; the" in said) is bool(
                given
            )
            assert ("The optimizers, the random generators" in said) is not bool(given)
