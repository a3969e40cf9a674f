"""Arguments of ``connect`` of the wrong kind, and a second call with other ones."""

import itertools
import re

import numpy as np
import pytest
import torch

from diloco_core import ConfigurationError, ObjectStoreAllReduce, Transfer, connect, in_process
from diloco_core._store._open import open_store


class TestArguments:
    """Everything of the wrong kind is refused by name, before anything is opened."""

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            *itertools.product(
                ("join_timeout", "sync_timeout", "beat_interval", "lost_after"),
                (
                    0,
                    -1,
                    float("nan"),
                    float("inf"),
                    "9",
                    True,
                    [1],
                    b"1",
                    np.float32("nan"),
                    torch.tensor([1.0, 2.0]),
                ),
            ),
            *itertools.product(
                ("rank", "world_size"),
                ("1", 1.0, True, [1], -1, b"2", 10**9, float("nan"), np.bool_(1)),
            ),
            *itertools.product(("chunk_bytes",), (0, -1, 1.5, "64", True, float("nan"), 2**40)),
            *itertools.product(("run_id",), (1, b"monday", ["a"], True)),
            *itertools.product(
                ("uri",), (1, b"/tmp/x", ["a"], "", "  ", "/tmp/a\nb", "/tmp/a\0b", True)
            ),
            *itertools.product(("min_replicas",), ("2", 0, True, 2.5, 9)),
            *itertools.product(("environ",), (1, [("A", "b")])),
            *itertools.product(("transfer",), (32, "16", {"connections": 32}, Transfer)),
            ("connections", {"transfer": Transfer(connections=2**40)}),
        ],
    )
    def test_the_wrong_kind_is_refused_by_name(self, environ, tmp_path, monkeypatch, name, value):
        monkeypatch.setattr(
            "diloco_core._connect.open_store", lambda *_, **__: pytest.fail("opened")
        )
        monkeypatch.setattr("diloco_core._store._transfer.most_files", lambda: 1024)
        given = value if name == "connections" else {name: value}
        with pytest.raises(ConfigurationError, match=name):
            connect(**{"environ": environ, **given})
        assert not list(tmp_path.iterdir())

    @pytest.mark.parametrize("text", ["1.0", "0x1", "", "one", "1_0", "\u0661", "1e3"])
    def test_numbers_in_the_environment_are_plain(self, environ, text):
        with pytest.raises(ConfigurationError, match="REPLICA_RANK must be a whole number"):
            connect(environ={**environ, "REPLICA_RANK": text})

    def test_numbers_of_numpy_are_numbers(self, environ, lab):
        exchange = connect(
            rank=np.int64(0),
            world_size=np.int32(1),
            sync_timeout=np.float32(9),
            chunk_bytes=np.int64(64),
            environ=environ,
        )
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
        with pytest.raises(
            ConfigurationError,
            match=re.escape(f"{name}={first!r}, and cannot also connect with {name}={second!r}"),
        ):
            connect(environ=environ, **{name: second})
        assert connect(environ=environ, **{name: first}) is exchange
        if name != "run_id":
            assert connect(environ=environ) is exchange
        exchange.leave()

    def test_what_differs_from_a_default_is_refused_too(self, environ):
        exchange = connect(environ=environ)
        assert (
            connect(environ=environ, lost_after=90, chunk_bytes=2**20, transfer=Transfer())
            is exchange
        )
        with pytest.raises(
            ConfigurationError, match=r"lost_after=90.0, and cannot also connect with lost_after=80"
        ):
            connect(environ=environ, lost_after=80)
        exchange.leave()

    def test_other_settings_of_elastic_runs_are_refused(self, environ):
        exchange = connect(environ=environ, min_replicas=2, grace=7.0)
        assert connect(environ=environ, min_replicas=2) is exchange
        with pytest.raises(
            ConfigurationError, match=r"grace=7.0, and cannot also connect with grace=8.0"
        ):
            connect(environ=environ, min_replicas=2, grace=8.0)
        exchange.leave()


class TestPlainMeans:
    def test_an_exchange_has_its_own_settings(self):
        (exchange,) = in_process(1)
        for options in ({"rank": 0}, {"world_size": 2}, {"sync_timeout": 5.0}):
            with pytest.raises(
                ConfigurationError, match=f"{next(iter(options))}: an exchange has its own"
            ):
                ObjectStoreAllReduce(exchange, **options)

    @pytest.mark.parametrize("uri", [1, b"x", ["a"], object()])
    def test_something_else_is_refused(self, uri):
        with pytest.raises(ConfigurationError, match="uri must be"):
            ObjectStoreAllReduce(uri)


class TestHomeFolders:
    def test_one_that_is_known(self, tmp_path, monkeypatch):
        monkeypatch.setenv("HOME", str(tmp_path))
        exchange = connect("~/run", rank=0, world_size=1)
        assert exchange.store.uri == (tmp_path / "run").as_uri()
        exchange.leave()

    def test_one_that_is_not_known(self):
        with pytest.raises(ConfigurationError, match="'~nobody-here', whose home folder is not"):
            connect("~nobody-here/run", rank=0, world_size=1)
        with pytest.raises(ConfigurationError, match="'~nobody-here', whose home folder is not"):
            open_store("~nobody-here/run")
