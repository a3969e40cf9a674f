"""Clipping to the median of the norms in every exchange, compared with a plain formula."""

import json
import math

import pytest
import torch
from delay_lab import exchanges
from hypothesis import given
from hypothesis import strategies as st
from training_lab import fill, run

from diloco_core import (
    Clipped,
    ConfigurationError,
    DiLoCo,
    ManagerExchange,
    MismatchError,
    MockManager,
    NonFiniteDeltaError,
    StoreExchange,
    SyncReport,
    in_process,
)
from diloco_core._arithmetic._clip import factors
from diloco_core._codecs._named import find_codec
from diloco_core._store._open import open_store
from diloco_core.testing import run_replicas

KINDS = ["threads", "store", "sharded", "gather"]


def train(exchange, learned, steps=1, delay=0, **options):
    """Average plainly what replicas learn; return the parameters at the end and the reports.

    Args:
        learned: For every rank the values of each tensor: what one inner step changes.
        steps: For every rank, how many such steps it takes (those of a longer period are empty).
    """
    rank, reports = exchange.rank, []
    model = torch.nn.ParameterList(
        [torch.zeros(len(each), dtype=torch.float64) for each in learned[0]]
    )
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    options = {"clip": "median", "outer_lr": 1.0, "outer_momentum": 0.0, **options}
    with DiLoCo(
        model,
        inner,
        exchange,
        sync_every=2,
        delay=delay,
        flush="none",
        on_sync=reports.append,
        **options,
    ) as outer:
        for step in range(2):
            for parameter, values in zip(model, learned[rank], strict=True):
                # With a delay, only the first step is sent.
                sent = torch.tensor(values, dtype=torch.float64)
                parameter.grad = sent if step == 0 else torch.zeros_like(sent)
            if options.get("weight") == "tokens":
                outer.count_tokens(1 + 2 * rank)
            inner.step()
    return [parameter.detach().clone() for parameter in model], reports


def by_the_formula(learned, codec="plain", weights=None):
    """Clip first, then weigh, tensor by tensor; return what tensors become, and all factors."""
    weights = weights or [1.0] * len(learned)
    decoded = []
    for each in learned:
        values = torch.tensor([value for tensor in each for value in tensor], dtype=torch.float64)
        back = torch.empty_like(values)
        find_codec(codec).decode(find_codec(codec).encode(values), back)
        sizes = [len(tensor) for tensor in each]
        decoded.append([part.tolist() for part in back.split(sizes)])
    results, scales = [], []
    for tensors in zip(*decoded, strict=True):
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
    scale = st.sampled_from([0.0, 1e-3, 1.0, 100.0])
    return [
        [[scale_of * each for each in tensor] for tensor in tensors]
        for tensors, scale_of in draw(
            st.lists(st.tuples(one, scale), min_size=replicas, max_size=replicas)
        )
    ]


@given(
    cases(),
    st.sampled_from(KINDS),
    st.sampled_from(["plain", "bf16", "int8"]),
    st.sampled_from([0, 1]),
    st.sampled_from(["equal", "tokens"]),
)
def test_every_tensor_is_scaled_down_to_the_median(learned, kind, codec, delay, weight):
    options = {"codec": codec, "delay": delay, "weight": weight}
    found = run(lambda each: train(each, learned, **options), exchanges(kind, len(learned)))
    steps = 2 - delay
    tokens = [(steps * (1 + 2 * rank)) ** 2 / steps for rank in range(len(learned))]
    wanted, scales = by_the_formula(learned, codec, tokens if weight == "tokens" else None)
    for values, reports in found:
        for each, other, right in zip(values, found[0][0], wanted, strict=True):
            assert torch.equal(each, other)
            assert each.tolist() == pytest.approx(right, rel=1e-9, abs=1e-9)
        (report,) = reports
        for member, clipped in enumerate(report.clipped):
            own = [scale[member] for scale in scales]
            assert clipped.least == pytest.approx(min(own), rel=1e-12)
            assert clipped.most == pytest.approx(max(own), rel=1e-12)
            assert (clipped.tensor == "") == (clipped.least == 1)
        assert len(report.clipped) == len(learned)


@given(st.lists(st.lists(st.floats(0, 1e300), min_size=3, max_size=3), min_size=1, max_size=6))
def test_nothing_is_scaled_up_and_half_of_the_replicas_stay_as_they_are(norms):
    found = factors(norms)
    assert all(0 <= factor <= 1 for each in found for factor in each)
    for tensor in range(3):
        kept = sum(each[tensor] == 1 for each in found)
        assert kept >= (len(norms) + 1) // 2


def test_of_an_even_number_the_lower_median_counts():
    assert factors([[2.0], [8.0]]) == [(1.0,), (0.25,)]
    assert factors([[0.0], [0.0], [5.0]]) == [(1.0,), (1.0,), (0.0,)]


def test_who_sends_nothing_of_a_tensor_does_not_enter_its_median_with_a_sparse_codec():
    norms = [[0.0], [0.0], [5.0], [10.0]]
    assert factors(norms, sparse=True) == [(1.0,), (1.0,), (1.0,), (0.5,)]


class Mixed(torch.nn.Module):
    """Tensors of several dtypes, one larger than a shard, one without elements, and a buffer."""

    def __init__(self):
        super().__init__()
        self.large = torch.nn.Parameter(torch.zeros(3000))
        self.empty = torch.nn.Parameter(torch.zeros(0))
        self.small = torch.nn.Parameter(torch.zeros(3))
        self.wide = torch.nn.Parameter(torch.zeros(50, dtype=torch.float64))
        self.narrow = torch.nn.Parameter(torch.zeros(70, dtype=torch.bfloat16))
        self.register_buffer("seen", torch.zeros(4))
        fill(self)


def some_steps(exchange, scale=1.0, **options):
    model, reports = Mixed(), []
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with DiLoCo(
        model, inner, exchange, sync_every=4, clip="median", on_sync=reports.append, **options
    ):
        for step in range(9):
            generator = torch.Generator().manual_seed(100 * exchange.rank + step)
            for parameter in model.parameters():
                gradient = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                factor = scale if exchange.rank == 1 else 1.0
                parameter.grad = (factor * gradient).to(parameter.dtype)
            model.seen += exchange.rank
            inner.step()
    return b"".join(
        bytes(t.detach().reshape(-1).view(torch.uint8).numpy()) for t in model.state_dict().values()
    ), reports


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"fragments": 2, "delay": 1, "alpha": 0.25},
        {"codec": "int8", "error_feedback": True},
        {"codec": "topk64", "weight": "steps"},
    ],
    ids=lambda options: ",".join(options) or "plain",
)
def test_all_exchanges_come_to_the_same_bits(options):
    found = {
        kind: run(lambda each: some_steps(each, 50.0, **options), exchanges(kind, 3))
        for kind in KINDS
    }
    first, reports = found["threads"][0]
    assert min(each.least for report in reports for each in report.clipped) < 0.05
    for results in found.values():
        assert all(values == first for values, _ in results)
        assert [report.clipped for report in results[0][1]] == [each.clipped for each in reports]


def test_only_what_is_clipped_changes():
    """Where all contributions are the same, clipping leaves every bit as it is."""
    alike = [[[0.1, 0.3], [1e-300]]] * 3
    (with_clip, _), *_ = run(lambda each: train(each, alike), in_process(3))
    wanted, _ = by_the_formula(alike)
    assert [values.tolist() for values in with_clip] == wanted


def test_the_norm_is_that_of_what_decodes():
    """int8 sends the small values of this contribution as zero."""
    learned = [[[1000.0] + [1.0] * 99], [[10.0] + [1.0] * 99]]
    found = run(lambda each: train(each, learned, codec="int8"), in_process(2))
    clipped = found[0][1][0].clipped[0]
    _, ((factor, _),) = by_the_formula(learned, "int8")
    assert clipped.least == factor
    assert factor != by_the_formula(learned)[1][0][0]


def test_clipping_does_not_flow_back_into_the_residual():
    """What error feedback keeps is what the codec has lost, and not what was scaled away."""
    learned = [[[1.0, 0.5]], [[1.0, 0.5]], [[512.0, 256.0]]]

    def replica(exchange):
        model = torch.nn.ParameterList([torch.zeros(2)])
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        with DiLoCo(
            model,
            inner,
            exchange,
            sync_every=1,
            clip="median",
            codec="bf16",
            error_feedback=True,
        ) as outer:
            model[0].grad = torch.tensor(learned[exchange.rank][0])
            inner.step()
            return [each.residual.values for each in outer._fragments]

    for residuals in run(replica, in_process(3)):
        assert all(not values.any() for each in residuals for values in each)


def test_a_norm_that_float64_cannot_hold_is_refused_by_name():
    learned = [[[1.0], [1e200, 1e200]]]
    (error,) = run_replicas(lambda each: train(each, learned), in_process(1))
    assert isinstance(error, NonFiniteDeltaError)
    assert error.tensor == "1"


def test_the_report_says_who_was_clipped_as_json():
    learned = [[[1.0], [1.0]], [[1.0], [1.0]], [[1.0], [8.0]]]
    _, (report,) = run(lambda each: train(each, learned), in_process(3))[0]
    assert report.clipped == (Clipped(1, 1, ""), Clipped(1, 1, ""), Clipped(0.125, 1, "1"))
    assert json.loads(report.to_json())["clipped"] == [[1, 1, ""], [1, 1, ""], [0.125, 1, "1"]]
    assert SyncReport.__dataclass_fields__["clipped"].default == ()


def lone(exchange=None, **options):
    model = torch.nn.Linear(2, 2)
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    return DiLoCo(model, inner, exchange or in_process(5)[0], sync_every=2, **options)


@pytest.mark.parametrize("clip", ["mean", 1.0, True, "", ["median"]])
def test_unknown_values(clip):
    with pytest.raises(ConfigurationError, match="clip must be 'median'"):
        lone(clip=clip)


def test_it_is_not_combined_with_a_trimmed_mean():
    with pytest.raises(ConfigurationError, match="cannot be used with aggregate='trimmed'"):
        lone(clip="median", aggregate="trimmed")


def test_a_manager_takes_plain_means():
    manager = ManagerExchange(MockManager(in_process(3)[0]), world_size=3)
    with pytest.raises(ConfigurationError, match="clip='median' cannot be used with Manager"):
        lone(manager, clip="median")


@pytest.mark.parametrize("kind", ["threads", "store"])
def test_replicas_that_clip_differently_are_refused(kind):
    def replica(exchange):
        with lone(exchange, clip=[None, "median"][exchange.rank]):
            pass

    results = run_replicas(replica, exchanges(kind, 2))
    assert any(isinstance(e, MismatchError) and "setting 'clip'" in str(e) for e in results)


def test_a_fixed_run_that_is_resumed_clips_on(tmp_path):
    def meet(*, resume):
        store = open_store(str(tmp_path))
        return [StoreExchange(store, rank, 2, resume=resume) for rank in range(2)]

    learned = [[[1.0, 2.0]], [[500.0, 0.0]]]
    run(lambda each: train(each, learned), meet(resume=False))
    again = run(lambda each: train(each, learned)[1], meet(resume=True))
    assert all(reports[0].clipped[1].least < 1 for reports in again)
