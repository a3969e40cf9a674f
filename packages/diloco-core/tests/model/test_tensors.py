"""Which tensors are synced: trainable ones, each once, whatever their shape, dtype and layout."""

import pytest
import torch
from torch import nn

from diloco_core import DiLoCo, StoreExchange, in_process
from diloco_core._model._partition import Buffers, split
from diloco_core._outer._fragment import Fragment
from diloco_core._outer._optimizer import OuterOptimizer
from diloco_core._store._open import open_store

AVERAGING = {"outer_lr": 1.0, "outer_momentum": 0.0}


class Tied(nn.Module):
    """A language model's shape: the head uses the embedding's weight, in another fragment."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.rest = nn.Module()
        self.rest.middle = nn.Linear(3, 3)
        self.rest.head = nn.Linear(3, 5)
        self.rest.head.weight = self.embed.weight


class TestTied:
    @pytest.mark.parametrize("fragments", [1, 2, 3, "modules"])
    def test_a_tied_tensor_is_in_one_fragment_once(self, fragments):
        model = Tied()
        parts = split(
            model, [model.embed, model.rest] if fragments == "modules" else fragments, Buffers.MEAN
        )
        assert len(parts) == (2 if fragments == "modules" else fragments)
        assert sorted(named.name for part in parts for named in part) == [
            "embed.weight",
            "rest.head.bias",
            "rest.middle.bias",
            "rest.middle.weight",
        ]

    @pytest.mark.parametrize("fragments", [1, 2, "modules"])
    def test_a_tied_tensor_takes_one_outer_step_per_cycle(self, lab, fragments):
        """With outer lr 2 a step moves by twice the inner movements since the last one; a second
        step would move on.
        """

        def replica(exchange):
            model = lab.fill(Tied())
            start = model.embed.weight.detach().clone()
            inner = torch.optim.SGD(model.parameters(), lr=1.0)
            parts = [model.embed, model.rest] if fragments == "modules" else fragments
            options = {"sync_every": 4, "fragments": parts, "outer_lr": 2.0, "outer_momentum": 0.0}
            with DiLoCo(model, inner, exchange, **options) as outer:
                for _ in range(4):
                    for parameter in model.parameters():
                        parameter.grad = torch.ones_like(parameter)
                    inner.step()
                # The first fragment begins with the embedding.
                copy = outer.state_dict()["fragments"][0]["copy"][0][:15].clone()
            assert model.rest.head.weight is model.embed.weight
            return start.flatten() - copy

        steps_before_its_sync = 4 if fragments == 1 else 2
        for moved in lab.run(replica, in_process(2)):
            assert torch.allclose(moved, torch.full((15,), 2.0 * steps_before_its_sync))

    def test_tied_and_untied_models_of_equal_gradients_agree(self, lab):
        """Tying is no change to the outer step: a model without the second name makes the same
        numbers.
        """

        class Untied(nn.Module):
            def __init__(self):
                super().__init__()
                self.embed = nn.Embedding(5, 3)
                self.rest = nn.Module()
                self.rest.middle = nn.Linear(3, 3)
                self.rest.head = nn.Module()
                self.rest.head.bias = nn.Parameter(torch.zeros(5))

        options = {"steps": 6, "sync_every": 4, "fragments": 2}
        tied = lab.train(lambda rank: lab.fill(Tied()), in_process(3), **options)
        untied = lab.train(lambda rank: lab.fill(Untied()), in_process(3), **options)
        assert lab.identical(tied)
        assert torch.equal(tied[0]["embed.weight"], untied[0]["embed.weight"])
        assert torch.equal(tied[0]["rest.head.weight"], untied[0]["embed.weight"])
        assert torch.equal(tied[0]["rest.head.bias"], untied[0]["rest.head.bias"])


class Counting:
    """A store that notes every object written."""

    def __init__(self, store):
        self._store = store
        self.written = {}

    def __getattr__(self, name):
        return getattr(self._store, name)

    def put(self, key, parts):
        size = self._store.put(key, parts)
        self.written[key] = size
        return size


class TestFrozen:
    def sizes(self, lab, folder, frozen):
        """Bytes of the deltas and states that two replicas wrote, for 100 trainable parameters and
        some frozen ones.
        """
        stores = [Counting(open_store(str(folder))) for _ in range(2)]
        reports = []

        def make(rank):
            model = lab.fill(
                nn.Sequential(nn.Linear(frozen, 100, bias=False), nn.Linear(100, 1, bias=False))
            )
            model[0].requires_grad_(False)
            return model

        runs = lab.train(
            make,
            [StoreExchange(s, r, 2) for r, s in enumerate(stores)],
            on_sync=reports.append,
            save_inner_every=0,
        )
        assert torch.equal(runs[1]["0.weight"], make(0)[0].weight), "left alone"
        assert torch.equal(runs[1]["1.weight"], runs[0]["1.weight"])
        assert len(reports) == 4
        written = {
            key: size
            for store in stores
            for key, size in store.written.items()
            if "safetensors" in key
        }
        assert len([key for key in written if "deltas" in key]) == 2 * 2, (
            "two replicas and two syncs"
        )
        frozen_once = [
            key for store in stores for key in store.written if key.startswith("unsynced/")
        ]
        assert len(frozen_once) == 1, "when the run begins, by rank 0"
        synced = [size for key, size in written.items() if not key.startswith("unsynced/")]
        return synced, {(report.bytes_sent, report.bytes_received) for report in reports}

    def test_frozen_parameters_are_never_sent(self, lab, tmp_path):
        small, moved = self.sizes(lab, tmp_path / "small", 1)
        large, moved_too = self.sizes(lab, tmp_path / "large", 1000)
        assert sum(small) == sum(large)
        assert moved == moved_too
        assert max(large) < 100 * 4 * 2 + 1500, "parameters, momentum and a header"

    def test_frozen_parameters_are_in_no_fragment(self):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        model[0].requires_grad_(False)
        assert [named.name for part in split(model, 2, Buffers.MEAN) for named in part] == [
            "1.weight",
            "1.bias",
        ]


class TestShapes:
    @pytest.mark.parametrize("chunk_bytes", [40, 2**20])
    def test_channels_last_parameters(self, lab, chunk_bytes):
        """The same numbers as with contiguous ones, and the layout stays."""

        def make(memory_format):
            def model(rank):
                made = lab.fill(
                    nn.Sequential(nn.Conv2d(3, 4, 2), nn.Conv2d(4, 2, 3)).to(
                        memory_format=memory_format
                    )
                )
                assert made[0].weight.is_contiguous() == (memory_format is torch.contiguous_format)
                return made

            return model

        def layouts(exchange):
            model = make(torch.channels_last)(exchange.rank)
            inner = torch.optim.SGD(model.parameters(), lr=1.0)
            with DiLoCo(model, inner, exchange, sync_every=1):
                lab.push(model, inner, exchange.rank, 0)
            return [
                (p.is_contiguous(memory_format=torch.channels_last), p.stride())
                for p in model.parameters()
            ]

        strided = lab.train(
            make(torch.channels_last), in_process(3, chunk_bytes=chunk_bytes), steps=5
        )
        plain = lab.train(
            make(torch.contiguous_format), in_process(3, chunk_bytes=chunk_bytes), steps=5
        )
        assert lab.identical([*strided, *plain])
        for found in lab.run(layouts, in_process(2)):
            assert found[0] == (True, (12, 1, 6, 3))

    def test_a_transposed_parameter(self, lab):
        def make(rank):
            model = nn.Module()
            model.weight = nn.Parameter(torch.arange(12.0).reshape(3, 4).t())
            assert model.weight.stride() == (1, 4)
            return model

        def contiguous(rank):
            model = nn.Module()
            model.weight = nn.Parameter(torch.arange(12.0).reshape(3, 4).t().contiguous())
            return model

        assert lab.identical(
            [*lab.train(make, in_process(3)), *lab.train(contiguous, in_process(3))]
        )

    @pytest.mark.parametrize("store", [False, True])
    def test_scalars_and_empty_tensors(self, lab, tmp_path, store):
        def make(rank):
            model = nn.Module()
            model.scale = nn.Parameter(torch.tensor(2.0))
            model.none = nn.Parameter(torch.empty(0, 3))
            model.one = nn.Parameter(torch.ones(1, dtype=torch.float64))
            return model

        folder = [StoreExchange(open_store(str(tmp_path)), rank, 4) for rank in range(4)]
        runs = lab.train(
            make, folder if store else in_process(4), sync_every=3, fragments=3, **AVERAGING
        )
        assert lab.identical(runs)
        assert runs[0]["scale"] != 2.0
        assert runs[0]["one"] != 1.0

    @pytest.mark.parametrize("fragments", [1, 2, 4])
    def test_more_replicas_than_elements(self, lab, fragments):
        def make(rank):
            return lab.fill(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)))

        runs = lab.train(make, in_process(5), sync_every=4, fragments=fragments, **AVERAGING)
        assert lab.identical(runs)
        # Averaged once per element, whatever the fragments: all are where the mean of the movements
        # has taken them.
        alone = [make(rank) for rank in range(5)]
        for rank, model in enumerate(alone):
            inner = torch.optim.SGD(model.parameters(), lr=1.0)
            for step in range(4):
                lab.push(model, inner, rank, step)
        for name, value in runs[0].items():
            mean = torch.stack([model.state_dict()[name] for model in alone]).mean(0)
            assert torch.allclose(value, mean, atol=1e-6)


class TestFragments:
    def test_by_number_they_are_of_about_equal_size_and_in_order(self):
        model = nn.Sequential(*(nn.Linear(10, 10) for _ in range(12)))
        parts = split(model, 4, Buffers.MEAN)
        sizes = [sum(named.tensor.numel() for named in part) for part in parts]
        assert sum(sizes) == 12 * 110
        assert max(sizes) <= 1.4 * min(sizes)
        assert [named.name for part in parts for named in part] == [
            name for name, _ in model.named_parameters()
        ]

    def test_by_module(self):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
        parts = split(model, [model[2], [model[0], model[1]]], Buffers.MEAN)
        assert [[named.name for named in part] for part in parts] == [
            ["2.weight", "2.bias"],
            ["0.weight", "0.bias", "1.weight", "1.bias"],
        ]

    @pytest.mark.parametrize("fragments", [1, 2, 4])
    def test_each_is_synced_once_per_cycle_in_turn(self, lab, fragments):
        def replica(exchange):
            model = lab.fill(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
            inner = torch.optim.SGD(model.parameters(), lr=1.0)
            reports = []
            with DiLoCo(
                model, inner, exchange, sync_every=4, fragments=fragments, on_sync=reports.append
            ) as outer:
                for step in range(12):
                    lab.push(model, inner, exchange.rank, step)
                    assert outer.committed == (step + 1) * fragments // 4
                return [(r.fragment, r.total_inner_steps, r.sync) for r in reports]

        period = 4 // fragments
        wanted = [(str(n % fragments), (n + 1) * period, n + 1) for n in range(3 * fragments)]
        assert lab.run(replica, in_process(2)) == [wanted, wanted]


def test_beginning_comes_first():
    (part,) = split(nn.Linear(2, 2), 1, Buffers.MEAN)
    fragment = Fragment("0", part, OuterOptimizer(()), 1)
    with pytest.raises(RuntimeError, match="begin"):
        fragment.adopt(fragment.layout.chunks(0, 8)[0], torch.ones(2))
