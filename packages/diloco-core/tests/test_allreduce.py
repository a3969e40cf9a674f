"""Any exchange of any tensors is the exact mean in rank order, the same bytes on every replica."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_core import ConfigurationError, ObjectStoreAllReduce, StoreExchange, connect, in_process
from diloco_core._store._open import open_store
from diloco_core.testing import run_replicas

_prefixes = itertools.count()

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)


def exchanges(kind, world_size, chunk_bytes, tmp_path=None):
    if kind == "threads":
        return in_process(world_size, chunk_bytes=chunk_bytes)
    name = str(next(_prefixes))
    uri = f"memory://mean/{name}" if kind == "memory" else str(tmp_path / name)
    stores = [open_store(uri) for _ in range(world_size)]
    options = {"chunk_bytes": chunk_bytes}
    return [StoreExchange(store, r, world_size, **options) for r, store in enumerate(stores)]


def means(tensors_of, exchanges):
    """Return what each replica holds after a mean, and its report; or its error."""

    def replica(exchange):
        tensors = tensors_of(exchange.rank)
        with ObjectStoreAllReduce(exchange) as reduce:
            return tensors, reduce.mean(tensors)

    return run_replicas(replica, exchanges)


def exact_mean(columns):
    """Sum in rank order in at least fp32, divided once, rounded once."""
    results = []
    for tensors in zip(*columns, strict=True):
        wide = torch.promote_types(tensors[0].dtype, torch.float32)
        total = tensors[0].to(wide)
        for tensor in tensors[1:]:
            total = total + tensor.to(wide)
        results.append((total / len(tensors)).to(tensors[0].dtype))
    return results


@st.composite
def cases(draw):
    world = draw(st.integers(1, 5))
    described = draw(st.lists(st.tuples(shapes, st.sampled_from(DTYPES)), min_size=1, max_size=6))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    columns = [
        [
            torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
            for shape, dtype in described
        ]
        for _ in range(world)
    ]
    return columns, draw(st.sampled_from([1, 8, 64, 100, 2**20]))


@pytest.mark.parametrize("kind", ["threads", "memory"])
@settings(deadline=None, max_examples=25)
@given(case=cases())
def test_any_exchange_is_the_exact_mean_in_rank_order(kind, case):
    columns, chunk_bytes = case
    expected = exact_mean(columns)
    made = exchanges(kind, len(columns), chunk_bytes)
    for tensors, _ in means(lambda rank: [column.clone() for column in columns[rank]], made):
        for tensor, wanted in zip(tensors, expected, strict=True):
            assert torch.equal(tensor, wanted)


@pytest.mark.sampled
@pytest.mark.parametrize("kind", ["threads", "memory", "folder"])
def test_many_means_in_a_row(kind, tmp_path):
    def replica(exchange):
        tensor = torch.tensor([float(exchange.rank), 1.0])
        reports = []
        with ObjectStoreAllReduce(exchange) as reduce:
            for _ in range(10):
                tensor += exchange.rank
                reports.append(reduce.mean([tensor]))
        return tensor, reports

    results = run_replicas(replica, exchanges(kind, 3, 2**20, tmp_path))
    for tensor, reports in results:
        assert tensor.tolist() == [1.0 + 10, 1.0 + 10]
        assert [report.sync for report in reports] == list(range(10))
        assert all(report.committed and report.members == 3 for report in reports)


def test_one_process_of_a_group_says_whose_means_it_takes(tmp_path, monkeypatch):
    place = {"rank": 0, "world_size": 1}
    environ = {"REPLICA_RANK": "0", "REPLICA_WORLD_SIZE": "1"}
    exchange = connect(tmp_path / "one", **place)
    untold = ObjectStoreAllReduce(tmp_path / "two", rank=0, environ=environ)
    told = ObjectStoreAllReduce(tmp_path / "three", **place)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    for reduce in (ObjectStoreAllReduce(exchange), untold):
        with pytest.raises(ConfigurationError, match=r"group of 2 .* pass rank= and world_size="):
            reduce.mean([torch.ones(1)])
        reduce.close()
    tensor = torch.ones(2)
    with told as reduce:
        assert reduce.mean([tensor]).members == 1
    with ObjectStoreAllReduce(in_process(1)[0]) as reduce:  # which needs no store
        assert reduce.mean([tensor]).members == 1


def test_only_floating_point_has_a_mean():
    reduce = ObjectStoreAllReduce(in_process(1)[0])
    for tensors, text in (
        ([torch.ones(1), torch.ones(1, dtype=torch.int64)], r"number 1 is torch.int64"),
        ([[1.0]], "number 0 is list"),
        ([], "at least one"),
    ):
        with pytest.raises(ConfigurationError, match=text):
            reduce.mean(tensors)
