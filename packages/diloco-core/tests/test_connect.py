"""Who a replica is: arguments win over the environment, and what is missing or impossible is named."""

import itertools
import re

import numpy as np
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
    SyncError,
    Timing,
    Transfer,
    connect,
    in_process,
)
from diloco_core._exchange._base import Schema


@pytest.fixture
def environ(tmp_path):
    return {
        "RENDEZVOUS_URI": str(tmp_path / "run"),
        "REPLICA_RANK": "1",
        "REPLICA_WORLD_SIZE": "4",
        "DILOCO_RUN_ID": "monday",
    }


def test_everything_from_the_environment(environ, monkeypatch):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    exchange = connect()
    assert (exchange.rank, exchange.world_size, exchange.run_id) == (1, 4, "monday")
    exchange.leave()


def test_parts_of_a_run_are_one_run(environ):
    exchange = connect(environ={**environ, "DILOCO_COHORT": "week"})
    assert exchange.run_id == "week"
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


class TestWorldSize:
    """The variable WORLD_SIZE belongs to torchrun and the trainers, and counts the processes of one replica."""

    @pytest.mark.parametrize("size", ["1", "8"])
    def test_the_replicas_are_counted_and_not_the_processes_of_one(self, environ, size, caplog):
        lane = {"WORLD_SIZE": size, "LOCAL_RANK": "0", "RANK": "0", "TORCHELASTIC_RUN_ID": "none"}
        for inner in ({"WORLD_SIZE": size}, lane):
            exchange = connect(environ={**environ, **inner})
            assert exchange.world_size == 4
            exchange.leave()
        assert caplog.text == ""

    @pytest.mark.parametrize("sign", ["LOCAL_RANK", "TORCHELASTIC_RUN_ID"])
    def test_that_of_torchrun_is_not_taken(self, environ, sign):
        del environ["REPLICA_WORLD_SIZE"]
        with pytest.raises(
            ConfigurationError,
            match=f"set REPLICA_WORLD_SIZE. WORLD_SIZE=8 is not taken for it, since {sign} is set",
        ):
            connect(environ={**environ, "WORLD_SIZE": "8", sign: "0"})

    def test_that_of_an_older_launcher_is_taken_with_a_warning(self, environ, caplog):
        environ["WORLD_SIZE"] = environ.pop("REPLICA_WORLD_SIZE")
        exchange = connect(environ=environ)
        assert exchange.world_size == 4
        assert "taken from WORLD_SIZE=4" in caplog.text
        exchange.leave()
        with pytest.raises(ConfigurationError, match="WORLD_SIZE must be a whole number, not 'x'"):
            connect(environ={**environ, "WORLD_SIZE": "x"})


@pytest.mark.parametrize(
    ("missing", "told"),
    [
        ("RENDEZVOUS_URI", "uri= or set RENDEZVOUS_URI"),
        ("REPLICA_RANK", "rank="),
        ("REPLICA_WORLD_SIZE", "world_size="),
    ],
)
def test_what_is_missing_is_named(environ, missing, told):
    del environ[missing]
    with pytest.raises(ConfigurationError, match=told):
        connect(environ=environ)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"REPLICA_RANK": "one"}, "REPLICA_RANK must be a whole number, not 'one'"),
        ({"REPLICA_RANK": "4"}, "rank must be a whole number from 0 to 3"),
        ({"REPLICA_RANK": "-1"}, "rank must be a whole number from 0 to 3"),
        ({"REPLICA_WORLD_SIZE": "0"}, "world_size must be a whole number from 1 to 100000"),
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
            (
                {"min_replicas": 5},
                r"min_replicas must be at most world_size \(4\), not 5: a larger quorum",
            ),
            (
                {"min_replicas": 0},
                "min_replicas must be a whole number of at least 1, not 0$",
            ),
            (
                {"min_replicas": 2, "grace": 1800.0},
                "grace must be less than sync_timeout",
            ),
            ({"min_replicas": 2, "grace": 0.0}, "grace must be a positive number of seconds"),
            ({"min_replicas": 2, "late": "keep"}, "late must be 'carry' or 'drop', not 'keep'"),
            (
                {"min_replicas": 2, "topology": "ring"},
                "topology must be 'auto', 'sharded' or 'gather'",
            ),
            ({"grace": 5.0}, "grace=5.0 is for elastic runs. Pass min_replicas= too"),
            ({"topology": "gather"}, "is for elastic runs"),
            ({"resume": "always"}, "resume must be False, True or 'newest-whole', not 'always'"),
        ],
    )
    def test_what_is_impossible_is_named_before_anything_is_written(
        self, environ, tmp_path, options, told
    ):
        with pytest.raises(ConfigurationError, match=told):
            connect(environ=environ, **options)
        assert not (tmp_path / "run").exists()

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("min_replicas", 0),
            ("min_replicas", True),
            ("grace", 0.0),
            ("late", "keep"),
            ("retention", 0),
        ],
    )
    def test_what_no_run_could_have_is_refused_where_it_is_written(self, name, value):
        with pytest.raises(ConfigurationError, match=f"{name} must be .*, not {value!r}"):
            Elastic(**{"min_replicas": 2, name: value})

    def test_only_by_asking(self, environ):
        strict = connect(environ=environ)
        assert isinstance(strict, ObjectStoreExchange)
        strict.leave()
        elastic = connect(environ=environ, min_replicas=2)
        assert isinstance(elastic, ElasticExchange)
        assert elastic.settings == Elastic(2)
        assert connect(environ=environ) is elastic
        assert connect(environ=environ, min_replicas=2) is elastic
        with pytest.raises(ConfigurationError, match="min_replicas=2, and cannot also connect"):
            connect(environ=environ, min_replicas=3)
        elastic.leave()

    def test_an_exchange_that_is_strict_does_not_become_elastic(self, environ):
        strict = connect(environ=environ)
        with pytest.raises(ConfigurationError, match="min_replicas=None, and cannot also connect"):
            connect(environ=environ, min_replicas=2)
        strict.leave()

    def test_plain_means_are_for_strict_runs(self, environ):
        with (
            ObjectStoreAllReduce(
                environ["RENDEZVOUS_URI"], rank=0, world_size=1, min_replicas=1
            ) as reduce,
            pytest.raises(ConfigurationError, match="only for a DiLoCo outer loop, not for 'mean'"),
        ):
            reduce.mean([torch.ones(2)])

    def test_another_launch_is_refused_unless_it_resumes(self, environ, lab):
        def train(run_id, syncs, **options):
            exchange = connect(
                rank=0, world_size=1, min_replicas=1, run_id=run_id, environ=environ, **options
            )
            net = lab.small_model()
            optimizer = torch.optim.SGD(net.parameters(), lr=0.001)
            outer = DiLoCo(net, optimizer, exchange, sync_every=1)
            with outer:
                while outer.committed < syncs:
                    lab.small_step(net, optimizer)
            return outer.inner_steps

        assert train("monday", 3) == 3
        with pytest.raises(
            RunExistsError,
            match=r"belongs to run 'monday', but this replica belongs to run 'tuesday'.*resume=True",
        ):
            train("tuesday", 5)
        assert train("tuesday", 5, resume=True) == 5
        assert train("monday", 6) == 6


class TestTogether:
    """The limits in one Timing, and the settings of elastic membership in one Elastic."""

    def test_they_are_what_the_exchange_has(self, tmp_path):
        elastic, timing = Elastic(1, grace=7.0, late="drop"), Timing(sync_timeout=77.0)
        exchange = connect(tmp_path, rank=0, world_size=2, elastic=elastic, timing=timing)
        assert (exchange.settings, exchange._timing) == (elastic, timing)
        exchange.leave()

    def test_a_strict_run_has_limits_too(self, tmp_path):
        timing = Timing(join_timeout=11.0)
        exchange = connect(tmp_path, rank=0, world_size=1, timing=timing)
        assert isinstance(exchange, ObjectStoreExchange)
        assert exchange._timing is timing
        exchange.leave()

    @pytest.mark.parametrize(
        ("options", "told"),
        [
            (
                {"elastic": Elastic(1), "grace": 60.0},
                r"grace= cannot be given together with elastic=, which holds the same settings: "
                r"put grace into Elastic\(\.\.\.\), or leave elastic= out",
            ),
            (
                {"elastic": Elastic(1), "min_replicas": 1, "late": "carry"},
                "min_replicas=, late= cannot be given together with elastic=, which holds the same settings: "
                "put min_replicas, late into",
            ),
            (
                {"timing": Timing(), "sync_timeout": 1800.0},
                "sync_timeout= cannot be given together with timing=, which holds the same settings: "
                "put sync_timeout into Timing",
            ),
            (
                {"elastic": 2},
                "elastic must be an Elastic such as Elastic.min_replicas=2., not an int",
            ),
            ({"elastic": Elastic}, "elastic must be an Elastic"),
            (
                {"timing": 600},
                "timing must be a Timing such as Timing.sync_timeout=600., not an int",
            ),
            (
                {"elastic": Elastic(3)},
                r"min_replicas must be at most world_size \(2\), not 3",
            ),
            ({"elastic": Elastic(1), "timing": Timing(sync_timeout=30.0)}, "grace must be less"),
        ],
    )
    def test_what_is_said_twice_or_is_something_else_is_refused(self, tmp_path, options, told):
        with pytest.raises(ConfigurationError, match=told):
            connect(tmp_path / "run", rank=0, world_size=2, **options)
        assert not (tmp_path / "run").exists()

    def test_asking_twice_may_say_it_in_either_way(self, tmp_path):
        place = {"uri": tmp_path, "rank": 0, "world_size": 2}
        exchange = connect(**place, elastic=Elastic(1, grace=9.0), timing=Timing(lost_after=99.0))
        assert connect(**place, min_replicas=1, grace=9.0, lost_after=99.0) is exchange
        assert connect(**place, elastic=Elastic(1, grace=9.0)) is exchange
        assert connect(**place, timing=Timing(lost_after=99.0)) is exchange
        with pytest.raises(ConfigurationError, match=r"already connected .* with grace=9.0, and"):
            connect(**place, elastic=Elastic(1))
        with pytest.raises(
            ConfigurationError, match=r"with lost_after=99.0, and cannot also connect with"
        ):
            connect(**place, timing=Timing())
        exchange.leave()


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


def test_no_password_is_shown(environ, caplog):
    uri = f"memory://key:SECRET@{environ['RENDEZVOUS_URI']}"
    exchange = connect(uri, environ=environ)
    texts = [repr(exchange)]
    for again, options in ((uri, {"world_size": 9}), (f"{uri}\n", {})):
        with pytest.raises(ConfigurationError) as caught:
            connect(again, environ=environ, **options)
        texts.append(str(caught.value))
    exchange.abort(ValueError(f"cannot read {uri}/x"))
    with pytest.raises(SyncError) as caught:
        exchange.join(Schema({}, {}))
    texts.append(str(caught.value))
    texts.append(exchange.store.get("notes/00001.json").decode())
    assert "cannot read memory://***@" in texts[-1]
    assert "SECRET" not in " ".join(texts) + caplog.text
