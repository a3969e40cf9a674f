"""Arguments of ``connect`` of the wrong kind, and a second call with other ones."""

import re

import numpy as np
import pytest
import torch

from diloco_core import ConfigurationError, ObjectStoreAllReduce, Transfer, connect, in_process

_SECONDS = (
    0, -1, float("nan"), float("inf"), "9", True, [1], b"1", np.float32("nan"),
    torch.tensor([1.0, 2.0]),
)  # fmt: skip
WRONG = {
    **dict.fromkeys(("join_timeout", "sync_timeout", "beat_interval", "lost_after"), _SECONDS),
    **dict.fromkeys(
        ("rank", "world_size"), ("1", 1.0, True, [1], -1, b"2", 10**9, float("nan"), np.bool_(1))
    ),
    "chunk_bytes": (0, -1, 1.5, "64", True, float("nan"), 2**40),
    "run_id": (1, b"monday", ["a"], True),
    "uri": (1, b"/tmp/x", ["a"], "", "  ", "/tmp/a\nb", "/tmp/a\0b", True),
    "min_replicas": ("2", 0, True, 2.5, 9),
    "environ": (1, [("A", "b")]),
    "transfer": (32, "16", {"connections": 32}, Transfer, Transfer(connections=2**40)),
}


class TestArguments:
    """Everything of the wrong kind is refused by name, before anything is opened."""

    @pytest.mark.parametrize("name", WRONG)
    def test_the_wrong_kind_is_refused_by_name(self, environ, tmp_path, monkeypatch, name):
        monkeypatch.setattr(
            "diloco_core._connect.open_store", lambda *_, **__: pytest.fail("opened")
        )
        monkeypatch.setattr("diloco_core._store._transfer.most_files", lambda: 1024)
        for value in WRONG[name]:
            told = "connections" if isinstance(value, Transfer) else name
            with pytest.raises(ConfigurationError, match=told):
                connect(**{"environ": environ, name: value})
        assert not list(tmp_path.iterdir())

    def test_numbers_of_numpy_are_numbers(self, environ, lab):
        numbers = {"sync_timeout": np.float32(9), "chunk_bytes": np.int64(64)}
        exchange = connect(rank=np.int64(0), world_size=np.int32(1), environ=environ, **numbers)
        with ObjectStoreAllReduce(exchange) as reduce:
            reduce.mean([torch.ones(3)])
        assert type(exchange.rank) is int

    def test_a_path_is_a_folder(self, environ, tmp_path):
        exchange = connect(tmp_path / "path", rank=0, world_size=1, environ=environ)
        assert exchange.store.uri == (tmp_path / "path").as_uri()
        assert connect(f"{tmp_path}/path/", rank=0, environ=environ, world_size=1) is exchange
        exchange.leave()


class TestTheSecondCall:
    @pytest.mark.parametrize(
        ("name", "first", "second"),
        [
            ("join_timeout", 5.0, 6.0),
            ("sync_timeout", 500.0, 600.0),
            ("beat_interval", 5.0, 6.0),
            ("lost_after", 50.0, 60.0),
            ("chunk_bytes", 64, 128),
            ("run_id", "a", "b"),
            ("transfer", Transfer(connections=8), Transfer(connections=9)),
        ],
    )
    def test_other_settings_are_refused(self, environ, name, first, second):
        environ["RENDEZVOUS_URI"] = "memory://second/run"  # a folder takes no transfer
        exchange = connect(environ=environ, **{name: first})
        told = re.escape(f"{name}={first!r}, and cannot also connect with {name}={second!r}")
        with pytest.raises(ConfigurationError, match=told):
            connect(environ=environ, **{name: second})
        assert connect(environ=environ, **{name: first}) is exchange
        if name != "run_id":
            assert connect(environ=environ) is exchange
        exchange.leave()

    def test_what_differs_from_a_default_is_refused_too(self, environ):
        exchange = connect(environ=environ)
        defaults = {"lost_after": 90, "chunk_bytes": 2**20, "transfer": Transfer()}
        assert connect(environ=environ, **defaults) is exchange
        told = r"lost_after=90.0, and cannot also connect with lost_after=80"
        with pytest.raises(ConfigurationError, match=told):
            connect(environ=environ, lost_after=80)
        exchange.leave()

    def test_other_settings_of_elastic_runs_are_refused(self, environ):
        exchange = connect(environ=environ, min_replicas=2, grace=7.0)
        assert connect(environ=environ, min_replicas=2) is exchange
        with pytest.raises(ConfigurationError, match=r"grace=7.0, and .* connect with grace=8.0"):
            connect(environ=environ, min_replicas=2, grace=8.0)
        exchange.leave()


class TestPlainMeans:
    def test_an_exchange_has_its_own_settings(self):
        (exchange,) = in_process(1)
        for name, value in (("rank", 0), ("world_size", 2), ("sync_timeout", 5.0)):
            with pytest.raises(ConfigurationError, match=f"{name}: an exchange has its own"):
                ObjectStoreAllReduce(exchange, **{name: value})

    @pytest.mark.parametrize("uri", [1, b"x", ["a"], object()])
    def test_something_else_is_refused(self, uri):
        with pytest.raises(ConfigurationError, match="uri must be"):
            ObjectStoreAllReduce(uri)
