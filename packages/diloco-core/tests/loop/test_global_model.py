"""The last committed values: in the model for a time, and as copies."""

from functools import partial

import pytest
import torch
from export_lab import Everything, compiled_by_torch
from export_lab import exchanges as over_store
from loop_lab import exchanges, live, loop
from safetensors.torch import load_file
from training_lab import fill, identical, push, run, values

from diloco_core import (
    DiLoCo,
    ModelChangedError,
    NonFiniteDeltaError,
    SyncError,
    export,
    in_process,
)
from diloco_core.testing import run_replicas

pytestmark = pytest.mark.sampled

DELAYED = {"sync_every": 4, "fragments": 2, "delay": 1, "alpha": 0.5}
AVERAGED = {"sync_every": 1, "outer_lr": 1.0, "outer_momentum": 0.0}
KINDS = ["threads", "store", "sharded", "gather", "manager"]


def layers():
    return torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))


def learn(model, inner, rank, step):
    """A step that also moves the running statistics, on each replica by other amounts."""
    norm = getattr(model, "norm", None)
    if norm is not None:
        norm.running_mean.add_(1 + rank)
        norm.num_batches_tracked.add_(1)
    push(model, inner, rank, step)


def replica(make, committed, exchange, looks=True, steps=9, **options):
    """Train a replica that looks at the committed values after every step where it may."""
    model = fill(make())
    inner = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    options = {"sync_every": 3, **options}
    with DiLoCo(model, inner, exchange, **options) as outer:
        for step in range(steps + 1):
            if step:  # it looks before the first one, too
                learn(model, inner, exchange.rank, step)
            if not looks or outer.syncing:
                continue
            own = values(model)
            state = outer.global_state_dict()
            assert identical([own, values(model)]), "the model is not touched"
            with outer.global_model():
                assert identical([state, values(model)])
            assert identical([own, values(model)]), "to the bit"
            before = committed[exchange.rank].setdefault(outer.committed, state)
            assert identical([before, state]), "they change in syncs alone"
    state = outer.global_state_dict()
    committed[exchange.rank][outer.committed] = state
    assert identical([state, values(model)]), "the block ends with what was committed last"
    return values(model)


@pytest.mark.parametrize(
    ("kind", "options"),
    [(kind, {}) for kind in KINDS]
    + [("store", DELAYED), ("gather", DELAYED), ("threads", AVERAGED), ("sharded", AVERAGED)],
)
def test_all_replicas_have_the_same_values_and_train_as_if_nobody_had_looked(kind, options):
    make, looked, alone = Everything, [{}, {}], [{}, {}]
    if kind == "manager":  # which knows no counters
        make = layers
    ends = run(partial(replica, make, looked, **options), exchanges(kind, 2))
    ends += run(partial(replica, make, alone, looks=False, **options), exchanges(kind, 2))
    assert identical(ends)
    assert looked[0].keys() == looked[1].keys()
    assert len(looked[0]) >= 4
    assert all(identical([looked[0][sync], looked[1][sync]]) for sync in looked[0])
    assert 0 in looked[0], "before the first sync"


@pytest.mark.parametrize(
    ("kind", "options"),
    [("fixed", {}), ("sharded", {}), ("gather", {}), ("sharded", DELAYED), ("gather", AVERAGED)],
)
def test_they_are_what_export_writes_of_the_same_sync(tmp_path, kind, options):
    committed, uri = [{}, {}], tmp_path / "run"
    run(partial(replica, Everything, committed, **options), over_store(uri, kind))
    sync = export(uri, tmp_path / "model")
    exported = load_file(tmp_path / "model")
    assert sync >= 3
    assert identical([committed[0][sync], committed[1][sync], exported])


def test_a_plain_model_takes_them_under_its_own_names():
    plain = Everything()
    model = compiled_by_torch(plain)
    inner = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    with DiLoCo(model, inner, in_process(1)[0], sync_every=2) as outer:
        before = values(plain)
        push(plain, inner, 0, 0)
        state = outer.global_state_dict()
    other = Everything()
    other.load_state_dict(state, strict=True)
    assert identical([before, values(other)])
    assert state["out.weight"] is state["embed.weight"], "tied tensors are one"
    state["out.weight"].zero_()
    assert plain.out.weight.any(), "they are copies"


def test_buffers_of_a_replica_alone_stay_its_own():
    model, inner, outer, _ = loop(model=fill(Everything()), buffers="none")
    with outer:
        learn(model, inner, 0, 0)
        own = model.norm.running_mean.clone()
        assert torch.equal(outer.global_state_dict()["norm.running_mean"], own)
        with outer.global_model():
            assert torch.equal(model.norm.running_mean, own)


def test_own_values_and_gradients_come_back_after_an_error_and_a_new_buffer():
    model, inner, outer, _ = loop(model=fill(Everything()))
    with outer:
        learn(model, inner, 0, 0)
        gradient = model.module.weight.grad
        own = values(model)

        def evaluate():
            with outer.global_model():
                assert not torch.equal(model.module.weight, own["module.weight"])
                model.norm.running_mean = torch.full((3,), 7.0)
                frozen = {name: own[name] for name in own if "frozen" in name}
                model.load_state_dict({name: each * 0 for name, each in own.items()} | frozen)
                raise ArithmeticError

        with pytest.raises(ArithmeticError):
            evaluate()
        assert identical([own, values(model)])
        assert model.module.weight.grad is gradient
        with outer.global_model(), torch.no_grad():
            model.norm.running_mean = model.norm.running_mean.clone()
        assert identical([own, values(model)])
        learn(model, inner, 0, 1)  # nothing was loaded that is still there


def test_a_load_is_still_noticed_after_it():
    model, inner, outer, _ = loop(sync_every=4)

    def load(model):
        with outer.global_model():
            pass
        model.load_state_dict({n: each * 2 for n, each in model.state_dict().items()})

    with pytest.raises(ModelChangedError, match="were loaded"):
        live(model, inner, outer, 0, load, 1)


def refused(act, what):
    with pytest.raises(SyncError, match=what):
        act()


def entered(outer):
    with outer.global_model():
        pass


def test_what_needs_own_values_is_refused_inside():
    model, inner, outer, reports = loop()
    refused(partial(entered, outer), r"call global_model\(\) inside its block")
    refused(outer.global_state_dict, r"call global_state_dict\(\) inside its block")
    with outer:
        push(model, inner, 0, 0)
        own = values(model)
        with outer.global_model():
            inside = values(model)
            refused(partial(entered, outer), r"global_model\(\) came inside")
            refused(outer.state_dict, r"state_dict\(\) came inside")
            refused(outer.flush, r"flush\(\) came inside")
            refused(lambda: push(model, inner, 0, 1), "a step of the inner optimizer came inside")
            assert identical([inside, values(model), outer.global_state_dict()])
        assert identical([own, values(model)])
        with outer.global_model():
            assert identical([inside, values(model)]), "it may be entered again"
        push(model, inner, 0, 1)
        assert [report.sync for report in reports] == [1]
    with outer.global_model():
        assert identical([values(model), outer.global_state_dict()]), "the block has ended"


def test_the_end_of_the_block_inside_is_an_error_of_this_replica():
    def each(exchange):
        model, inner, outer, _ = loop(exchange)
        outer.__enter__()
        push(model, inner, exchange.rank, 0)
        if exchange.rank == 0:
            own = values(model)
            with outer.global_model():
                refused(lambda: outer.__exit__(None, None, None), "the end of the block of DiLoCo")
            assert identical([own, values(model)])
            return "refused"
        return outer.__exit__(None, None, None)

    first, other = run_replicas(each, in_process(2))
    assert first == "refused"
    assert "the end of the block of DiLoCo" in str(other)


def test_while_a_sync_is_under_way_or_after_a_failed_one_there_are_no_whole_values():
    model, inner, outer, _ = loop(sync_every=3, delay=1)
    with outer:
        for step in range(2):
            push(model, inner, 0, step)
        assert outer.syncing
        for act in (partial(entered, outer), outer.global_state_dict):
            refused(act, r"a sync is under way \(delay=1\)")
        push(model, inner, 0, 2)
        with outer.global_model():
            pass
    model, inner, outer, _ = loop(sync_every=1)
    with pytest.raises(NonFiniteDeltaError):
        live(model, inner, outer, lambda model: model[0].weight.data.fill_(float("nan")), 0)
    for act in (partial(entered, outer), outer.global_state_dict):
        refused(act, "an earlier sync of this outer loop has failed")
