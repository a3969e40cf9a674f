"""Test what replicas must have in common though it is never synced."""

import pytest
import torch
from loop_lab import Net, exchanges, fragments_of, net_loop
from torch import nn

from diloco_core import MismatchError, in_process
from diloco_core.testing import run_replicas


def tensor_of(model, name):
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}[name].data


class TestWhatReplicasHaveInCommon:
    def outcome(self, lab, change, each=None, **options):
        def replica(exchange):
            model = lab.fill(Net())
            if exchange.rank:
                change(model)
            model, inner, outer = net_loop(exchange, model, **options)
            with outer:
                lab.push(model, inner, exchange.rank, 0)

        return run_replicas(replica, each or in_process(2))

    @pytest.mark.parametrize("init", ["rank0", "check"])
    @pytest.mark.parametrize("buffers", ["mean", "none"])
    def test_frozen_values_and_state_that_is_not_saved(self, lab, init, buffers):
        def nudge(name):
            return lambda model: tensor_of(model, name).view(-1)[-1].add_(1e-6)

        for name in ("base.weight", "base.bias", "cache"):
            for result in self.outcome(lab, nudge(name), init=init, buffers=buffers):
                assert isinstance(result, MismatchError)
                assert f"tensor {name!r}" in str(result)
        if init == "rank0" or buffers == "none":
            assert self.outcome(lab, nudge("mean"), init=init, buffers=buffers) == [None, None]

    def test_a_parameter_that_only_one_of_them_has_frozen(self, lab):
        for result in self.outcome(lab, lambda model: model.body.requires_grad_(False)):
            assert isinstance(result, MismatchError)
            assert "tensor 'body.weight'" in str(result)
            assert "frozen" in str(result)

    def test_a_late_joiner_of_an_elastic_run(self, lab, tmp_path):
        def incarnation(rank, change=lambda model: None):
            (exchange,) = exchanges("elastic", 2, tmp_path, ranks=[rank], least=1, grace=1.0)
            model = lab.fill(Net())
            change(model)
            model, inner, outer = net_loop(exchange, model)
            with outer:
                lab.push(model, inner, rank, 0)
                model.cache.add_(1)
            return outer.committed

        assert incarnation(0) == 1
        for name in ("base.bias", "cache"):
            change = lambda model, name=name: tensor_of(model, name).add_(1)  # noqa: E731
            with pytest.raises(MismatchError, match="with values"):
                incarnation(1, change)
        assert incarnation(1) == 2

    def test_nothing_of_it_is_copied_whole(self, monkeypatch):
        """A frozen model may fill the memory."""
        largest = []
        monkeypatch.setattr("diloco_core._model._values._HASHED_AT_ONCE", 8)
        monkeypatch.setattr(
            "diloco_core._model._values.view", lambda t: largest.append(t.numel()) or b""
        )
        frozen = nn.Linear(40, 40).requires_grad_(False)
        _, _, outer = net_loop(model=nn.Sequential(frozen, nn.Linear(2, 2)))
        with outer:
            pass
        assert max(largest) == 8 * 4

    @pytest.mark.sampled
    @pytest.mark.parametrize(
        "dtype",
        [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn,
         torch.complex64, torch.int64, torch.int8, torch.uint8, torch.bool],
    )  # fmt: skip
    def test_every_bit_in_any_dtype_and_order_of_memory(self, lab, dtype, monkeypatch):
        monkeypatch.setattr("diloco_core._model._values._HASHED_AT_ONCE", 4)

        def differ(change):
            def replica(exchange):
                model = lab.fill(nn.Linear(2, 2))
                model.register_buffer("odd", torch.zeros(5, 3, dtype=dtype), persistent=False)
                model.odd.view(torch.uint8)[1, 2] = 1
                if exchange.rank:
                    change(model)
                with net_loop(exchange, model)[2]:
                    pass

            errors = run_replicas(replica, in_process(2))
            return all(isinstance(error, MismatchError) for error in errors)

        assert differ(lambda model: model.odd.view(torch.uint8)[4, -1:].fill_(1))
        assert differ(lambda model: setattr(model, "odd", model.odd.flip(0)))
        assert not differ(lambda model: setattr(model, "odd", model.odd.t().contiguous().t()))


class TestWhatIsCompared:
    def test_what_cannot_be_read_is_said(self, lab, caplog):
        model = Net()
        model.register_buffer("graph", torch.eye(3).to_sparse(), persistent=False)
        model, inner, outer = net_loop(model=model)
        with outer:
            lab.push(model, inner, 0, 0)
        assert "the values of 'graph', a Tensor, cannot be compared" in caplog.text

    def test_persistence_is_asked_of_the_modules(self):
        """A hook that renames what is saved, as wrappers have, does not hide a buffer."""
        model = Net()
        model.register_state_dict_post_hook(
            lambda m, state, prefix, meta: state.__delitem__("mean")
        )
        assert fragments_of(model, 1)[0][-2:] == ["mean", "count"]
