"""The model of an earlier outer step, and of the newest whole one where newer ones are damaged."""

import contextlib
import logging
import re
import shutil
from collections import Counter

import pytest
import torch
from export_lab import Adapted, all_exported, history, loads_exactly, meddled
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from training_lab import identical

from diloco_core import (
    ConfigurationError,
    CorruptedObjectError,
    DiLoCo,
    Elastic,
    RendezvousError,
    StoreExchange,
    export,
)
from diloco_core._run._records._keys import MANIFEST, commit_key
from diloco_core._run._records._records import Rollback, digest
from diloco_core._store._open import open_store

KINDS = ("fixed", "sharded", "gather")


@pytest.fixture(autouse=True)
def warnings(caplog):
    caplog.set_level(logging.WARNING)


def metadata(model):
    with safe_open(model, "pt") as file:
        return file.metadata()


def roll_back(run, sync, states, given_up, epoch=1, before=0):
    """Write the record with which a run goes back to older states."""
    store = open_store(str(run))
    fence, name = {0: epoch, 1: epoch}, digest(store.get(MANIFEST))
    record = Rollback(sync, states, given_up, fence, before, run=name)
    assert store.create(commit_key(sync), record.to_json())


@pytest.mark.sampled
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fragments", [1, 2])
def test_each_that_is_there_is_what_the_model_was(lab, run, model, caplog, kind, fragments):
    states = history(lab, run, kind, fragments)
    exports = all_exported(run, model, 8)
    last = 5 + fragments  # at the end the other fragments are synced once more
    assert max(exports) == last
    if fragments == 1:  # with fragments the model is further on with those that were not synced
        assert all(identical([exports[step], states[step]]) for step in exports if step)
    steps = ", ".join(map(str, exports))
    with pytest.raises(RendezvousError, match=rf"the states after outer steps {steps}\."):
        export(run, model, at=99)
    caplog.clear()
    assert export(run, model) == last
    assert not caplog.text, "of a run that is whole nothing is said"


@pytest.mark.parametrize("fragments", [1, 2])
def test_after_a_rollback_it_is_what_the_run_goes_on_from(lab, run, model, fragments):
    """States that were given up are whole, and no longer of the run."""
    history(lab, run, "sharded", fragments)
    last = 5 + fragments
    export(run, model, at=last - 1)
    before = load_file(model)
    kept = {1: (last - 1,), 2: (last - 2, last - 1)}[fragments]  # seven is of the first fragment
    roll_back(run, last + 1, kept, (last,))
    assert export(run, model) == last - 1
    assert identical([load_file(model), before])
    with pytest.raises(RendezvousError, match=f"does not hold the state after outer step {last}"):
        export(run, model, at=last)


@pytest.mark.parametrize("damaged", [False, True])
def test_of_several_rollbacks_each_is_obeyed(lab, run, model, tmp_path, damaged):
    """The second one goes back to a state that is newer than what the first one gave up."""
    history(lab, run, "sharded")
    roll_back(run, 7, (5,), (6,))
    state = run / "state" / "00000006"
    shutil.copytree(state, tmp_path / "given up")
    states = history(lab, run, "sharded", syncs=7)
    assert sorted(states) == [6, 7]
    shutil.copytree(tmp_path / "given up", state, dirs_exist_ok=True)
    roll_back(run, 10, (8,), (9,), 2, 7)
    if damaged:  # what goes on from there names the first one
        (run / commit_key(10)).write_text("torn")
        assert export(run, model) == 7
    else:
        assert export(run, model) == 6
        loads_exactly(model, Adapted, states[6])
        text = r"outer step 7\. It holds the states after outer steps 6\."
        with pytest.raises(RendezvousError, match=text):
            export(run, model, at=7)
    export(run, model, at=6)
    loads_exactly(model, Adapted, states[6])


@pytest.mark.sampled
@pytest.mark.parametrize("kind", ["sharded", "gather"])
@pytest.mark.parametrize("fragments", [1, 2])
@pytest.mark.parametrize("harm", ["gone", "torn"])
def test_without_the_record_of_a_rollback_steps_are_counted_right(
    lab, run, model, kind, fragments, harm
):
    """A state that was given up must not count: under ``at=`` there would be another model."""
    history(lab, run, kind, fragments)
    last = 5 + fragments
    kept = {1: (last - 1,), 2: (last - 2, last - 1)}[fragments]
    roll_back(run, last + 1, kept, (last,))
    states = history(lab, run, kind, fragments, syncs=last + 2)
    true = all_exported(run, model, 3 * last)
    assert max(true) >= max(states)
    record = run / commit_key(last + 1)
    record.unlink() if harm == "gone" else record.write_text("torn")
    assert export(run, model) == max(true)
    results = []
    for step in range(3 * last):
        with contextlib.suppress(CorruptedObjectError):
            assert export(run, model, at=step) == step
            results.append(step)
            assert identical([load_file(model), true[step]])
    assert results
    text = rf"{record.name} is damaged or gone.* not known which of the states before it were given"
    with pytest.raises(CorruptedObjectError, match=text):
        export(run, model, at=next(step for step in range(99) if step not in true))


@pytest.mark.parametrize("done", [True, False])
def test_a_damaged_record_of_the_newest_sync_is_made_up_for(lab, run, model, caplog, done):
    history(lab, run, "sharded")
    (run / "commits" / "00000006.json").write_text("torn")
    if not done:
        (run / "state" / "00000006" / "000.done.json").unlink()
    assert export(run, model) == 5 + done
    assert ("00000006.json" in caplog.text) is not done


def test_stray_files_are_passed_over(lab, run, model):
    history(lab, run, "fixed")
    (run / "state" / "notes.txt").write_text("mine")
    (run / "state" / "00000009").mkdir()
    for name in ("00000.safetensors.bak", "00002.safetensors", "x"):
        (run / "state" / "00000009" / name).write_text("mine")
    assert export(run, model) == 6


@pytest.mark.parametrize("at", [-1, 1.0, "1", True])
def test_what_is_no_number_of_steps_is_refused(run, model, at):
    with pytest.raises(ConfigurationError, match="at must be a number of outer steps"):
        export(run, model, at=at)


@pytest.mark.sampled
@pytest.mark.parametrize("kind", [*KINDS, "far away"])
def test_what_was_damaged_on_its_way_is_opened_and_read_again(
    lab, run, model, caplog, monkeypatch, kind
):
    """Far away, the first opening may have fetched the wrong bytes ahead."""
    uri = f"memory://{run}" if kind == "far away" else str(run)
    states = history(lab, uri, "sharded" if kind == "far away" else kind)
    opened = Counter()

    def flips(real, key, size=None):
        reader, opened[key] = real(key, size), opened[key] + 1
        read_into, first = reader.read_into, opened[key] == 1

        def read(offset, buffer):
            read_into(offset, buffer)
            if first and key.startswith("state/") and offset > 8:
                buffer[-1] ^= 1

        reader.read_into = read
        return reader

    meddled(monkeypatch, open=flips, **({"near": False} if kind == "far away" else {}))
    assert export(uri, model) == max(states)
    failed = [key for key, times in opened.items() if times == 2]
    assert caplog.text.count("reading again in") == len(failed) >= 2
    loads_exactly(model, Adapted, states[max(states)])


# A fixed run has no record that says that a shard was there.
@pytest.mark.sampled
@pytest.mark.parametrize(
    ("kind", "harm"),
    [("fixed", "damage"), *((kind, h) for kind in KINDS[1:] for h in ("damage", "remove"))],
)
def test_where_the_newest_is_damaged_it_is_the_one_before(lab, run, model, caplog, kind, harm):
    states = history(lab, run, kind)
    complete = "*.safetensors" if kind == "fixed" else "*.done.json"
    folders = {path.parent for path in (run / "state").rglob(complete)}
    newest, before = sorted(folders, reverse=True)[:2]
    steps = int(newest.name), int(before.name)
    shard = sorted(newest.glob("*.safetensors"))[0]
    if harm == "damage":
        data = bytearray(shard.read_bytes())
        data[-30] ^= 1  # before the checksums
        shard.write_bytes(data)
    else:
        shard.unlink()
    assert export(run, model) == steps[1]
    *again, warning = [r.getMessage() for r in caplog.records if r.name == "diloco_core"]
    assert all(message.startswith("reading again in") for message in again)
    assert warning.startswith(f"the state after outer step {steps[0]} in ")
    assert shard.name in warning
    assert warning.endswith(f". The file holds the state after outer step {steps[1]}.")
    loads_exactly(model, Adapted, states[steps[1]])
    header = metadata(model)
    assert (header["sync"], header["damaged"]) == (str(steps[1]), str(steps[0]))
    with pytest.raises(CorruptedObjectError, match=rf"\. Complete states in .*[ ,]{steps[1]}\.$"):
        export(run, model, at=steps[0])


@pytest.mark.sampled
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "gone",
    [
        ["state/{:08}/000.done.json"],
        ["state/{:08}/000.done.json", "commits/{:08}.json"],
        ["state/{:08}/000.00000.safetensors", "state/{:08}/000.done.json"],
        ["state/{:08}/*"],
    ],
)
def test_a_newest_state_of_which_something_is_gone_is_named(lab, run, model, caplog, kind, gone):
    states = history(lab, run, kind)
    removed = [path for part in gone for path in run.glob(part.format(6))]
    assert len(removed) >= len(gone)
    for path in removed:
        path.unlink()
    before = export(run, model)
    assert before < 6
    assert f"holds the state after outer step {before}, and the run has taken" in caplog.text
    loads_exactly(model, Adapted, states[before])
    header = metadata(model)
    assert (header["sync"], header["behind"]) == (str(before), str(6 - before))
    text = r"the state after outer step 6 .*is incomplete\. .*Complete states in"
    with pytest.raises(CorruptedObjectError, match=text):
        export(run, model, at=6)
    caplog.clear()
    assert export(run, model, at=before) == before
    assert not caplog.text, "it is what was asked for"


@pytest.mark.sampled
@pytest.mark.parametrize("kind", KINDS)
def test_where_nothing_is_whole_the_error_says_what_is_missing(lab, run, model, kind):
    history(lab, run, kind)
    for pattern in ("state/*/*00000.*", "initial/*/*00000.*", "state/*/*.done.json"):
        for path in run.glob(pattern):
            path.unlink()
    with pytest.raises(CorruptedObjectError) as caught:
        export(run, model)
    text = str(caught.value)
    incomplete = (
        r"the state after outer step 6 in \S+ is incomplete\. Missing: state/00000006/0\S* "
    )
    assert re.match(incomplete, text)
    assert text.endswith(f"Complete states in {run.as_uri()}: none.")
    assert "try again later" not in text


def train_one(run, syncs, visit, fragments=4):
    """Run one replica, and visit after each sync what the store then holds."""
    elastic = Elastic(1, topology="gather", publish_every=2)
    exchange = StoreExchange(open_store(str(run)), 0, 1, elastic)
    net = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(4)))
    inner = torch.optim.SGD(net.parameters(), lr=1e-6)
    with DiLoCo(net, inner, exchange, sync_every=fragments, fragments=fragments) as outer:
        while outer.committed < syncs:
            before = outer.committed
            inner.zero_grad()
            net(torch.ones(1, 2)).sum().backward()
            inner.step()
            if outer.committed > before:
                visit(outer.committed)
    return outer.committed


def test_gather_says_how_old_a_state_is(run, model, caplog):
    ages = {}

    def visit(committed):
        if committed not in {7, 16, 18}:
            return
        caplog.clear()
        step = export(run, model)
        ages[committed] = committed - step
        text = caplog.text
        assert bool(text) == (committed > step)
        assert int((metadata(model) or {}).get("behind", 0)) == committed - step
        if step == 0:
            assert "when the run began (outer step 0), and nothing that was trained" in text
            assert f"{committed} outer steps were taken since" in text
        elif step < committed:
            assert f"the state after outer step {step}, and the run has taken" in text

    last = train_one(run, 20, visit)
    assert max(ages.values()) > 8
    caplog.clear()
    assert export(run, model) == last
    assert caplog.text == "", "a run that has ended has published its state"


def test_the_newest_two_states_of_the_whole_model_are_kept(run, model):
    counts = []

    def visit(committed):
        if committed < 8:
            return
        with pytest.raises(RendezvousError) as caught:
            export(run, model, at=9999)
        counts.append(len(re.findall(r"\d+", str(caught.value).partition("after outer steps")[2])))

    train_one(run, 16, visit, fragments=2)
    assert min(counts) >= 2
