"""Every argument of ``connect`` does something, or is refused by name; a second call agrees."""

import inspect

import numpy as np
import pytest
import torch
from training_lab import push, small_model

from diloco_core import (
    ConfigurationError,
    DiLoCo,
    Elastic,
    ObjectStoreAllReduce,
    Timing,
    Transfer,
    connect,
    in_process,
)

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
    "run_id": (1, b"monday", ["a"], True, "x" * 257),
    "uri": (1, b"/tmp/x", ["a"], "", "  ", "/tmp/a\nb", "/tmp/a\0b", True),
    "min_replicas": ("2", 0, True, 2.5, 9),
    "environ": (1, [("A", "b")]),
    "telemetry": (1, 0, "yes", "False"),
    "transfer": (32, "16", {"connections": 32}, Transfer, Transfer(connections=2**40)),
}


class TestArguments:
    """Everything of the wrong kind is refused by name, before anything is opened."""

    @pytest.mark.parametrize("name", WRONG)
    def test_the_wrong_kind_is_refused_by_name(self, environ, tmp_path, monkeypatch, name):
        monkeypatch.setattr(
            "diloco_core._connect.open_store", lambda *_, **__: pytest.fail("opened")
        )
        monkeypatch.setattr("resource.getrlimit", lambda _: (1024, 2048))
        for value in WRONG[name]:
            told = "connections" if isinstance(value, Transfer) else name
            with pytest.raises(ConfigurationError, match=told):
                connect(**{"environ": environ, name: value})
        assert not list(tmp_path.iterdir())

    def test_numbers_of_numpy_are_numbers(self, environ):
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


def test_a_second_call_with_other_limits_is_refused(environ):
    exchange = connect(environ=environ)
    defaults = {"lost_after": 90, "chunk_bytes": 2**20, "transfer": Transfer()}
    assert connect(environ=environ, **defaults) is exchange
    for name in LIMITS:
        text = rf"with {name}=\d+\.0, and cannot also connect with {name}=9"
        with pytest.raises(ConfigurationError, match=text):
            connect(environ=environ, **{name: 9 if name == "beat_interval" else 99})
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


LIMITS = ("join_timeout", "sync_timeout", "beat_interval", "lost_after", "return_within")
SETTINGS = ("grace", "late", "retention")
KINDS = {
    "fixed": {},
    "sharded": {"min_replicas": 2, "topology": "sharded"},
    "gather": {"min_replicas": 2, "topology": "gather"},
}
# Two values each, of which the second is not the default; what is seen in the objects of the run,
# or in the exchange.
SEEN = {
    "uri": ("/one", "/two"),
    "rank": (0, 1),
    "world_size": (2, 3),
    "run_id": ("one", "two"),
    "chunk_bytes": (2**20, 64),
    "transfer": (None, Transfer(connections=3)),
    "min_replicas": (None, 1),
    "topology": (None, "gather"),
    "publish_every": (4, 1),
    "resume": (None, True),
    "elastic": (None, Elastic(1)),
    "timing": (None, Timing(sync_timeout=99.0, return_within=0.0)),
    "environ": ({"REPLICA_RANK": "0"}, {"REPLICA_RANK": "1"}),
    "telemetry": (None, False),
}
ELASTIC_ONLY = {"publish_every", "topology", "grace", "late", "retention"}


def test_the_list_is_complete():
    elsewhere = {"process_group"}  # tests/processes
    assert set(inspect.signature(connect).parameters) == {*SEEN, *LIMITS, *SETTINGS, *elsewhere}


@pytest.mark.parametrize("name", [*SETTINGS, "publish_every", "topology"])
def test_settings_of_elastic_runs_are_refused_in_strict_ones(tmp_path, name):
    value = {"late": "drop", "topology": "gather"}.get(name, 3)
    with pytest.raises(ConfigurationError, match=f"{name}=.* is for elastic runs"):
        connect(tmp_path, rank=0, world_size=1, **{name: value})


def published(folder, **options):
    exchange = connect(folder, rank=0, world_size=1, min_replicas=1, **options)
    found = set()
    model = small_model()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)

    def look(report):
        found.update((key.split("/")[1]) for key in exchange.store.list("state/"))

    with DiLoCo(model, inner, exchange, sync_every=1, on_sync=look):
        for step in range(6):
            push(model, inner, 0, step)
    return found


def test_publish_every_publishes_more_often_or_is_refused(tmp_path):
    rare = published(tmp_path / "rare", topology="gather")
    often = published(tmp_path / "often", topology="gather", publish_every=1)
    assert len(often) > len(rare)
    with pytest.raises(ConfigurationError, match="publish_every=1 cannot be used with topology="):
        published(tmp_path / "sharded", topology="sharded", publish_every=1)
    with pytest.raises(ConfigurationError, match="publish_every=2 cannot be used with topology="):
        Elastic(1, topology="sharded", publish_every=2)


@pytest.mark.parametrize("kind", KINDS)
def test_a_number_does_not_say_whether_to_resume(tmp_path, kind):
    for value in (1, 0):
        with pytest.raises(ConfigurationError, match=f"resume must be False, True .* not {value}"):
            connect(tmp_path / "run", rank=0, world_size=2, resume=value, **KINDS[kind])
    assert not (tmp_path / "run").exists()


@pytest.mark.sampled
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [each for each in SEEN if each not in ELASTIC_ONLY])
def test_what_an_exchange_was_given_is_what_it_has(tmp_path, kind, name):
    """And a second call with another value is refused, so that none is left out silently."""

    def made(value):
        options = {"uri": f"{tmp_path}/run", "rank": 0, "world_size": 2, **KINDS[kind]}
        if name == "environ":
            options.pop("rank")
        if name == "uri":
            value = f"{tmp_path}{value}"
        if name == "elastic":
            options = {key: options[key] for key in ("uri", "rank", "world_size")}
        return connect(**{**options, **({} if value is None else {name: value})})

    first = made(SEEN[name][0])
    try:
        second = made(SEEN[name][1])
    except ConfigurationError as error:
        assert "already connected" in str(error)  # noqa: PT017
        assert name in str(error) or name in {"timing", "elastic"}  # noqa: PT017
    else:
        assert second is not first
        assert (second.rank, second.store.uri) != (first.rank, first.store.uri)
        second.leave()
    first.leave()
