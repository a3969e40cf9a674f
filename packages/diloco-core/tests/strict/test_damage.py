"""What is damaged between being written and being read: a flip on the way is read again, one at rest is mended or named."""

import json
import time
from functools import partial
from types import SimpleNamespace

import damage_lab
import pytest
import torch

from diloco_core import (
    CorruptedObjectError,
    MismatchError,
    ObjectStoreAllReduce,
    ObjectStoreExchange,
    ReplicaLostError,
    Timing,
)
from diloco_core._allreduce import Mean
from diloco_core._arithmetic._sharded import Scratch, carried_groups, contributions
from diloco_core._exchange._base import Schema
from diloco_core._exchange._endings import Ending, Progress
from diloco_core._store._open import open_store
from diloco_core._store._patient import Patient
from diloco_core._strict._liveness import Liveness
from diloco_core._strict._records._delta import DeltaFile, DeltaPlan, ShardDelta
from diloco_core._strict._records._manifest import Manifest
from diloco_core._strict._records._records import (
    Claim,
    check_commit,
    commit,
    note,
    read_note,
    schema_digest,
)
from diloco_core._wire._sections import seed as wire_seed
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
        ObjectStoreExchange(store, rank, world_size, timing=timing, **options)
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
            tmp_path, lambda store: DamagingWrites(store, HARMS[harm], lambda key: "deltas/" in key)
        )
        results = run_replicas(means(1), made)
        assert lab.kinds(results)[0] is CorruptedObjectError, results
        assert "deltas/" in str(results[0])
        assert not [key for key in made[0].store.list("state/") if "/00000." in key]

    @pytest.mark.parametrize("harm", HARMS)
    def test_a_shard_whose_owner_has_left_is_named(self, lab, tmp_path, harm):
        made = exchanges(
            tmp_path, lambda store: DamagingWrites(store, HARMS[harm], lambda key: "state/" in key)
        )
        results = run_replicas(means(1), made)
        assert lab.kinds(results) == [CorruptedObjectError, list]
        assert "state/00000000/00001" in str(results[0])
        assert "Rank 1, which had the values, has left the run" in str(results[0])

    @pytest.mark.parametrize("harm", HARMS)
    def test_a_shard_whose_owner_lives_is_written_again(self, lab, tmp_path, caplog, harm):
        def wrap(store):
            return DamagingWrites(
                store, HARMS[harm], lambda key: key.startswith("state/00000003/"), times=1
            )

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
        assert not open_store(str(tmp_path / "b" / "run")).list("requests/")

    def test_tensors_that_have_changed_since_are_not_taken_for_the_shard(self, lab, tmp_path):
        made = exchanges(
            tmp_path,
            lambda store: DamagingWrites(
                store, flip, lambda key: key.startswith("state/00000000/"), times=1
            ),
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
            return DamagingWrites(
                store, harms[harm], lambda key: key.startswith("commits/"), times=1
            )

        (made,) = exchanges(tmp_path, wrap, world_size=1)
        with ObjectStoreAllReduce(made) as reduce:
            reduce.mean([torch.ones(4)])
        assert (
            "a commit record is damaged and is written again with the same content" in caplog.text
        )
        (key,) = made.store.list("commits/")
        assert json.loads(made.store.get(key))["sync"] == 0

    def test_a_commit_record_of_others_is_refused(self, tmp_path):
        def another(_):
            return commit(made._participant.run, 0, "mean", ["deltas/00000000/else"])

        (made,) = exchanges(
            tmp_path,
            lambda store: DamagingWrites(store, another, lambda key: "commits/" in key),
            world_size=1,
        )
        with pytest.raises(MismatchError, match="other members"):
            ObjectStoreAllReduce(made).mean([torch.ones(1)])

    def test_a_damaged_note_is_ignored_loudly(self, lab, tmp_path, caplog):
        made = exchanges(
            tmp_path,
            lambda store: DamagingWrites(store, lambda data: data[:9], lambda key: "notes" in key),
        )
        assert all_equal(
            run_replicas(means(1), made), 1
        )  # rank 1 has left; nobody needs it any more
        with pytest.raises(
            ReplicaLostError, match=r"no sign of life .* how it ended, but that note is damaged"
        ):
            observe(made)
        assert "the note that says how rank 1 ended cannot be read and is ignored" in caplog.text


def observe(made):
    """Let rank 0 wait for rank 1 until it counts as lost."""
    now = [0.0]
    timing = Timing(clock=lambda: now[0], sleep=lambda seconds: None)
    liveness = Liveness(Patient(made[0].store, timing), 0, 2, timing, "n")
    while now[0] < 200:
        liveness.check([1], Progress(1, 1), "sync 2")
        now[0] += 50


class TestOnTheWay:
    @pytest.mark.parametrize("harm", HARMS)
    @pytest.mark.parametrize("folder", ["deltas/", "state/", "commits/", "claims/", "notes/"])
    def test_what_does_not_match_is_read_again(self, lab, tmp_path, folder, harm):
        damaging = []

        def wrap(store):
            damaging.append(
                DamagingReads(store, HARMS[harm], lambda key: key.startswith(folder), times=2)
            )
            return damaging[0]

        results = run_replicas(means(3), exchanges(tmp_path, wrap))
        assert all_equal(results, 3), results
        assert folder == "notes/" or not damaging[0].times

    @pytest.mark.parametrize("stale", [1, 3, 10**9])
    def test_a_listing_that_is_older_than_the_record_is_read_again(self, lab, tmp_path, stale):
        """Rank 0 sees both contributions and commits; rank 1's listings do not hold rank 0's yet."""

        class Stale(Damaging):
            def list(self, prefix):
                listing = self.inner.list(prefix)
                committed = bool(self.inner.list("commits/"))
                if not prefix.startswith("deltas/") or (committed and not self.hits(prefix)):
                    return listing
                return {key: size for key, size in listing.items() if "/00001." in key}

        results = run_replicas(
            means(1), exchanges(tmp_path, lambda store: Stale(store, None, bool, stale))
        )
        if stale < 4:
            assert all_equal(results, 1), results
        else:
            assert isinstance(results[1], CorruptedObjectError)
            assert "is gone: something deletes objects there" in str(results[1])

    def test_a_flip_in_any_chunk_of_a_contribution_changes_nothing(self, lab, tmp_path):
        """Small chunks: whatever was added up before a flip is not added up twice."""

        size = 1000
        for bit in range(0, 8 * size, 509):
            made = exchanges(
                tmp_path / str(bit),
                lambda store, bit=bit: DamagingReads(
                    store,
                    lambda data: flip(data, bit % (8 * len(data))),
                    lambda key: "deltas/" in key,
                    times=1,
                ),
                chunk_bytes=16,
            )
            assert all_equal(run_replicas(means(1), made), 1)


RUN = 32 * "a"
MEMBERS = ["deltas/00000003/00000.x", "deltas/00000003/00001.x"]
RECORDS = {
    "claim": (
        Claim(
            1,
            2,
            "monday",
            64,
            schema_digest(Schema({"a": "float32[3]"}, {"sync_every": "5"})),
            "0f",
            "host",
            7,
            10_000,
        ).to_bytes(),
        lambda data: Claim.from_bytes(data, 1, "x"),
    ),
    "note": (
        note(Ending(1, "failed", Progress(3, 2), "ValueError: x", 0), "n"),
        lambda data: read_note(data, 1, "x"),
    ),
    "commit": (
        commit(RUN, 3, "0", MEMBERS),
        lambda data: check_commit(data, RUN, 3, "0", 2, lambda rank, key: 1, "x"),
    ),
    "manifest": (
        Manifest(
            "monday",
            32 * "0",
            2,
            {"sync_every": "5"},
            {"a": "float32[3]"},
            [],
            {},
            [(2, "0f"), (2, "f0")],
            [(32 * "1", 4)],
            [16 * "2"],
        ).to_bytes(),
        lambda data: Manifest.from_bytes(data, 2, "x"),
    ),
}


def test_the_record_of_another_fragments_sync_is_refused():
    with pytest.raises(MismatchError, match="is not what the replicas of this run write"):
        check_commit(commit(RUN, 3, "1", MEMBERS), RUN, 3, "0", 2, lambda rank, key: 1, "x")


class TestEveryBit:
    """A single bit, or everything after a byte: a named error, or the very same. In whole runs: ``test_exchange_bits``."""

    @pytest.mark.parametrize("kind", RECORDS)
    def test_of_a_record(self, kind):
        data, read = RECORDS[kind]
        assert read(data) == read(data)
        harmed = [flip(data, bit) for bit in range(8 * len(data))] + [
            data[:size] for size in range(len(data))
        ]
        for one in harmed:
            with pytest.raises(CorruptedObjectError):
                read(one)

    def test_of_a_contribution(self, tmp_path):
        """As its readers see it: every chunk that is handed out is what was written."""
        values = torch.arange(64.0)
        job = Mean([values], 2)
        job.begin()
        scratch = Scratch(16)
        seed = partial(wire_seed, "delta")
        plan = DeltaPlan(job.layout, 2, 16, carried_groups(job), is_rank_zero=False)
        file = DeltaFile(plan, 1, seed, {"rank": "1"})
        data = b"".join(
            map(bytes, file.parts(lambda shard: contributions(job, shard, 1, 16, scratch)))
        )
        wanted = [values[chunk.start : chunk.stop] for chunk in job.layout.chunks(0, 16)]
        harmed = [flip(data, bit) for bit in range(8 * len(data))] + [
            data[:size] for size in range(len(data))
        ]
        refused = 0
        for one in [data, *harmed]:
            store = SimpleNamespace(
                retries=True,
                uri="x",
                near=True,
                patience=1.0,
                open=lambda key, size, one=one: damage_lab.InMemory(one, key),
            )
            timing = Timing(sleep=lambda seconds: None)
            try:
                delta = ShardDelta(Patient(store, timing), "deltas/x", len(one), file, 0, timing)
                for chunk in wanted:
                    out = torch.empty(len(chunk))
                    delta.read(out)
                    assert torch.equal(out, chunk)
            except CorruptedObjectError:
                refused += 1
        # All bits of the values and of the checksums, and all truncations; nobody reads the header.
        assert refused == 8 * file.distance(0) + len(data)
