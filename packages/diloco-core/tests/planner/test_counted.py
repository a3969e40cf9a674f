"""What is planned and what is reported is what a store sees."""

from functools import partial

import pytest
import torch

from diloco_core import (
    DiLoCo,
    Elastic,
    ElasticExchange,
    ObjectStoreExchange,
    plan_exchange,
)
from diloco_core._store._open import open_store


class Counting:
    """A store that counts payload bytes."""

    def __init__(self, store):
        self._store = store
        self.sent = self.received = 0

    def __getattr__(self, name):
        return getattr(self._store, name)

    def put(self, key, parts):
        size = self._store.put(key, parts)
        self.sent += size * key.endswith(".safetensors")
        return size

    def create(self, key, data):
        if isinstance(data, bytes):
            return self._store.create(key, data)
        parts = [bytes(part) for part in data]
        created = self._store.create(key, parts)
        self.sent += sum(map(len, parts)) * created
        return created

    def open(self, key, size=None):
        reader = self._store.open(key, size)
        read_into = reader.read_into

        def counted(offset, buffer):
            self.received += len(buffer)
            read_into(offset, buffer)

        reader.read_into = counted
        return reader


class TestCounted:
    """What is planned and what is reported is what a store sees."""

    @pytest.mark.parametrize("kind", ["strict", "sharded", "gather"])
    @pytest.mark.parametrize(
        ("replicas", "optimizer", "outer_state"),
        [(n, "momentum", 1.0) for n in (1, 2, 8)] + [(3, "plain", 0.0), (3, "Adam", 2.0)],
    )
    def test_bytes(self, lab, tmp_path, kind, replicas, optimizer, outer_state):
        plan, mean = self.moved(lab, tmp_path, kind, replicas, optimizer, outer_state, 24_000)
        assert mean == pytest.approx([plan.bytes_sent, plan.bytes_received], rel=0.03, abs=3000)

    @pytest.mark.parametrize(
        ("kind", "outer_state"), [("strict", 0.0), ("strict", 1.0), ("sharded", 1.0)]
    )
    def test_bytes_of_encoded_state(self, lab, tmp_path, kind, outer_state):
        optimizer = "momentum" if outer_state else "plain"
        codecs = {"codec": "int8", "state_codec": "int8", "full_state_every": 2}
        plan, mean = self.moved(lab, tmp_path, kind, 4, optimizer, outer_state, 400_000, **codecs)
        assert mean == pytest.approx([plan.bytes_sent, plan.bytes_received], rel=0.02)

    def moved(self, lab, tmp_path, kind, replicas, optimizer, outer_state, params, **codecs):
        """The plan, and the bytes that a replica sent and received per sync."""
        cycles = 2
        outer = {
            "plain": {"outer_momentum": 0.0},
            "momentum": {},
            "Adam": {"outer_optimizer": partial(torch.optim.Adam, lr=0.1)},
        }[optimizer]
        stores = [Counting(open_store(str(tmp_path))) for _ in range(replicas)]
        seen, reports = [[] for _ in stores], [[] for _ in stores]

        def replica(exchange):
            model = torch.nn.ParameterList([torch.ones(params)])
            inner = torch.optim.SGD(model.parameters(), lr=1.0)

            def count(report):
                store = stores[exchange.rank]
                seen[exchange.rank].append((store.sent, store.received))
                reports[exchange.rank].append(report)

            with DiLoCo(model, inner, exchange, sync_every=1, on_sync=count, **outer, **codecs):
                # A sync is planned as it is in the middle of a run, with the outer state there.
                for step in range(2 + 2 * cycles):
                    lab.push(model, inner, exchange.rank, step)

        lab.run(
            replica,
            [self.exchange(kind, store, rank, replicas) for rank, store in enumerate(stores)],
        )
        for rank in range(replicas):
            first, last = seen[rank][1], seen[rank][-1]
            counted = [last[i] - first[i] for i in (0, 1)]
            reported = [
                sum(r.bytes_sent for r in reports[rank][2:]),
                sum(r.bytes_received for r in reports[rank][2:]),
            ]
            assert reported == pytest.approx(counted, rel=0.02, abs=1000 * cycles)
        plan = plan_exchange(
            params,
            replicas,
            1e9,
            topology="gather" if kind == "gather" else "sharded",
            strict=kind == "strict",
            outer_state=outer_state,
            publish_every=2,
            **codecs,
        )
        mean = [
            sum(seen[r][-1][i] - seen[r][1][i] for r in range(replicas)) / replicas / 2 / cycles
            for i in (0, 1)
        ]
        return plan, mean

    @staticmethod
    def exchange(kind, store, rank, replicas):
        if kind == "strict":
            return ObjectStoreExchange(store, rank, replicas)
        return ElasticExchange(
            store, rank, replicas, Elastic(replicas, topology=kind, publish_every=2)
        )
