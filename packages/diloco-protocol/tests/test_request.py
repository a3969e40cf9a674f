"""What a launch may ask for: everything is checked before anything is started."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_protocol import InvalidRequestError, make_request


def request(n=2, entrypoint="m:f", args=None, **options):
    return make_request(n, entrypoint, args or {}, **options)


class TestRequest:
    def test_defaults(self):
        made = request(3, args={"a": [1, {"b": None}]})
        assert made.ranks == (0, 1, 2)
        assert made.world_size == 3
        assert made.kwargs == {"a": [1, {"b": None}]}
        assert made.timeout == 3600.0
        assert made.max_restarts == 0

    def test_specs(self):
        made = request(
            2,
            args={
                "x": 1,
                "rendezvous_uri": "/tmp/r",
                "rank_env": "MY_RANK",
                "world_size_env": "WORLD_SIZE",
            },
            run_id="a",
            timeout=5,
        )
        first, second = made.specs(grace=3.0)
        assert (first.rank, second.rank) == (0, 1)
        assert first.kwargs == {"x": 1, "rendezvous_uri": "/tmp/r"}
        assert first.rendezvous_uri == "/tmp/r"
        assert (first.rank_env, first.world_size_env) == ("MY_RANK", "WORLD_SIZE")
        assert (first.timeout, first.grace, first.run_id, first.world_size) == (5.0, 3.0, "a", 2)

    def test_only_a_launch_of_the_whole_cohort_knows_whether_a_rank_comes_back(self):
        for part, told in (({}, False), ({"rank_offset": 1}, None), ({"world_size": 3}, None)):
            specs = request(2, **part).specs(restarts=False)
            assert [spec.restarts for spec in specs] == [told, told]
        assert request(2).specs()[0].restarts is None

    def test_a_run_may_span_backends(self):
        made = request(2, rank_offset=3, world_size=8)
        assert made.ranks == (3, 4)
        assert [spec.world_size for spec in made.specs()] == [8, 8]
        assert request(2, rank_offset=3).world_size == 5

    def test_a_run_may_be_several_launches(self):
        made = request(2, run_id="a", cohort="b")
        assert [(spec.run_id, spec.cohort) for spec in made.specs()] == [("a", "b")] * 2
        assert request(1, run_id="a").specs()[0].cohort == "a"
        assert made.fingerprint() != request(2, run_id="a").fingerprint()
        assert (
            request(1, run_id="a").fingerprint() == request(1, run_id="a", cohort="a").fingerprint()
        )

    @given(st.integers(1, 20), st.integers(0, 20), st.integers(1, 30))
    def test_ranks_fit_into_the_world(self, count, offset, world):
        try:
            made = request(count, rank_offset=offset, world_size=world)
        except InvalidRequestError:
            assert offset + count > world
        else:
            assert made.ranks == tuple(range(offset, offset + count))
            assert made.ranks[-1] < world

    def test_every_launch_has_a_name_of_its_own(self):
        names = {request().run_id for _ in range(200)}
        assert len(names) == 200
        assert all(name.startswith("run-") for name in names)
        assert request(run_prefix="nightly").run_id.startswith("nightly-")
        assert request(run_prefix="nightly", run_id="mine").run_id == "mine"

    def test_the_longest_prefix_makes_a_name_for_dns(self):
        name = request(run_prefix="a" * 24).run_id
        assert len(name) <= 63 - len("-00000")
        assert re.fullmatch("[a-z0-9]([-a-z0-9]*[a-z0-9])?", name)
        assert request(run_prefix="a" * 24, run_id=name).run_id == name

    @pytest.mark.parametrize(
        ("given", "cpu"), [(4, "4"), (0.5, "0.5"), ("500m", "500m"), (None, None)]
    )
    def test_cpu(self, given, cpu):
        assert request(cpu=given).cpu == cpu

    def test_equal_launches_have_equal_fingerprints(self):
        assert request(run_id="a").fingerprint() == request(run_id="a").fingerprint()
        for change in (
            {"timeout": 9},
            {"env": {"A": "1"}},
            {"n": 3},
            {"args": {"a": 1}},
            {"entrypoint": "m:g"},
        ):
            assert (
                request(**{"run_id": "a", **change}).fingerprint()
                != request(run_id="a").fingerprint()
            )

    def test_a_launch_that_was_named_by_itself_can_be_launched_again_by_its_name(self):
        first = request()
        again = request(run_id=first.run_id)
        assert (first.named, again.named) == (False, True)
        assert first == again
        assert first.fingerprint() == again.fingerprint()

    @pytest.mark.parametrize(
        ("change", "told"),
        [
            ({"n": 0}, "n_replicas must be a whole number from 1"),
            ({"n": -1}, "n_replicas"),
            ({"n": 2.0}, "n_replicas"),
            ({"n": True}, "n_replicas"),
            ({"n": 10**6}, "to 10000"),
            ({"rank_offset": -1}, "rank_offset"),
            ({"world_size": 1}, "do not fit into a world_size of 1"),
            ({"args": [1]}, "entrypoint_args must be a mapping"),
            ({"args": {"a": float("nan")}}, r"entrypoint_args\.a is nan"),
            ({"args": {"a b": 1}}, "'a b', which cannot be the name"),
            ({"args": {"rendezvous_uri": 3}}, "rendezvous_uri must be text"),
            ({"args": {"rendezvous_uri": "x" * 40_000}}, "of at most 32768 characters, not"),
            ({"args": {"rank_env": "REPLICA_WORLD_SIZE"}}, "rank_env"),
            ({"args": {"rank_env": "1X"}}, "rank_env"),
            ({"args": {"world_size_env": "REPLICA_RANK"}}, "world_size_env must be the name"),
            ({"args": {"world_size_env": 4}}, "world_size_env must be the name"),
            ({"args": {"world_size_env": "N"}, "env": {"N": "7"}}, "N would be set twice"),
            ({"args": {"world_size_env": "N", "rank_env": "N"}}, "N would be set twice"),
            ({"timeout": 0}, "timeout must be a positive number of seconds"),
            ({"timeout": -1}, "timeout"),
            ({"timeout": float("inf")}, "timeout"),
            ({"timeout": "60"}, "timeout"),
            ({"timeout": True}, "timeout"),
            ({"run_id": "My_Run"}, "the run_id 'My_Run' is not allowed: 1 to 48"),
            ({"run_id": ""}, "run_id"),
            ({"run_id": "-a"}, "run_id"),
            ({"run_id": "a" * 49}, "run_id"),
            ({"cohort": "My_Run"}, "the cohort 'My_Run' is not allowed: 1 to 48"),
            ({"cohort": ""}, "cohort"),
            ({"cohort": 1}, "cohort"),
            ({"run_prefix": "a" * 25}, "run_id='a+' cannot begin"),
            ({"run_prefix": "My_Runs"}, "run_id='My_Runs' cannot begin"),
            ({"run_prefix": "-"}, "cannot begin"),
            ({"gpu": ""}, "gpu"),
            ({"gpu": 1}, "gpu"),
            ({"gpu": "8 x H100"}, "gpu='8 x H100' is not a request for GPUs"),
            ({"gpu": "A100:0"}, "gpu='A100:0' is not a request for GPUs"),
            ({"memory": " "}, "memory"),
            ({"cpu": 0}, "cpu must be a positive number"),
            ({"cpu": True}, "cpu"),
            ({"cpu": ""}, "cpu"),
            ({"spot": "yes"}, "spot must be True, False or None"),
            ({"args": {"rendezvous_uri": ""}}, "rendezvous_uri"),
            ({"args": {"rendezvous_uri": "/a\0b"}}, "rendezvous_uri"),
            ({"args": {"rank_env": None}}, "rank_env"),
            ({"args": {"rank_env": "R"}, "env": {"R": "7"}}, "R would be set twice"),
            ({"args": {"rank_env": "R"}, "secrets": {"R": "ref"}}, "R would be set twice"),
            ({"env": {"TOKEN": "x"}, "secrets": {"TOKEN": "ref"}}, "TOKEN would be set twice"),
            ({"env": {"A B": "1"}}, "name 'A B'"),
            ({"env": {"A": 1}}, "'A' maps to a value of type int"),
            ({"env": {"REPLICA_WORLD_SIZE": "7"}}, "may not set REPLICA_WORLD_SIZE"),
            ({"env": {"REPLICA_RANK": "7"}}, "may not set REPLICA_RANK"),
            ({"env": {"DILOCO_SPEC_0": "7"}}, "may not set DILOCO_SPEC_0"),
            ({"env": {"A": "x\0y"}}, "NUL"),
            ({"env": ["A=1"]}, "env must be a mapping"),
            ({"secrets": {"1A": "ref"}}, "secrets has the name '1A'"),
            ({"labels": {"a": 1}}, "labels must map text to text"),
            ({"max_restarts": -1}, "max_restarts"),
        ],
    )
    def test_what_is_not_allowed_is_named(self, change, told):
        arguments = {"n": 2, "entrypoint": "m:f", "args": {}, **change}
        n, entrypoint, args = (arguments.pop(name) for name in ("n", "entrypoint", "args"))
        with pytest.raises(InvalidRequestError, match=told):
            make_request(n, entrypoint, args, **arguments)
