"""What the outer loop promises beyond its arithmetic: what is sent, what is kept, how it ends and how it resumes."""

import io

import pytest
import torch
from torch import nn

from diloco_core import ConfigurationError, DiLoCo, ObjectStoreExchange, SyncError, in_process, make_diloco_outer_loop
from diloco_core._fragment import Fragment
from diloco_core._fragments import Buffers, split
from diloco_core._store import open_store
from diloco_core.testing import run_replicas


def results(runs):
    for run in runs:
        if isinstance(run, BaseException):
            raise run
    return runs


def fill(model, seed=0):
    """Give a model the same random values everywhere; torch's global generator is shared between threads."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def push(model, inner, rank, step):
    """An inner step whose gradients differ from rank to rank and from step to step."""
    for number, parameter in enumerate(p for p in model.parameters() if p.requires_grad):
        parameter.grad = torch.full_like(parameter, 0.01 * (rank + 1) * (step + 1) * (number + 1))
    inner.step()


def values(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def run(make_model, exchanges, steps=4, **options):
    """Train replicas with made-up gradients; returns each one's state dict."""

    def replica(exchange):
        model = make_model(exchange.rank)
        inner = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
        with DiLoCo(model, inner, exchange, **{"sync_every": 2, **options}):
            for step in range(steps):
                push(model, inner, exchange.rank, step)
        return values(model)

    return results(run_replicas(replica, exchanges))


def identical(runs):
    return all(torch.equal(run[name], runs[0][name]) for run in runs for name in runs[0])


class TestWhatIsSynced:
    def tied(self, rank=0):
        model = nn.Module()
        model.embed, model.middle, model.head = nn.Embedding(5, 3), nn.Linear(3, 3), nn.Linear(3, 5, bias=False)
        model.head.weight = model.embed.weight
        return fill(model)

    def test_a_tied_tensor_is_in_one_fragment_once(self):
        model = self.tied()
        for fragments in (1, 2, [model.embed, model.middle, model]):
            if not isinstance(fragments, int):
                fragments = [model.embed, model.middle]
            names = [named.name for part in split(model, fragments, Buffers.MEAN) for named in part]
            assert sorted(names) == ["embed.weight", "middle.bias", "middle.weight"]

    def test_a_tied_tensor_takes_one_outer_step_per_cycle(self):
        def replica(exchange):
            model = self.tied()
            start = model.embed.weight.detach().clone()
            inner = torch.optim.SGD(model.parameters(), lr=1.0)
            options = {"outer_lr": 1.0, "outer_momentum": 0.0, "fragments": [model.embed, model.middle]}
            with DiLoCo(model, inner, exchange, sync_every=2, **options):
                for _ in range(2):
                    model.embed.weight.grad = torch.ones(5, 3)
                    inner.step()
            assert model.head.weight is model.embed.weight
            return start - model.embed.weight.detach()

        for moved in results(run_replicas(replica, in_process(2))):
            assert torch.allclose(moved, torch.full((5, 3), 2.0))

    def test_frozen_parameters_are_never_sent(self, tmp_path):
        def make(rank):
            model = fill(nn.Sequential(nn.Linear(100, 100, bias=False), nn.Linear(100, 1, bias=False)))
            model[0].weight.requires_grad_(False)
            model[0].weight.data += rank
            return model

        exchanges = [ObjectStoreExchange(open_store(str(tmp_path)), rank, 2) for rank in range(2)]
        runs = run(make, exchanges)
        assert torch.equal(runs[1]["0.weight"], runs[0]["0.weight"] + 1), "untouched"
        assert torch.equal(runs[1]["1.weight"], runs[0]["1.weight"])
        sizes = [size for key, size in exchanges[0].store.list("").items() if key.endswith(".safetensors")]
        assert max(sizes) < 2000, "100 trainable parameters, not 10,100"

    def test_non_contiguous_parameters(self):
        def make(rank):
            model = nn.Sequential(nn.Conv2d(3, 4, 2)).to(memory_format=torch.channels_last)
            fill(model)
            assert not model[0].weight.is_contiguous()
            return model

        runs = run(make, in_process(3, chunk_bytes=40), outer_lr=1.0, outer_momentum=0.0, steps=2)
        assert identical(runs)
        averaging = {"outer_lr": 1.0, "outer_momentum": 0.0, "steps": 2}
        contiguous = run(lambda rank: fill(nn.Sequential(nn.Conv2d(3, 4, 2))), in_process(3), **averaging)
        assert torch.allclose(runs[0]["0.weight"], contiguous[0]["0.weight"])

    def test_mixed_dtypes_each_in_its_own_precision(self):
        def make(rank):
            return nn.ModuleList([nn.Linear(3, 3, dtype=torch.float64), nn.Linear(3, 3), nn.Linear(3, 3).bfloat16()])

        def replica(exchange):
            model = fill(make(exchange.rank))
            inner = torch.optim.SGD(model.parameters(), lr=1.0)
            with DiLoCo(model, inner, exchange, sync_every=1) as outer:
                push(model, inner, exchange.rank, 0)
                copies = outer.state_dict()["fragments"][0]["copy"]
            return [copy.dtype for copy in copies], [copy.numel() for copy in copies], values(model)

        runs = results(run_replicas(replica, in_process(2)))
        assert runs[0][:2] == ([torch.float64, torch.float32], [12, 24])
        assert identical([run[2] for run in runs])

    def test_scalars_and_empty_tensors(self):
        def make(rank):
            model = nn.Module()
            model.scale, model.none, model.one = (
                nn.Parameter(torch.tensor(2.0)),
                nn.Parameter(torch.empty(0, 3)),
                nn.Parameter(torch.ones(1)),
            )
            return model

        assert identical(run(make, in_process(4)))

    @pytest.mark.parametrize("fragments", [1, 2, 3])
    def test_more_replicas_than_elements(self, fragments):
        def make(rank):
            return fill(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)))

        runs = run(make, in_process(5), 6, sync_every=6, fragments=fragments)
        assert identical(runs)


class TestBuffers:
    def model(self, rank):
        model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))
        fill(model)
        with torch.no_grad():
            model[0].running_mean.fill_(rank)
            model[0].running_var.fill_(1.0 + rank)
            model[0].num_batches_tracked.fill_(10 + rank)
        return model

    def run(self, policy):
        """Buffers that move away from each other after the start, and are synced once."""

        def replica(exchange):
            model = self.model(0)
            inner = torch.optim.SGD(model.parameters(), lr=1.0)
            with DiLoCo(model, inner, exchange, sync_every=1, buffers=policy):
                model[0].running_mean.fill_(exchange.rank)
                model[0].num_batches_tracked.fill_(10 + exchange.rank)
                push(model, inner, exchange.rank, 0)
            return values(model)

        return results(run_replicas(replica, in_process(3)))

    def test_mean(self):
        runs = self.run("mean")
        assert identical(runs)
        assert runs[2]["0.running_mean"].tolist() == [1.0, 1.0, 1.0]
        assert runs[2]["0.num_batches_tracked"].item() == 10

    def test_rank0(self):
        runs = self.run("rank0")
        assert identical(runs)
        assert runs[2]["0.running_mean"].tolist() == [0.0, 0.0, 0.0]
        assert runs[2]["0.num_batches_tracked"].item() == 10

    def test_none(self):
        runs = self.run("none")
        assert [run["0.num_batches_tracked"].item() for run in runs] == [10, 11, 12]
        assert torch.equal(runs[0]["1.weight"], runs[2]["1.weight"])

    def test_the_first_rank_gives_the_initial_buffers(self):
        def replica(exchange):
            model = self.model(exchange.rank)
            inner = torch.optim.SGD(model.parameters(), lr=1.0)
            with DiLoCo(model, inner, exchange, sync_every=1):
                return values(model)

        runs = results(run_replicas(replica, in_process(3)))
        assert identical(runs)
        assert runs[1]["0.running_var"].tolist() == [1.0, 1.0, 1.0]

    def test_buffers_that_are_not_saved_are_not_synced(self):
        model = nn.Linear(2, 2)
        model.register_buffer("cache", torch.ones(3), persistent=False)
        (part,) = split(model, 1, Buffers.MEAN)
        assert [named.name for named in part] == ["weight", "bias"]

    def test_an_unknown_policy_is_refused(self):
        with pytest.raises(ConfigurationError, match=r"buffers must be one of 'mean', 'rank0', 'none', not 'sum'"):
            DiLoCo(nn.Linear(1, 1), None, in_process(1)[0], sync_every=1, buffers="sum")


class TestPrecision:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_outer_steps_too_small_for_the_model_add_up(self, dtype):
        """A hundred outer steps, each a tenth of what the model's dtype can show."""
        ulp = 1.0 * torch.finfo(dtype).eps

        def replica(exchange):
            model = nn.Module()
            model.weight = nn.Parameter(torch.ones(4, dtype=dtype))
            inner = torch.optim.SGD([model.weight], lr=1.0)
            options = {"sync_every": 1, "outer_lr": 0.1, "outer_momentum": 0.0}
            with DiLoCo(model, inner, exchange, **options) as outer:
                for _ in range(100):
                    model.weight.grad = torch.full((4,), -ulp, dtype=dtype)
                    inner.step()
                return outer.state_dict()["fragments"][0]["copy"][0].clone(), model.weight.detach().clone()

        for copy, weight in results(run_replicas(replica, in_process(2))):
            assert copy.dtype is torch.float32
            assert torch.allclose(copy, torch.full((4,), 1 + 10 * ulp), atol=ulp / 10)
            assert torch.equal(weight, copy.to(dtype))

    def test_rounding_is_no_progress(self):
        """Replicas that do not move leave the global copy alone, although the model cannot hold it exactly."""

        def replica(exchange):
            model = nn.Module()
            model.weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
            inner = torch.optim.SGD([model.weight], lr=1.0)
            with DiLoCo(model, inner, exchange, sync_every=1, outer_lr=0.3, outer_momentum=0.0) as outer:
                model.weight.grad = torch.full((4,), 0.0078125, dtype=torch.bfloat16)
                inner.step()
                moved = outer.state_dict()["fragments"][0]["copy"][0].clone()
                for _ in range(5):
                    model.weight.grad = torch.zeros(4, dtype=torch.bfloat16)
                    inner.step()
                return moved, outer.state_dict()["fragments"][0]["copy"][0].clone()

        for moved, later in results(run_replicas(replica, in_process(1))):
            assert not torch.equal(moved, moved.bfloat16().float())
            assert torch.equal(moved, later)

    def test_momentum_is_at_least_fp32(self):
        def replica(exchange):
            model = fill(nn.Linear(2, 2)).bfloat16()
            inner = torch.optim.SGD(model.parameters(), lr=1.0)
            with DiLoCo(model, inner, exchange, sync_every=1) as outer:
                push(model, inner, 0, 0)
                return outer.state_dict()["fragments"][0]["outer"]["ranges"]

        (ranges,) = results(run_replicas(replica, in_process(1)))
        assert [entry["tensors"]["momentum_buffer"].dtype for entry in ranges] == [torch.float32]


class TestTheEnd:
    def test_a_partial_period_is_flushed(self):
        for fragments in (1, 2):
            runs = run(lambda rank: fill(nn.Linear(4, 4)), in_process(3), 5, sync_every=4, fragments=fragments)
            assert identical(runs)

    def test_nothing_is_flushed_when_nothing_is_open(self):
        reports = []
        model = fill(nn.Linear(2, 2))
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        with DiLoCo(model, inner, in_process(1)[0], sync_every=2, on_sync=reports.append) as outer:
            for step in range(4):
                push(model, inner, 0, step)
            assert outer.flush() == []
        assert [(report.sync, report.inner_steps, report.total_inner_steps) for report in reports] == [
            (1, 2, 2),
            (2, 2, 4),
        ]

    def test_a_flush_counts_the_steps_of_each_fragment(self):
        reports = []
        model = fill(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        with DiLoCo(model, inner, in_process(1)[0], sync_every=4, fragments=2, on_sync=reports.append):
            for step in range(5):
                push(model, inner, 0, step)
        assert [(r.fragment, r.inner_steps) for r in reports] == [("0", 2), ("1", 4), ("0", 3), ("1", 1)]

    def test_leaving_by_an_exception_flushes_nothing(self):
        reports = []
        model = fill(nn.Linear(2, 2))
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        outer = DiLoCo(model, inner, in_process(1)[0], sync_every=2, on_sync=reports.append)

        def fail():
            with outer:
                push(model, inner, 0, 0)
                raise KeyError("lost")

        with pytest.raises(KeyError):
            fail()
        assert reports == []

    def test_the_hook_is_gone_afterwards(self):
        model = fill(nn.Linear(2, 2))
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        outer = DiLoCo(model, inner, in_process(1)[0], sync_every=1)
        with outer:
            push(model, inner, 0, 0)
        push(model, inner, 0, 1)
        assert outer.inner_steps == outer.committed == 1

    def test_it_is_entered_once(self):
        model = fill(nn.Linear(2, 2))
        outer = DiLoCo(model, torch.optim.SGD(model.parameters(), lr=1.0), in_process(1)[0], sync_every=1)
        with outer:
            pass
        with pytest.raises(SyncError, match="entered already"):
            outer.__enter__()

    def test_gradients_of_what_was_synced_are_dropped(self):
        model = fill(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        with DiLoCo(model, inner, in_process(1)[0], sync_every=2, fragments=list(model)):
            push(model, inner, 0, 0)
            assert model[0].weight.grad is None
            assert model[1].weight.grad is not None


class TestResuming:
    @pytest.mark.parametrize("outer", ["sgd", "adam"])
    @pytest.mark.parametrize("stop", [3, 4, 5, 8])
    def test_a_resumed_run_is_the_continued_run(self, outer, stop):
        factory = {"sgd": None, "adam": lambda p: torch.optim.Adam(p, lr=0.1)}[outer]
        options = {"sync_every": 4, "fragments": 2, "outer_optimizer": factory}
        total = 11

        def parts(exchange):
            model = fill(nn.Sequential(nn.Linear(7, 9), nn.Linear(9, 3)))
            inner = torch.optim.AdamW(model.parameters(), lr=0.1)
            return model, inner, DiLoCo(model, inner, exchange, **options)

        def continued(exchange):
            model, inner, outer = parts(exchange)
            with outer:
                for step in range(total):
                    push(model, inner, exchange.rank, step)
            return values(model)

        def until_stop(exchange):
            model, inner, outer = parts(exchange)
            with outer:
                for step in range(stop):
                    push(model, inner, exchange.rank, step)
                saved = io.BytesIO()
                torch.save([model.state_dict(), inner.state_dict(), outer.state_dict()], saved)
            return saved.getvalue()

        def from_stop(exchange):
            model, inner, outer = parts(exchange)
            states = torch.load(io.BytesIO(saved[exchange.rank]), weights_only=True)
            for part, state in zip((model, inner, outer), states, strict=True):
                part.load_state_dict(state)
            with outer:
                for step in range(stop, total):
                    push(model, inner, exchange.rank, step)
            return values(model)

        wanted = results(run_replicas(continued, in_process(3, chunk_bytes=64)))
        saved = results(run_replicas(until_stop, in_process(3, chunk_bytes=64)))
        again = results(run_replicas(from_stop, in_process(3, chunk_bytes=100)))
        assert identical([*wanted, *again])

    def state(self, rank=0, world=1, model=None):
        def replica(exchange):
            net = model or fill(nn.Linear(2, 2))
            outer = DiLoCo(net, torch.optim.SGD(net.parameters(), lr=1.0), exchange, sync_every=1)
            with outer:
                return outer.state_dict()

        return results(run_replicas(replica, in_process(world)))[rank]

    @pytest.mark.parametrize(
        ("change", "told"),
        [
            ({"rank": 1}, "its rank is 1, here it is 0"),
            ({"world_size": 3}, "its world_size is 3, here it is 1"),
            ({"version": 99}, "its version is 99"),
            ({"fragments": []}, "its fragments"),
        ],
    )
    def test_what_does_not_fit_is_refused(self, change, told):
        model = fill(nn.Linear(2, 2))
        outer = DiLoCo(model, torch.optim.SGD(model.parameters(), lr=1.0), in_process(1)[0], sync_every=1)
        with pytest.raises(ConfigurationError, match=told):
            outer.load_state_dict({**self.state(), **change})

    def test_another_model_is_refused(self):
        model = fill(nn.Linear(3, 3))
        outer = DiLoCo(model, torch.optim.SGD(model.parameters(), lr=1.0), in_process(1)[0], sync_every=1)
        with pytest.raises(ConfigurationError, match="fragments"):
            outer.load_state_dict(self.state())

    def test_loading_comes_before_entering(self):
        model = fill(nn.Linear(2, 2))
        outer = DiLoCo(model, torch.optim.SGD(model.parameters(), lr=1.0), in_process(1)[0], sync_every=1)
        with outer, pytest.raises(SyncError, match="before"):
            outer.load_state_dict(outer.state_dict())


class TestArguments:
    def make(self, model=None, **options):
        model = model or nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        return DiLoCo(
            model, torch.optim.SGD(nn.Linear(1, 1).parameters()), in_process(1)[0], **{"sync_every": 6, **options}
        )

    @pytest.mark.parametrize("sync_every", [0, -3, 5, 2.0, 7])
    def test_sync_every_is_a_positive_multiple_of_the_fragments(self, sync_every):
        with pytest.raises(ConfigurationError, match="positive multiple of the number of fragments, which is 3"):
            self.make(sync_every=sync_every, fragments=3)

    @pytest.mark.parametrize("lr", [0.0, -0.1, float("nan")])
    def test_the_outer_lr_is_positive(self, lr):
        with pytest.raises(ConfigurationError, match="outer learning rate must be positive"):
            self.make(outer_lr=lr)
        with pytest.raises((ConfigurationError, ValueError)):
            self.make(outer_optimizer=lambda p: torch.optim.SGD(p, lr=lr))

    @pytest.mark.parametrize("momentum", [-0.1, 1.0])
    def test_the_outer_momentum_is_in_range(self, momentum):
        with pytest.raises(ConfigurationError, match=r"must be in \[0, 1\)"):
            self.make(outer_momentum=momentum)

    def test_a_model_without_trainable_parameters_is_refused(self):
        with pytest.raises(ConfigurationError, match="no trainable parameter"):
            self.make(nn.Linear(2, 2).requires_grad_(False))

    def test_an_optimizer_that_is_not_elementwise_is_refused(self):
        with pytest.raises(ConfigurationError, match="LBFGS is not known to be element-wise"):
            self.make(outer_optimizer=torch.optim.LBFGS)

    def test_fragments(self):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        with pytest.raises(ConfigurationError, match="at least 1"):
            self.make(model, fragments=0)
        with pytest.raises(ConfigurationError, match="4 trainable tensors, too few for 6"):
            self.make(model, fragments=6)
        with pytest.raises(ConfigurationError, match=r"in no fragment: '1.weight', '1.bias'"):
            self.make(model, fragments=[model[0]])
        with pytest.raises(ConfigurationError, match=r"fragment 1 .* is not a module of the model"):
            self.make(model, fragments=[model[0], nn.Linear(2, 2)])
        with pytest.raises(ConfigurationError, match="adds no trainable parameter"):
            self.make(model, fragments=[model, model[0]])
        with pytest.raises(ConfigurationError, match="at least one module"):
            self.make(model, fragments=[])

    def test_dtypes_that_cannot_be_synced(self):
        with pytest.raises(ConfigurationError, match=r"'weight' has dtype torch.complex64"):
            self.make(nn.Linear(2, 2, dtype=torch.complex64))
        with pytest.raises(ConfigurationError, match="meta device"):
            self.make(nn.Linear(2, 2, device="meta"))

    def test_init(self):
        with pytest.raises(ConfigurationError, match="init must be"):
            self.make(init="random")

    def test_fragments_by_number_are_of_about_equal_size(self):
        model = nn.Sequential(*(nn.Linear(10, 10) for _ in range(12)))
        sizes = [sum(named.tensor.numel() for named in part) for part in split(model, 4, Buffers.MEAN)]
        assert sum(sizes) == 12 * 110
        assert max(sizes) <= 1.4 * min(sizes)

    def test_the_factory_has_the_usual_settings(self, tmp_path, monkeypatch):
        monkeypatch.setenv("RENDEZVOUS_URI", str(tmp_path))
        monkeypatch.setenv("REPLICA_RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", "1")
        model = nn.Linear(2, 2)
        outer = make_diloco_outer_loop(model, torch.optim.SGD(model.parameters(), lr=0.1))
        assert outer.sync_every == 500
        with outer:
            pass
        assert outer.exchange.ended

    def test_beginning_comes_first(self):
        (part,) = split(nn.Linear(2, 2), 1, Buffers.MEAN)
        fragment = Fragment("0", part, None, 1)
        with pytest.raises(RuntimeError, match="begin"):
            fragment.adopt(next(fragment.layout.chunks(0, 8)), torch.ones(2))
