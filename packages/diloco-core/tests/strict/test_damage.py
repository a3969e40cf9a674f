"""What is damaged between being written and being read: a flip on the way is read again, one at rest is mended or named."""

import time
from functools import partial

import damage_lab
import keys_lab
import pytest
import torch
from strict_lab import Changing, Means, Run
from training_lab import identical

from diloco_core import (
    CorruptedObjectError,
    MismatchError,
    ObjectStoreAllReduce,
    ReplicaLostError,
    StoreExchange,
    Timing,
    UnequalSyncsError,
)
from diloco_core._store._open import open_store
from diloco_core.testing import run_replicas


def flip(data, bit=None):
    """Flip one bit: unless another is asked for, one among the values of a payload, before the checksums at its end."""
    return damage_lab.flip(data, 8 * (len(data) - 36) + 4 if bit is None else bit)


HARMS = {"flip": flip, "cut": lambda data: data[: len(data) // 3], "empty": lambda data: b""}


class Damaging:
    """A store that harms some objects while they are written, or while they are read: at most ``times`` of them."""

    def __init__(self, store, harm, wanted, times=10**9):
        self.inner, self.harm, self.wanted, self.times = store, harm, wanted, times

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def hits(self, key):
        if not self.wanted(key) or not self.times:
            return False
        self.times -= 1
        return True


class DamagingWrites(Damaging):
    def put(self, key, parts):
        if not self.hits(key):
            return self.inner.put(key, parts)
        return self.inner.put(key, [self.harm(b"".join(map(bytes, parts)))])


class DamagingReads(Damaging):
    def get(self, key, *args, **options):
        data = self.inner.get(key, *args, **options)
        return self.harm(data) if self.hits(key) else data

    def open(self, key, size=None):
        if not self.hits(key):
            return self.inner.open(key, size)
        with self.inner.open(key) as reader:
            data = bytearray(reader.size)
            reader.read_into(0, memoryview(data))
        return damage_lab.InMemory(self.harm(bytes(data)), key)


def exchanges(tmp_path, wrap=None, world_size=2, **options):
    """Exchanges over one folder whose pauses are short; ``wrap`` is put around the store of the last rank."""
    timing = Timing(sleep=lambda seconds: time.sleep(min(seconds, 0.002)))
    stores = [open_store(str(tmp_path / "run")) for _ in range(world_size)]
    if wrap is not None:
        stores[-1] = wrap(stores[-1])
    return [
        StoreExchange(store, rank, world_size, timing=timing, **options)
        for rank, store in enumerate(stores)
    ]


def means(count):
    """Every replica averages so many tensors; returns them."""

    def replica(exchange):
        found = []
        with ObjectStoreAllReduce(exchange) as reduce:
            for number in range(count):
                tensor = torch.arange(64.0) * (exchange.rank + 1) + number
                reduce.mean([tensor])
                found.append(tensor)
        return found

    return replica


def expected(count):
    return [torch.arange(64.0) * 1.5 + number for number in range(count)]


def all_equal(results, count):
    return all(all(map(torch.equal, result, expected(count))) for result in results)


class TestAtRest:
    @pytest.mark.parametrize("harm", HARMS)
    def test_a_damaged_contribution_is_refused_and_never_gets_into_the_state(
        self, lab, tmp_path, harm
    ):
        made = exchanges(
            tmp_path, lambda store: DamagingWrites(store, HARMS[harm], keys_lab.of("contribution"))
        )
        results = run_replicas(means(1), made)
        assert lab.kinds(results)[0] is CorruptedObjectError, results
        assert "deltas/" in str(results[0])
        assert not keys_lab.keys_of(made[0].store.list(""), "state", rank=0)

    @pytest.mark.parametrize("harm", HARMS)
    def test_a_shard_whose_owner_has_left_is_named(self, lab, tmp_path, harm):
        made = exchanges(
            tmp_path, lambda store: DamagingWrites(store, HARMS[harm], keys_lab.of("state"))
        )
        results = run_replicas(means(1), made)
        assert lab.kinds(results) == [CorruptedObjectError, list]
        (shard,) = keys_lab.keys_of(made[0].store.list(""), "state", sync=0, rank=1)
        assert shard in str(results[0])
        assert "Rank 1, which had the values, has left the run" in str(results[0])

    @pytest.mark.parametrize("harm", HARMS)
    def test_a_shard_whose_owner_lives_is_written_again(self, lab, tmp_path, caplog, harm):
        def wrap(store):
            return DamagingWrites(store, HARMS[harm], keys_lab.of("state", sync=3), times=1)

        healthy = lab.train(
            lambda rank: lab.fill(lab.small_model()), exchanges(tmp_path / "a"), steps=8
        )
        assert lab.identical(
            lab.train(
                lambda rank: lab.fill(lab.small_model()), exchanges(tmp_path / "b", wrap), steps=8
            )
            + healthy
        )
        assert "is written again with the same content" in caplog.text
        keys = open_store(str(tmp_path / "b" / "run")).list("")
        assert not keys_lab.keys_of(keys, "request")

    def test_tensors_that_have_changed_since_are_not_taken_for_the_shard(self, lab, tmp_path):
        made = exchanges(
            tmp_path,
            lambda store: DamagingWrites(store, flip, keys_lab.of("state", sync=0), times=1),
        )

        def replica(exchange):
            with ObjectStoreAllReduce(exchange) as reduce:
                tensor = torch.ones(64)
                reduce.mean([tensor])
                tensor += 1
                reduce.mean([tensor])

        results = run_replicas(replica, made)
        assert lab.kinds(results) == [ReplicaLostError, CorruptedObjectError]
        assert "cannot be written again" in str(results[1])

    @pytest.mark.parametrize("harm", ["cut", "empty", "other"])
    def test_a_damaged_commit_record_is_written_again(self, lab, tmp_path, caplog, harm):
        harms = {"other": lambda data: data.replace(b"commit", b"commut"), **HARMS}

        def wrap(store):
            return DamagingWrites(store, harms[harm], keys_lab.of("commit"), times=1)

        (made,) = exchanges(tmp_path, wrap, world_size=1)
        with ObjectStoreAllReduce(made) as reduce:
            reduce.mean([torch.ones(4)])
        assert (
            "a commit record is damaged and is written again with the same content" in caplog.text
        )
        (key,) = keys_lab.keys_of(made.store.list(""), "commit")
        assert keys_lab.fields(key, made.store.get(key))["sync"] == 0

    @pytest.mark.parametrize(
        ("changes", "match"),
        [
            ({"members": [{"rank": 0, "key": "deltas/00000000/else"}]}, "other members"),
            ({"name": "another"}, "is not what the replicas of this run write"),
        ],
        ids=["members", "fragment"],
    )
    def test_a_commit_record_of_others_is_refused(self, changes, match):
        store = Changing(
            keys_lab.of("commit"), lambda key, data: keys_lab.sealed_again(key, data, **changes)
        )
        (result,) = Means(1, store=store).live(until=1)
        with pytest.raises(MismatchError, match=match):
            raise result

    def test_a_damaged_note_is_ignored_loudly(self, caplog):
        """Rank 1 has left after one mean. If rank 0 takes one more, the note is not believed."""
        store = Changing(keys_lab.of("note", rank=1), lambda key, data: data[:9])
        assert identical(Leaving(2, store=store).live(until=1)), "nobody needs it any more"
        result, _ = Leaving(2, store=Changing(store.wanted, store.change)).live(until=2)
        with pytest.raises(
            ReplicaLostError, match=r"no sign of life .* how it ended, but that note is damaged"
        ):
            raise result
        assert "the note that says how rank 1 ended cannot be read and is ignored" in caplog.text


class Leaving(Means):
    """Rank 1 leaves after one mean."""

    def train(self, exchange, until):
        return super().train(exchange, 1 if exchange.rank else until)


class TestOnTheWay:
    @pytest.mark.parametrize("harm", HARMS)
    @pytest.mark.parametrize("kind", ["contribution", "state", "commit", "claim", "note"])
    def test_what_does_not_match_is_read_again(self, lab, tmp_path, kind, harm):
        damaging = []

        def wrap(store):
            damaging.append(DamagingReads(store, HARMS[harm], keys_lab.of(kind), times=2))
            return damaging[0]

        results = run_replicas(means(3), exchanges(tmp_path, wrap))
        assert all_equal(results, 3), results
        assert kind == "note" or not damaging[0].times

    @pytest.mark.parametrize("stale", [1, 3, 10**9])
    def test_a_listing_that_is_older_than_the_record_does_not_matter(self, lab, tmp_path, stale):
        """Rank 0 sees both contributions and commits; rank 1's listings do not hold rank 0's yet."""

        class Stale(Damaging):
            def list(self, prefix):
                listing = self.inner.list(prefix)
                committed = bool(keys_lab.keys_of(self.inner.list(""), "commit"))
                if not prefix.startswith("deltas/") or (committed and not self.hits(prefix)):
                    return listing
                theirs = set(keys_lab.keys_of(listing, "contribution", rank=0))
                return {key: size for key, size in listing.items() if key not in theirs}

        results = run_replicas(
            means(1), exchanges(tmp_path, lambda store: Stale(store, None, bool, stale))
        )
        assert all_equal(results, 1), results

    def test_a_contribution_that_is_gone_is_named(self, lab, tmp_path):
        """It is deleted when both have seen it."""

        class Deleting(Damaging):
            def get(self, key, *args, **options):
                data = self.inner.get(key, *args, **options)
                if key.startswith("commits/"):
                    self.inner.delete([k for k in self.inner.list("deltas/") if "/00000." in k])
                return data

        results = run_replicas(
            means(1), exchanges(tmp_path, lambda store: Deleting(store, None, bool))
        )
        assert isinstance(results[1], CorruptedObjectError)
        assert "deltas/00000000/00000." in str(results[1])
        assert "something deletes objects there" in str(results[1])

    def test_a_flip_in_any_chunk_of_a_contribution_changes_nothing(self, lab, tmp_path):
        """Small chunks: whatever was added up before a flip is not added up twice."""
        size = 1000
        for bit in range(0, 8 * size, 509):
            made = exchanges(
                tmp_path / str(bit),
                lambda store, bit=bit: DamagingReads(
                    store,
                    lambda data: flip(data, bit % (8 * len(data))),
                    keys_lab.of("contribution"),
                    times=1,
                ),
                chunk_bytes=16,
            )
            assert all_equal(run_replicas(means(1), made), 1)


def harms(size, step):
    """Flips of one bit of every ``step``, and cuts after one byte of every ``step``, as functions of the bytes."""
    flips = [partial(flip, bit=bit) for bit in range(step // 2, 8 * size, step)]
    return flips + [lambda data, end=end: data[:end] for end in range(0, size, step)]


SLOWLY = [False, pytest.param(True, marks=pytest.mark.slow)]


@pytest.mark.parametrize("slowly", SLOWLY, ids=["sampled", "every"])
class TestEveryBit:
    """A single bit, or everything after a byte: no record is believed. In whole runs: ``test_bits``."""

    def test_of_a_claim(self, slowly):
        run, key = Means(2), keys_lab.claim_key(1)
        run.live(until=1)
        claim = run.store.objects[key]
        for harm in harms(len(claim), 1 if slowly else 61):
            again = Means(2)
            again.store.write(key, harm(claim))
            (result,) = again.live(until=1, ranks=[0])
            assert isinstance(result, CorruptedObjectError), result
            assert key in str(result)

    def test_of_a_note(self, slowly):
        """It says that rank 1 has left, which is not taken for a reason not to wait for it."""
        run, wanted = Leaving(2), keys_lab.of("note", rank=1)
        result, _ = run.live(until=2)
        assert isinstance(result, UnequalSyncsError)
        (key,) = filter(wanted, run.store.objects)
        for harm in harms(len(run.store.objects[key]), 5 if slowly else 181):
            store = Changing(wanted, lambda key, data, harm=harm: harm(data))
            result, _ = Leaving(2, store=store).live(until=2)
            assert isinstance(result, ReplicaLostError), result
            assert "that note is damaged" in str(result)

    def test_of_the_record_of_a_sync(self, slowly, caplog):
        run = Means(1)
        wanted = run.live(until=1)
        (key,) = keys_lab.keys_of(run.store.objects, "commit")
        assert caplog.text == ""
        for harm in harms(len(run.store.objects[key]), 1 if slowly else 61):
            caplog.clear()
            store = Changing(keys_lab.of("commit"), lambda key, data, harm=harm: harm(data))
            assert identical([*wanted, *Means(1, store=store).live(until=1)])
            assert "a commit record is damaged and is written again" in caplog.text

    def test_of_a_manifest(self, slowly):
        run, key = Run(1), keys_lab.manifest_key(2)
        run.live(until=1)
        run.live(until=2, resume=True)
        manifest = run.store.objects[key]
        for harm in harms(len(manifest), 5 if slowly else 307):
            for damaged in (key, keys_lab.copy_key(key)):
                run.store.damage(damaged, harm(manifest))
            before = dict(run.store.objects)
            (result,) = run.live(resume=True)
            assert isinstance(result, CorruptedObjectError), result
            assert key in str(result)
            assert run.store.objects == before
