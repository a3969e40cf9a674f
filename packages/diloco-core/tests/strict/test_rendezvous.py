"""Replicas meet once, agree on everything, or are told at once and by name what is in the way."""

import time

import pytest
import torch
from strict_lab import claim

from diloco_core import (
    ConfigurationError,
    CorruptedObjectError,
    FormatError,
    MismatchError,
    ObjectStoreAllReduce,
    ObjectStoreExchange,
    RendezvousTimeoutError,
    RunExistsError,
    Timing,
    in_process,
)
from diloco_core._exchange._base import Schema
from diloco_core._exchange._endings import Ending, Progress
from diloco_core._store._open import open_store
from diloco_core._strict._records._records import (
    Claim,
    claim_key,
    note,
    read_note,
    schema_digest,
    schema_key,
)
from diloco_core._strict._records._version import VERSION
from diloco_core._wire._fields import LARGEST
from diloco_core._wire._sealed import FORMAT, seal, unseal
from diloco_core.testing import run_replicas

pytestmark = pytest.mark.processes


class TestMeeting:
    def test_a_replica_that_never_comes_is_named(self, lab, tmp_path):
        def replica(exchange):
            exchange.join(Schema({}, {}))

        def timing():
            clock = lab.Clock()

            def sleep(seconds):
                # No time passes before both are there, and each has its own: nobody waits less than the whole time for the other.
                claims = {path.name for path in (tmp_path / "run" / "claims").glob("*.json")}
                if {"00000.json", "00002.json"} <= claims:
                    clock.sleep(seconds)
                else:
                    time.sleep(0.001)

            return Timing(join_timeout=5.0, clock=clock, sleep=sleep)

        store = str(tmp_path / "run")
        results = run_replicas(
            replica, [ObjectStoreExchange(open_store(store), r, 4, timing=timing()) for r in (0, 2)]
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
        first, second = lab.store_exchanges(tmp_path, 2)
        theirs = Schema({"a": "float32[3]"}, {})
        key = schema_key(schema_digest(theirs))
        put = second.store.put

        def damaging(at, parts):
            if at != key:
                return put(at, parts)
            tables = {
                "other": {"tensors": {"b": "float32[3]"}, "settings": {}},
                "damaged": {},
                "gone": None,
            }
            return None if tables[what] is None else put(at, [seal("schema", key, tables[what])])

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
        exchanges = [ObjectStoreExchange(store, 0, 2), ObjectStoreExchange(store, 1, 3)]
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
        rival_claim[0] = rival.store.get("claims/00000.json")
        monkeypatch.setattr(exchange.store, "create", overwriting)
        with pytest.raises(RunExistsError):
            exchange.join(Schema({}, {}))
        rival.leave()

    @pytest.mark.parametrize("data", [b"", b"[]", b"{}", b"[" * 10**5, b"\xff" * 100, b"x" * 10**6])
    def test_a_claim_that_is_damaged_is_named(self, lab, tmp_path, data):
        (exchange,) = lab.store_exchanges(tmp_path, 2, ranks=[0], join_timeout=50.0)
        exchange.store.put("claims/00001.json", [data])
        with pytest.raises(CorruptedObjectError, match=r"claims/00001.json"):
            exchange.join(Schema({}, {}))

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
    def test_every_field_of_a_claim_is_checked(self, field, value):
        """A sealed record may still be made by something that is not ours."""
        key = "claims/00001.json"
        fields = unseal(
            "claim",
            key,
            Claim(1, 2, "a", 64, schema_digest(Schema({"t": "1"}, {})), "n", "h", 7, 9).to_bytes(),
            "x",
        )
        assert Claim.from_bytes(seal("claim", key, fields), 1, "x").pid == 7
        if value is ...:
            del fields[field]
        else:
            fields[field] = value
        if field in {"run_id", "nonce"} and value == "x":
            return
        with pytest.raises(CorruptedObjectError, match=f"'{field}'"):
            Claim.from_bytes(seal("claim", key, fields), 1, "x")

    @pytest.mark.parametrize(
        "field", ["rank", "nonce", "event", "number", "syncs", "message", "cause_rank"]
    )
    @pytest.mark.parametrize("value", [-1, 10**30, 1.5, True, "x", [], ...])
    def test_every_field_of_a_note_is_checked(self, field, value):
        key, ending = "notes/00001.json", Ending(1, "failed", Progress(3, 2), "m", 0)
        fields = unseal("note", key, note(ending, "n"), "x")
        assert read_note(seal("note", key, fields), 1, "x") == (ending, "n")
        if value is ...:
            del fields[field]
        else:
            fields[field] = value
        if not isinstance(value, list) and (field, value) in {
            ("message", "x"),
            ("nonce", "x"),
            ("cause_rank", -1),
        }:
            return
        with pytest.raises(CorruptedObjectError, match=f"'{field}'"):
            read_note(seal("note", key, fields), 1, "x")

    def test_a_claim_of_another_rank_under_this_key_is_refused(self):
        data = Claim(2, 3, "a", 64, schema_digest(Schema({}, {})), "n", "h", 7, 9).to_bytes()
        with pytest.raises(CorruptedObjectError, match="another key"):
            Claim.from_bytes(data, 1, "x")

    def test_a_claim_of_another_version_is_named(self, lab, tmp_path):
        (exchange,) = lab.store_exchanges(tmp_path, 2, ranks=[0], join_timeout=50.0)
        exchange.store.put("claims/00001.json", [b'{"format": 1, "rank": 1}'])
        with pytest.raises(
            FormatError, match=rf"claims/00001.json has format 1.*reads format {FORMAT} only"
        ):
            exchange.join(Schema({}, {}))

    @pytest.mark.parametrize(
        ("version", "named"),
        [(None, "an earlier version"), (VERSION + 1, f"version {VERSION + 1}")],
    )
    def test_a_claim_of_a_strict_run_of_another_version_is_named(
        self, lab, tmp_path, version, named
    ):
        (exchange,) = lab.store_exchanges(tmp_path, 2, ranks=[0], join_timeout=50.0)
        key = claim_key(1)
        fields = unseal("claim", key, claim(1, "n").to_bytes(), "x")
        del fields["version"]
        if version is not None:
            fields["version"] = version
        exchange.store.put(key, [seal("claim", key, fields)])
        with pytest.raises(
            FormatError, match=rf"claims/00001.json is the claim of a strict run of {named}, and"
        ):
            exchange.join(Schema({}, {}))

    @pytest.mark.parametrize(
        ("seconds", "milliseconds"), [(10.0, 10_000), (0.0004, 1), (1e308, LARGEST)]
    )
    def test_a_claim_says_how_often_its_process_beats(self, seconds, milliseconds):
        new = Claim.of_this_process(0, 1, "", 64, Schema({}, {}), "n", seconds)
        stored = Claim.from_bytes(new.to_bytes(), 0, "x")
        assert stored == new
        assert stored.beat_milliseconds == milliseconds

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
            if f"{folder}/{name}" != "beats/00001"
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
            "manifest.json",
            "manifests/0002.json",
            "commits/00000000.json",
            f"commits/00000000.{16 * 'a'}.json",
            f"state/00000000/00000.{16 * 'a'}.safetensors",
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
        made = [
            ObjectStoreExchange(store, rank, 2, chunk_bytes=64 * (rank + 1)) for rank in range(2)
        ]
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
