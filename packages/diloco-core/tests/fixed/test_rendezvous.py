"""Replicas meet, agree on everything, or are told at once and by name what is in the way."""

import keys_lab
import pytest
import torch
from strict_lab import Changing, Means, Run
from training_lab import identical

from diloco_core import (
    MismatchError,
    ObjectStoreAllReduce,
    RendezvousTimeoutError,
    ReplicaLostError,
    RunExistsError,
    in_process,
)
from diloco_core.testing import run_replicas

pytestmark = pytest.mark.processes


def mean(exchange):
    """Take one mean; its value."""
    with ObjectStoreAllReduce(exchange) as reduce:
        tensor = torch.full((64,), float(exchange.rank))
        reduce.mean([tensor])
    return tensor


class Failing(Means):
    """Rank 1 fails after one mean."""

    def train(self, exchange, until):
        if not exchange.rank:
            return super().train(exchange, until)
        with ObjectStoreAllReduce(exchange) as reduce:
            reduce.mean([torch.zeros(64)])
            raise ValueError("m")


def told(change):
    """Return how rank 0 ends when rank 1 has failed and its failure note is changed."""
    result, _ = Failing(2, store=Changing(keys_lab.of("note", rank=1), change)).live(until=2)
    return result


def test_a_replica_that_never_comes_is_named(new_store):
    limits = {rank: {"join_timeout": 50.0} for rank in range(4)}
    results = Run(4, store=new_store(), limits=limits).live(ranks=[0, 2])
    first = next(result for result in results if isinstance(result, RendezvousTimeoutError))
    assert first.missing == (1, 3)
    # Whoever gives up first tells the other, which then need not wait any longer.
    assert all("missing: ranks 1, 3" in str(result) for result in results)


def test_another_model_is_refused_and_the_tensor_named(lab, tmp_path, exchanges_in):
    def replica(exchange):
        outer, _ = lab.outer_loop(lab.small_model(width=4 + exchange.rank), exchange)
        with outer:
            pass

    for exchanges in (exchanges_in(tmp_path, 2), in_process(2)):
        results = run_replicas(replica, exchanges)
        assert lab.kinds(results) == [MismatchError] * 2
        assert "tensor '0.weight'" in str(results[0])
        assert "float32[4, 3]" in str(results[0])
        assert "float32[5, 3]" in str(results[0])


def test_another_world_size_is_refused(lab, tmp_path, exchanges_in):
    exchanges = [*exchanges_in(tmp_path, 2, [0]), *exchanges_in(tmp_path, 3, [1])]
    results = run_replicas(mean, exchanges)
    assert MismatchError in lab.kinds(results)
    assert set(lab.kinds(results)) <= {MismatchError, ReplicaLostError}
    assert all("world_size" in str(result) for result in results)


@pytest.mark.sampled
@pytest.mark.parametrize("starts", [(0.0, 0.0), (0.0, 5.0), (5.0, 0.0)])
def test_after_a_refusal_they_can_be_started_again(starts):
    class Unequal(Run):
        def train(self, exchange, until, **more):
            return super().train(exchange, until, outer_lr=0.5 + 0.1 * exchange.rank, **more)

    refused = Unequal(2)
    assert [type(result) for result in refused.live()] == [MismatchError] * 2
    limits = {rank: {"return_within": 300.0} for rank in range(2)}
    run = Run(2, store=refused.store, options={"outer_lr": 0.5}, incarnations=1, limits=limits)
    assert identical([*run.live(starts=starts), *Run(2, options={"outer_lr": 0.5}).live()])


def test_a_second_run_on_the_same_prefix_is_refused(new_store):
    run = Run(2, store=new_store())
    run.live(until=2)
    before = dict(run.store.objects)
    for result in run.live(until=2):
        assert isinstance(result, RunExistsError)
        assert "start all of its ranks again with resume=True" in str(result)
        assert "use another prefix" in str(result)
    assert run.store.objects == before


def test_of_two_launches_at_the_same_time_one_is_refused(new_store):
    class Launches(Means):
        def exchange(self, connection, scheduler, limits, resume):
            exchange = super().exchange(connection, scheduler, limits, resume)
            exchange.run_id = ("monday", "tuesday")[connection.rank]
            return exchange

    results = Launches(2, store=new_store()).live(until=1)
    assert isinstance(results[0], (RendezvousTimeoutError, ReplicaLostError))
    assert isinstance(results[1], RunExistsError)
    assert "monday" in str(results[1])
    assert "tuesday" in str(results[1])


@pytest.mark.sampled
@pytest.mark.parametrize("field", ["event", "reason", "cause"])
@pytest.mark.parametrize("value", [-1, 10**30, "x", [], ...])
def test_whatever_is_said_the_rank_that_failed_is_named(field, value):
    whole = (field, value) in [("reason", "x"), ("cause", ...)]
    match = "rank 1 failed after 1 sync: " if whole else "rank 1 has left or failed after 1 sync"
    with pytest.raises(ReplicaLostError, match=match) as it:
        raise told(lambda key, note: keys_lab.sealed_again(key, note, **{field: value}))
    assert it.value.rank == 1


def test_what_else_lies_in_the_prefix_is_passed_over(lab, tmp_path, exchanges_in):
    """Placeholders of consoles, leftovers of copies, files of other tools."""

    def replica(exchange):
        with ObjectStoreAllReduce(exchange) as reduce:
            for _ in range(3):
                reduce.mean([torch.ones(4)])
            return exchange.store.list("")

    made = exchanges_in(tmp_path, 2)
    folders = "claims claims/00001 beats deltas deltas/00000002 state state/00000002 commits"
    folders += " inner initial generations generations/000001-x meetings"
    names = "_$folder$ x 00007.json.bak a.json 00001.safetensors \u0661\u0661.json"
    stray = [f"{folder}/{name}" for folder in folders.split() for name in names.split()]
    for key in stray:
        made[0].store.put(key, [b""])
    for keys in lab.run(replica, made):
        assert set(stray) <= set(keys)


@pytest.mark.parametrize(
    "left", [keys_lab.claim_key(0), keys_lab.commit_key(1), keys_lab.state_key(1, 0)]
)
def test_what_is_left_of_another_run_is_refused(lab, tmp_path, left):
    (exchange,) = lab.store_exchanges(tmp_path, 1)
    exchange.store.put(left, [b"{}"])
    with pytest.raises(RunExistsError, match="holds objects of an earlier run") as caught:
        mean(exchange)
    assert left in str(caught.value)
    assert list(exchange.store.list("")) == [left]
