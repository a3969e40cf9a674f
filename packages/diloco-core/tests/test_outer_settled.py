"""All replicas end with the same bytes, whatever was done to the model after its last sync; and what cannot be changed."""

import pytest
import torch
from torch import nn

from diloco_core import DiLoCo, Elastic, ElasticExchange, ModelChangedError, export, in_process
from diloco_core._store import open_store


class Net(nn.Module):
    """A linear layer and BatchNorm; some of it in other dtypes, and one tensor that is not contiguous."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.norm = nn.BatchNorm1d(2)
        self.thin = nn.Parameter(torch.ones(5, dtype=torch.bfloat16))
        self.turned = nn.Parameter(torch.ones(2, 3).t())
        self.register_buffer("gap", torch.tensor([torch.nan, 1.0]))

    def forward(self, inputs):
        return self.norm(self.linear(inputs))


def batch(rank, number):
    return torch.randn(8, 3, generator=torch.Generator().manual_seed(100 * rank + number))


def another_step(model, inner, rank):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(0.1 * (rank + 1))


def later_hook(model, inner, rank):
    inner.register_step_post_hook(lambda *_: model.linear.weight.data.mul_(rank + 2))


def load_other_values(model, inner, rank):
    model.load_state_dict({**model.state_dict(), "linear.bias": torch.ones(2) * rank})


def move_to_other_memory(model, inner, rank):
    model.thin.data = torch.full((5,), rank + 7.0, dtype=torch.bfloat16)


def assign_a_buffer(model, inner, rank):
    model.norm.running_mean = torch.ones(2) * rank


CHANGES = {
    "a step that nobody sees": (another_step, "'thin', 'turned', 'linear.weight' and 3 more"),
    "values that are loaded": (load_other_values, "'linear.bias'"),
    "other memory": (move_to_other_memory, "'thin'"),
    "a batch that the gradient scaler has skipped": (lambda model, inner, rank: model(batch(rank, 77)), ""),
    "a buffer that is assigned": (assign_a_buffer, ""),
    "nothing": (lambda model, inner, rank: None, ""),
}


class TestTheEnd:
    def runs(self, lab, change, exchanges=None, steps=4, **options):
        def replica(exchange):
            model = lab.fill(Net())
            inner = torch.optim.SGD(model.parameters(), lr=0.1)
            with DiLoCo(model, inner, exchange, sync_every=2, **options) as outer:
                for step in range(steps):
                    inner.zero_grad()
                    model(batch(exchange.rank, step)).pow(2).sum().backward()
                    inner.step()
                change(model, inner, exchange.rank)
            held = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
            assert held["gap"].isnan().tolist() == [True, False]
            held["gap"] = held["gap"].nan_to_num()
            return held, outer.committed

        return lab.run(replica, exchanges or in_process(2))

    @pytest.mark.parametrize("change", CHANGES)
    @pytest.mark.parametrize("options", [{}, {"fragments": 2}, {"flush": "none"}])
    def test_is_the_last_committed_state_on_all_replicas(self, lab, caplog, change, options):
        apply, named = CHANGES[change]
        runs = self.runs(lab, apply, **options)
        wanted = self.runs(lab, lambda *_: None, **options)
        if options.get("fragments", 1) == 1:  # otherwise it is part of what the flush syncs
            assert lab.identical([held for held, _ in runs + wanted])
            assert ("parameters were changed after the last sync" in caplog.text) == bool(named)
            assert named in caplog.text
        assert lab.identical([held for held, _ in runs])

    def test_what_hooks_do_after_the_last_sync_goes_too(self, lab, caplog):
        def replica(exchange):
            model = lab.fill(nn.Linear(3, 2))
            inner = torch.optim.SGD(model.parameters(), lr=0.1)
            outer = DiLoCo(
                model, inner, exchange, sync_every=2, on_sync=lambda report: model.bias.data.add_(exchange.rank + 1)
            )
            later_hook(nn.ModuleDict({"linear": model}), inner, exchange.rank)
            with outer:
                for step in range(3):
                    lab.push(model, inner, exchange.rank, step)
            return lab.values(model)

        assert lab.identical(lab.run(replica, in_process(2)))
        assert "'bias'" in caplog.text

    def test_it_is_what_export_writes(self, lab, tmp_path):
        from safetensors.torch import load_file

        def life():
            return [ElasticExchange(open_store(str(tmp_path / "run")), 0, 1, Elastic(1, grace=1.0))]

        ((held, committed),) = self.runs(lab, another_step, life())
        export(tmp_path / "run", tmp_path / "model.safetensors")
        written = load_file(tmp_path / "model.safetensors")
        written["gap"] = written["gap"].nan_to_num()
        assert lab.identical([held, written])
        assert committed == 2

    def test_where_it_can_no_longer_be_put_back_that_is_an_error(self, lab):
        def change(model, inner, rank):
            model.linear = nn.Linear(3, 2)

        with pytest.raises(BaseExceptionGroup) as caught:
            self.runs(lab, change, flush="none")
        assert all(isinstance(error, ModelChangedError) for error in caught.value.exceptions)


def test_the_exchange_of_a_loop_cannot_be_replaced(lab):
    model = lab.fill(nn.Linear(2, 2))
    outer = DiLoCo(model, torch.optim.SGD(model.parameters()), in_process(1)[0], sync_every=1)
    with pytest.raises(AttributeError):
        outer.exchange = in_process(1)[0]


def test_what_is_not_synced_is_stored_as_it_is_when_the_block_is_entered(lab, tmp_path):
    """Not as it was when the loop was made: a forward in between may have assigned it anew."""
    from safetensors.torch import load_file

    model = Net()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    exchange = ElasticExchange(open_store(str(tmp_path / "run")), 0, 1, Elastic(1, grace=1.0))
    outer = DiLoCo(model, inner, exchange, sync_every=1, buffers="none")
    model.norm.running_mean = torch.tensor([3.0, 4.0])
    with outer:
        lab.push(model, inner, 0, 0)
    export(tmp_path / "run", tmp_path / "model.safetensors")
    assert load_file(tmp_path / "model.safetensors")["norm.running_mean"].tolist() == [3.0, 4.0]
