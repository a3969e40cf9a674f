"""All replicas end with the same bytes, whatever was done to the model after its last sync."""

from dataclasses import replace

import pytest
import torch
from loop_lab import exchanges, live, loop
from safetensors.torch import load_file
from simulated import Schedule, simulate
from torch import nn

from diloco_core import DiLoCo, Elastic, ModelChangedError, StoreExchange, export, in_process


class Net(nn.Module):
    """A linear layer and BatchNorm, partly in other dtypes, with one non-contiguous tensor."""

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
    "a batch that the scaler has skipped": (lambda model, inner, rank: model(batch(rank, 77)), ""),
    "a buffer that is assigned": (assign_a_buffer, ""),
    "nothing": (lambda model, inner, rank: None, ""),
}


class TestTheEnd:
    def runs(self, lab, change, each=None, **options):
        def replica(exchange):
            model = lab.fill(Net())
            inner = torch.optim.SGD(model.parameters(), lr=0.1)
            with DiLoCo(model, inner, exchange, sync_every=2, **options) as outer:
                for step in range(4):
                    inner.zero_grad()
                    model(batch(exchange.rank, step)).pow(2).sum().backward()
                    inner.step()
                change(model, inner, exchange.rank)
            state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
            assert state["gap"].isnan().tolist() == [True, False]
            state["gap"] = state["gap"].nan_to_num()
            return state, outer.committed

        return lab.run(replica, each or in_process(2))

    @pytest.mark.sampled
    @pytest.mark.parametrize("change", CHANGES)
    @pytest.mark.parametrize("options", [{}, {"fragments": 2}, {"flush": "none"}])
    def test_is_the_last_committed_state_on_all_replicas(self, lab, caplog, change, options):
        apply, named = CHANGES[change]
        runs = self.runs(lab, apply, **options)
        wanted = self.runs(lab, lambda *_: None, **options)
        if options.get("fragments", 1) == 1:  # otherwise it is part of what the flush syncs
            assert lab.identical([state for state, _ in runs + wanted])
            assert ("parameters were changed after the last sync" in caplog.text) == bool(named)
            assert named in caplog.text
        assert lab.identical([state for state, _ in runs])

    def test_what_hooks_do_after_the_last_sync_goes_too(self, lab, caplog):
        def replica(exchange):
            model = lab.fill(nn.Linear(3, 2))
            act = lambda report: model.bias.data.add_(exchange.rank + 1)  # noqa: E731
            model, inner, outer, _ = loop(exchange, model, on_sync=act)
            scale = exchange.rank + 2
            inner.register_step_post_hook(lambda *_: model.weight.data.mul_(scale))
            live(model, inner, outer, *range(3))
            return lab.values(model)

        assert lab.identical(lab.run(replica, in_process(2)))
        assert "'bias'" in caplog.text

    def test_where_it_can_no_longer_be_put_back_that_is_an_error(self, lab):
        def change(model, inner, rank):
            model.linear = nn.Linear(3, 2)

        with pytest.raises(BaseExceptionGroup) as caught:
            self.runs(lab, change, flush="none")
        assert all(isinstance(error, ModelChangedError) for error in caught.value.exceptions)


class TestTheEndOfAnElasticRun:
    """What too few replicas were left to sync is in nobody's model, as it is not in the run's."""

    def ends(self, tmp_path, train, replicas, late="carry"):
        """Return what replicas hold at the end, their reports, and what export writes, by rank."""
        reports = {rank: [] for rank in range(replicas)}

        def replica(node):
            model = nn.ParameterList([torch.zeros(40), torch.zeros(30)])
            inner = torch.optim.SGD(model.parameters(), lr=1.0)

            def step(seconds):
                node.sleep(seconds)
                for parameter in model:
                    parameter.grad = torch.full_like(parameter, node.rank + 1.0)
                inner.step()

            note = reports[node.rank].append
            options = {"fragments": 2, "sync_every": 4, "on_sync": note}
            with DiLoCo(model, inner, node.exchange, **options) as outer:
                train(node.rank, outer, step)
            return {name: tensor.clone() for name, tensor in model.state_dict().items()}

        settings = Elastic(2, grace=5.0, topology="sharded", late=late)
        outcome = simulate(replica, Schedule(replicas), settings, most_incarnations=1)
        for key, data in outcome.store.objects.items():
            (tmp_path / "run" / key).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "run" / key).write_bytes(data)
        export(tmp_path / "run", tmp_path / "model.safetensors")
        states = {rank: result for (rank, _), result in outcome.results.items()}
        assert not outcome.errors()
        return states, reports, load_file(tmp_path / "model.safetensors")

    def test_a_partial_period_that_is_left_out_is_put_back(self, lab, tmp_path, caplog):
        """And what all have synced is not spoken of."""

        def train(rank, outer, step):
            for _ in range(11 if rank == 2 else 8):
                step(30.0 if rank == 2 and outer.inner_steps >= 8 else 1.0)

        states, reports, written = self.ends(tmp_path, train, 3)
        assert lab.identical([*states.values(), written])
        assert not reports[2][-1].committed
        text = (
            "rank 2: the last 5 inner steps of this replica are not in the model, because too few"
        )
        assert text in caplog.text
        assert caplog.text.count("are not in the model") == 1

    def test_so_is_a_contribution_that_is_still_carried(self, lab, tmp_path, caplog):
        def train(rank, outer, step):
            while outer.committed < 6:
                step(30.0 if rank == 2 and outer.committed == 4 else 1.0)

        states, reports, written = self.ends(tmp_path, train, 3)
        assert "carried" in [report.contribution for report in reports[2]]
        assert lab.identical([*states.values(), written])
        assert "inner steps of this replica are not in the model" in caplog.text

    @pytest.mark.parametrize("late", ["carry", "drop"])
    def test_reports_count_every_inner_step_of_a_fragment_once(self, tmp_path, late):
        def train(rank, outer, step):
            while outer.committed < 12:
                step(9.0 if rank == 2 and outer.inner_steps == 3 else 1.0)

        _, reports, _ = self.ends(tmp_path, train, 3, late)
        fates = {report.contribution for report in reports[2]}
        assert {"carry": "carried", "drop": "dropped"}[late] in fates
        for fragment in "01":
            of_one = [report for report in reports[2] if report.fragment == fragment]
            assert sum(report.inner_steps for report in of_one) == of_one[-1].total_inner_steps
        carried = [report for report in reports[2] if report.contribution == "carried"]
        assert not any(report.inner_steps for report in carried)


def test_what_is_not_synced_is_stored_as_it_is_when_the_block_is_entered(lab, tmp_path):
    """Not as it was when the loop was made: a forward in between may have assigned it anew."""
    (exchange,) = exchanges("elastic", 1, tmp_path / "run", grace=1.0)
    model, inner, outer, _ = loop(exchange, Net(), buffers="none")
    model.norm.running_mean = torch.tensor([3.0, 4.0])
    with outer:
        lab.push(model, inner, 0, 0)
    export(tmp_path / "run", tmp_path / "model.safetensors")
    assert load_file(tmp_path / "model.safetensors")["norm.running_mean"].tolist() == [3.0, 4.0]


def test_a_run_that_goes_back_while_an_incarnation_begins_counts_fewer_inner_steps():
    """Others return to older states after this replica has restored the newest ones."""

    class GoesBack(StoreExchange):
        def restore(self, jobs, *, loaded=False):
            return replace(super().restore(jobs, loaded=loaded), inner_steps=8)

    (exchange,) = exchanges("elastic", 1)
    exchange.__class__ = GoesBack
    with loop(exchange)[2] as outer:
        assert outer.inner_steps == exchange.counted == 0
