"""Connecting to an elastic run, with its settings one by one or in one object."""

import pytest
import torch

from diloco_core import (
    ConfigurationError,
    DiLoCo,
    Elastic,
    ObjectStoreAllReduce,
    RunExistsError,
    Timing,
    connect,
)


class TestElastic:
    @pytest.mark.parametrize(
        ("options", "text"),
        [
            ({"min_replicas": 5}, r"must be at most world_size \(4\), not 5: a larger quorum"),
            ({"min_replicas": 2, "grace": 1800.0}, "grace must be less than sync_timeout"),
            (
                {"min_replicas": 2, "sync_timeout": 30},
                r"sync_timeout \(30 s\), but it is 60 s \(60 s if left out\)",
            ),
            ({"beat_interval": 60}, r"must be .* \(60 s\), but it is 90 s \(90 s if left out\)"),
            ({"min_replicas": 2, "grace": 0.0}, "grace must be a positive number of seconds"),
            ({"min_replicas": 2, "retention": 0}, "retention must be .*, not 0"),
            ({"min_replicas": 2, "publish_every": 0}, "publish_every must be .*, not 0"),
            ({"min_replicas": 2, "late": "keep"}, "one of 'carry', 'drop', not 'keep'"),
            ({"min_replicas": 2, "topology": "ring"}, "'auto', 'sharded', 'gather', not 'ring'"),
            ({"grace": 5.0}, "grace=5.0 is for elastic runs. Pass min_replicas= too"),
            ({"topology": "gather"}, "is for elastic runs"),
            ({"resume": "always"}, "resume must be False, True or 'newest-whole', not 'always'"),
        ],
    )
    def test_what_is_impossible_is_named_before_anything_is_written(
        self, environ, tmp_path, options, text
    ):
        with pytest.raises(ConfigurationError, match=text):
            connect(environ=environ, **options)
        assert not (tmp_path / "run").exists()

    def test_plain_means_are_for_fixed_runs(self, environ):
        place = {"rank": 0, "world_size": 1, "min_replicas": 1}
        reduce = ObjectStoreAllReduce(environ["RENDEZVOUS_URI"], **place)
        text = "only for a DiLoCo outer loop, not for 'mean'"
        with reduce, pytest.raises(ConfigurationError, match=text):
            reduce.mean([torch.ones(2)])

    def test_another_launch_is_refused_unless_it_resumes(self, environ, lab):
        def train(run_id, syncs, **options):
            place = {"rank": 0, "world_size": 1, "min_replicas": 1, "environ": environ}
            exchange = connect(**place, run_id=run_id, **options)
            net = lab.small_model()
            optimizer = torch.optim.SGD(net.parameters(), lr=0.001)
            outer = DiLoCo(net, optimizer, exchange, sync_every=1)
            with outer:
                while outer.committed < syncs:
                    lab.small_step(net, optimizer)
            return outer.inner_steps

        assert train("monday", 3) == 3
        text = r"to run 'monday', but this replica belongs to run 'tuesday'.*resume=True"
        with pytest.raises(RunExistsError, match=text):
            train("tuesday", 5)
        assert train("tuesday", 5, resume=True) == 5
        assert train("monday", 6) == 6


class TestTogether:
    """The limits in one Timing, and the settings of elastic membership in one Elastic."""

    @pytest.mark.parametrize(
        ("options", "text"),
        [
            (
                {"elastic": Elastic(1), "grace": 60.0},
                r"grace= cannot be given together with elastic=.* put grace into Elastic\(\.\.\.\)",
            ),
            (
                {"elastic": Elastic(1), "min_replicas": 1, "late": "carry"},
                "min_replicas=, late= cannot be given together with elastic=",
            ),
            (
                {"timing": Timing(), "sync_timeout": 1800.0},
                "sync_timeout= cannot be given together .*: put sync_timeout into Timing",
            ),
            ({"elastic": 2}, "elastic must be settings such as Elastic.*, not an int"),
            ({"elastic": Elastic}, "elastic must be settings such as"),
            ({"timing": 600}, "timing must be settings such as Timing.*, not an int"),
            ({"elastic": Elastic(3)}, r"min_replicas must be at most world_size \(2\), not 3"),
            (
                {"elastic": Elastic(1), "timing": Timing(sync_timeout=30.0, return_within=0.0)},
                "grace must be less",
            ),
        ],
    )
    def test_what_is_said_twice_or_is_something_else_is_refused(self, tmp_path, options, text):
        with pytest.raises(ConfigurationError, match=text):
            connect(tmp_path / "run", rank=0, world_size=2, **options)
        assert not (tmp_path / "run").exists()

    def test_asking_twice_may_say_it_in_either_way(self, tmp_path):
        place = {"uri": tmp_path, "rank": 0, "world_size": 2}
        exchange = connect(**place, elastic=Elastic(1, grace=9.0), timing=Timing(sync_timeout=99.0))
        assert exchange.settings == Elastic(1, grace=9.0)
        assert connect(**place, min_replicas=1, grace=9.0, sync_timeout=99.0) is exchange
        assert connect(**place, elastic=Elastic(1, grace=9.0)) is exchange
        assert connect(**place, timing=Timing(sync_timeout=99.0)) is exchange
        with pytest.raises(ConfigurationError, match=r"already connected .* with grace=9.0, and"):
            connect(**place, elastic=Elastic(1))
        with pytest.raises(ConfigurationError, match=r"with sync_timeout=99.0, and cannot also"):
            connect(**place, timing=Timing())
        exchange.leave()


def test_signs_of_life_may_be_rare(tmp_path):
    """An elastic run does not use ``lost_after``, so its default does not limit the interval."""
    options = {"rank": 0, "world_size": 2, "min_replicas": 1, "grace": 300}
    connect(tmp_path / "run", beat_interval=60, **options)
    with pytest.raises(ConfigurationError, match="lost_after=300 cannot be used in an elastic run"):
        connect(tmp_path / "other", beat_interval=60, lost_after=300, **options)
    # All limits together can only be made with a longer lost_after.
    timing = Timing(beat_interval=60, lost_after=120)
    connect(tmp_path / "together", timing=timing, **options).leave()


@pytest.mark.parametrize("limit", [{"lost_after": 33.0}, {"return_within": 7.0}])
def test_limits_of_fixed_runs_are_refused_in_either_form(tmp_path, limit):
    for options in (limit, {"timing": Timing(sync_timeout=600.0, **limit)}):
        for elastic in ({"min_replicas": 1}, {"elastic": Elastic(1)}):
            text = f"{next(iter(limit))}=.* cannot be used in an elastic run"
            with pytest.raises(ConfigurationError, match=text):
                connect(tmp_path / "run", rank=0, world_size=2, **elastic, **options)
    assert not (tmp_path / "run").exists()
