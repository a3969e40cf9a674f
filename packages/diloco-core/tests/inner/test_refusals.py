"""Inner state that cannot be saved, or is restored to something else, is refused by name."""

import pytest
import torch
from inner_lab import Loader

from diloco_core import (
    ConfigurationError,
    CorruptedObjectError,
    DiLoCo,
    Elastic,
    StoreExchange,
    connect,
    in_process,
)
from diloco_core._inner._state import InnerState
from diloco_core._run._records._keys import inner_key
from diloco_core._store._open import open_store


class TestRefusals:
    def test_another_kind_of_optimizer(self):
        parameters = [torch.nn.Parameter(torch.zeros(2))]
        saved = b"".join(
            bytes(part)
            for part in InnerState([torch.optim.SGD(parameters, lr=0.1)], {}).parts(3, "key")
        )
        with pytest.raises(ConfigurationError, match=r"optimizer was SGD and is AdamW"):
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

    def test_an_optimizer_with_quantized_state_is_told_how_it_can_be_used(self, tmp_path):
        class Quantized(torch.Tensor):
            """As torchao's optimizers keep their state in subclasses of a tensor."""

        class Inner(torch.optim.SGD):
            def step(self, closure=None):
                super().step(closure)
                for parameter in self.param_groups[0]["params"]:
                    self.state[parameter]["exp_avg"] = parameter.detach().as_subclass(Quantized)

        def train(name, **options):
            model = torch.nn.Linear(2, 1)
            inner = Inner(model.parameters(), lr=0.1)
            exchange = connect(str(tmp_path / name), rank=0, world_size=1)
            with DiLoCo(model, inner, exchange, sync_every=1, **options) as outer:
                model(torch.ones(2)).sum().backward()
                inner.step()
            return outer.committed

        with pytest.raises(ConfigurationError, match=r"Quantized.*With save_inner_every=0 the"):
            train("saved")
        assert train("not saved", save_inner_every=0) == 1

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
        monkeypatch.setattr("diloco_core._inner._file.MOST_HEADER_BYTES", 5000)
        with pytest.raises(
            ConfigurationError,
            match=r"stateful.loader \(Loader\) takes .* return long lists .* as tensors",
        ):
            inner.try_out()
        with pytest.raises(ConfigurationError, match=r"takes .* bytes besides its tensors"):
            list(inner.parts(1, "key"))

    def outer(self, folder, optimizer=torch.optim.SGD, **options):
        net = torch.nn.Linear(2, 2)
        inner = optimizer(net.parameters(), lr=0.1)
        exchange = StoreExchange(open_store(str(folder)), 0, 1, Elastic(1, grace=1.0))
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

    def test_what_would_never_be_saved_is_refused(self, tmp_path):
        with pytest.raises(
            ConfigurationError, match=r"stateful was given \(for 'loader'\).*save_inner_every=0"
        ):
            self.outer(tmp_path, stateful={"loader": Loader()}, save_inner_every=0)
        assert not (tmp_path / "manifest.json").exists()

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
        with pytest.raises(ConfigurationError, match=r"pass an object with state_dict\(\)"):
            InnerState([inner], {"x": 3})
        with pytest.raises(ConfigurationError, match="has no store that could keep their states"):
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
        exchange = StoreExchange(open_store(str(uri)), 0, 1, Elastic(1))
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
        """Both weights have the same shape: by number alone, each would get the other one's
        momentum.
        """
        self.live(tmp_path, torch.optim.AdamW)
        with pytest.raises(
            ConfigurationError,
            match="optimizer held other parameters, or held them in another order",
        ):
            self.live(tmp_path, later)
        self.live(tmp_path, torch.optim.AdamW)

    def test_what_does_not_take_back_its_own_state_is_named(self, tmp_path):
        self.live(tmp_path, torch.optim.AdamW, stateful={"loader": Fussy()})
        with pytest.raises(
            ConfigurationError,
            match=r"stateful\.loader \(Fussy\) refuses the state .*KeyError: 'offset'",
        ):
            self.live(tmp_path, torch.optim.AdamW, stateful={"loader": Fussy()})

    def test_a_random_state_that_is_none_is_refused_by_name(self, tmp_path, monkeypatch):
        with monkeypatch.context() as patched:
            patched.setattr("diloco_core._inner._state.random_state", lambda: {"numpy": 5})
            self.live(tmp_path, torch.optim.AdamW)
        with pytest.raises(
            ConfigurationError, match=r"random generators refuse .*KeyError: 'torch'"
        ):
            self.live(tmp_path, torch.optim.AdamW)


@pytest.mark.parametrize("scheduler", [False, True])
def test_settings_that_were_given_anew_are_named_where_the_saved_ones_stay(
    tmp_path, caplog, scheduler
):
    caplog.set_level("INFO", logger="diloco_core")

    def incarnation(lr, syncs):
        net = torch.nn.Linear(3, 2)
        inner = torch.optim.AdamW(net.parameters(), lr=lr, weight_decay=0.5)
        if scheduler:
            torch.optim.lr_scheduler.LinearLR(inner)
        exchange = StoreExchange(open_store(str(tmp_path / "run")), 0, 1, Elastic(1, grace=1.0))
        with DiLoCo(net, inner, exchange, sync_every=1) as outer:
            assert (outer.committed, inner.param_groups[0]["weight_decay"]) == (syncs - 1, 0.5)
            net(torch.ones(1, 3)).sum().backward()
            inner.step()
        return inner.param_groups[0]["lr"]

    first = incarnation(0.25, 1)
    assert incarnation(0.25, 2) == first
    assert "that were saved" not in caplog.text
    assert incarnation(0.125, 3) == first
    (record,) = [record for record in caplog.records if "that were saved" in record.message]
    assert record.levelname == ("INFO" if scheduler else "WARNING")
    assert f"optimizer group 0: lr={first} (not {first / 2})" in record.message
    assert "weight_decay" not in record.message
