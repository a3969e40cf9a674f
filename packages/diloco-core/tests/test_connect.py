"""Who a replica is: arguments win over the environment, and what is missing or impossible is named."""

import pytest
import torch

from diloco_core import (
    ConfigurationError,
    DiLoCo,
    Elastic,
    ElasticExchange,
    ObjectStoreAllReduce,
    ObjectStoreExchange,
    RunExistsError,
    StoreUnavailableError,
    connect,
)


@pytest.fixture
def environ(tmp_path):
    return {
        "RENDEZVOUS_URI": str(tmp_path / "run"),
        "REPLICA_RANK": "1",
        "WORLD_SIZE": "4",
        "DILOCO_RUN_ID": "monday",
    }


def test_everything_from_the_environment(environ, monkeypatch):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    exchange = connect()
    assert (exchange.rank, exchange.world_size, exchange.run_id) == (1, 4, "monday")
    exchange.leave()


def test_arguments_win(environ, tmp_path):
    exchange = connect(str(tmp_path / "b"), rank=0, world_size=2, run_id="tuesday", environ=environ)
    assert (exchange.rank, exchange.world_size, exchange.run_id) == (0, 2, "tuesday")
    assert exchange.store.uri == (tmp_path / "b").as_uri()
    exchange.leave()


def test_connecting_twice_gives_the_same_exchange(environ):
    first = connect(environ=environ)
    assert connect(environ=environ) is first
    first.leave()
    second = connect(environ=environ)
    assert second is not first
    second.leave()


def test_two_ranks_in_one_process_are_two_exchanges(environ):
    first, second = connect(rank=0, environ=environ), connect(rank=1, environ=environ)
    assert first is not second
    first.leave()
    second.leave()


def test_the_same_place_with_another_world_size_is_refused(environ):
    first = connect(environ=environ)
    with pytest.raises(ConfigurationError, match="already connected"):
        connect(world_size=5, environ=environ)
    first.leave()


@pytest.mark.parametrize(
    ("missing", "told"),
    [("RENDEZVOUS_URI", "uri= or set RENDEZVOUS_URI"), ("REPLICA_RANK", "rank="), ("WORLD_SIZE", "world_size=")],
)
def test_what_is_missing_is_named(environ, missing, told):
    del environ[missing]
    with pytest.raises(ConfigurationError, match=told):
        connect(environ=environ)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"REPLICA_RANK": "one"}, "REPLICA_RANK must be a whole number, not 'one'"),
        ({"REPLICA_RANK": "4"}, "rank must be one of 0 … 3"),
        ({"REPLICA_RANK": "-1"}, "rank must be one of 0 … 3"),
        ({"WORLD_SIZE": "0"}, "world_size must be a whole number from 1 to 100000"),
        ({"RENDEZVOUS_URI": " "}, "RENDEZVOUS_URI"),
        ({"RENDEZVOUS_URI": "nfs7://x"}, "unknown scheme 'nfs7'"),
    ],
)
def test_what_is_impossible_is_named(environ, change, told):
    with pytest.raises(ConfigurationError, match=told):
        connect(environ={**environ, **change})


def test_limits_are_checked(environ):
    with pytest.raises(ConfigurationError, match="sync_timeout"):
        connect(environ=environ, sync_timeout=0)
    with pytest.raises(ConfigurationError, match="chunk_bytes"):
        connect(environ=environ, chunk_bytes=0)


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StoreUnavailableError, match="cannot be written"):
        connect(str(tmp_path / "file"), rank=0, world_size=1)


class TestElastic:
    @pytest.mark.parametrize(
        ("options", "told"),
        [
            ({"min_replicas": 5}, "min_replicas must be one of 1 … 4"),
            ({"min_replicas": 0}, "min_replicas must be one of 1 … 4"),
            (
                {"min_replicas": 2, "grace": 1800.0},
                "grace must be less than sync_timeout",
            ),
            ({"min_replicas": 2, "grace": 0.0}, "grace must be a positive number of seconds"),
            ({"min_replicas": 2, "late": "keep"}, "late must be 'carry' or 'drop', not 'keep'"),
            ({"min_replicas": 2, "topology": "ring"}, "topology must be 'auto', 'sharded' or 'gather'"),
            ({"grace": 5.0}, "grace=5.0 is for elastic runs: pass min_replicas="),
            ({"topology": "gather"}, "is for elastic runs"),
            ({"resume": True}, "is for elastic runs"),
        ],
    )
    def test_what_is_impossible_is_named_before_anything_is_written(self, environ, tmp_path, options, told):
        with pytest.raises(ConfigurationError, match=told):
            connect(environ=environ, **options)
        assert not (tmp_path / "run").exists()

    def test_only_by_asking(self, environ):
        strict = connect(environ=environ)
        assert isinstance(strict, ObjectStoreExchange)
        strict.leave()
        elastic = connect(environ=environ, min_replicas=2)
        assert isinstance(elastic, ElasticExchange)
        assert elastic.settings == Elastic(2)
        assert connect(environ=environ) is elastic
        assert connect(environ=environ, min_replicas=2) is elastic
        with pytest.raises(ConfigurationError, match="min_replicas=2, and cannot be"):
            connect(environ=environ, min_replicas=3)
        elastic.leave()

    def test_an_exchange_that_is_strict_does_not_become_elastic(self, environ):
        strict = connect(environ=environ)
        with pytest.raises(ConfigurationError, match="min_replicas=None, and cannot be"):
            connect(environ=environ, min_replicas=2)
        strict.leave()

    def test_plain_means_are_for_strict_runs(self, environ):
        with (
            ObjectStoreAllReduce(environ["RENDEZVOUS_URI"], rank=0, world_size=1, min_replicas=1) as reduce,
            pytest.raises(ConfigurationError, match="carries a DiLoCo outer loop, not 'mean'"),
        ):
            reduce.mean([torch.ones(2)])

    def test_another_launch_is_refused_unless_it_resumes(self, environ, lab):
        def train(run_id, syncs, **options):
            exchange = connect(rank=0, world_size=1, min_replicas=1, run_id=run_id, environ=environ, **options)
            net = lab.small_model()
            optimizer = torch.optim.SGD(net.parameters(), lr=0.001)
            outer = DiLoCo(net, optimizer, exchange, sync_every=1)
            with outer:
                while outer.committed < syncs:
                    lab.small_step(net, optimizer)
            return outer.inner_steps

        assert train("monday", 3) == 3
        with pytest.raises(
            RunExistsError, match=r"belongs to run 'monday', and this replica to 'tuesday'.*resume=True"
        ):
            train("tuesday", 5)
        assert train("tuesday", 5, resume=True) == 5
        assert train("monday", 6) == 6
