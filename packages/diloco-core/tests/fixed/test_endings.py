"""Test how runs end: the one that failed first is named, and nobody is kept waiting."""

import tempfile

import pytest
import torch
from strict_lab import STORES

from diloco_core import (
    MismatchError,
    ObjectStoreAllReduce,
    ReplicaLostError,
    StoreExchange,
    UnequalSyncsError,
    in_process,
)
from diloco_core._exchange._endings import Ending, Progress, conclude
from diloco_core.testing import run_replicas

pytestmark = pytest.mark.processes


@pytest.fixture(params=[*STORES, "threads"])
def make(request, tmp_path):
    """Makes exchanges for all ranks; over a store, nobody waits for a rank to be started again."""

    def of(world_size):
        if request.param == "threads":
            return in_process(world_size)
        folder = tempfile.mkdtemp(dir=tmp_path)
        return [
            StoreExchange(STORES[request.param](folder), rank, world_size)
            for rank in range(world_size)
        ]

    return of


def left(rank, number=3):
    return Ending(rank, "left", Progress(number, number))


def failed(rank, cause=None, message="ValueError: x"):
    return Ending(rank, "failed", Progress(3, 2), message, cause)


class TestConclusions:
    @pytest.mark.parametrize(
        ("endings", "missing", "wanted"),
        [
            ([], [0, 1], None),
            ([failed(2)], [], (ReplicaLostError, 2)),
            ([failed(1, cause=0)], [0, 1], (ReplicaLostError, 0)),
            ([failed(1, cause=0), failed(2, cause=1)], [0, 1, 2], (ReplicaLostError, 0)),
            ([failed(1, cause=0), failed(0)], [0, 1], (ReplicaLostError, 0)),
            ([failed(1, cause=2), failed(0)], [0, 1], (ReplicaLostError, 0)),
            ([failed(1, cause=3)], [1], (ReplicaLostError, 1)),
            ([left(1)], [1], (UnequalSyncsError, 1)),
            ([left(1)], [2], None),
            ([left(1, number=4)], [1], None),
            ([left(1), failed(2, cause=1)], [2], (UnequalSyncsError, 1)),
            ([left(1), failed(2)], [1], (ReplicaLostError, 2)),
            # Both have finished the sync at hand, and rank 2 has missed rank 1 in the next one.
            ([left(1, number=4), failed(2, cause=1)], [2], None),
            (
                [left(1, number=4), failed(2, cause=1), failed(0, cause=2)],
                [2],
                (ReplicaLostError, 2),
            ),
        ],
    )
    def test_who_is_named(self, endings, missing, wanted):
        error = conclude({ending.rank: ending for ending in endings}, missing, 3, Progress(3, 2))
        assert (error and (type(error), error.rank)) == wanted


@pytest.mark.sampled
def test_everybody_names_the_replica_that_failed_first(make, lab):
    def replica(exchange):
        model = lab.fill(lab.small_model())
        outer, optimizer = lab.outer_loop(model, exchange)
        with outer:
            for step in range(4):
                if exchange.rank == 1 and step == 2:
                    raise ValueError("bad batch")
                lab.small_step(model, optimizer)

    results = run_replicas(replica, make(4))
    lost = ReplicaLostError
    assert lab.kinds(results) == [lost, ValueError, lost, lost]
    assert {results[rank].rank for rank in (0, 2, 3)} == {1}
    assert "rank 1 failed after 2 syncs" in str(results[0])
    assert "ValueError: bad batch" in str(results[0])


@pytest.mark.sampled
def test_runs_without_a_step_end_in_peace(make, lab):
    """Whoever is done first has left before the others have adopted what it published."""

    def replica(exchange):
        model = lab.fill(torch.nn.Linear(3, 2), seed=exchange.rank)
        outer, _ = lab.outer_loop(model, exchange)
        with outer:
            pass
        return lab.values(model)

    for _ in range(5):
        assert lab.identical(lab.run(replica, make(3)))


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("others", "call"),
    [
        ([torch.ones(5)], 0),
        ([torch.ones(4), torch.ones(1)], 2),
        ([torch.ones(4, dtype=torch.float64)], 2),
        ([torch.ones(2, 2)], 0),
    ],
)
def test_other_tensors_on_one_replica_are_named(make, others, call, lab):
    """Another number, shape or dtype, from the first call on or later."""

    def replica(exchange):
        with ObjectStoreAllReduce(exchange) as reduce:
            for number in range(3):
                reduce.mean(others if exchange.rank and number == call else [torch.ones(4)])

    results = run_replicas(replica, make(2))
    assert MismatchError in lab.kinds(results)
    assert set(lab.kinds(results)) <= {MismatchError, ReplicaLostError}
    text = next(str(result) for result in results if isinstance(result, MismatchError))
    assert f"in mean {call + 1}, rank" in text
    assert "the same shapes and dtypes" in text
