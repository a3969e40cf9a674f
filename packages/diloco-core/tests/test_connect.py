"""Who a replica is: arguments win over the environment, and what is missing or impossible is named."""

import pytest

from diloco_core import ConfigurationError, StoreUnavailableError, connect


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
        ({"WORLD_SIZE": "0"}, "world_size must be a whole number of at least 1"),
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
