"""Records that were damaged, or into which somebody else has written."""

import pytest

from diloco_modal._record import DamagedRecordError, call_of, entry, launch_of
from diloco_protocol import BackendError

RIGHT = {
    "launch": {
        "id": "1", "fingerprint": "2", "ranks": [0, 1], "world_size": 2, "app": "a", "function": "f", "environment": "",
        "grace": 10.0, "at": 1.0,
    },
    "call-0": {"call": "fc-1"},
    "cancel-0": {"by": "executor", "at": 1.0},
    "life-0-1": {"attempt": 1, "at": 1.0},
    "attempt-0-2": {"at": 1.0},
    "end-0-1": {"started": 1, "failed": 0, "at": 1.0},
    "over-0": {"at": 1},
}  # fmt: skip


def test_what_this_version_writes_is_read():
    assert all(entry(RIGHT, key) == value for key, value in RIGHT.items())
    assert entry(RIGHT, "call-1") is None
    assert (call_of(RIGHT, 0), call_of(RIGHT, 1)) == ("fc-1", None)
    assert launch_of(RIGHT)["world_size"] == 2


@pytest.mark.parametrize("key", RIGHT)
def test_every_field_that_is_not_right_is_named(key):
    for name in RIGHT[key]:
        wrong = {"ranks": (-1, "0", [0, "1"], [-1], [], [1, 1]), "world_size": (0,)}.get(name, ())
        if name == "at":
            wrong = ("1", float("nan"), float("inf"), -1.0)
        for value in (*wrong, None, b"", object()):
            with pytest.raises(DamagedRecordError, match=f"{key!r}.* has to have .*{name}"):
                entry({key: {**RIGHT[key], name: value}}, key)
    for value in (None, 7, "text", [], {}):
        with pytest.raises(DamagedRecordError, match="written by somebody else or by another"):
            entry({key: value}, key)


@pytest.mark.parametrize("key", [key for key in RIGHT if key != "launch"])
def test_a_damaged_entry_is_named_and_the_replica_can_be_cancelled_all_the_same(lab, key):
    executor = lab.executor()
    (handle,) = lab.launch(1, executor)
    lab.begin(handle)
    lab.record().put(key, "damaged")
    if key == "over-0":
        lab.call(handle).oom()
    with pytest.raises(BackendError, match=f"the entry '{key}' of the run's record"):
        lab.executor().describe(handle)
    if key == "call-0":  # it is not known any more whose it is
        return
    lab.executor().cancel_run("run")
    lab.executor().cancel(handle)
    assert key == "over-0" or lab.call(handle).status == "terminated"


@pytest.mark.parametrize("more", [{"again": "no"}, {"outcome": "{"}, {"outcome": 1}])
def test_what_an_end_says_besides_is_right_or_named(more):
    """Apps of earlier versions say nothing."""
    with pytest.raises(DamagedRecordError, match="the entry 'end-0-1' of the run's record"):
        entry({"end-0-1": {**RIGHT["end-0-1"], **more}}, "end-0-1")


def test_a_dict_with_a_launch_that_is_not_ours(lab):
    lab.launch(1)
    lab.record().put("launch", {"of": "a rocket"})
    for verb in (lambda: lab.launch(1), lambda: lab.executor().attach("run")):
        with pytest.raises(BackendError, match="the entry 'launch' of the run's record"):
            verb()
