"""Every option of connect() has an effect in every kind of run, or is refused by name."""

import inspect

import pytest
import torch
from training_lab import push, run, small_model

from diloco_core import ConfigurationError, DiLoCo, Elastic, Timing, Transfer, connect

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
}
ELASTIC_ONLY = {"publish_every", "topology", "grace", "late", "retention"}


class Watched:
    """Notes which of its values were asked for."""

    def __getattribute__(self, name):
        if name in LIMITS or name in SETTINGS:
            ASKED.add(name)
        return super().__getattribute__(name)


class WatchedTiming(Watched, Timing):
    pass


class WatchedElastic(Watched, Elastic):
    pass


ASKED = set()


def train(exchange, steps=6):
    model = small_model()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with DiLoCo(model, inner, exchange, sync_every=1) as outer:
        for step in range(steps):
            push(model, inner, exchange.rank, step)
    return outer.committed


def test_the_list_is_complete():
    assert set(inspect.signature(connect).parameters) == {*SEEN, *LIMITS, *SETTINGS}


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[] if kind == "sharded" else pytest.mark.slow) for kind in KINDS],
)
def test_a_limit_is_asked_for_or_refused(tmp_path, kind):
    options = {**KINDS[kind], "timing": WatchedTiming()}
    each = [connect(tmp_path / "run", rank=rank, world_size=2, **options) for rank in range(2)]
    ASKED.clear()
    run(train, each)
    # In a fixed run lost_after is asked for where a replica has been silent for a while:
    # tests/fixed/test_failures.py. Who finds the run begun by a faster replica does not ask for
    # join_timeout: tests/elastic/test_beginning.py.
    used = {"join_timeout", *ASKED, *(["lost_after", "return_within"] if kind == "fixed" else [])}
    for name in LIMITS:
        more = {"lost_after": 999.0} if name == "beat_interval" and kind == "fixed" else {}
        options = {**KINDS[kind], name: 88.0 if more or name != "beat_interval" else 8.0, **more}
        try:
            connect(tmp_path / name, rank=0, world_size=2, **options).leave()
        except ConfigurationError as error:
            assert f"{name}=88.0 cannot be used" in str(error)  # noqa: PT017
            assert not (tmp_path / name).exists()
            refused = True
        else:
            refused = False
        assert refused is (name not in used), name


@pytest.mark.parametrize("name", [*SETTINGS, "publish_every", "topology"])
def test_settings_of_elastic_runs_are_refused_in_strict_ones(tmp_path, name):
    value = {"late": "drop", "topology": "gather"}.get(name, 3)
    with pytest.raises(ConfigurationError, match=f"{name}=.* is for elastic runs"):
        connect(tmp_path, rank=0, world_size=1, **{name: value})


@pytest.mark.parametrize("kind", ["sharded", "gather"])
def test_a_setting_of_an_elastic_run_is_asked_for(tmp_path, kind):
    settings = WatchedElastic(2, topology=kind)
    each = [connect(tmp_path, rank=rank, world_size=2, elastic=settings) for rank in range(2)]
    ASKED.clear()
    run(train, each)
    assert set(SETTINGS) - ASKED == set()


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
