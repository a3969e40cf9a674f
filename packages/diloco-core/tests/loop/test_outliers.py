"""Clipping to the median of the norms, and the trimmed mean, in every exchange, by the formulas."""

import json
import math

import pytest
import torch
from codecs_lab import decoded as as_sent
from hypothesis import example, given
from hypothesis import strategies as st
from loop_lab import AVERAGING, KINDS, exchanges, loop
from training_lab import run

from diloco_core import (
    Clipped,
    ConfigurationError,
    Elastic,
    NonFiniteDeltaError,
    StoreExchange,
    SyncReport,
    in_process,
)
from diloco_core._store._open import open_store
from diloco_core.testing import run_replicas

CODECS = ["plain", "bf16", "int8"]


def train(exchange, learned, delay=0, **options):
    """Average plainly what replicas learn; return the parameters at the end and the reports.

    Args:
        learned: For every rank the values of each tensor: what one inner step changes.
    """
    model = torch.nn.ParameterList([torch.zeros(len(tensor)).double() for tensor in learned[0]])
    options = {**AVERAGING, "delay": delay, "flush": "none", **options}
    model, inner, outer, reports = loop(exchange, model, **options)
    with outer:
        for step in range(2):
            for parameter, values in zip(model, learned[exchange.rank], strict=True):
                # With a delay, only the first step is sent.
                sent = torch.tensor(values, dtype=torch.float64)
                parameter.grad = sent if step == 0 else torch.zeros_like(sent)
            if options.get("weight") == "tokens":
                outer.count_tokens(1 + 2 * exchange.rank)
            inner.step()
    return [parameter.detach().clone() for parameter in model], reports


def clipped(exchange, learned, **options):
    return train(exchange, learned, clip="median", **options)


def decoded(learned, codec):
    """For every rank the values of each tensor, as the others read them."""
    results = []
    for each in learned:
        values = torch.tensor([value for tensor in each for value in tensor], dtype=torch.float64)
        parts = as_sent(codec, values).split([len(tensor) for tensor in each])
        results.append([part.tolist() for part in parts])
    return results


def clip_first(learned, codec="plain", weights=None):
    """Clip first, then weigh, tensor by tensor; return what tensors become, and all factors."""
    weights = weights or [1.0] * len(learned)
    results, scales = [], []
    for tensors in zip(*decoded(learned, codec), strict=True):
        norms = [math.sqrt(math.fsum(value**2 for value in tensor)) for tensor in tensors]
        median = sorted(norms)[(len(norms) - 1) // 2]
        scales.append([min(1.0, median / norm) if norm else 1.0 for norm in norms])
        rows = [
            [weight * factor * value for value in tensor]
            for weight, factor, tensor in zip(weights, scales[-1], tensors, strict=True)
        ]
        results.append([-math.fsum(column) / sum(weights) for column in zip(*rows, strict=True)])
    return results, scales


@st.composite
def cases(draw):
    replicas = draw(st.integers(1, 4))
    sizes = draw(st.lists(st.integers(1, 12), min_size=1, max_size=3))
    value = st.one_of(st.just(0.0), st.integers(-3, 3).map(float), st.floats(-1e6, 1e6))
    one = st.tuples(*(st.lists(value, min_size=size, max_size=size) for size in sizes))
    scaled = st.tuples(one, st.sampled_from([0.0, 1e-3, 1.0, 100.0]))
    return [
        [[scale * each for each in tensor] for tensor in tensors]
        for tensors, scale in draw(st.lists(scaled, min_size=replicas, max_size=replicas))
    ]


@given(
    cases(),
    st.sampled_from(KINDS),
    st.sampled_from(CODECS),
    st.sampled_from([0, 1]),
    st.sampled_from(["equal", "tokens"]),
)
# The lower median of an even number; a median of zero; int8 sends the small values as zero.
@example([[[2.0]], [[8.0]]], "threads", "plain", 0, "equal")
@example([[[0.0]], [[0.0]], [[5.0]]], "threads", "plain", 0, "equal")
@example([[[1000.0] + [1.0] * 99], [[10.0] + [1.0] * 99]], "threads", "int8", 0, "equal")
def test_every_tensor_is_scaled_down_to_the_median(learned, kind, codec, delay, weight):
    options = {"codec": codec, "delay": delay, "weight": weight}
    results = run(lambda each: clipped(each, learned, **options), exchanges(kind, len(learned)))
    steps = 2 - delay
    tokens = [(steps * (1 + 2 * rank)) ** 2 / steps for rank in range(len(learned))]
    wanted, scales = clip_first(learned, codec, tokens if weight == "tokens" else None)
    for values, reports in results:
        for each, other, right in zip(values, results[0][0], wanted, strict=True):
            assert torch.equal(each, other)
            assert each.tolist() == pytest.approx(right, rel=1e-9, abs=1e-9)
        (report,) = reports
        for member, clipping in enumerate(report.clipped):
            mine = [scale[member] for scale in scales]
            assert clipping.least == pytest.approx(min(mine), rel=1e-12)
            assert clipping.most == pytest.approx(max(mine), rel=1e-12)
            assert (clipping.tensor == "") == (clipping.least == 1)
        assert len(report.clipped) == len(learned)


def test_only_what_is_clipped_changes():
    """Clipping leaves every bit as it is if all contributions are the same."""
    alike = [[[0.1, 0.3], [1e-300]]] * 3
    (received, _), *_ = run(lambda each: clipped(each, alike), in_process(3))
    assert [values.tolist() for values in received] == clip_first(alike)[0]


def test_with_a_sparse_codec_those_who_send_nothing_do_not_enter_the_median():
    learned = [[[0.0] * 64], [[0.0] * 64], [[5.0] + [0.0] * 63], [[10.0] + [0.0] * 63]]
    ((_, (report,)), *_) = run(lambda each: clipped(each, learned, codec="topk64"), in_process(4))
    assert [each.least for each in report.clipped] == pytest.approx([1, 1, 1, 0.5])


def test_clipping_does_not_flow_back_into_the_residual():
    """Error feedback keeps what the codec has lost, and not what was scaled away."""
    learned = [[1.0, 0.5], [1.0, 0.5], [512.0, 256.0]]

    def replica(exchange):
        model = torch.nn.ParameterList([torch.zeros(2)])
        options = {"clip": "median", "codec": "bf16", "error_feedback": True, "sync_every": 1}
        model, inner, outer, _ = loop(exchange, model, **options)
        with outer:
            model[0].grad = torch.tensor(learned[exchange.rank])
            inner.step()
            return outer.state_dict()["fragments"][0]["residual"]

    for residual in run(replica, in_process(3)):
        assert residual
        assert not any(values.any() for values in residual)


def test_a_norm_that_float64_cannot_hold_is_refused_by_name():
    (error,) = run_replicas(lambda each: clipped(each, [[[1.0], [1e200, 1e200]]]), in_process(1))
    assert isinstance(error, NonFiniteDeltaError)
    assert error.tensor == "1"


def test_the_report_says_who_was_clipped_as_json():
    learned = [[[1.0], [1.0]], [[1.0], [1.0]], [[1.0], [8.0]]]
    _, (report,) = run(lambda each: clipped(each, learned), in_process(3))[0]
    assert report.clipped == (Clipped(1, 1, ""), Clipped(1, 1, ""), Clipped(0.125, 1, "1"))
    assert json.loads(report.to_json())["clipped"] == [[1, 1, ""], [1, 1, ""], [0.125, 1, "1"]]
    assert SyncReport.__dataclass_fields__["clipped"].default == ()


@st.composite
def trimmed_cases(draw):
    trim = draw(st.integers(1, 2))
    replicas = draw(st.integers(2 * trim + 1, 5))
    size = draw(st.integers(1, 40))
    one = st.lists(st.integers(-3, 3) | st.floats(-1e6, 1e6), min_size=size, max_size=size)
    return trim, [[each] for each in draw(st.lists(one, min_size=replicas, max_size=replicas))]


@given(trimmed_cases(), st.sampled_from(KINDS), st.sampled_from(CODECS), st.sampled_from([0, 1]))
@example((None, [[[-1e9]], [[1.0]], [[2.0]], [[1e9]]]), "threads", "plain", 0)
def test_every_element_is_the_mean_of_those_that_are_left(case, kind, codec, delay):
    trim, learned = case
    options = {"aggregate": "trimmed", "trim": trim, "codec": codec, "delay": delay}
    results = run(lambda each: train(each, learned, **options), exchanges(kind, len(learned)))
    least = trim or 1
    columns = zip(*(tensors[0] for tensors in decoded(learned, codec)), strict=True)
    left = [sorted(column)[least : len(column) - least] for column in columns]
    wanted = torch.tensor([-sum(column) / len(column) for column in left], dtype=torch.float64)
    for (values,), _ in results:
        assert torch.allclose(values, wanted, rtol=1e-12, atol=1e-9)
        assert torch.equal(values, results[0][0][0])


@pytest.mark.parametrize(("fewest", "fits"), [(2, False), (3, True)])
def test_in_elastic_runs_enough_replicas_take_part_in_every_sync(tmp_path, fewest, fits):
    exchange = StoreExchange(open_store(str(tmp_path)), 0, 4, Elastic(fewest))
    if fits:
        assert loop(exchange, aggregate="trimmed")
    else:
        with pytest.raises(ConfigurationError, match=r"at least 3 replicas .* min_replicas is 2"):
            loop(exchange, aggregate="trimmed")
