"""Objects that are damaged between being written and being read are found, and end the run."""

import json

import pytest
import torch

from diloco_core import (
    CorruptedObjectError,
    ObjectStoreAllReduce,
)
from diloco_core.testing import run_replicas


class TestDamage:
    """Objects that are damaged in the store between being written and being read."""

    @staticmethod
    def damage(store, monkeypatch, folder, harm):
        """Let every object below a folder be harmed as it is written."""
        real = store.put

        def put(key, parts):
            data = bytearray()
            for part in parts:
                data += part
            return real(key, [harm(bytes(data)) if key.startswith(folder) else data])

        monkeypatch.setattr(store, "put", put)

    @staticmethod
    def flip(data):
        """Flip one bit in the first section."""
        start = 8 + int.from_bytes(data[:8], "little")
        return data[: start + 2] + bytes([data[start + 2] ^ 16]) + data[start + 3 :]

    @pytest.mark.parametrize("folder", ["deltas/", "state/"])
    @pytest.mark.parametrize("harm", ["flip", "cut", "empty"])
    def test_a_damaged_object_is_refused(self, lab, tmp_path, monkeypatch, folder, harm):
        def replica(exchange):
            with ObjectStoreAllReduce(exchange) as reduce:
                reduce.mean([torch.ones(64)])

        exchanges = lab.store_exchanges(tmp_path, 2)
        harms = {"flip": self.flip, "cut": lambda data: data[:-9], "empty": lambda data: b""}
        self.damage(exchanges[1].store, monkeypatch, folder, harms[harm])
        results = run_replicas(replica, exchanges)
        assert lab.kinds(results)[0] is CorruptedObjectError, results
        assert folder in str(results[0])

    def test_a_damaged_contribution_never_reaches_the_published_state(self, lab, tmp_path, monkeypatch):
        def replica(exchange):
            with ObjectStoreAllReduce(exchange) as reduce:
                reduce.mean([torch.ones(64)])

        exchanges = lab.store_exchanges(tmp_path, 2)
        self.damage(exchanges[1].store, monkeypatch, "deltas/", self.flip)
        run_replicas(replica, exchanges)
        assert "state/00000000/00000.safetensors" not in exchanges[0].store.list("state/")

    def test_a_commit_record_of_others_is_refused(self, lab, tmp_path):
        (exchange,) = lab.store_exchanges(tmp_path, 1)
        record = {"sync": 0, "members": [{"rank": 0, "key": "deltas/00000000/else"}]}
        real = exchange.store.put

        def put(key, parts):
            return real(key, [json.dumps(record).encode()] if key.startswith("commits/") else parts)

        exchange.store.put = put
        with pytest.raises(CorruptedObjectError, match="other members"):
            ObjectStoreAllReduce(exchange).mean([torch.ones(1)])
