"""Records of elastic runs are what was written under their keys, or are refused by name."""

from dataclasses import replace

import pytest
from keys_lab import sealed_again
from simulated import SimulatedStore, SimulatedTraining, once, violations

from diloco_core import CorruptedObjectError, Elastic
from diloco_core._run._records._keys import (
    Delta,
    Hint,
    Wish,
    commit_key,
    commit_sync,
    done_key,
    epochs,
    inner_key,
    parse_inner,
)
from diloco_core._run._records._manifest import Manifest
from diloco_core._run._records._records import Commit, Done, Rollback, read_record

_BASE, _SCHEMA, _RUN = "0" * 16, "f" * 16, "a" * 16


def _delta(rank, stop=5, sync=3):
    return Delta(sync, rank, 1, 0, stop, _BASE, _SCHEMA)


WISH = f"deltas/00000003/lr.4.00001.0003.3fb999999999999a4000000000000000.{_SCHEMA}"
RATE = Wish.parse(WISH).rate  # 0.1 and 2.0
COMMIT = Commit(
    3, 1, _BASE, "1" * 16, (_delta(0), _delta(4)), {0: 5, 2: 1, 4: 5}, 2, 2, RATE, run=_RUN
)
DONE = Done(3, 1, (1, 2**63), (5, 6), COMMIT)
ROLLBACK = Rollback(9, (3, 4), (6, 7, 8), {0: 2, 7: 1}, 5, run=_RUN)
TABLE = {"name": "0", "shards": 2, "fingerprint": "0" * 32, "groups": [], "tensors": []}
MANIFEST = Manifest(
    run_id="r", writer=0, world_size=2, min_replicas=1, topology="gather", publish_every=4,
    retention=2, settings={"a": "b"}, tensors={}, fragments=[TABLE], unsynced={},
    initial="0" * 16, sums=[[1, 2]], rests=[[3, 4]],
)  # fmt: skip


def test_records_survive_being_stored():
    assert read_record(COMMIT.to_json(), 3, "here") == COMMIT
    assert read_record(ROLLBACK.to_json(), 9, "here") == ROLLBACK
    assert Done.from_json(DONE.to_json(), 3, 1, "here") == DONE
    changes = replace(DONE, full=False)
    assert Done.from_json(changes.to_json(), 3, 1, "here") == changes
    assert Manifest.from_json(MANIFEST.to_json(), "here") == MANIFEST
    assert Done.from_json(DONE.to_json(), 3, 1, "here").commit.to_json() == COMMIT.to_json()


@pytest.mark.parametrize(
    ("read", "record", "place"),
    [
        (read_record, COMMIT, (4,)),
        (read_record, ROLLBACK, (8,)),
        (Done.from_json, DONE, (3, 0)),
        (Done.from_json, DONE, (4, 1)),
        (Manifest.from_json, COMMIT, ()),
    ],
    ids=range(5),
)
def test_records_under_other_keys_are_refused(read, record, place):
    with pytest.raises(CorruptedObjectError, match="here"):
        read(record.to_json(), *place, "here")


def _refused(read, key, record, *place, under=None, **changes):
    """A record with other fields, whole by its checksum, is refused by where it lies."""
    with pytest.raises(CorruptedObjectError, match="here"):
        read(sealed_again(key, record, under, **changes), *place, "here")


MEMBERS = COMMIT.fields()["members"]
NO_RATES = ["0" * 16, "7ff0000000000000", "7ff8000000000000", "bfe0000000000000", "3f"]


def _member(**changes):
    return {"members": [{**MEMBERS[0], **changes}, MEMBERS[1]]}


@pytest.mark.sampled
@pytest.mark.parametrize(
    "changes",
    [
        *(
            {name: wrong}
            for name in COMMIT.fields()
            for wrong in (..., None, -1, 2.0, True, "x", {}, [[1]])
        ),
        *(_member(**{name: 77}) for name in ("rank", "epoch", "from", "to", "key")),
        _member(key=_delta(0, sync=4).key),
        _member(key=_delta(0).key.replace("0-5", f"0-{'9' * 5000}")),
        *({"members": wrong} for wrong in ([], MEMBERS[::-1], MEMBERS[:1] * 2)),
        *({"positions": wrong} for wrong in ([[0, 5], [4, 6]], [[4, 5], [0, 5]])),
        {"rollback": 3},
        {"outer_steps": 0},
        {"outer_steps": 4},
        *({"outer_lr": [digits]} for digits in NO_RATES),
        *(
            {"lr_wish": {"n": 4, "rank": 1, "epoch": 3} | {name: wrong}}
            for name in ("n", "rank", "epoch")
            for wrong in (-1, None, 1.5)
        ),
        # The key of the next wish could not hold its number.
        {"lr_wish": {"n": 999_999_999, "rank": 1, "epoch": 3}},
    ],
)
def test_a_sealed_commit_with_wrong_fields_is_refused_by_name(changes):
    _refused(read_record, commit_key(3), COMMIT.to_json(), 3, **changes)


@pytest.mark.parametrize("name", ["run", "sync", "states", "given_up", "fence", "rollback"])
@pytest.mark.parametrize("wrong", [None, -1, 3.0, "x", [[]], [9], [-1, 0], [[0, 0]]])
def test_a_sealed_rollback_with_wrong_fields_is_refused_by_name(name, wrong):
    _refused(read_record, commit_key(9), ROLLBACK.to_json(), 9, **{name: wrong})


@pytest.mark.parametrize("name", ["sync", "fragment", "sums", "rests", "commit", "commit_digest"])
@pytest.mark.parametrize("wrong", [None, -1, 3.0, "x", [1], {}, "0" * 16])
def test_a_sealed_done_record_with_wrong_fields_is_refused_by_name(name, wrong):
    _refused(Done.from_json, done_key(3, 1), DONE.to_json(), 3, 1, **{name: wrong})


@pytest.mark.parametrize("name", [name for name in Manifest.__slots__ if name != "unsynced"])
@pytest.mark.parametrize("wrong", [None, -1, 3.5, [1, 2], {"a": 1}])
def test_a_sealed_manifest_with_wrong_fields_is_refused_by_name(name, wrong):
    _refused(Manifest.from_json, "manifest.json", MANIFEST.to_json(), **{name: wrong})


def test_every_key_has_one_spelling():
    assert commit_sync("commits/7.json") is None
    assert epochs(["claims/00001/00002.json", "claims/00001/10000.json"], 1) == [10000]
    assert Hint.parse(Hint(3, 1, 12345, "join").key) == Hint(3, 1, 12345, "join")
    assert Hint.parse("deltas/00000003/hint.00001.00005.join") is None
    assert parse_inner(inner_key(1, 10000, 7)) == (10000, 7)
    assert parse_inner("inner/00001/00002.00000007.safetensors") is None


def test_a_record_says_the_tokens_of_its_members():
    member = replace(_delta(0), tokens=4096)
    commit = replace(COMMIT, members=(member, _delta(4)))
    assert read_record(commit.to_json(), 3, "here") == commit
    assert [fields.get("tokens") for fields in commit.fields()["members"]] == [4096, None]
    wrong = commit.fields()["members"]
    wrong[0]["tokens"] = 4097
    _refused(read_record, commit_key(3), commit.to_json(), 3, members=wrong)


LONGEST = 18 * "9"  # Python refuses to read numbers of thousands of digits


@pytest.mark.parametrize(
    ("old", "new"),
    [(".7.", f".{tokens}.") for tokens in ("0", "07", "-7", "7.5", "9" * 19)]
    + [(LONGEST, digits * "9") for digits in (19, 5000)],
)
def test_numbers_in_keys_are_written_in_one_way_only(old, new):
    key = replace(_delta(0, int(LONGEST)), tokens=7).key
    assert Delta.parse(key).key == key
    assert Delta.parse(key.replace(old, new)) is None


@pytest.mark.parametrize("wrong", [{"sums": ()}, {"rests": (5, 6, 7)}])
def test_a_done_record_of_another_number_of_shards_is_damage(wrong):
    DONE.check_shards(2, "here")
    with pytest.raises(CorruptedObjectError, match=r"^here names \d shards, but fragment 1 has 2"):
        replace(DONE, **wrong).check_shards(2, "here")


class Moved(SimulatedStore):
    """The contribution of rank 1 to sync 2 lies under another key, which says something else."""

    def __init__(self, change):
        super().__init__()
        self.change, self.key = change, None

    def write(self, key, data):
        made = Delta.parse(key)
        if made is not None and (made.sync, made.rank) == (2, 1):
            self.key = key = replace(made, **self.change).key
        super().write(key, data)


@pytest.mark.sampled
@pytest.mark.parametrize(
    "change", [{}, {"epoch": 9}, {"stop": 9}, {"tokens": 99}, {"rate": 16 * "1"}], ids=str
)
def test_under_another_key_it_is_refused(change):
    training, store = SimulatedTraining(4, (640,), clip=True, weight="tokens"), Moved(change)
    settings = Elastic(3, grace=5.0, topology="sharded")
    outcome = once(training, 4, settings, store=store, limit=2000.0)
    errors = outcome.errors().values()
    if not change:
        assert violations(outcome, training) == []
        return
    assert any(isinstance(error, CorruptedObjectError) for error in errors), errors
    assert any("section norms" in str(error) and store.key in str(error) for error in errors)
    assert not any(sync > 1 for sync in training.states)
