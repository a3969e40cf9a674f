"""A rank that comes back gets its inner optimizer, its random numbers and its place in the data back."""

import random
import shutil

import numpy as np
import pytest
import torch
from damage_lab import run_of
from safetensors import safe_open

from diloco_core import (
    ConfigurationError,
    CorruptedObjectError,
    DiLoCo,
    Elastic,
    ElasticExchange,
    FencedError,
    in_process,
)
from diloco_core._elastic._log._keys import claim_key, inner_key
from diloco_core._inner._state import InnerState, check_inner
from diloco_core._store._open import open_store
from diloco_core.testing import Schedule, SimulatedStore, simulate


class Loader:
    def __init__(self):
        self.position, self.seen = 0, []

    def __iter__(self):
        return self

    def __next__(self):
        self.position += 1
        self.seen.append(self.position)
        return torch.full((4, 3), float(self.position))

    def state_dict(self):
        return {
            "position": self.position,
            "seen": list(self.seen),
            "pair": (1, None),
            "weights": torch.ones(3),
        }

    def load_state_dict(self, state):
        assert state["pair"] == (1, None)
        assert torch.equal(state["weights"], torch.ones(3))
        self.position, self.seen = state["position"], state["seen"]


def _train(uri, rank, syncs, loader, world_size=1, every=10, stop=None, **settings):
    torch.manual_seed(5)
    net = torch.nn.Linear(3, 2)
    inner = torch.optim.AdamW(net.parameters(), lr=0.01)
    exchange = ElasticExchange(open_store(uri), rank, world_size, Elastic(1, grace=1.0, **settings))
    outer = DiLoCo(
        net, inner, exchange, sync_every=2, stateful={"loader": loader}, save_inner_every=every
    )
    noise = []
    with outer:
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
            str(tmp_path), 0, 9, Loader(), every=2, stop=7
        )  # killed after sync 3, saved at sync 2
    loader = Loader()
    _, _, _, outer = _train(str(tmp_path), 0, 6, loader, every=2)
    assert outer.batches_to_skip == 2
    # Steps 5 and 6 are counted already; the 7th was never done.
    assert loader.seen == list(range(1, 13))


def test_several_optimizers_are_all_saved(tmp_path):
    def life(steps):
        net = torch.nn.Linear(3, 2)
        inner = [
            torch.optim.AdamW([net.weight], lr=0.1),
            torch.optim.SGD([net.bias], lr=0.1, momentum=0.9),
        ]
        exchange = ElasticExchange(open_store(str(tmp_path)), 0, 1, Elastic(1, grace=1.0))
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

    _, saved = life(3)
    restored, _ = life(4)
    for wanted, found in zip(saved, restored, strict=True):
        assert wanted[0].keys() == found[0].keys()
        assert all(torch.equal(wanted[0][name], found[0][name]) for name in wanted[0])


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
                str(tmp_path), 0, 9, Loader(), every=10, stop=7
            )  # killed before the first saving
    assert "fresh inner state" not in caplog.text
    _train(str(tmp_path), 0, 6, Loader())
    assert (
        "rank 0 continues with a fresh inner state because the store holds none of this rank"
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
        assert "inner state was damaged" in caplog.text
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
        assert "inner state was damaged" in caplog.text
        assert (
            "rank 0 takes the inner state after sync 2 instead: skip 4 batches (batches_to_skip)"
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
    lives = {}

    def train(node):
        net, loader = torch.nn.ParameterList([torch.zeros(4)]), Loader()
        inner = torch.optim.SGD(net.parameters(), lr=1.0)
        options = {"stateful": {"loader": loader}, "save_inner_every": 1}
        with DiLoCo(net, inner, node.exchange, sync_every=2, **options) as outer:
            lives[node.rank, node.life] = outer.inner_steps, outer.batches_to_skip, loader.position
            while outer.committed < 8:
                first = (node.rank, node.life) == (1, 1)
                if first and outer.inner_steps == 7:
                    raise RuntimeError("crash")
                node.sleep(
                    9.0 if first and outer.inner_steps == 5 else 1.0
                )  # late: steps 5 and 6 are carried
                next(loader)
                net[0].grad = torch.ones(4)
                inner.step()

    simulate(train, Schedule(3, restart_after=1.0), Elastic(2, grace=4.0))
    steps, skip, position = lives[1, 2]
    assert steps == 4
    assert position + skip == steps, "the loader stands where the counted steps end"


def test_a_life_with_a_successor_saves_nothing():
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
        node.connection.create(claim_key(0, 2), b"a newer life")
        with pytest.raises(FencedError):
            exchange.save_inner(lambda identity: [b"x"])
        assert node.connection.list("inner/") == {inner_key(0, 1, 0): whole}
        return "seen"

    store = SimulatedStore()
    outcome = simulate(train, Schedule(1), Elastic(1, grace=4.0), store=store, most_lives=1)
    assert outcome.results == {(0, 1): "seen"}


class TestRefusals:
    def test_another_kind_of_optimizer(self):
        parameters = [torch.nn.Parameter(torch.zeros(2))]
        saved = b"".join(
            bytes(part)
            for part in InnerState([torch.optim.SGD(parameters, lr=0.1)], {}).parts(3, "key")
        )
        with pytest.raises(ConfigurationError, match=r"'SGD'.*'AdamW'"):
            InnerState([torch.optim.AdamW(parameters)], {}).restore(saved, "key", "here")

    def test_other_things_are_refused(self, tmp_path):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
        saved = b"".join(bytes(part) for part in InnerState([optimizer], {}).parts(3, "key"))
        assert InnerState([optimizer], {}).restore(saved, "key", "here") == 3
        with pytest.raises(ConfigurationError, match="the same stateful="):
            InnerState([optimizer], {"loader": Loader()}).restore(saved, "key", "here")

    def test_what_another_rank_has_saved_is_refused(self):
        """Whole, but it came to lie under this replica's key."""
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
        keys = [inner_key(rank, 1, 3) for rank in range(2)]
        saved = b"".join(bytes(part) for part in InnerState([optimizer], {}).parts(3, keys[1]))
        with pytest.raises(CorruptedObjectError, match="another key"):
            InnerState([optimizer], {}).restore(saved, keys[0], "here")

    def test_what_cannot_be_saved_is_named(self):
        class Odd(Loader):
            def state_dict(self):
                return {"a": [1, object()]}

        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
        with pytest.raises(ConfigurationError, match=r"stateful.odd\['a'\]\[1\] is an object"):
            list(InnerState([optimizer], {"odd": Odd()}).parts(1, "key"))

    @pytest.mark.parametrize(
        "number", [2**1024, -(10**5000), 3**30000 + 1], ids=["short", "negative", "long"]
    )
    def test_long_numbers_come_back(self, number):
        """Python itself neither writes nor reads more than 4300 decimal digits of them."""
        loader, again = Loader(), Loader()
        loader.state_dict = lambda: {"seed": number, number: [number, 2**1023, True]}
        again.load_state_dict = lambda state: setattr(again, "state", state)
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
        InnerState([optimizer], {"loader": loader}).try_out()
        saved = b"".join(
            bytes(part) for part in InnerState([optimizer], {"loader": loader}).parts(3, "key")
        )
        InnerState([optimizer], {"loader": again}).restore(saved, "key", "here")
        assert again.state == loader.state_dict()

    @pytest.mark.parametrize("depth", [100, 350, 480])
    def test_what_is_nested_too_deeply_for_json_is_refused_at_the_start(self, depth):
        loader, again, nested = Loader(), Loader(), []
        for _ in range(depth):
            nested = [nested]
        loader.state_dict = lambda: nested
        again.load_state_dict = lambda state: setattr(again, "state", state)
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
        inner = InnerState([optimizer], {"loader": loader})
        try:
            inner.try_out()
        except ConfigurationError as error:
            assert depth > 100
            assert "stateful.loader (Loader) cannot be saved" in str(error)  # noqa: PT017
        else:
            saved = b"".join(bytes(part) for part in inner.parts(3, "key"))
            InnerState([optimizer], {"loader": again}).restore(saved, "key", "here")
            assert again.state == nested

    def test_more_than_could_be_read_again_is_refused(self, monkeypatch):
        loader = Loader()
        loader.seen = list(range(1000))
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
        inner = InnerState([optimizer], {"loader": loader})
        inner.try_out()
        monkeypatch.setattr("diloco_core._inner._state.MOST_HEADER_BYTES", 5000)
        with pytest.raises(
            ConfigurationError,
            match=r"stateful.loader \(Loader\) saves .* hold long lists .* as tensors",
        ):
            inner.try_out()
        with pytest.raises(ConfigurationError, match=r"saves .* bytes beside tensors"):
            list(inner.parts(1, "key"))

    def outer(self, folder, optimizer=torch.optim.SGD, **options):
        net = torch.nn.Linear(2, 2)
        inner = optimizer(net.parameters(), lr=0.1)
        exchange = ElasticExchange(open_store(str(folder)), 0, 1, Elastic(1, grace=1.0))
        return net, inner, DiLoCo(net, inner, exchange, sync_every=2, **options)

    @pytest.mark.parametrize(
        ("state", "named"),
        [
            (lambda: {"a": {1, 2}}, r"stateful.loader\['a'\] is a set"),
            (
                lambda: {"a": torch.eye(2).to_sparse()},
                r"stateful.loader\['a'\] is a Tensor \(torch.sparse_coo",
            ),
            (lambda: {"a": torch.ones(2, dtype=torch.complex64)}, "is a tensor of torch.complex64"),
            (lambda: 1 / 0, r"stateful.loader \(Loader\) cannot be saved: ZeroDivisionError"),
            (lambda: (deep := []).append(deep) or deep, "cannot be saved: RecursionError"),
        ],
        ids=["a set", "a sparse tensor", "complex numbers", "an error", "itself"],
    )
    def test_what_cannot_be_saved_is_refused_before_anything_starts(self, tmp_path, state, named):
        loader = Loader()
        loader.state_dict = state
        _, _, outer = self.outer(tmp_path, stateful={"loader": loader})
        with pytest.raises(ConfigurationError, match=named):
            outer.__enter__()
        assert not (tmp_path / "manifest.json").exists()
        _, _, outer = self.outer(tmp_path, stateful={"loader": loader}, save_inner_every=0)
        with outer:
            assert outer.committed == 0, "nobody will ask for it"

    def test_an_optimizers_state_is_tried_after_its_first_step(self, tmp_path):
        class Odd(torch.optim.SGD):
            def step(self, closure=None):
                super().step(closure)
                self.state[self.param_groups[0]["params"][0]]["odd"] = object()

        net, inner, outer = self.outer(tmp_path, Odd)

        def train():
            with outer:
                for _ in range(2):
                    net(torch.ones(1, 2)).sum().backward()
                    inner.step()

        with pytest.raises(
            ConfigurationError, match=r"optimizer\['state'\]\[0\]\['odd'\] is an object"
        ):
            train()
        assert outer.inner_steps == 1

    def test_arguments(self):
        net = torch.nn.Linear(2, 2)
        inner = torch.optim.SGD(net.parameters(), lr=0.1)
        (exchange,) = in_process(1)
        with pytest.raises(ConfigurationError, match="without state_dict"):
            InnerState([inner], {"x": 3})
        with pytest.raises(ConfigurationError, match="for elastic runs"):
            DiLoCo(net, inner, exchange, sync_every=1, stateful={"x": Loader()})
        with pytest.raises(ConfigurationError, match="save_inner_every"):
            DiLoCo(net, inner, exchange, sync_every=1, save_inner_every=-1)


class Fussy:
    """Saves, and does not take back what it saved."""

    def state_dict(self):
        return {"position": 3}

    def load_state_dict(self, state):
        raise KeyError("offset")


class TestWhatDoesNotFit:
    def live(self, uri, make, **options):
        torch.manual_seed(5)
        net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
        inner = make(list(net.parameters()))
        exchange = ElasticExchange(open_store(str(uri)), 0, 1, Elastic(1))
        with DiLoCo(net, inner, exchange, sync_every=1, save_inner_every=1, **options):
            net(torch.ones(1, 3)).sum().backward()
            inner.step()

    @pytest.mark.parametrize(
        "later",
        [
            lambda p: torch.optim.AdamW([p[2], p[1], p[0], p[3]]),
            lambda p: torch.optim.AdamW([{"params": p[:2]}, {"params": p[2:]}]),
        ],
        ids=["another order", "other groups"],
    )
    def test_a_state_is_not_given_to_other_parameters(self, tmp_path, later):
        """Both weights have the same shape: by number alone, each would get the other one's momentum."""
        self.live(tmp_path, torch.optim.AdamW)
        with pytest.raises(
            ConfigurationError,
            match="optimizer held other parameters, or the same in another order",
        ):
            self.live(tmp_path, later)
        self.live(tmp_path, torch.optim.AdamW)

    def test_what_does_not_take_back_its_own_state_is_named(self, tmp_path):
        self.live(tmp_path, torch.optim.AdamW, stateful={"loader": Fussy()})
        with pytest.raises(
            ConfigurationError,
            match=r"stateful\.loader \(Fussy\) does not take back .*KeyError: 'offset'",
        ):
            self.live(tmp_path, torch.optim.AdamW, stateful={"loader": Fussy()})


@pytest.mark.parametrize("scheduler", [False, True])
def test_settings_that_were_given_anew_are_named_where_the_saved_ones_stay(
    tmp_path, caplog, scheduler
):
    caplog.set_level("INFO", logger="diloco_core")

    def life(lr, syncs):
        net = torch.nn.Linear(3, 2)
        inner = torch.optim.AdamW(net.parameters(), lr=lr, weight_decay=0.5)
        if scheduler:
            torch.optim.lr_scheduler.LinearLR(inner)
        exchange = ElasticExchange(open_store(str(tmp_path / "run")), 0, 1, Elastic(1, grace=1.0))
        with DiLoCo(net, inner, exchange, sync_every=1) as outer:
            assert (outer.committed, inner.param_groups[0]["weight_decay"]) == (syncs - 1, 0.5)
            net(torch.ones(1, 3)).sum().backward()
            inner.step()
        return inner.param_groups[0]["lr"]

    first = life(0.25, 1)
    assert life(0.25, 2) == first
    assert "that were saved" not in caplog.text
    assert life(0.125, 3) == first
    (record,) = [record for record in caplog.records if "that were saved" in record.message]
    assert record.levelname == ("INFO" if scheduler else "WARNING")
    assert f"optimizer group 0: lr={first} (not {first / 2})" in record.message
    assert "weight_decay" not in record.message
