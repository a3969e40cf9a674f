"""The model of an earlier outer step, and of the newest whole one where newer ones are damaged."""

import contextlib
import logging
import re
import shutil

import pytest
import torch
from export_lab import Adapted, exchanges, loads_exactly
from safetensors import safe_open
from safetensors.torch import load_file

from diloco_core import ConfigurationError, CorruptedObjectError, DiLoCo, RendezvousError, export
from diloco_core._export import _choice, _export
from diloco_core._run._records._keys import MANIFEST, commit_key
from diloco_core._run._records._records import Rollback, digest
from diloco_core._store._open import open_store
from diloco_core._wire._published import ValuesReader


class TestEarlierStates:
    """A run keeps its newest states, and each can be had."""

    def history(self, lab, folder, kind, fragments=1, syncs=6, committed=0):
        """What the model held after every sync that this replica saw."""
        held = {}

        def replica(exchange):
            net = lab.fill(Adapted())
            inner = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=1.0)

            def seen(report):
                if exchange.rank == 0:
                    held[report.sync] = lab.values(net)

            options = {"sync_every": fragments, "fragments": fragments, "on_sync": seen}
            with DiLoCo(net, inner, exchange, **options) as outer:
                while outer.committed < syncs:
                    lab.push(net, inner, exchange.rank, outer.committed)

        lab.run(replica, exchanges(folder, kind))
        return held

    @pytest.mark.parametrize("kind", ["fixed", "sharded", "gather"])
    @pytest.mark.parametrize("fragments", [1, 2])
    def test_each_that_is_there_is_what_the_model_was(self, lab, tmp_path, kind, fragments):
        held = self.history(lab, tmp_path / "run", kind, fragments)
        found = []
        for step in range(8):
            try:
                assert export(str(tmp_path / "run"), tmp_path / f"model{step}", at=step) == step
            except RendezvousError as error:
                message = str(error)
                assert (
                    f"does not hold the state after outer step {step}. It holds the states after "
                    "outer steps " in message
                )
                continue
            found.append(step)
            if (
                step and fragments == 1
            ):  # with fragments the model is further on with those that were not synced
                loads_exactly(tmp_path / f"model{step}", Adapted, held[step])
        last = 5 + fragments  # at the end the other fragments are synced once more
        assert found[-1] == last
        assert f"It holds the states after outer steps {', '.join(map(str, found))}." in message
        assert export(str(tmp_path / "run"), tmp_path / "model") == last

    @pytest.mark.parametrize("fragments", [1, 2])
    def test_after_a_rollback_it_is_what_the_run_goes_on_from(self, lab, tmp_path, fragments):
        """States that were given up are whole, and no longer of the run."""
        self.history(lab, tmp_path / "run", "sharded", fragments)
        last = 5 + fragments
        store = open_store(str(tmp_path / "run"))
        before = load_file(
            (export(str(tmp_path / "run"), tmp_path / "a", at=last - 1), tmp_path / "a")[1]
        )
        kept = {1: (last - 1,), 2: (last - 2, last - 1)}[
            fragments
        ]  # seven is of the first of two fragments
        record = Rollback(last + 1, kept, (last,), {0: 1, 1: 1}, run=digest(store.get(MANIFEST)))
        assert store.create(f"commits/{last + 1:08}.json", record.to_json())
        assert export(str(tmp_path / "run"), tmp_path / "model") == last - 1
        found = load_file(tmp_path / "model")
        assert all(torch.equal(value, before[name]) for name, value in found.items())
        with pytest.raises(
            RendezvousError, match=f"does not hold the state after outer step {last}"
        ):
            export(str(tmp_path / "run"), tmp_path / "again", at=last)

    @pytest.mark.parametrize("damaged", [False, True])
    def test_of_several_rollbacks_each_is_obeyed(self, lab, tmp_path, damaged):
        """The second one goes back to a state that is newer than what the first one gave up."""
        uri = str(tmp_path / "run")
        self.history(lab, uri, "sharded")
        store = open_store(uri)
        store.create(
            commit_key(7),
            Rollback(7, (5,), (6,), {0: 1, 1: 1}, run=digest(store.get(MANIFEST))).to_json(),
        )
        shutil.copytree(tmp_path / "run" / "state" / "00000006", tmp_path / "given up")
        held = self.history(lab, uri, "sharded", syncs=7)
        assert sorted(held) == [6, 7]
        shutil.copytree(
            tmp_path / "given up", tmp_path / "run" / "state" / "00000006", dirs_exist_ok=True
        )
        store.create(
            commit_key(10),
            Rollback(10, (8,), (9,), {0: 2, 1: 2}, 7, run=digest(store.get(MANIFEST))).to_json(),
        )
        if damaged:  # what goes on from there names the first one
            (tmp_path / "run" / commit_key(10)).write_text("torn")
            assert export(uri, tmp_path / "model") == 7
        else:
            assert export(uri, tmp_path / "model") == 6
            loads_exactly(tmp_path / "model", Adapted, held[6])
            with pytest.raises(
                RendezvousError,
                match=r"does not hold the state after outer step 7\. "
                r"It holds the states after outer steps 6\.",
            ):
                export(uri, tmp_path / "again", at=7)
        export(uri, tmp_path / "model", at=6)
        loads_exactly(tmp_path / "model", Adapted, held[6])

    @pytest.mark.parametrize("kind", ["sharded", "gather"])
    @pytest.mark.parametrize("fragments", [1, 2])
    @pytest.mark.parametrize("harm", ["gone", "torn"])
    def test_without_the_record_of_a_rollback_steps_are_counted_right(
        self, lab, tmp_path, kind, fragments, harm
    ):
        """What was given up counted again: the same model had other numbers, and under ``at=``
        there was another model.
        """
        uri = str(tmp_path / "run")
        self.history(lab, uri, kind, fragments)
        last = 5 + fragments
        store = open_store(uri)
        kept = {1: (last - 1,), 2: (last - 2, last - 1)}[fragments]
        run = digest(store.get(MANIFEST))
        store.create(
            commit_key(last + 1), Rollback(last + 1, kept, (last,), {0: 1, 1: 1}, run=run).to_json()
        )

        def without_the_record():
            record = tmp_path / "run" / commit_key(last + 1)
            return record.unlink() if harm == "gone" else record.write_text("torn")

        held = self.history(lab, uri, kind, fragments, syncs=last + 2)
        true = {}
        for step in range(3 * last):
            try:
                export(uri, tmp_path / f"before{step}", at=step)
            except RendezvousError:
                continue
            true[step] = load_file(tmp_path / f"before{step}")
        newest = max(true)
        assert newest >= max(held)
        without_the_record()
        assert export(uri, tmp_path / "model") == newest
        found = []
        for step in range(3 * last):
            with contextlib.suppress(CorruptedObjectError):
                assert export(uri, tmp_path / "model", at=step) == step
                found.append(step)
                model = load_file(tmp_path / "model")
                assert all(torch.equal(value, true[step][name]) for name, value in model.items())
        assert found
        with pytest.raises(
            CorruptedObjectError,
            match="it is not known which of the states before it were given up",
        ) as caught:
            export(uri, tmp_path / "model", at=next(step for step in range(99) if step not in true))
        assert f"{commit_key(last + 1)} is damaged or gone" in str(caught.value)

    @pytest.mark.parametrize("done", [True, False])
    def test_a_damaged_record_of_the_newest_sync_is_made_up_for(self, lab, tmp_path, caplog, done):
        self.history(lab, tmp_path / "run", "sharded")
        (tmp_path / "run" / "commits" / "00000006.json").write_text("torn")
        if not done:
            (tmp_path / "run" / "state" / "00000006" / "000.done.json").unlink()
        with caplog.at_level(logging.WARNING):
            assert export(str(tmp_path / "run"), tmp_path / "model") == 5 + done
        assert ("00000006.json" in caplog.text) is not done

    def test_stray_files_are_passed_over(self, lab, tmp_path):
        self.history(lab, tmp_path / "run", "fixed")
        state = tmp_path / "run" / "state"
        (state / "notes.txt").write_text("mine")
        (state / "00000009").mkdir()
        for name in ("00000.safetensors.bak", "00002.safetensors", "x"):
            (state / "00000009" / name).write_text("mine")
        assert export(str(tmp_path / "run"), tmp_path / "model") == 6

    @pytest.mark.parametrize("at", [-1, 1.0, "1", True])
    def test_what_is_no_number_of_steps_is_refused(self, tmp_path, at):
        with pytest.raises(ConfigurationError, match="at must be a number of outer steps"):
            export(str(tmp_path), tmp_path / "model", at=at)

    @pytest.mark.parametrize("kind", ["fixed", "sharded", "gather"])
    def test_what_was_damaged_on_its_way_is_opened_and_read_again(
        self, lab, tmp_path, caplog, monkeypatch, kind
    ):
        held = self.history(lab, tmp_path / "run", kind)
        values, failed = _choice.Reading.values, set()

        def once(reading, file, reader):
            if file.key not in failed:
                failed.add(file.key)
                raise CorruptedObjectError(f"{file.key} does not match its checksum")
            return values(reading, file, reader)

        monkeypatch.setattr(_choice.Reading, "values", once)
        assert export(str(tmp_path / "run"), tmp_path / "model") == max(held)
        assert caplog.text.count("reading again in") == len(failed) >= 2
        loads_exactly(tmp_path / "model", Adapted, held[max(held)])

    def test_what_was_opened_ahead_and_damaged_on_its_way_is_opened_again(
        self, lab, monkeypatch, tmp_path
    ):
        (exchange,) = exchanges(f"memory://{tmp_path}/run", "sharded", count=1)
        net = lab.fill(Adapted())
        inner = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=1.0)
        with DiLoCo(net, inner, exchange, sync_every=1):
            lab.push(net, inner, 0, 0)
        verify, readers = ValuesReader.verify, {}

        def far_away(uri, **options):
            store = open_store(uri, **options)
            store.near = False  # only then are objects opened ahead
            return store

        def damaged_once(self):
            readers.setdefault(self._origin, []).append(self._reader)
            if len(readers[self._origin]) == 1:
                raise CorruptedObjectError("a bit has flipped")
            return verify(self)

        monkeypatch.setattr(_export, "open_store", far_away)
        monkeypatch.setattr(ValuesReader, "verify", damaged_once)
        assert export(f"memory://{tmp_path}/run", tmp_path / "model") == 1
        loads_exactly(tmp_path / "model", Adapted, lab.values(net))
        assert readers
        for first, second in readers.values():
            assert first is not second, "the first one may have fetched the wrong bytes ahead"

    # A fixed run has no record that says that a shard was there.
    @pytest.mark.parametrize(
        ("kind", "harm"),
        [
            ("fixed", "damage"),
            *((k, harm) for k in ("sharded", "gather") for harm in ("damage", "remove")),
        ],
    )
    def test_where_the_newest_is_damaged_it_is_the_one_before(
        self, lab, tmp_path, caplog, kind, harm
    ):
        held = self.history(lab, tmp_path / "run", kind)
        complete = "*.safetensors" if kind == "fixed" else "*.done.json"
        folders = {path.parent for path in (tmp_path / "run" / "state").rglob(complete)}
        newest, before = sorted(folders, reverse=True)[:2]
        steps = int(newest.name), int(before.name)
        shard = sorted(newest.glob("*.safetensors"))[0]
        if harm == "damage":
            data = bytearray(shard.read_bytes())
            data[-30] ^= 1  # before the checksums
            shard.write_bytes(data)
        else:
            shard.unlink()
        with caplog.at_level(logging.WARNING):
            assert export(str(tmp_path / "run"), tmp_path / "model") == steps[1]
        *again, record = [
            record.getMessage() for record in caplog.records if record.name == "diloco_core"
        ]
        assert all(message.startswith("reading again in") for message in again)
        assert record.startswith(f"the state after outer step {steps[0]} in ")
        assert shard.name in record
        assert record.endswith(f". The file holds the state after outer step {steps[1]}.")
        loads_exactly(tmp_path / "model", Adapted, held[steps[1]])
        with safe_open(tmp_path / "model", "pt") as file:
            assert (file.metadata()["sync"], file.metadata()["damaged"]) == (
                str(steps[1]),
                str(steps[0]),
            )
        with pytest.raises(CorruptedObjectError) as caught:
            export(str(tmp_path / "run"), tmp_path / "again", at=steps[0])
        assert re.search(rf"\. Complete states in .*[ ,]{steps[1]}\.$", str(caught.value))

    @pytest.mark.parametrize(
        ("kind", "gone"),
        [
            *(
                (kind, gone)
                for kind in ("fixed", "sharded", "gather")
                for gone in (
                    ["state/{:08}/000.done.json"],
                    ["state/{:08}/000.done.json", "commits/{:08}.json"],
                    ["state/{:08}/000.00000.safetensors", "state/{:08}/000.done.json"],
                    ["state/{:08}/*"],
                    ["state/{:08}/*", "commits/{:08}.json"],
                )
            ),
        ],
    )
    def test_a_newest_state_of_which_something_is_gone_is_named(
        self, lab, tmp_path, caplog, kind, gone
    ):
        held = self.history(lab, tmp_path / "run", kind)
        removed = [path for part in gone for path in (tmp_path / "run").glob(part.format(6))]
        assert len(removed) >= len(gone)
        for path in removed:
            path.unlink()
        with caplog.at_level(logging.WARNING):
            before = export(tmp_path / "run", tmp_path / "model")
        assert before < 6
        assert f"holds the state after outer step {before}, and the run has taken" in caplog.text
        loads_exactly(tmp_path / "model", Adapted, held[before])
        with safe_open(tmp_path / "model", "pt") as file:
            saved = file.metadata()
        assert (saved["sync"], saved["behind"]) == (str(before), str(6 - before))
        with pytest.raises(
            CorruptedObjectError,
            match=r"the state after outer step 6 .*is incomplete: .*Complete states in",
        ):
            export(tmp_path / "run", tmp_path / "again", at=6)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert export(tmp_path / "run", tmp_path / "model", at=before) == before
        assert not caplog.text, "it is what was asked for"

    @pytest.mark.parametrize("kind", ["fixed", "sharded", "gather"])
    @pytest.mark.parametrize("fragments", [1, 2])
    def test_of_a_run_that_is_whole_nothing_is_said(self, lab, tmp_path, caplog, kind, fragments):
        with caplog.at_level(logging.WARNING):
            self.history(lab, tmp_path / "run", kind, fragments)
            caplog.clear()
            export(tmp_path / "run", tmp_path / "model")
        assert not caplog.text

    @pytest.mark.parametrize("kind", ["fixed", "sharded", "gather"])
    def test_where_nothing_is_whole_the_error_says_what_is_missing(self, lab, tmp_path, kind):
        self.history(lab, tmp_path / "run", kind)
        for folder in (
            *(tmp_path / "run" / "state").iterdir(),
            *(tmp_path / "run").glob("initial/*"),
        ):
            for path in folder.glob("*00000.*"):
                path.unlink()
            for path in folder.glob("*.done.json"):
                path.unlink()
        with pytest.raises(CorruptedObjectError) as caught:
            export(tmp_path / "run", tmp_path / "model")
        text = str(caught.value)
        assert re.match(
            r"the state after outer step 6 in \S+ is incomplete: "
            r"state/00000006/0\S* .*(is|are) missing",
            text,
        )
        assert text.endswith(f"Complete states in {(tmp_path / 'run').as_uri()}: none.")
        assert "try again later" not in text
