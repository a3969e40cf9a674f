"""Test which tensors are synced: trainable ones, each once, whatever their shape and dtype."""

import pytest
import torch
from loop_lab import AVERAGING, exchanges, fragments_of, live, loop
from torch import nn

from diloco_core import in_process


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
        modules = fragments == "modules"
        parts = fragments_of(model, [model.embed, model.rest] if modules else fragments)
        assert len(parts) == (2 if modules else fragments)
        names = ["embed.weight", "rest.head.bias", "rest.middle.bias", "rest.middle.weight"]
        assert sorted(name for part in parts for name in part) == names

    def test_modules_inside_of_each_other_hold_what_is_left(self):
        model = Tied()
        parts = fragments_of(model, [model.rest.middle, [model.rest.middle, model]])
        assert list(map(sorted, parts)) == [
            ["rest.middle.bias", "rest.middle.weight"],
            ["embed.weight", "rest.head.bias"],
        ]

    @pytest.mark.parametrize("fragments", [1, 2, "modules"])
    def test_a_tied_tensor_takes_one_outer_step_per_cycle(self, lab, fragments):
        """With outer lr 2, a second step would move on."""

        def replica(exchange):
            model = lab.fill(Tied())
            start = model.embed.weight.detach().clone()
            parts = [model.embed, model.rest] if fragments == "modules" else fragments
            options = {"sync_every": 4, "fragments": parts, "outer_lr": 2.0, "outer_momentum": 0.0}
            _, inner, outer, _ = loop(exchange, model, **options)
            with outer:
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


def moved(lab, frozen):
    """The bytes that syncs of 100 trainable parameters and some frozen ones move."""
    reports = []

    def make(rank):
        layers = nn.Linear(frozen, 100, bias=False), nn.Linear(100, 1, bias=False)
        model = lab.fill(nn.Sequential(*layers))
        model[0].requires_grad_(False)
        return model

    runs = lab.train(make, exchanges("store", 2), on_sync=reports.append)
    assert torch.equal(runs[1]["0.weight"], make(0)[0].weight), "left alone"
    assert torch.equal(runs[1]["1.weight"], runs[0]["1.weight"])
    return {(report.bytes_sent, report.bytes_received) for report in reports}


def test_frozen_parameters_are_never_sent(lab):
    assert moved(lab, 1) == moved(lab, 1000)
    model = nn.Sequential(nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 2))
    assert fragments_of(model, 2) == [["1.weight"], ["1.bias"]]


class TestShapes:
    @pytest.mark.parametrize("chunk_bytes", [40, 2**20])
    def test_channels_last_parameters(self, lab, chunk_bytes):
        """The same numbers as with contiguous ones, and the layout stays."""

        def replica(exchange, memory_format):
            model = lab.fill(nn.Sequential(nn.Conv2d(3, 4, 2), nn.Conv2d(4, 2, 3)))
            model, inner, outer, _ = loop(exchange, model.to(memory_format=memory_format))
            live(model, inner, outer, *range(5))
            layout = model[0].weight.is_contiguous(memory_format=memory_format)
            return lab.values(model), layout, model[0].weight.stride()

        strided, plain = (
            lab.run(
                lambda each, memory=memory: replica(each, memory),
                in_process(3, chunk_bytes=chunk_bytes),
            )
            for memory in (torch.channels_last, torch.contiguous_format)
        )
        assert lab.identical([held for held, *_ in strided + plain])
        assert strided[0][1:] == (True, (12, 1, 6, 3))

    @pytest.mark.parametrize("kind", ["threads", "store"])
    def test_scalars_and_empty_tensors(self, lab, kind):
        def make(rank):
            one = torch.ones(1, dtype=torch.float64)
            return nn.ParameterDict(
                {"scale": torch.tensor(2.0), "none": torch.empty(0, 3), "one": one}
            )

        runs = lab.train(make, exchanges(kind, 4), sync_every=3, fragments=3, **AVERAGING)
        assert lab.identical(runs)
        assert runs[0]["scale"] != 2.0
        assert runs[0]["one"] != 1.0

    @pytest.mark.sampled
    @pytest.mark.parametrize("fragments", [1, 2, 4])
    def test_more_replicas_than_elements(self, lab, fragments):
        """Each element is averaged once, whatever the fragments."""

        def make(rank):
            return lab.fill(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)))

        options = {"sync_every": 4, **AVERAGING}
        runs = lab.train(make, in_process(5), fragments=fragments, **options)
        once = lab.train(make, in_process(5), **options)
        assert lab.identical(runs)
        assert all(torch.allclose(value, once[0][name]) for name, value in runs[0].items())


def test_fragments_by_number_are_of_about_equal_size_and_in_order():
    model = nn.Sequential(*(nn.Linear(10, 10) for _ in range(12)))
    parts = fragments_of(model, 4)
    counts = [sum(model.get_parameter(name).numel() for name in part) for part in parts]
    assert sum(counts) == 12 * 110
    assert max(counts) <= 1.4 * min(counts)
    names = [name for name, _ in model.named_parameters()]
    assert [name for part in parts for name in part] == names
