"""What a run tells is read with bounds, whatever lies there, and no more of it than has changed."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_protocol.telemetry import (
    HISTORY_BYTES,
    LIVE_BYTES,
    HistoryKey,
    Live,
    RunReader,
    SyncLine,
    end_key,
    find_runs,
    live_key,
)

LINE = SyncLine(
    number=1, time=1.0, sync=1, fragment="0", committed=True, members=1, bytes_sent=0,
    bytes_received=0, wait_seconds=0.0, exchange_seconds=0.0,
)  # fmt: skip


def live(rank, step=0):
    return Live(
        run="r", rank=rank, world_size=9, epoch=1, time=1.0, step=step, sync=0, phase="training"
    )


class Store:
    """Objects, and what was asked for."""

    def __init__(self, objects, stamps=True):
        self.objects, self.stamps, self.read_keys, self.listed = dict(objects), stamps, [], []

    def list_keys(self, folder):
        self.listed.append(folder)
        for key, data in self.objects.items():
            if key.startswith(folder):
                yield key, hash(data) if self.stamps else None

    def read(self, key, most):
        self.read_keys.append(key)
        data = self.objects.get(key)
        return None if data is None else data[:most]

    def reader(self, **options):
        return RunReader(self.list_keys, self.read, **options)


def run_of(ranks, objects=3):
    keys = [HistoryKey(rank, 1, n + 1, n + 1) for rank in range(ranks) for n in range(objects)]
    return {live_key(rank): live(rank).to_bytes() for rank in range(ranks)} | {
        key.key: LINE.to_bytes() for key in keys
    }


class TestLook:
    def test_what_is_there(self):
        store = Store(run_of(2))
        told = store.reader().look()
        assert told.live == {0: live(0), 1: live(1)}
        assert [(key.rank, key.first) for key in told.history] == [
            (rank, n) for rank in range(2) for n in (1, 2, 3)
        ]
        assert all(history.lines == (LINE,) for history in told.history.values())
        assert (told.skipped, told.of_another_version, told.left_out) == (0, 0, 0)
        assert store.listed == ["live/", "history/"]

    def test_the_ends_of_incarnations(self):
        """What is there under the key of another one, or is no such record, is skipped."""
        ends = {(1, epoch): replace(live(1), epoch=epoch, ended="failed") for epoch in (1, 2, 3)}
        objects = {end_key(*key): each.to_bytes() for key, each in ends.items()}
        wrong = {end_key(1, 4): live(1).to_bytes(), end_key(0, 1): live(1).to_bytes()}
        wrong[end_key(1, 5)] = replace(live(1), epoch=5).to_bytes()  # which has not ended
        store = Store(run_of(2) | objects | wrong | {end_key(0, 2): LINE.to_bytes()})
        reader = store.reader()
        told = reader.look()
        assert told.ends == ends
        assert told.live == {0: live(0), 1: live(1)}
        assert (len(told.history), told.skipped, told.left_out) == (6, 4, 0)
        store.read_keys.clear()
        assert reader.look() == told
        assert store.read_keys == []

    def test_only_what_has_changed_is_read_again(self):
        store = Store(run_of(3))
        reader = store.reader()
        reader.look()
        store.read_keys.clear()
        assert reader.look().live[1] == live(1)
        assert store.read_keys == []
        store.objects[live_key(1)] = live(1, step=5).to_bytes()
        grown = HistoryKey(2, 1, 3, 4).key
        store.objects[grown] = LINE.to_bytes() * 2
        told = reader.look()
        assert store.read_keys == [live_key(1), grown]
        assert told.live[1].step == 5
        assert [(key.rank, key.last) for key in told.history][-1] == (2, 4)
        del store.objects[live_key(1)]
        assert 1 not in reader.look().live

    def test_without_stamps_everything_is_read_again(self):
        store = Store(run_of(1), stamps=False)
        reader = store.reader()
        reader.look()
        assert len(store.read_keys) == 4
        reader.look()
        assert len(store.read_keys) == 8

    def test_without_history(self):
        store = Store(run_of(2))
        assert not store.reader().look(history=False).history
        assert store.listed == ["live/"]

    def test_an_object_that_is_gone_since_it_was_listed(self):
        store = Store(run_of(1))
        reader = RunReader(store.list_keys, lambda *_: None)
        told = reader.look()
        assert (told.live, told.history, told.skipped) == ({}, {}, 0)

    def test_what_is_no_record_is_skipped_and_counted(self):
        other = live(3).to_bytes().replace(b'"version":1', b'"version":2')
        store = Store({
            **run_of(1),
            live_key(1): b"torn",
            live_key(2): live(1).to_bytes(),  # about another rank
            live_key(3): other,
            live_key(4): b"{" + b" " * LIVE_BYTES + live(4).to_bytes()[1:],
            "live/x": b"",
            HistoryKey(0, 2, 1, 1).key: b"\n" * (HISTORY_BYTES + 1),
            "history/00000/later": b"",
        })  # fmt: skip
        told = store.reader().look()
        assert list(told.live) == [0]
        assert len(told.history) == 3
        assert (told.skipped, told.of_another_version) == (6, 1)
        assert max(map(len, store.objects.values())) > HISTORY_BYTES

    def test_no_more_is_asked_for_than_an_object_may_have(self):
        asked = []

        def read(key, most):
            asked.append(most)
            return b"x" * most

        told = RunReader(Store(run_of(1, objects=1)).list_keys, read).look()
        assert asked == [LIVE_BYTES + 1, HISTORY_BYTES + 1]
        assert told.skipped == 2

    def test_where_there_is_too_much_the_newest_of_every_rank_is_read(self):
        store = Store(run_of(4))
        most = sum(len(store.objects[live_key(rank)]) for rank in range(4)) + 4 * len(
            LINE.to_bytes()
        )
        ends = [replace(live(0), epoch=epoch, ended="failed") for epoch in range(1, 10)]
        store.objects |= {end_key(0, each.epoch): each.to_bytes() for each in ends}
        told = store.reader(most_bytes=most).look()
        assert len(told.live) == 4
        assert [(key.rank, key.first) for key in told.history] == [(rank, 3) for rank in range(4)]
        assert (told.left_out, told.ends) == (8 + 9, {})

    def test_what_goes_on_has_not_ended(self):
        """Its live object is newer; that of the next incarnation says nothing of this one."""
        old, new = replace(live(0), ended="failed"), replace(live(0), time=2.0)
        store = Store({end_key(0, 1): old.to_bytes(), live_key(0): new.to_bytes()})
        reader = store.reader()
        assert (reader.look().ends, reader.look().skipped) == ({}, 1)
        store.objects[live_key(0)] = replace(new, epoch=2).to_bytes()
        assert (reader.look().ends, reader.look().skipped) == ({(0, 1): old}, 0)

    @pytest.mark.parametrize(
        "epoch", ["9" * 5000, f"{2**63}", "00001", "-001", "1", "\N{ARABIC-INDIC DIGIT ONE}" * 4]
    )
    def test_an_end_has_one_key(self, epoch):
        store = Store({f"history/00001/{epoch}.end.json": live(1).to_bytes()})
        told = store.reader().look()
        assert (told.ends, told.skipped, store.read_keys) == ({}, 1, [])

    def test_of_many_ends_the_newest_of_every_rank_are_read(self, monkeypatch):
        monkeypatch.setattr("diloco_protocol._telemetry._reader.MOST_ENDS", 4)
        of_one = [replace(live(0), epoch=epoch, ended="failed") for epoch in range(9_990, 10_010)]
        ends = [*of_one, replace(live(8), ended="left")]
        store = Store({end_key(each.rank, each.epoch): each.to_bytes() for each in ends})
        told = store.reader().look()
        assert set(told.ends) == {(0, 10_009), (0, 10_008), (0, 10_007), (8, 1)}
        assert (told.left_out, told.skipped, len(store.read_keys)) == (17, 0, 4)

    def test_a_listing_without_an_end_is_cut_off(self, monkeypatch):
        def list_keys(folder):
            number = 0
            while True:
                yield f"{folder}{number}", None
                number += 1

        monkeypatch.setattr("diloco_protocol._telemetry._reader.MOST_KEYS", 50)
        told = RunReader(list_keys, lambda *_: pytest.fail("nothing is read")).look()
        assert (told.skipped, told.left_out) == (100, 2)

    @given(
        st.dictionaries(
            st.sampled_from([*run_of(3), "live/", "live/00001.json.tmp", "history/00001/x", "x"]),
            st.binary(max_size=50) | st.sampled_from([*run_of(3).values()]),
        )
    )
    def test_whatever_is_there_it_is_read(self, objects):
        told = Store(objects).reader().look()
        assert all(told.live[rank].rank == rank for rank in told.live)
        assert len(told.live) + len(told.history) + told.skipped <= len(objects)


class TestFindRuns:
    FOLDERS = {
        "": ["b", "a", "file.txt", "c"],
        "a": ["manifest.json", "live"],
        "b": ["generations", "meetings"],
        "c": ["a"],
    }

    def names(self, folder):
        return self.FOLDERS.get(folder, [])

    def test_runs_below_a_prefix(self):
        assert find_runs(self.names) == ["a", "b"]

    @pytest.mark.parametrize("name", ["manifest.json", "live", "generations"])
    def test_the_prefix_of_a_run(self, name):
        assert find_runs(lambda folder: ["commits", name]) == [""]

    def test_none(self):
        assert find_runs(lambda folder: []) == []

    def test_only_so_many_folders_are_looked_at(self):
        asked = []

        def names(folder):
            asked.append(folder)
            return map(str, range(5000)) if not folder else []

        assert find_runs(names) == []
        assert len(asked) == 1001
