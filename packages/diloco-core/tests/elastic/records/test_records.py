"""Records of elastic runs: each is what was written under its key, field by field, or it is refused
by name.
"""

from dataclasses import replace

import pytest

from diloco_core._arithmetic._rate import Rate
from diloco_core._errors import CorruptedObjectError, FormatError
from diloco_core._run._records._keys import (
    Delta,
    commit_key,
    commit_sync,
    done_key,
    epochs,
    highest_epochs,
    parse_inner,
)
from diloco_core._run._records._manifest import Manifest
from diloco_core._run._records._records import Commit, Done, Rollback, read_record
from diloco_core._wire._sealed import seal, unseal

_BASE, _SCHEMA, _RUN = "0" * 16, "f" * 16, "a" * 16


def _delta(rank, stop=5, sync=3):
    return Delta(sync, rank, 1, 0, stop, _BASE, _SCHEMA)


RATE = Rate((0.1, 2.0), 4, 1, 3)
COMMIT = Commit(
    3, 1, _BASE, "1" * 16, (_delta(0), _delta(4)), {0: 5, 2: 1, 4: 5}, 2, 2, RATE, run=_RUN
)
DONE = Done(3, 1, (1, 2**63), (5, 6), COMMIT)
ROLLBACK = Rollback(9, (3, 4), (6, 7, 8), {0: 2, 7: 1}, 5, run=_RUN)
MANIFEST = Manifest(
    run_id="r",
    writer=0,
    world_size=2,
    min_replicas=1,
    topology="gather",
    publish_every=4,
    retention=2,
    settings={"a": "b"},
    tensors={},
    fragments=[{"name": "0", "shards": 2, "fingerprint": "0" * 32, "groups": [], "tensors": []}],
    unsynced={},
    initial="0" * 16,
    sums=[[1, 2]],
    rests=[[3, 4]],
)


def test_records_survive_being_stored():
    assert read_record(COMMIT.to_json(), 3, "here") == COMMIT
    assert read_record(ROLLBACK.to_json(), 9, "here") == ROLLBACK
    assert Done.from_json(DONE.to_json(), 3, 1, "here") == DONE
    for full in (True, False):
        done = replace(DONE, full=full)
        assert Done.from_json(done.to_json(), 3, 1, "here") == done
    assert Manifest.from_json(MANIFEST.to_json(), "here") == MANIFEST


def test_a_done_record_holds_its_commit_to_the_last_byte():
    assert Done.from_json(DONE.to_json(), 3, 1, "here").commit.to_json() == COMMIT.to_json()


@pytest.mark.parametrize(
    "read",
    [
        lambda: read_record(COMMIT.to_json(), 4, "here"),
        lambda: read_record(ROLLBACK.to_json(), 8, "here"),
        lambda: Done.from_json(DONE.to_json(), 3, 0, "here"),
        lambda: Done.from_json(DONE.to_json(), 4, 1, "here"),
        lambda: Manifest.from_json(COMMIT.to_json(), "here"),
    ],
    ids=range(5),
)
def test_records_under_other_keys_are_refused(read):
    with pytest.raises(CorruptedObjectError, match="here"):
        read()


def _changed(name, value):
    return {**COMMIT.fields(), name: value}


def _member(**changes):
    first, second = COMMIT.fields()["members"]
    return _changed("members", [{**first, **changes}, second])


@pytest.mark.parametrize(
    "fields",
    [
        *(
            {name: value for name, value in COMMIT.fields().items() if name != gone}
            for gone in COMMIT.fields()
        ),
        *(
            _changed(name, wrong)
            for name in COMMIT.fields()
            for wrong in (None, -1, 2.0, True, "x", {}, [[1]])
        ),
        *(_member(**{name: 77}) for name in ("rank", "epoch", "from", "to", "key")),
        _member(key=_delta(0, sync=4).key),
        _member(key=_delta(0).key.replace("0-5", f"0-{'9' * 5000}")),
        _changed("members", []),
        _changed("members", COMMIT.fields()["members"][::-1]),
        _changed("members", COMMIT.fields()["members"][:1] * 2),
        _changed("positions", [[0, 5], [4, 6]]),
        _changed("positions", [[4, 5], [0, 5]]),
        _changed("rollback", 3),
        _changed("outer_steps", 0),
        _changed("outer_steps", 4),
        *(
            _changed("outer_lr", [digits])
            for digits in (
                "0" * 16,
                "7ff0000000000000",
                "7ff8000000000000",
                "bfe0000000000000",
                "3f",
            )
        ),
        *(
            _changed("lr_wish", {"n": 4, "rank": 1, "epoch": 3} | {name: wrong})
            for name in ("n", "rank", "epoch")
            for wrong in (-1, None, 1.5)
        ),
        # The key of the next wish could not hold its number.
        _changed("lr_wish", {"n": 999_999_999, "rank": 1, "epoch": 3}),
    ],
)
def test_a_sealed_commit_with_wrong_fields_is_refused_by_name(fields):
    with pytest.raises(CorruptedObjectError, match="here"):
        read_record(seal("commit", commit_key(3), fields), 3, "here")


@pytest.mark.parametrize("name", ["run", "sync", "states", "given_up", "fence", "rollback"])
@pytest.mark.parametrize("wrong", [None, -1, 3.0, "x", [[]], [9], [-1, 0], [[0, 0]]])
def test_a_sealed_rollback_with_wrong_fields_is_refused_by_name(name, wrong):
    fields = unseal("rollback", commit_key(9), ROLLBACK.to_json(), "here")
    with pytest.raises(CorruptedObjectError, match="here"):
        read_record(seal("rollback", commit_key(9), {**fields, name: wrong}), 9, "here")


@pytest.mark.parametrize("name", ["sync", "fragment", "sums", "rests", "commit", "commit_digest"])
@pytest.mark.parametrize("wrong", [None, -1, 3.0, "x", [1], {}, "0" * 16])
def test_a_sealed_done_record_with_wrong_fields_is_refused_by_name(name, wrong):
    fields = unseal("done", done_key(3, 1), DONE.to_json(), "here")
    with pytest.raises(CorruptedObjectError, match="here"):
        Done.from_json(seal("done", done_key(3, 1), {**fields, name: wrong}), 3, 1, "here")


@pytest.mark.parametrize("name", [name for name in Manifest.__slots__ if name != "unsynced"])
@pytest.mark.parametrize("wrong", [None, -1, 3.5, [1, 2], {"a": 1}])
def test_a_sealed_manifest_with_wrong_fields_is_refused_by_name(name, wrong):
    fields = unseal("manifest", "manifest.json", MANIFEST.to_json(), "here")
    with pytest.raises(CorruptedObjectError, match="here"):
        Manifest.from_json(seal("manifest", "manifest.json", {**fields, name: wrong}), "here")


def test_keys_that_do_not_parse_are_not_of_the_run():
    stray = [
        "claims/00001/",
        "claims/00001/notes.json",
        "claims/00001/00x2.json",
        "claims/1/0009.json",
    ]
    assert epochs(["claims/00001/0001.json", *stray], 1) == [1]
    assert highest_epochs([*stray, "claims/00000/0003.json", "claims/00000/0002.json"]) == {0: 3}
    assert commit_sync("commits/00000007.json") == 7
    assert {
        commit_sync(key) for key in ("commits/", "commits/7.json", "commits/00000007.json.tmp")
    } == {None}
    assert {
        parse_inner(key) for key in ("inner/00000/", "inner/00000/00000006.0001.safetensors")
    } == {None}
    assert Delta.parse(f"deltas/00000003/00000.0001.05-7.{_BASE}.{_SCHEMA}.safetensors") is None


@pytest.mark.parametrize(
    "data", [b"", b"{}", b'{"format": 9}', b'{"format": 2, "members": [{"key": "x"}]}', b"[]"]
)
@pytest.mark.parametrize(
    "read",
    [
        lambda data: read_record(data, 3, "where it lies"),
        lambda data: Done.from_json(data, 3, 1, "where it lies"),
        lambda data: Manifest.from_json(data, "where it lies"),
    ],
    ids=["log", "done", "manifest"],
)
def test_what_is_no_record_of_this_version_is_named(data, read):
    with pytest.raises((CorruptedObjectError, FormatError), match="where it lies"):
        read(data)


def test_a_record_says_the_tokens_of_its_members():
    member = replace(_delta(0), tokens=4096)
    commit = replace(COMMIT, members=(member, _delta(4)))
    assert read_record(commit.to_json(), 3, "here") == commit
    assert [fields.get("tokens") for fields in commit.fields()["members"]] == [4096, None]
    other = commit.fields()
    other["members"][0]["tokens"] = 4097
    with pytest.raises(CorruptedObjectError, match="tokens"):
        read_record(seal("commit", "commits/00000003.json", other), 3, "here")


@pytest.mark.parametrize("tokens", ["0", "07", "-7", "7.5", "9" * 19])
def test_tokens_are_written_in_one_way_only(tokens):
    key = replace(_delta(0), tokens=7).key
    assert Delta.parse(key).tokens == 7
    assert Delta.parse(key.replace(".7.", f".{tokens}.")) is None


def test_inner_steps_in_keys_have_at_most_18_digits():
    """Python refuses to read numbers of thousands of digits."""
    longest = 18 * "9"
    key = _delta(0, int(longest)).key
    assert Delta.parse(key).key == key
    for digits in (19, 5000):
        assert Delta.parse(key.replace(longest, digits * "9")) is None


@pytest.mark.parametrize("wrong", [{"sums": ()}, {"rests": (5, 6, 7)}])
def test_a_done_record_of_another_number_of_shards_is_damage(wrong):
    DONE.check_shards(2, "here")
    with pytest.raises(CorruptedObjectError, match=r"^here names \d shards, but fragment 1 has 2"):
        replace(DONE, **wrong).check_shards(2, "here")
