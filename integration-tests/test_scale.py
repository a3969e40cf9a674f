"""What a sync may cost as replicas grow, counted by the harness of ``hatch run bench-scale``."""

import math
from functools import partial
from itertools import pairwise

import pytest
import torch

from diloco_core._arithmetic._layout import Group, Layout, Rule
from diloco_core._retry import Retries
from diloco_core._store._drivers._remote import RemoteStore
from diloco_core._store._transfer import PART_BYTES
from diloco_core._wire._sections import Section, header, section_parts


def in_virtual_time(scale, act, **s3):
    """What ``act(network, store)`` returns, and how many seconds it takes."""
    time = scale.virtual_time.VirtualTime()
    network = scale.network.Network(time, scale.s3.Bucket(scale.s3.S3(**s3)))
    found = []

    def body():
        driver = scale.driver.VirtualDriver(network, 1, PART_BYTES)
        retries = Retries(clock=network.clock, sleep=network.sleep)
        store = RemoteStore(
            "s3://bucket/run",
            driver,
            retries,
            background=partial(scale.network.Background, network),
        )
        start = network.clock()
        found.extend([act(network, store), network.clock() - start])

    time.start_at(0.0, body)
    time.run_all(1e6)
    return found


class TestTheModel:
    """The seconds of the model are those that can be computed by hand."""

    def test_requests_in_the_background_share_the_connections(self, scale):
        def act(network, store):
            futures = [
                store.background.submit(lambda: network.request("GET", down=9_000_000))
                for _ in range(33)
            ]
            return [future.result() for future in futures]

        _, seconds = in_virtual_time(scale, act, network=1e12)
        assert seconds == pytest.approx(3 * (0.03 + 0.1)), (
            "33 requests over 16 connections are three rounds"
        )

    def test_the_network_card_is_shared_too(self, scale):
        def act(network, store):
            for future in [
                store.background.submit(lambda: network.request("GET", down=9_000_000))
                for _ in range(16)
            ]:
                future.result()

        _, seconds = in_virtual_time(scale, act, network=144e6)
        assert seconds == pytest.approx(0.03 + 16 * 9e6 / 144e6)

    def test_an_upload_in_parts(self, scale):
        def act(_, store):
            store.put("k", (bytes(PART_BYTES) for _ in range(20)))

        _, seconds = in_virtual_time(scale, act, network=1e12)
        part = 0.03 + PART_BYTES / 90e6
        assert seconds == pytest.approx(0.03 + 2 * part + 0.03), (
            "15 parts, then five, between a beginning and an end"
        )

    def test_the_rate_of_a_prefix(self, scale):
        def act(network, store):
            for future in [
                store.background.submit(lambda: network.request("GET")) for _ in range(100)
            ]:
                future.result()

        _, seconds = in_virtual_time(scale, act, reads=50.0)
        assert seconds == pytest.approx(99 / 50 + 0.03)

    def test_pages_and_bulks(self, scale):
        def act(network, store):
            for number in range(2001):
                network.bucket.write(f"deltas/{number:05}", scale.weights.Weighed("", b"", 1))
            before = network.requests.copy()
            store.delete(store.list("deltas/"))
            return network.requests - before, store.list("deltas/")

        (requests, left), seconds = in_virtual_time(scale, act)
        assert requests == {"LIST": 3, "DELETE": 3}
        assert left == {}
        assert seconds == pytest.approx(7 * 0.03)

    def test_s3fs_removes_objects_one_by_one_and_several_at_a_time(self, scale):
        def act(network, store):
            for number in range(33):
                network.bucket.write(f"deltas/{number:05}", scale.weights.Weighed("", b"", 1))
            before, start = network.requests.copy(), network.clock()
            store.delete([f"deltas/{number:05}" for number in range(33)])
            return network.requests - before, network.clock() - start, store.list("deltas/")

        (requests, seconds, left), _ = in_virtual_time(scale, act, bulk=1, head_reads=False)
        assert requests == {"DELETE": 33}
        assert left == {}
        assert seconds == pytest.approx(3 * 0.03), "16 at a time"

    def test_what_is_asked_for_in_the_background_waits_for_its_turn(self, scale):
        """A request that follows another one in the background begins when that one has ended."""

        def act(network, store):
            times = []

            def second():
                network.request("GET")
                times.append(network.clock())

            def first():
                network.request("GET")
                return store.background.submit(second)

            store.background.submit(first).result().result()
            return times

        times, seconds = in_virtual_time(scale, act)
        assert seconds == pytest.approx(0.06)
        assert times[0] == pytest.approx(0.12 + 0.06), "opening the store took four requests"

    def test_threads_that_wait_for_each_other_are_told_of(self, scale):
        time = scale.virtual_time.VirtualTime()
        barrier, ended = scale.virtual_time.Barrier(time, 2), []

        def body():
            try:
                barrier.wait()
            except scale.virtual_time.Killed as error:
                ended.append(error)

        time.start_at(0.0, body)
        with pytest.raises(scale.virtual_time.StuckError):
            time.run_all(1e6)
        assert ended


class TestScaling:
    """A small model costs what the large one that it stands for would cost."""

    @pytest.mark.parametrize("shards", [1, 3])
    def test_what_objects_weigh(self, scale, shards):
        factor = 64

        def file(numel):
            layout = Layout((Group(torch.float32, numel, Rule.OUTER),), shards)
            sections = [
                Section(f"shard.{number}", layout.shard(number), number) for number in range(shards)
            ]
            values = torch.zeros(numel)
            parts = [
                part
                for s in sections
                for part in section_parts(s, [values[p.start : p.stop] for p in s.pieces])
            ]
            return header(layout, sections, {}), b"".join(map(bytes, parts))

        small, large = file(160 * shards), file(160 * shards * factor)
        weighed = scale.weights.Weighed("deltas/1.safetensors", b"".join(small), factor)
        assert weighed.weight - len(small[0]) == len(large[1])
        assert weighed.values == len(small[0])
        cuts = range(0, len(weighed.data) + 1, 7)
        assert sum(weighed.between(a, b) for a, b in pairwise(cuts)) == weighed.between(0, cuts[-1])
        end = weighed.reaching(len(small[0]) + 10 * factor * 4)
        assert end == len(small[0]) + 40
        assert scale.weights.Weighed("commits/1.json", b"".join(small), factor).weight == len(
            weighed.data
        )

    @pytest.mark.parametrize("kind", ["fixed", "sharded"])
    def test_as_many_requests_and_seconds(self, scale, kind, monkeypatch):
        """The same model with all of its parameters and with an eighth, all 64 times smaller."""
        monkeypatch.setattr(scale.driver, "HEAD_BYTES", 1024)
        monkeypatch.setattr(scale.cohort, "CHUNK_BYTES", 2**20 // 64)
        s3 = scale.s3.S3(connection=90e6 / 64, network=1.25e9 / 64)
        found = []
        with scale.scaling.scaled(64):
            for factor in (1, 8):
                chosen = scale.scaling.Scale(factor, 2**19 // factor)
                monkeypatch.setattr(scale.cohort.Scale, "fitting", lambda *_, chosen=chosen: chosen)
                found.append(scale.measured(kind, 4, 2**19, s3=s3, warm=0))
        large, small = found
        assert small.requests == pytest.approx(large.requests, rel=0.02)
        assert small.seconds == pytest.approx(large.seconds, rel=0.02)
        assert small.sent == pytest.approx(large.sent, rel=0.01)
        assert small.received == pytest.approx(large.received, rel=0.01)

    def test_constants_that_nobody_has_thought_of_are_told_of(self, scale, monkeypatch):
        monkeypatch.setattr("diloco_core._store._reread._AHEAD_BYTES", 2**20, raising=False)
        with (
            pytest.raises(RuntimeError, match=r"_store\._reread\._AHEAD_BYTES"),
            scale.scaling.scaled(2),
        ):
            pass


SIZES = (3, 6, 12)

MOST_GETS = {"fixed": (2, 3), "sharded": (2, 6), "gather": (1, 8)}
"""At most a N + b GETs by one replica in a sync, if each contribution is one block: (a, b).

Fixed: one of them shows whether the rank has a newer incarnation. Gather: but for the sync after a
publication, in which one replica sends 2 N + 4.
"""


class TestLaws:
    @pytest.mark.sampled
    @pytest.mark.parametrize("kind", ["fixed", "sharded", "gather"])
    def test_reads_grow_with_the_replicas_and_no_faster(self, scale, kind):
        a, b = MOST_GETS[kind]
        most = {replicas: scale.measure(kind, replicas).most["GET"] for replicas in SIZES}
        assert all(gets <= a * replicas + b for replicas, gets in most.items()), most

    @pytest.mark.parametrize("replicas", SIZES[:2])
    def test_after_a_publication_one_replica_looks_at_its_shards(self, scale, replicas):
        """Not before the fifth sync, so that the law above says nothing of it."""
        run = scale.cohort.Run("gather", 1e5, replicas, warm=5, measured=4, tensors=4)
        outcome = scale.cohort.simulate(run)
        most = [
            sorted((cost.requests["GET"] for cost in costs), reverse=True)
            for costs in outcome.syncs
        ]
        assert max(first for first, *_ in most) == 2 * replicas + 4
        assert all(second <= replicas + 8 for _, second, *_ in most)
        assert scale.figures.sync_of(run, outcome).requests["GET"] <= replicas + 5

    @pytest.mark.parametrize("kind", ["fixed", "sharded", "gather"])
    def test_everything_else_does_not_grow(self, scale, kind):
        for replicas in SIZES:
            found = scale.measure(kind, replicas)
            # With one for a beat, and one for a look around.
            limits = {"PUT": 5, "LIST": 5, "DELETE": 1, "HEAD": 0}
            assert {
                kind: count
                for kind, count in found.most.items()
                if count > limits.get(kind, math.inf)
            } == {}

    @pytest.mark.parametrize("kind", ["fixed", "sharded"])
    def test_bytes_stay_flat(self, scale, kind):
        size = 4e6
        for replicas in SIZES:
            figures = scale.measure(kind, replicas)
            published = size * 2 / replicas
            assert figures.sent <= 1.03 * (size + published) + 8192 * replicas, (
                "with headers of their own"
            )
            assert figures.received <= 1.03 * 2 * size * (replicas - 1) / replicas + 8192 * replicas

    def test_a_start_does_not_depend_on_how_much_was_before_it(self, scale):
        costs = []
        for syncs in (4, 16):
            run = scale.cohort.Run("sharded", 1e5, 3, warm=syncs, measured=0, joins=True)
            costs.append(scale.cohort.simulate(run).joining)
        assert costs[0].requests == costs[1].requests
        assert sum(costs[0].requests.values()) < 45
        assert costs[0].seconds == pytest.approx(costs[1].seconds, rel=0.01)
