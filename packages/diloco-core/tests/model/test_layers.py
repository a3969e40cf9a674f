"""Fragments made of the repeated layers of a model, in the patterns of Streaming DiLoCo."""

import logging

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from loop_lab import exchanges, fragments_of, live, loop
from torch import nn
from training_lab import fill

from diloco_core import ConfigurationError, MismatchError, in_process
from diloco_core.testing import run_replicas


class Block(nn.Module):
    def __init__(self, experts=0):
        super().__init__()
        self.mixed = nn.Linear(2, 2, bias=False)
        self.norm = nn.LayerNorm(2)
        self.experts = nn.ModuleList(nn.Linear(2, 2) for _ in range(experts))


class Transformer(nn.Module):
    """Embeddings, repeated layers, a final norm and a head."""

    def __init__(self, layers=12, experts=0):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.embed = nn.Embedding(3, 2)
        self.layers = nn.ModuleList(Block(experts) for _ in range(layers))
        self.norm = nn.LayerNorm(2)
        self.head = nn.Linear(2, 3, bias=False)
        self.register_buffer("count", torch.zeros(1))


def parts(model, kind, count=None):
    """What each fragment holds: the numbers of layers, and the names of what else there is."""
    results = []
    for part in fragments_of(model, (kind, count) if count else kind):
        held = [int(name.split(".")[1]) if name.startswith("layers.") else name for name in part]
        results.append(list(dict.fromkeys(held)))
    return results


def refused(message, model, *pattern):
    with pytest.raises(ConfigurationError, match=message):
        parts(model, *pattern)


BEGIN = ["scale", "embed.weight"]
END = ["norm.weight", "norm.bias", "head.weight", "count"]


class TestPatterns:
    @pytest.mark.parametrize(
        ("layers", "kind", "count", "wanted"),
        [
            (12, "strided", 4, [[*BEGIN, 0, 4, 8], [1, 5, 9], [2, 6, 10], [3, 7, 11, *END]]),
            (12, "sequential", 4, [[*BEGIN, 0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11, *END]]),
            (5, "strided", 3, [[*BEGIN, 0, 3], [1, 4], [2, *END]]),
            (5, "sequential", 3, [[*BEGIN, 0, 1], [2, 3], [4, *END]]),
            (2, "strided", 1, [[*BEGIN, 0, 1, *END]]),
            (2, "sequential", 2, [[*BEGIN, 0], [1, *END]]),
        ],
    )
    def test_layers_are_dealt_out(self, caplog, layers, kind, count, wanted):
        with caplog.at_level(logging.INFO, "diloco_core"):
            assert parts(Transformer(layers), kind, count) == wanted
        text = f"fragments=({kind!r}, {count}): the layers in 'layers' ({layers} Block) are dealt"
        assert text in caplog.text

    @pytest.mark.sampled
    @pytest.mark.parametrize("kind", ["strided", "sequential"])
    @pytest.mark.parametrize(("layers", "count"), [(4, 2), (6, 2), (7, 3), (12, 4), (25, 9)])
    def test_up_to_three_layers_in_each_fragment_if_no_number_is_given(self, kind, layers, count):
        found = parts(Transformer(layers), kind)
        assert len(found) == count
        assert found == parts(Transformer(layers), kind, count)

    @given(
        kind=st.sampled_from(["strided", "sequential"]),
        layers=st.integers(2, 9),
        count=st.integers(1, 9),
        frozen=st.sets(st.integers(0, 8)),
        ties=st.lists(st.tuples(st.integers(0, 8), st.integers(-1, 8)), max_size=4),
        tied_head=st.booleans(),
    )
    def test_each_trainable_parameter_is_in_one_fragment_once(
        self, kind, layers, count, frozen, ties, tied_head
    ):
        model = Transformer(layers)
        for layer, other in ties:  # -1 for the embeddings, whose weight fits as it is not used
            source = model.embed if other < 0 else model.layers[other % layers].mixed
            model.layers[layer % layers].mixed.weight = source.weight
        if tied_head:
            model.head.weight = model.embed.weight
        for number in frozen:
            model.layers[number % layers].requires_grad_(False)
        trained = [name for name, p in model.named_parameters() if p.requires_grad]
        counted = [n for n in range(layers) if model.layers[n].norm.weight.requires_grad]
        if len(counted) < max(2, count):
            refused("layers", model, kind, count)
            return
        names = fragments_of(model, (kind, count), buffers="none")
        assert sorted(name for part in names for name in part) == sorted(trained)
        for part in names:
            assert part == sorted(part, key=trained.index), "in the order of the model"
        assert len(names) == count
        place = {name: number for number, part in enumerate(names) for name in part}
        fragments = [place[f"layers.{number}.norm.bias"] for number in counted]
        if kind == "strided":
            assert fragments == [number % count for number in range(len(counted))]
        else:
            assert fragments == sorted(fragments)
            sizes = [fragments.count(number) for number in range(count)]
            assert max(sizes) - min(sizes) <= 1
        assert place["scale"] == place.get("embed.weight", 0) == 0
        assert place["norm.weight"] == count - 1
        assert place.get("head.weight", count - 1) == count - 1


class TestTensorsWithSeveralNames:
    def test_a_layer_without_a_tensor_of_its_own_is_not_counted(self):
        model = Transformer(5)
        model.layers[1] = model.layers[0]
        model.layers[3].requires_grad_(False)
        assert parts(model, "strided", 3) == [[*BEGIN, 0], [2], [4, *END]]


class TestWhichLayers:
    def test_lists_inside_of_a_layer_are_part_of_it(self):
        """Experts, which are more than there are layers."""
        assert parts(Transformer(4, experts=7), "strided", 2) == [[*BEGIN, 0, 2], [1, 3, *END]]

    def test_the_longest_list_that_has_parameters_to_sync_is_taken(self):
        model = Transformer(4)
        model.tower = nn.ModuleList(nn.Linear(2, 2) for _ in range(9)).requires_grad_(False)
        model.dropouts = nn.ModuleList(nn.Dropout() for _ in range(9))
        assert parts(model, "strided", 2) == [[*BEGIN, 0, 2], [1, 3, *END]]
        model.heads = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
        heads = [f"heads.{n}.{name}" for n in range(3) for name in ("weight", "bias")]
        wanted = [[*BEGIN, 0, 2], [1, 3, *END[:-1], *heads, "count"]]
        assert parts(model, "strided", 2) == wanted

    def test_several_of_the_same_length_or_class_are_refused(self):
        """An encoder and a decoder: one of them would be a part of the last fragment as a whole."""
        model = Transformer(4)
        model.heads = nn.ModuleList(nn.Linear(2, 2) for _ in range(4))
        message = r"several: 'layers' \(4 Block\), 'heads' \(4 Linear\)\. So pass the fragments you"
        refused(message, model, "strided", 2)
        model = Transformer(4)
        model.encoder = Transformer(6)
        message = r"several: 'layers' \(4 Block\), 'encoder\.layers' \(6 Block\)"
        refused(message, model, "strided", 2)

    @pytest.mark.parametrize(
        "model",
        [
            nn.Linear(2, 2),
            nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)),
            nn.Sequential(nn.Linear(2, 2)),
            nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False)),
        ],
        ids=["no list", "of several classes", "a single one", "only one to sync"],
    )
    def test_a_model_without_layers_is_refused(self, model):
        refused("has none: pass the fragments yourself: a list", model, "strided", 2)

    def test_too_few_layers_are_refused(self):
        message = r"\('strided', 5\) needs 5 layers with .* but 'layers' \(4 Block\) has only 4"
        refused(message, Transformer(4), "strided", 5)

    def test_up_to_three_layers_are_one_fragment(self):
        assert parts(Transformer(3), "strided") == [[*BEGIN, 0, 1, 2, *END]]


def test_modules_by_hand():
    model = Transformer(2)
    root = nn.ModuleDict({"begin": model.embed, "end": model.head})
    root.layers, root.norm = model.layers, model.norm
    groups = [[root["begin"], root.layers[0]], (root.layers[1], root.norm, root["end"])]
    first, second = fragments_of(root, groups)
    names = ("mixed.weight", "norm.weight", "norm.bias")
    assert first == ["begin.weight", *(f"layers.0.{name}" for name in names)]
    assert second[-1] == "end.weight"
    eleven = nn.Sequential(*(nn.Linear(2, 2) for _ in range(11)))
    # A module does not contain another whose name begins like its own.
    assert fragments_of(eleven, [list(eleven[:10]), eleven[10]])[1] == ["10.weight", "10.bias"]


def train(exchange, fragments):
    """A replica whose syncs have the numbers of these fragments."""
    model = fill(Transformer(4))
    options = {"sync_every": 4, "fragments": fragments, "flush": "none"}
    model, inner, outer, reports = loop(exchange, model, **options)
    live(model, inner, outer, *range(8))
    return [report.fragment for report in reports], model.state_dict()


class TestInTheLoop:
    @pytest.mark.parametrize("fragments", ["strided", "sequential", ("strided", 2), ["strided", 2]])
    def test_each_fragment_is_synced_in_turn(self, fragments):
        (order, mine), (_, theirs) = run_replicas(
            lambda exchange: train(exchange, fragments), in_process(2)
        )
        assert order == ["0", "1", "0", "1"]
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)

    def test_replicas_with_other_patterns_refuse_each_other(self):
        def replica(exchange):
            return train(exchange, ("strided", 2) if exchange.rank else ("sequential", 2))

        errors = run_replicas(replica, in_process(2))
        assert {type(error) for error in errors} == {MismatchError}
        assert "in tensor 'layers.2.mixed.weight': " in str(errors[1])
        assert "in fragment 1 at rank 0. Start" in str(errors[1])

    @pytest.mark.parametrize("kind", ["store", "elastic"])
    def test_a_run_goes_on_with_its_own_pattern_only(self, tmp_path, kind):
        def live(fragments, resume=True):
            return train(*exchanges(kind, 1, tmp_path, resume=resume), fragments)

        live(("strided", 2), resume=False)
        text = (
            r"begun with other fragments.*'layers\.[12]\.mixed\.weight' is .* in fragment . in the"
        )
        with pytest.raises(MismatchError, match=text):
            live(("sequential", 2))
        assert live(("strided", 2))[0] == ["0", "1", "0", "1"]
