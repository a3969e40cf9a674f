"""Replicas meet once, agree on everything, or are told at once and by name what is in the way."""

import time

import keys_lab
import pytest
import torch
from strict_lab import Changing, Means

from diloco_core import (
    ConfigurationError,
    CorruptedObjectError,
    FormatError,
    MismatchError,
    ObjectStoreAllReduce,
    RendezvousTimeoutError,
    ReplicaLostError,
    RunExistsError,
    StoreExchange,
    Timing,
    in_process,
)
from diloco_core._exchange._base import Schema
from diloco_core._store._open import open_store
from diloco_core._wire._fields import LARGEST
from diloco_core._wire._sealed import FORMAT
from diloco_core.testing import run_replicas

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def met():
    """A run of two ranks, and the claim of rank 1."""
    run, key = Means(2), keys_lab.claim_key(1)
    run.live(until=1)
    return run, key, run.store.objects[key]


def joined(run, key, claim):
    """What rank 0 of such a run comes to that finds this claim of rank 1."""
    again = type(run)(2)
    again.store.write(key, claim)
    (result,) = again.live(until=1, ranks=[0])
    return result


class Failing(Means):
    """Rank 1 fails after one mean."""

    def train(self, exchange, until):
        if not exchange.rank:
            return super().train(exchange, until)
        with ObjectStoreAllReduce(exchange) as reduce:
            reduce.mean([torch.zeros(64)])
            raise ValueError("m")


def told(change):
    """What rank 0 comes to when rank 1 has failed, and its note is changed."""
    result, _ = Failing(2, store=Changing(keys_lab.of("note", rank=1), change)).live(until=2)
    return result


class TestMeeting:
    def test_a_replica_that_never_comes_is_named(self, lab, tmp_path):
        def replica(exchange):
            exchange.join(Schema({}, {}))

        def timing():
            clock = lab.Clock()

            def sleep(seconds):
                # No time passes before both are there, and each has its own: nobody waits less than the whole time for the other.
                if all((tmp_path / "run" / keys_lab.claim_key(rank)).exists() for rank in (0, 2)):
                    clock.sleep(seconds)
                else:
                    time.sleep(0.001)

            return Timing(join_timeout=5.0, clock=clock, sleep=sleep)

        store = str(tmp_path / "run")
        results = run_replicas(
            replica, [StoreExchange(open_store(store), r, 4, timing=timing()) for r in (0, 2)]
        )
        first = next(result for result in results if isinstance(result, RendezvousTimeoutError))
        assert first.missing == (1, 3)
        # Whoever gives up first tells the other, which then need not wait any longer.
        assert all("missing: ranks 1, 3" in str(result) for result in results)

    def test_a_thread_that_never_comes_is_named(self, lab):
        exchanges = in_process(3, timing=Timing(join_timeout=0.05))
        results = run_replicas(lambda exchange: exchange.join(Schema({}, {})), exchanges[:2])
        assert RendezvousTimeoutError in lab.kinds(results)
        missing = [
            result.missing for result in results if isinstance(result, RendezvousTimeoutError)
        ]
        assert all(
            2 in ranks for ranks in missing
        )  # under load another thread may come too late as well

    def test_another_model_is_refused_and_the_tensor_named(self, lab, tmp_path):
        def replica(exchange):
            outer, _ = lab.outer_loop(lab.small_model(width=4 + exchange.rank), exchange)
            with outer:
                pass

        for exchanges in (lab.store_exchanges(tmp_path, 2), in_process(2)):
            results = run_replicas(replica, exchanges)
            assert lab.kinds(results) == [MismatchError] * 2
            assert "tensor '0.weight'" in str(results[0])
            assert "float32[4, 3]" in str(results[0])
            assert "float32[5, 3]" in str(results[0])

    def test_other_settings_are_refused_and_named(self, lab, tmp_path):
        def replica(exchange):
            outer, _ = lab.outer_loop(
                lab.small_model(), exchange, outer_lr=0.5 + 0.1 * exchange.rank
            )
            with outer:
                pass

        results = run_replicas(replica, lab.store_exchanges(tmp_path, 2))
        assert lab.kinds(results) == [MismatchError] * 2
        assert "setting 'outer_lr'" in str(results[0])
        assert "0.5" in str(results[0])

    @pytest.mark.parametrize("what", ["other", "damaged", "gone"])
    def test_a_table_that_cannot_be_read_hides_no_difference(self, lab, tmp_path, what):
        timing = Timing(sleep=lambda seconds: time.sleep(min(seconds, 0.002)))
        first, second = (
            StoreExchange(open_store(str(tmp_path)), rank, 2, timing=timing) for rank in range(2)
        )
        theirs = Schema({"a": "float32[3]"}, {})
        put = second.store.put

        def damaging(key, parts):
            if not keys_lab.of("table")(key):
                return put(key, parts)
            changes = {"other": {"tensors": {"b": "float32[3]"}}, "damaged": {"tensors": ...}}
            record = b"".join(map(bytes, parts))
            if what == "gone":
                return len(record)
            return put(key, [keys_lab.sealed_again(key, record, **changes[what])])

        second.store.put = damaging
        results = run_replicas(
            lambda exchange: exchange.join(
                Schema({"b": "float32[3]"}, {}) if exchange is first else theirs
            ),
            [first, second],
        )
        assert lab.kinds(results)[0] is MismatchError
        assert "rank 0 and rank 1 differ in their tensors or settings" in str(results[0])

    def test_another_world_size_is_refused(self, lab, tmp_path):
        store = open_store(str(tmp_path / "run"))
        exchanges = [StoreExchange(store, 0, 2), StoreExchange(store, 1, 3)]
        results = run_replicas(lambda exchange: exchange.join(Schema({}, {})), exchanges)
        assert lab.kinds(results) == [MismatchError] * 2
        assert "rank 1 was started with world_size=3, and rank 0 with world_size=2" in str(
            results[0]
        )

    def test_check_refuses_other_initial_values(self, lab, tmp_path):
        def replica(exchange):
            outer, _ = lab.outer_loop(nets[exchange.rank], exchange, init="check")
            with outer:
                pass

        nets = [lab.small_model(0), lab.small_model(1)]
        results = run_replicas(replica, lab.store_exchanges(tmp_path, 2))
        assert lab.kinds(results) == [MismatchError] * 2
        assert "values" in str(results[0])

    def test_the_first_rank_gives_the_initial_values(self, lab, tmp_path):
        nets = [lab.small_model(seed) for seed in range(3)]
        wanted = [parameter.clone() for parameter in nets[0].parameters()]

        def replica(exchange):
            outer, _ = lab.outer_loop(nets[exchange.rank], exchange)
            with outer:
                return [parameter.clone() for parameter in nets[exchange.rank].parameters()]

        for parameters in run_replicas(replica, lab.store_exchanges(tmp_path, 3)):
            assert all(map(torch.equal, parameters, wanted))

    def test_a_second_run_on_the_same_prefix_is_refused(self, lab, tmp_path):
        def replica(exchange):
            with ObjectStoreAllReduce(exchange) as reduce:
                reduce.mean([torch.ones(1)])

        assert (
            lab.kinds(run_replicas(replica, lab.store_exchanges(tmp_path, 2))) == [type(None)] * 2
        )
        results = run_replicas(replica, lab.store_exchanges(tmp_path, 2))
        assert lab.kinds(results) == [RunExistsError] * 2
        assert "prefix of its own" in str(results[0])

    def test_two_launches_on_the_same_prefix_are_told_apart(self, lab, tmp_path):
        exchanges = [
            lab.store_exchanges(tmp_path, 2, ranks=[0], run_id="monday")[0],
            lab.store_exchanges(tmp_path, 2, ranks=[1], run_id="tuesday")[0],
        ]
        results = run_replicas(lambda exchange: exchange.join(Schema({}, {})), exchanges)
        assert lab.kinds(results) == [RunExistsError] * 2
        assert "monday" in str(results[0])
        assert "tuesday" in str(results[0])

    def test_a_second_life_of_a_rank_is_refused(self, lab, tmp_path):
        run_replicas(
            lambda exchange: exchange.join(Schema({}, {})),
            lab.store_exchanges(tmp_path, 1, run_id="a"),
        )
        results = run_replicas(
            lambda exchange: exchange.join(Schema({}, {})),
            lab.store_exchanges(tmp_path, 1, run_id="a"),
        )
        assert lab.kinds(results) == [RunExistsError]
        assert "start all ranks again with resume=True" in str(results[0])

    def test_a_store_without_exclusive_creation_still_shows_a_second_life(
        self, lab, tmp_path, monkeypatch
    ):
        exchange, rival = lab.store_exchanges(tmp_path, 1) + lab.store_exchanges(tmp_path, 1)

        def overwriting(key, data):
            exchange.store.put(key, [data])
            if data != rival_claim[0]:
                exchange.store.put(key, [rival_claim[0]])  # the rival's claim arrives right after
            return True

        rival_claim = [b""]
        rival.join(Schema({}, {}))
        rival_claim[0] = rival.store.get(keys_lab.claim_key(0))
        monkeypatch.setattr(exchange.store, "create", overwriting)
        with pytest.raises(RunExistsError):
            exchange.join(Schema({}, {}))
        rival.leave()

    @pytest.mark.parametrize("data", [b"", b"[]", b"{}", b"[" * 10**5, b"\xff" * 100, b"x" * 10**6])
    def test_a_claim_that_is_damaged_is_named(self, met, data):
        run, key, _ = met
        with pytest.raises(CorruptedObjectError, match=key):
            raise joined(run, key, data)

    @pytest.mark.parametrize(
        "field",
        [
            "rank",
            "world_size",
            "chunk_bytes",
            "run_id",
            "schema",
            "nonce",
            "pid",
            "beat_milliseconds",
        ],
    )
    @pytest.mark.parametrize("value", [None, -1, 10**30, 1.5, True, "x", [], {"a": 1}, ...])
    def test_every_field_of_a_claim_is_checked(self, met, field, value):
        """A sealed record may still be made by something that is not ours."""
        run, key, claim = met
        if field in {"run_id", "nonce"} and value == "x":
            return
        changed = keys_lab.sealed_again(key, claim, **{field: value})
        with pytest.raises(CorruptedObjectError, match=f"{key}.*'{field}'"):
            raise joined(run, key, changed)

    @pytest.mark.parametrize(
        "field", ["rank", "nonce", "event", "number", "syncs", "message", "cause_rank"]
    )
    @pytest.mark.parametrize("value", [-1, 10**30, 1.5, True, "x", [], ...])
    def test_every_field_of_a_note_is_checked(self, caplog, field, value):
        if not isinstance(value, list) and (field, value) in {
            ("message", "x"),
            ("nonce", "x"),
            ("cause_rank", -1),
        }:
            return
        # What it says is not believed, so rank 1 counts as lost when its time is over.
        with pytest.raises(ReplicaLostError, match=r"rank 1 has shown no sign of life .* damaged"):
            raise told(lambda key, note: keys_lab.sealed_again(key, note, **{field: value}))
        ignored = "the note that says how rank 1 ended cannot be read and is ignored: "
        assert f"'{field}'" in caplog.text.partition(ignored)[2].splitlines()[0]

    def test_a_note_that_is_whole_is_believed(self):
        with pytest.raises(ReplicaLostError, match="rank 1 failed after 1 sync: ValueError: m"):
            raise told(keys_lab.sealed_again)

    def test_a_claim_of_another_rank_under_this_key_is_refused(self, met):
        run, key, claim = met
        other = keys_lab.sealed_again(key, claim, keys_lab.claim_key(2))
        with pytest.raises(CorruptedObjectError, match="another key"):
            raise joined(run, key, other)

    def test_a_claim_of_another_version_is_named(self, met):
        run, key, _ = met
        with pytest.raises(FormatError, match=rf"{key} has format 1.*reads format {FORMAT} only"):
            raise joined(run, key, b'{"format": 1, "rank": 1}')

    @pytest.mark.parametrize("later", [None, 1])
    def test_a_claim_of_a_strict_run_of_another_version_is_named(self, met, later):
        run, key, claim = met
        version = keys_lab.fields(key, claim)["version"]
        other = ... if later is None else version + later
        named = "an earlier version" if later is None else f"version {other}"
        with pytest.raises(
            FormatError,
            match=rf"{key} is the claim of a strict run of {named}, and .* version {version} only",
        ):
            raise joined(run, key, keys_lab.sealed_again(key, claim, version=other))

    # A thread cannot wait for 1e300 seconds, so nothing comes after the first sign of life.
    @pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
    @pytest.mark.parametrize(
        ("seconds", "milliseconds"), [(10.0, 10_000), (0.0004, 1), (1e300, LARGEST)]
    )
    def test_a_claim_says_how_often_its_process_beats(self, tmp_path, seconds, milliseconds):
        timing = Timing(beat_interval=seconds, lost_after=2 * seconds)
        exchange = StoreExchange(open_store(str(tmp_path)), 0, 1, timing=timing)
        exchange.join(Schema({}, {}))
        key = keys_lab.claim_key(0)
        claim = keys_lab.fields(key, exchange.store.get(key))
        exchange.leave()
        assert claim["beat_milliseconds"] == milliseconds

    def test_what_else_lies_in_the_prefix_is_passed_over(self, lab, tmp_path):
        """Placeholders of consoles, leftovers of copies, files of other tools, in every folder of the run."""

        def replica(exchange):
            with ObjectStoreAllReduce(exchange) as reduce:
                for _ in range(3):
                    reduce.mean([torch.ones(4)])
                return exchange.store.list("")

        made = lab.store_exchanges(tmp_path, 2)
        stray = [
            f"{folder}/{name}"
            for folder in (
                "claims",
                "notes",
                "beats",
                "deltas",
                "deltas/00000001",
                "state",
                "state/00000001",
                "commits",
            )
            for name in (
                "_$folder$",
                "x",
                "00001",
                "00007.json.bak",
                "a.json",
                "00001.safetensors",
                "\u0661\u0661.json",
            )
            if f"{folder}/{name}" != keys_lab.beat_key(1)
        ]
        stray += [
            "requests/x",
            "requests/00000001/x",
            "claims/copy/00000.json",
            "deltas/00000001/00001.0.safetensors",
        ]
        for key in stray:
            made[0].store.put(key, [b""])
        for keys in lab.run(replica, made):
            assert set(stray) <= set(keys)

    @pytest.mark.parametrize(
        "left",
        [
            keys_lab.MANIFEST,
            keys_lab.manifest_key(2),
            "commits/00000000.json",
            keys_lab.commit_key(16 * "a", 0),
            keys_lab.state_key(16 * "a", 0, 0),
        ],
    )
    def test_what_is_left_of_another_run_is_refused(self, lab, tmp_path, left):
        (exchange,) = lab.store_exchanges(tmp_path, 1)
        exchange.store.put(left, [b"{}"])
        with pytest.raises(RunExistsError, match=f"holds '{left}' of an earlier run"):
            exchange.join(Schema({}, {}))
        assert list(exchange.store.list("")) == [left]

    def test_other_chunks_are_refused(self, tmp_path):
        store = open_store(str(tmp_path / "run"))
        made = [StoreExchange(store, rank, 2, chunk_bytes=64 * (rank + 1)) for rank in range(2)]
        results = run_replicas(lambda exchange: exchange.join(Schema({}, {})), made)
        assert [type(result) for result in results] == [MismatchError] * 2
        assert "chunk_bytes=128" in str(results[0])

    def test_another_outer_loop_on_the_same_exchange_is_refused(self, lab, tmp_path):
        (exchange,) = lab.store_exchanges(tmp_path, 1)
        exchange.join(Schema({"a": "1"}, {}))
        exchange.join(Schema({"a": "1"}, {}))
        with pytest.raises(ConfigurationError, match="already joined"):
            exchange.join(Schema({"b": "1"}, {}))
        exchange.leave()
