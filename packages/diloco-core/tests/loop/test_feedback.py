"""Error feedback in every exchange: what a codec loses is added to the next contribution."""

import logging

import pytest
import torch
from resuming_lab import REPLICAS, Experiment, equal
from training_lab import fill, identical, push, run, train, values

from diloco_core import (
    ConfigurationError,
    DiLoCo,
    MismatchError,
    NonFiniteDeltaError,
    connect,
    in_process,
)
from diloco_core._codecs._codec import is_sparse
from diloco_core._codecs._named import CODECS
from diloco_core.testing import run_replicas

KINDS = ("in process", "fixed", "sharded", "gather")
CODEC = "e2m1"
DENSE = [name for name, codec in CODECS.items() if not codec.plain and not is_sparse(codec)]
PERIOD, SYNCS = 3, 4


def exchanges(kind, folder, **options):
    if kind == "in process":
        return in_process(2)
    elastic = {} if kind == "fixed" else {"min_replicas": 2, "topology": kind}
    return [connect(folder, rank=rank, world_size=2, **elastic, **options) for rank in range(2)]


def make(rank=0):
    return fill(torch.nn.Linear(16, 10))


def sent(learned):
    codec, out = CODECS[CODEC], torch.empty_like(learned)
    codec.decode(codec.encode(learned), out)
    return out


def flat(model):
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def wanted(delay, alpha, decay):
    """The parameters after some syncs without outer momentum, by the formulas."""
    models = [make() for _ in range(2)]
    inners = [torch.optim.SGD(model.parameters(), lr=1.0) for model in models]
    copy, residuals = flat(models[0]), [torch.zeros(170) for _ in range(2)]
    for sync in range(SYNCS):
        decoded = []
        for rank in range(2):
            for step in range(PERIOD * sync, PERIOD * (sync + 1)):
                if step == PERIOD * (sync + 1) - delay:
                    offered = copy - flat(models[rank]) + decay * residuals[rank]
                push(models[rank], inners[rank], rank, step)
            if not delay:
                offered = copy - flat(models[rank]) + decay * residuals[rank]
            # Shards are cut at multiples of 32 elements, so that blocks are the same in all of
            # them.
            decoded.append(sent(offered))
            residuals[rank] = offered - decoded[rank]
        copy = copy - 0.5 * (decoded[0] + decoded[1]) / 2
        for model in models:
            mixed = torch.lerp(copy, flat(model), alpha)
            torch.nn.utils.vector_to_parameters(mixed, model.parameters())
    return copy


@pytest.mark.parametrize(("delay", "alpha"), [(0, 0.0), (1, 0.0), (1, 0.5), (0, 0.5)])
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_as_in_the_formulas(kind, delay, alpha, tmp_path):
    decay = 0.75
    options = {"outer_lr": 0.5, "outer_momentum": 0.0, "delay": delay, "alpha": alpha}

    def replica(exchange):
        model = make()
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        loop = DiLoCo(
            model, inner, exchange, sync_every=PERIOD, codec=CODEC, error_feedback=decay, **options
        )
        with loop:
            for step in range(PERIOD * SYNCS):
                push(model, inner, exchange.rank, step)
        return flat(model)

    ends = run(replica, exchanges(kind, tmp_path / "run"))
    assert torch.equal(ends[0], ends[1])
    assert torch.allclose(ends[0], wanted(delay, alpha, decay), rtol=0, atol=1e-5)


def test_true_is_a_decay_of_one():
    whole, one, other = (
        train(make, in_process(2), steps=8, codec=CODEC, error_feedback=given)
        for given in (True, 1.0, 0.5)
    )
    assert identical([*whole, *one])
    assert not identical([whole[0], other[0]])


@pytest.mark.parametrize("codec", DENSE)
def test_over_many_syncs_it_loses_less(codec):
    """Small values beside large ones never arrive without it."""

    def one(exchange, **options):
        model = torch.nn.Linear(64, 1, bias=False)
        with torch.no_grad():
            model.weight.zero_()
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        gradient = torch.full((1, 64), 3e-3)
        gradient[0, 0] = -1.0
        loop = DiLoCo(
            model, inner, exchange, sync_every=1, outer_lr=1.0, outer_momentum=0.0, **options
        )
        with loop:
            for _ in range(100):
                model.weight.grad = gradient.clone()
                inner.step()
        return model.weight.detach().clone()

    (exact,) = run(one, in_process(1))
    (without,) = run(lambda exchange: one(exchange, codec=codec), in_process(1))
    (fed,) = run(lambda exchange: one(exchange, codec=codec, error_feedback=True), in_process(1))
    off, off_without = ((end - exact).abs().max().item() for end in (fed, without))
    assert off <= 0.2, "at most what one contribution loses"
    assert off <= off_without + 1e-6
    if codec in {"int8", "e2m1"}:
        assert off_without > 0.29, "the small values have never been sent"


@pytest.mark.parametrize(("stop", "delay"), [(0, 0), (1, 0), (4, 0), (7, 0), (4, 1), (8, 1)])
def test_a_loaded_state_goes_on_with_its_residual(lab, stop, delay):
    experiment = Experiment(lab, codec=CODEC, error_feedback=True, delay=delay)
    wanted = lab.run(experiment.whole, in_process(REPLICAS))
    saved = lab.run(experiment.until(stop), in_process(REPLICAS))
    assert all(map(equal, lab.run(experiment.since(saved, stop), in_process(REPLICAS)), wanted))


def state_of(**options):
    """The state after two syncs, and a loop that it may be loaded into."""
    (exchange,) = in_process(1)
    model = make()
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    with DiLoCo(model, inner, exchange, sync_every=2, codec=CODEC, **options) as outer:
        for step in range(4):
            push(model, inner, 0, step)
        return outer.state_dict(), model


def loop_for(model, **options):
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    return DiLoCo(model, inner, in_process(1)[0], sync_every=2, codec=CODEC, **options)


def test_a_state_with_another_residual_is_refused():
    state, model = state_of(error_feedback=True)
    loop_for(model, error_feedback=True).load_state_dict(state)
    part = state["fragments"][0]
    for wrong in ([part["residual"][0] + 1.0], [torch.zeros(3)], None):
        changed = {**state, "fragments": [{**part, "residual": wrong}]}
        with pytest.raises(ConfigurationError, match="have changed since state_dict"):
            loop_for(model, error_feedback=True).load_state_dict(changed)


@pytest.mark.parametrize(("before", "after"), [(True, False), (False, True), (True, 0.5)])
def test_a_state_of_another_setting_is_refused_by_name(before, after):
    state, model = state_of(error_feedback=before)
    with pytest.raises(ConfigurationError, match="setting 'error_feedback' is"):
        loop_for(model, error_feedback=after).load_state_dict(state)


@pytest.mark.parametrize("kind", ["in process", "fixed"])
def test_replicas_that_differ_in_it_are_refused_by_name(kind, tmp_path):
    def one(exchange):
        return train_one(exchange, codec=CODEC, error_feedback=(0.5, True)[exchange.rank])

    errors = run_replicas(one, exchanges(kind, tmp_path / "run"))
    assert any(
        isinstance(error, MismatchError) and "setting 'error_feedback'" in str(error)
        for error in errors
    )


def train_one(exchange, steps=6, **options):
    model = make()
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    with DiLoCo(model, inner, exchange, sync_every=2, **options) as outer:
        while outer.inner_steps < steps:
            push(model, inner, exchange.rank, outer.inner_steps)
    return values(model)


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize(("kind", "fragments"), [("fixed", 1), ("fixed", 2), ("sharded", 1)])
def test_a_resumed_run_ends_as_one_that_was_not_interrupted(
    kind, delay, fragments, tmp_path, caplog
):
    caplog.set_level(logging.WARNING)
    options = {
        "codec": CODEC,
        "error_feedback": True,
        "sync_every": 2 * fragments,
        "delay": delay,
        "fragments": fragments,
        "flush": "none",
    }
    steps = 8

    def until(exchange, last, **saves):
        model = make()
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        with DiLoCo(model, inner, exchange, **saves, **options) as outer:
            while outer.inner_steps < last:
                push(model, inner, exchange.rank, outer.inner_steps)
        return values(model)

    undisturbed = run(lambda exchange: until(exchange, 2 * steps), in_process(2))
    run(
        lambda exchange: until(exchange, steps, save_inner_every=1),
        exchanges(kind, tmp_path / "run"),
    )
    again = exchanges(kind, tmp_path / "run", resume=True)
    ends = run(lambda exchange: until(exchange, 2 * steps, save_inner_every=1), again)
    assert identical([*ends, *undisturbed])
    assert "error feedback" not in caplog.text


@pytest.mark.parametrize("elastic", [{}, {"min_replicas": 2}], ids=["fixed", "elastic"])
@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("save_every", [0, 4])
def test_a_residual_that_was_not_saved_is_lost_and_said(
    elastic, save_every, delay, tmp_path, caplog
):
    options = {
        "delay": delay,
        "codec": CODEC,
        "error_feedback": True,
        "sync_every": 2,
        "save_inner_every": save_every,
    }
    kind = "sharded" if elastic else "fixed"

    class StopError(Exception):
        pass

    def until(exchange, last, *, stops):
        model = make()
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        with DiLoCo(model, inner, exchange, **options) as outer:
            begun = [part.residual.values for part in outer._fragments]
            while outer.inner_steps < last:
                push(model, inner, exchange.rank, outer.inner_steps)
            if stops:
                raise StopError
        return begun

    with pytest.raises(BaseExceptionGroup):
        run(lambda exchange: until(exchange, 8, stops=True), exchanges(kind, tmp_path / "run"))
    caplog.clear()
    again = exchanges(kind, tmp_path / "run", resume=True)
    begun = run(lambda exchange: until(exchange, 10, stops=False), again)
    assert begun == [[[]], [[]]]
    for rank in (0, 1):
        said = [
            record
            for record in caplog.records
            if f"rank {rank}: error feedback of fragment 0 starts again from zero after sync"
            in record.getMessage()
        ]
        assert [record.levelno for record in said] == [logging.WARNING]
        advised = ["save_inner_every=1 avoids this" in record.getMessage() for record in said]
        assert advised == [True]


@pytest.mark.parametrize("kind", ["fixed", "sharded"])
def test_a_residual_outlives_a_kill_after_a_delayed_sync_was_counted(kind, tmp_path, caplog):
    """Its contribution is counted, but this rank has not adopted the sync yet, and has saved
    nothing since.
    """
    options = {"codec": CODEC, "error_feedback": True, "sync_every": 2, "delay": 1}

    class StopError(Exception):
        pass

    def until(exchange, last, *, stops):
        model = make()
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        with DiLoCo(model, inner, exchange, save_inner_every=1, **options) as outer:
            while outer.inner_steps < last:
                push(model, inner, exchange.rank, outer.inner_steps)
            if stops:
                assert outer.syncing
                outer._outer_steps._sent.result()
                raise StopError

    with pytest.raises(BaseExceptionGroup):
        run(lambda exchange: until(exchange, 7, stops=True), exchanges(kind, tmp_path / "run"))
    caplog.clear()
    again = exchanges(kind, tmp_path / "run", resume=True)
    run(lambda exchange: until(exchange, 9, stops=False), again)
    assert "starts again from zero" not in caplog.text


def test_what_is_not_finite_with_the_residual_is_refused_before_it_is_sent(tmp_path):
    exchange = connect(tmp_path / "run", rank=0, world_size=1)
    model = torch.nn.Linear(4, 1, bias=False)
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    options = {"codec": "fp16", "error_feedback": True, "outer_lr": 1e-30}

    def act():
        with DiLoCo(model, inner, exchange, sync_every=1, **options):
            for _ in range(4):  # fp16 sends 65504 of it, and the rest remains
                model.weight.grad = torch.full((1, 4), 0.75 * torch.finfo(torch.float32).max)
                inner.step()

    with pytest.raises(NonFiniteDeltaError, match="'weight' holds NaN or infinity"):
        act()


@pytest.mark.parametrize("given", [0, 0.0, -0.5, 1.5, "yes", torch.nan, [1.0]])
def test_what_is_no_decay_is_refused(given):
    with pytest.raises(ConfigurationError, match=r"error_feedback is .*True, False, or a number"):
        loop_for(make(), error_feedback=given)


@pytest.mark.parametrize("given", [True, 0.5])
def test_a_codec_that_loses_nothing_has_none(given):
    inner_model = make()
    inner = torch.optim.SGD(inner_model.parameters(), lr=1.0)
    with pytest.raises(ConfigurationError, match="cannot be used with codec='plain', which loses"):
        DiLoCo(inner_model, inner, in_process(1)[0], sync_every=1, error_feedback=given)
    DiLoCo(inner_model, inner, in_process(1)[0], sync_every=1, error_feedback=False)
