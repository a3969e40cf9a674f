"""Replicas meet once, agree on everything, or are told at once and by name what is in the way."""

import pytest
import torch

from diloco_core import (
    ConfigurationError,
    MismatchError,
    ObjectStoreAllReduce,
    ObjectStoreExchange,
    RendezvousTimeoutError,
    RunExistsError,
    Timing,
    in_process,
)
from diloco_core._exchange import Schema
from diloco_core._store import open_store
from diloco_core.testing import run_replicas


class TestMeeting:
    def test_a_replica_that_never_comes_is_named(self, lab, tmp_path):
        def replica(exchange):
            exchange.join(Schema({}, {}))

        results = run_replicas(replica, lab.store_exchanges(tmp_path, 4, ranks=[0, 2], join_timeout=5.0))
        first = next(result for result in results if isinstance(result, RendezvousTimeoutError))
        assert first.missing == (1, 3)
        # Whoever gives up first tells the other, which then need not wait any longer.
        assert all("missing: rank 1, 3" in str(result) for result in results)

    def test_a_thread_that_never_comes_is_named(self, lab):
        exchanges = in_process(3, timing=Timing(join_timeout=0.05))
        results = run_replicas(lambda exchange: exchange.join(Schema({}, {})), exchanges[:2])
        assert RendezvousTimeoutError in lab.kinds(results)
        assert "[2]" in str(results[0])

    def test_another_model_is_refused_and_the_tensor_named(self, lab, tmp_path):
        def replica(exchange):
            outer, _ = lab.outer_loop(lab.small_model(width=4 + exchange.rank), exchange)
            with outer:
                pass

        for exchanges in (lab.store_exchanges(tmp_path, 2), in_process(2)):
            results = run_replicas(replica, exchanges)
            assert lab.kinds(results) == [MismatchError] * 2
            assert "tensor '0.weight'" in str(results[0])
            assert "float32[4, 3]" in str(results[0])
            assert "float32[5, 3]" in str(results[0])

    def test_other_settings_are_refused_and_named(self, lab, tmp_path):
        def replica(exchange):
            outer, _ = lab.outer_loop(lab.small_model(), exchange, outer_lr=0.5 + 0.1 * exchange.rank)
            with outer:
                pass

        results = run_replicas(replica, lab.store_exchanges(tmp_path, 2))
        assert lab.kinds(results) == [MismatchError] * 2
        assert "setting 'outer_lr'" in str(results[0])
        assert "0.5" in str(results[0])

    def test_another_world_size_is_refused(self, lab, tmp_path):
        store = open_store(str(tmp_path / "run"))
        exchanges = [ObjectStoreExchange(store, 0, 2), ObjectStoreExchange(store, 1, 3)]
        results = run_replicas(lambda exchange: exchange.join(Schema({}, {})), exchanges)
        assert lab.kinds(results) == [MismatchError] * 2
        assert "world size" in str(results[0])

    def test_check_refuses_other_initial_values(self, lab, tmp_path):
        def replica(exchange):
            outer, _ = lab.outer_loop(nets[exchange.rank], exchange, init="check")
            with outer:
                pass

        nets = [lab.small_model(0), lab.small_model(1)]
        results = run_replicas(replica, lab.store_exchanges(tmp_path, 2))
        assert lab.kinds(results) == [MismatchError] * 2
        assert "values" in str(results[0])

    def test_the_first_rank_gives_the_initial_values(self, lab, tmp_path):
        nets = [lab.small_model(seed) for seed in range(3)]
        wanted = [parameter.clone() for parameter in nets[0].parameters()]

        def replica(exchange):
            outer, _ = lab.outer_loop(nets[exchange.rank], exchange)
            with outer:
                return [parameter.clone() for parameter in nets[exchange.rank].parameters()]

        for parameters in run_replicas(replica, lab.store_exchanges(tmp_path, 3)):
            assert all(map(torch.equal, parameters, wanted))

    def test_a_second_run_on_the_same_prefix_is_refused(self, lab, tmp_path):
        def replica(exchange):
            with ObjectStoreAllReduce(exchange) as reduce:
                reduce.mean([torch.ones(1)])

        assert lab.kinds(run_replicas(replica, lab.store_exchanges(tmp_path, 2))) == [type(None)] * 2
        results = run_replicas(replica, lab.store_exchanges(tmp_path, 2))
        assert lab.kinds(results) == [RunExistsError] * 2
        assert "prefix of its own" in str(results[0])

    def test_two_launches_on_the_same_prefix_are_told_apart(self, lab, tmp_path):
        exchanges = [
            lab.store_exchanges(tmp_path, 2, ranks=[0], run_id="monday")[0],
            lab.store_exchanges(tmp_path, 2, ranks=[1], run_id="tuesday")[0],
        ]
        results = run_replicas(lambda exchange: exchange.join(Schema({}, {})), exchanges)
        assert lab.kinds(results) == [RunExistsError] * 2
        assert "monday" in str(results[0])
        assert "tuesday" in str(results[0])

    def test_a_second_life_of_a_rank_is_refused(self, lab, tmp_path):
        run_replicas(lambda exchange: exchange.join(Schema({}, {})), lab.store_exchanges(tmp_path, 1, run_id="a"))
        results = run_replicas(
            lambda exchange: exchange.join(Schema({}, {})), lab.store_exchanges(tmp_path, 1, run_id="a")
        )
        assert lab.kinds(results) == [RunExistsError]
        assert "no second life" in str(results[0])

    def test_a_store_without_exclusive_creation_still_shows_a_second_life(self, lab, tmp_path, monkeypatch):
        exchange, rival = lab.store_exchanges(tmp_path, 1) + lab.store_exchanges(tmp_path, 1)

        def overwriting(key, data):
            exchange.store.put(key, [data])
            if data != rival_claim[0]:
                exchange.store.put(key, [rival_claim[0]])  # the rival's claim arrives right after
            return True

        rival_claim = [b""]
        rival.join(Schema({}, {}))
        rival_claim[0] = rival.store.get("claims/00000.json")
        monkeypatch.setattr(exchange.store, "create", overwriting)
        with pytest.raises(RunExistsError):
            exchange.join(Schema({}, {}))
        rival.leave()

    def test_a_foreign_object_among_the_claims_is_named(self, lab, tmp_path):
        (exchange,) = lab.store_exchanges(tmp_path, 2, ranks=[0])
        exchange.store.put("claims/00001.json", [b"[]"])
        with pytest.raises(RunExistsError, match=r"claims/00001.json"):
            exchange.join(Schema({}, {}))

    def test_another_outer_loop_on_the_same_exchange_is_refused(self, lab, tmp_path):
        (exchange,) = lab.store_exchanges(tmp_path, 1)
        exchange.join(Schema({"a": "1"}, {}))
        exchange.join(Schema({"a": "1"}, {}))
        with pytest.raises(ConfigurationError, match="already joined"):
            exchange.join(Schema({"b": "1"}, {}))
        exchange.leave()
