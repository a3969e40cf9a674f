"""Records that were damaged, or into which somebody else has written."""

import json
import re
import sys

import modal
import pytest

from diloco_modal._client import _records
from diloco_modal._state._record import (
    DamagedRecordError,
    call_of,
    entry,
    launch_of,
    written,
)
from diloco_protocol import (
    BackendError,
    RunConflictError,
)

RIGHT = {
    "launch": {
        "id": "1", "fingerprint": "2", "ranks": [0, 1], "world_size": 2, "app": "a",
        "function": "f", "environment": "",
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
    texts = {key: written(value) for key, value in RIGHT.items()}
    assert all(entry(texts, key) == value for key, value in RIGHT.items())
    assert entry(texts, "call-1") is None
    assert (call_of(texts, 0), call_of(texts, 1)) == ("fc-1", None)
    assert launch_of(texts)["world_size"] == 2


def test_where_a_run_meets_is_text_or_not_known():
    for uri in (None, "s3://bucket/run"):
        assert entry({"launch": json.dumps({**RIGHT["launch"], "rendezvous": uri})}, "launch")
    with pytest.raises(DamagedRecordError, match=r"has to have .*rendezvous"):
        entry({"launch": json.dumps({**RIGHT["launch"], "rendezvous": 7})}, "launch")


def test_no_password_of_a_rendezvous_is_kept(lab):
    uri = "s3://user:hunter2@bucket/run"
    (handle,) = lab.executor().launch_replicas(1, "trainer:train", {"rendezvous_uri": uri})
    where = lab.executor().meets_at(handle)
    assert "bucket/run" in where
    assert "hunter2" not in where


@pytest.mark.sampled
@pytest.mark.parametrize("key", [key for key in RIGHT if key != "launch"])
def test_a_damaged_entry_is_named_and_the_replica_can_be_cancelled_all_the_same(lab, key):
    executor = lab.executor()
    (handle,) = lab.launch(1, executor)
    lab.begin(handle)
    lab.record().put(key, "damaged")
    if key == "over-0":
        lab.call(handle).oom()
    status = lab.executor().describe(handle)
    assert f"the entry '{key}' of the run's record" in status.message
    assert status.state == ("failed" if key == "over-0" else "running")
    if key == "call-0":  # it is not known any more whose it is
        return
    lab.executor().cancel_run("run")
    lab.executor().cancel(handle)
    assert key == "over-0" or lab.call(handle).status == "terminated"


def test_a_damaged_life_that_is_found_at_the_end_is_no_matter_to_the_others(lab):
    """The other entries are as they were read before, as those of a minute ago may be."""
    handles = lab.launch(2)
    lab.begin(handles[1])
    lab.finish(handles[1], 1)
    lab.record().put("weights", {})
    executor = lab.executor()
    executor.poll(handles[0])
    lab.record().pop("weights")  # so that there seem to be no new entries
    lab.record().put("life-0-1", {"attempt": 0, "at": -1})
    lab.call(handles[0]).stop()
    first, second = executor.collect(handles, timeout=60)
    assert second["result"] == 1
    assert first["status"] == "cancelled"
    assert "the entry 'life-0-1' of the run's record" in first["error"]


@pytest.mark.sampled
@pytest.mark.parametrize("world_size", [1, 0, "2"])
def test_more_ranks_than_replicas(lab, world_size):
    handles = lab.launch(2)
    lab.record().put("launch", {**lab.record().items()["launch"], "world_size": world_size})
    for verb in (
        lambda: lab.executor().attach("run"),
        lambda: lab.executor().collect(handles, timeout=1),
        lambda: lab.executor().purge(handles[0]),
        lambda: lab.executor().cancel_run("run"),
    ):
        with pytest.raises(DamagedRecordError, match="the entry 'launch' of the run's record"):
            verb()
    with pytest.raises(RunConflictError, match="the entry 'launch' of the run's record"):
        lab.launch(2)
    assert [lab.call(handle).status for handle in handles] == ["terminated"] * 2


def test_a_call_of_a_rank_that_the_launch_leaves_out_is_named_and_ended(lab, caplog):
    """A purge would lose it while it runs."""
    handles = lab.launch(3)
    lab.begin(handles[0])
    lab.finish(handles[0])
    launch = lab.record().items()["launch"]
    lab.record().put("launch", {**launch, "ranks": [0]})
    words = r"has an entry 'call-1' \(.*'launch' leave that out"
    assert lab.executor().attach("run") == handles[:1]
    assert [bool(re.search(words, each.message)) for each in caplog.records] == [True, False]
    with pytest.raises(DamagedRecordError, match=words):
        lab.executor().purge(handles[0])
    assert lab.executor().poll(handles[0]) == "succeeded"
    assert re.search(words, lab.executor().describe(handles[1]).message)
    lab.executor().cancel(handles[1])
    assert lab.call(handles[1]).status == "terminated"
    with pytest.raises(DamagedRecordError, match=f"{words}.* were told to end$"):
        lab.executor().cancel_run("run")
    assert lab.call(handles[2]).status == "terminated"


def test_a_damaged_call_hides_no_other_rank(lab, caplog):
    """It may be running, so the record stays."""
    handles = lab.launch(2)
    for handle in handles:
        lab.begin(handle)
        lab.finish(handle)
    lab.record().put("call-0", "damaged")
    executor = lab.executor()
    assert executor.attach("run") == handles[1:]
    assert "the entry 'call-0' of the run's record" in caplog.text
    assert executor.poll(handles[1]) == "succeeded"
    for handle in handles:
        with pytest.raises(DamagedRecordError, match=r"'run' is not purged, .* the entry 'call-0'"):
            executor.purge(handle)
    lab.record().put("call-1", "damaged")
    with pytest.raises(DamagedRecordError, match="the entry 'call-0'"):
        lab.executor().attach("run")


@pytest.mark.parametrize("key", ["call-0", "launch"])
def test_a_run_with_a_damaged_record_is_purged_by_hand(lab, key):
    """As the error says: end the known, look at the unknown, and remove the Dict."""
    handles = lab.launch(2)
    lab.record().put(key, "damaged")
    executor = lab.executor()
    with pytest.raises(DamagedRecordError, match=r"is not purged, .*'modal dict delete diloco-RUN"):
        executor.purge(handles[1])
    with pytest.raises(DamagedRecordError, match="were told to end"):
        executor.cancel_run("run")
    assert executor.list_runs() == ["run"]
    modal.Dict.objects.delete("diloco-run", client=lab.client)
    lab.world.advance(60)
    executor.purge(handles[1])
    assert not executor.exists("run")
    assert len(lab.launch(1, executor)) == 1


@pytest.mark.sampled
@pytest.mark.parametrize("odd", ["\ud800", "fc-" + "x" * 300_000, "fc-a b", "ap-1", 7, None])
def test_a_call_that_can_be_none_hides_no_other_rank(lab, odd):
    handles = lab.launch(2)
    lab.begin(handles[1])
    lab.finish(handles[1])
    lab.record().put("call-0", {"call": odd})
    executor = lab.executor()
    assert executor.attach("run") == handles[1:]
    assert [each["status"] for each in executor.collect(handles[1:], timeout=0)] == ["succeeded"]
    assert "the entry 'call-0' of the run's record" in executor.describe(handles[0]).message


def test_a_damaged_call_keeps_no_other_from_being_ended(lab):
    handles = lab.launch(3)
    lab.record().put("call-1", "damaged")
    with pytest.raises(DamagedRecordError, match=r"the entry 'call-1' .* were told to end$"):
        lab.executor().cancel_run("run")
    assert [lab.call(handle).status for handle in handles] == [
        "terminated",
        "pending",
        "terminated",
    ]
    # Its own handle knows it, but not whether it is true.
    call = handles[1].metadata["function_call_id"]
    with pytest.raises(
        BackendError, match=f"the entry 'call-1' .* has not ended, and may cost money: .*{call}"
    ):
        lab.executor().cancel(handles[1])
    lab.call(handles[1]).stop()
    lab.executor().cancel(handles[1])


def test_what_could_not_be_ended_of_a_damaged_record_is_named(lab):
    handles = lab.launch(2)
    lab.record().put("launch", {**lab.record().items()["launch"], "grace": "long"})
    lab.stand_in.faults.add("forbidden", verb="FunctionCallCancel", times=1)
    call = handles[0].metadata["function_call_id"]
    with pytest.raises(DamagedRecordError, match=f"but for these, which may cost money: {call}$"):
        lab.executor().cancel_run("run")
    assert [lab.call(handle).status for handle in handles] == ["pending", "terminated"]


def test_a_dict_with_a_launch_that_is_not_ours(lab):
    lab.launch(1)
    lab.record().put("launch", {"of": "a rocket"})
    for verb in (lambda: lab.launch(1), lambda: lab.executor().attach("run")):
        with pytest.raises(BackendError, match="the entry 'launch' of the run's record"):
            verb()


def foreign_dict(lab, run_id):
    """A Dict that somebody else has made, of the name of a run's record."""
    return modal.Dict.from_name(
        f"diloco-{run_id}", create_if_missing=True, client=lab.client
    ).hydrate()


@pytest.mark.parametrize("letters", ["x" * 60_000, "x" * 30_000 + "\U0001f600"])
def test_what_others_write_into_many_records_is_not_kept(lab, monkeypatch, letters):
    """A character beyond U+FFFF makes every character of its text take 4 bytes of memory."""
    monkeypatch.setattr(_records, "_KEPT_BYTES", 100_000)
    executor = lab.executor()
    for number in range(4):
        foreign = foreign_dict(lab, f"s{number}")
        foreign.put("launch", "{}")
        foreign.put("life-0-1", letters)
        with pytest.raises(DamagedRecordError):
            executor.attach(f"s{number}")
    held = [texts for _, texts in executor._client._entries._values.values()]
    assert sum(sys.getsizeof(text) for texts in held for text in texts.values()) < 400_000
    lab.launch(1, executor)
    before = len(lab.stand_in.calls.requests())
    assert executor.exists("run")
    assert executor.exists("run")
    verbs = [call.verb for call in lab.stand_in.calls.requests()[before:]]
    assert verbs.count("DictContents") == 0  # what is small is kept


def test_a_record_of_more_ranks_than_a_launch_may_have_makes_nothing_be_written(lab):
    launch = {**RIGHT["launch"], "ranks": list(range(10_001)), "world_size": 10_001}
    foreign_dict(lab, "evil").put("launch", json.dumps(launch))
    with pytest.raises(DamagedRecordError, match="the entry 'launch'"):
        lab.executor().cancel_run("evil")
    assert list(lab.record("evil").items()) == ["launch"]
