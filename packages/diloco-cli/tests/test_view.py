"""What ``watch`` shows and says: pure functions, without a terminal."""

import dataclasses

import pytest
from cli_lab import DONE, FAILED, NOW, RUNNING

from diloco_cli._told import run_facts
from diloco_cli._view import (
    COLUMNS,
    View,
    Word,
    changes,
    choose_rank,
    fold,
    foot,
    is_over,
    rank_facts,
    screenful,
    see,
    sparkline,
    syncs_per_hour,
)
from diloco_protocol import ReplicaState, ReplicaStatus
from diloco_protocol.telemetry import Live, SyncLine, Told

QUIET = 35.0


def live(rank=0, world_size=2, **more):
    fields = {
        "run": "monday", "rank": rank, "world_size": world_size, "epoch": 1, "attempt": 1,
        "time": NOW - 12, "step": 250, "sync": 2, "phase": "training", "host": "node-7",
        "place": "us-east-1", "seconds_per_step": 0.5, "training_share": 0.93,
        "metrics": {"loss": 2.3123456},
    }  # fmt: skip
    return Live(**{**fields, **more})


def said(*lives):
    return run_facts("./run", Told({each.rank: each for each in lives}, {}, 0, 0, 0))["replicas"]


def line(number, **more):
    fields = {
        "number": number, "time": NOW + 60 * number, "sync": number, "fragment": "0",
        "committed": True, "members": 3, "bytes_sent": 3_000_000, "bytes_received": 1_500_000,
        "wait_seconds": 0.25, "exchange_seconds": 0.1, "metrics": {"loss": 4.0 / number},
    }  # fmt: skip
    return SyncLine(**{**fields, **more})


def facts(*looks, word=None, looked=NOW):
    """The facts about rank 0 after it was seen at some times."""
    seen, after = {}, None
    for at, each in looks:
        seen, after = see(seen, said(each), at, after), at
    return rank_facts(0, seen.get(0), word, looked, QUIET)


def cells(row, now=NOW):
    names = ("rank", "state", "reason", "attempt", "sync", "phase", "loss", "speed", "trains", "mb")
    return dict(
        zip((*names, "sign", "place"), (each.show(row, now).text for each in COLUMNS), strict=True)
    )


class TestRow:
    def test_both_sources(self):
        row = facts((NOW, live()), word=Word(RUNNING))
        assert cells(row) == {
            "rank": "0", "state": "running", "reason": "", "attempt": "1", "sync": "2",
            "phase": "training", "loss": "2.312", "speed": "2", "trains": "93%", "mb": "",
            "sign": "12s ago by its clock", "place": "us-east-1 node-7",
        }  # fmt: skip
        assert not is_over(row)

    def test_only_the_store(self):
        row = facts((NOW, live()))
        assert (row["state"], is_over(row)) == (None, False), "that it runs would be a guess"
        left = facts((NOW, live(ended="left", phase="idle")))
        assert (left["state"], cells(left)["phase"], is_over(left)) == ("succeeded", "left", True)
        odd = facts((NOW, live(ended="in its own way")))
        assert (odd["state"], is_over(odd)) == ("unknown", True)

    def test_only_a_backend(self):
        row = facts(word=Word(FAILED))
        shown = cells(row)
        assert (shown["state"], shown["reason"], shown["phase"]) == ("failed", "error", "")
        assert is_over(row)

    def test_neither(self):
        row = facts()
        assert cells(row)["phase"] == "has told nothing"
        assert not is_over(row)

    def test_the_backend_has_the_last_word_on_the_end(self):
        row = facts((NOW, live(ended="left")), word=Word(RUNNING))
        assert (row["state"], is_over(row)) == ("running", False)
        row = facts((NOW, live()), word=Word(FAILED))
        assert (cells(row)["phase"], is_over(row)) == ("was training", True)

    def test_a_backend_without_a_record_changes_nothing_that_the_store_knows(self):
        assert facts((NOW, live(ended="left")), word=Word(None))["state"] == "succeeded"
        row = facts((NOW, live()), word=Word(None))
        assert (row["state"], is_over(row)) == ("unknown", False), "it still gives signs"
        assert cells(row)["phase"] == "training"
        assert is_over(facts((NOW - 100, live()), word=Word(None)))
        assert is_over(facts(word=Word(None)))

    def test_silence(self):
        row = facts((NOW - QUIET - 1, live()), word=Word(RUNNING))
        assert cells(row)["phase"] == "silent 36s, was training"
        assert facts((NOW - QUIET, live()))["silent_since"] is None
        assert facts((NOW - 999, live(ended="left")))["silent_since"] is None
        assert facts((NOW - 999, live()), word=Word(DONE))["silent_since"] is None

    def test_a_store_that_is_silent_makes_no_rank_silent(self):
        row = facts((NOW - 10, live()), looked=NOW - 5)
        assert row["silent_since"] is None
        assert cells(row, NOW + 999)["phase"] == "training"

    def test_a_backend_that_is_silent(self):
        row = facts((NOW, live()), word=Word(RUNNING, silent_since=NOW - 120))
        assert cells(row)["state"] == "running 2m ago"

    def test_a_new_attempt_has_not_told_what_it_does(self):
        again = ReplicaStatus(ReplicaState.RUNNING, attempt=2)
        assert cells(facts((NOW, live()), word=Word(again)))["phase"] == "was training"
        assert cells(facts((NOW, live(attempt=2)), word=Word(again)))["phase"] == "training"

    def test_whom_it_waits_for(self):
        few = facts((NOW, live(phase="waiting", waits_for=[1, 2, 3, 7], missing=4)))
        assert cells(few)["phase"] == "waiting for 1-3, 7"
        many = facts((NOW, live(phase="waiting", waits_for=list(range(64)), missing=900)))
        assert cells(many)["phase"] == "waiting for 900 ranks"

    def test_the_last_sign_is_by_the_clock_here_once_it_was_seen(self):
        ahead = facts((NOW, live(time=NOW + 7200)))
        assert cells(ahead)["sign"] == "2h ahead by its clock"
        row = facts((NOW - 20, live(time=NOW + 7200)), (NOW - 8, live(time=NOW + 7212)))
        assert cells(row)["sign"] == "8s ago"

    def test_megabytes_per_sync_are_those_that_were_seen(self):
        base = live(sync=10, bytes_sent=90, bytes_received=10)
        assert facts((NOW, base))["bytes_per_sync"] is None
        later = live(sync=12, bytes_sent=6_000_090, bytes_received=10, step=300)
        assert cells(facts((NOW, base), (NOW, later)))["mb"] == "3"
        back = live(epoch=2, sync=13, bytes_sent=9_000_000)
        assert facts((NOW, base), (NOW, later), (NOW, back))["bytes_per_sync"] is None

    @pytest.mark.parametrize(
        ("metrics", "shown"),
        [
            ({"a_loss": 1, "loss": "nan"}, "nan"),
            ({"lr": 1, "Train/Loss": 0.5}, "0.5"),
            ({"lr": 1}, ""),
            ({}, ""),
            ({"loss_token": "x"}, None),
        ],
    )
    def test_the_loss_is_the_metric_of_that_name_or_with_it_in_its_name(self, metrics, shown):
        text = cells(facts((NOW, live(metrics=metrics))))["loss"]
        assert text == ("<redacted>" if shown is None else shown)


def view(*rows, **more):
    return View("./run", rows, now=NOW, **more)


def rows_of(count, odd=()):
    lives = {rank: live(rank, count, time=NOW - 1) for rank in range(count)} | dict(odd)
    seen = see({}, said(*lives.values()), NOW, None)
    return [rank_facts(rank, seen.get(rank), Word(RUNNING), NOW, QUIET) for rank in range(count)]


class TestFold:
    def test_a_thousand_ranks_are_one_row_and_the_odd_ones(self):
        odd = {
            7: live(7, 1000, phase="waiting", waits_for=[800], missing=1),
            800: live(800, 1000, phase="contributing"),
            900: live(900, 1000, sync=0),
        }
        shown = fold(rows_of(1000, odd), 20)
        assert [row["rank"] for row in shown] == ["997 ranks", 7, 800, 900]
        assert cells(shown[0])["phase"] == "training"
        drawn = screenful(view(*rows_of(1000, odd)), 100, 24)
        assert len(drawn) <= 24
        assert drawn[0][0].text == "./run: 1000 replicas (1000 running)"
        assert any("waiting for 800" in cell.text for row in drawn for cell in row)

    def test_more_kinds_than_room(self):
        odd = {rank: live(rank, 50, ended=f"as {rank}") for rank in range(0, 50, 2)}
        shown = fold(rows_of(50, odd), 5)
        assert len(shown) == 5
        assert [row["rank"] for row in shown] == [0, "1, 3, 5, 7-49", 2, 4, 6]
        assert (cells(shown[1])["state"], cells(shown[1])["phase"]) == ("several", "several")

    def test_a_row_of_several_says_nothing_that_holds_for_one_alone(self):
        odd = {rank: live(rank, 40, host=f"node-{rank}") for rank in range(40)}
        (row,) = fold(rows_of(40, odd), 1)
        assert (cells(row)["rank"], cells(row)["place"]) == ("0-39", "us-east-1 …")

    @pytest.mark.sampled
    @pytest.mark.parametrize("room", range(1, 40))
    def test_no_more_rows_than_room(self, room):
        odd = {rank: live(rank, 40, phase="idle") for rank in range(5)}
        odd |= {rank: live(rank, 40, phase="adopting") for rank in range(10, 15)}
        shown = fold(rows_of(40, odd), room)
        assert len(shown) <= room
        if room == 10:
            assert [row["rank"] for row in shown] == [0, 1, 2, 3, 4, "5-9, 15-39", "10-14"]

    def test_what_fits_is_not_folded(self):
        rows = rows_of(5)
        assert fold(rows, 5) == rows


class TestFoot:
    def text(self, *rows, **more):
        drawn = screenful(view(*rows, **more), 200, 50)
        return "\n".join("".join(cell.text for cell in each) for each in drawn)

    def test_syncs_quorum_and_loss(self):
        syncs = [(1, line(number, time=NOW - 330 + 60 * number)) for number in (1, 2, 3, 4)]
        rows = rows_of(4)
        text = self.text(*rows, syncs=syncs, syncs_of=2)
        assert "sync 2, 60 per hour as of 1m 30s ago, quorum 3 of 4" in text
        assert text.endswith("loss of rank 2 up to sync 4 █▃▂▁ 1")
        rows[2] = {**rows[2], "clock_off": -3600.0}
        text = self.text(*rows, syncs=syncs, syncs_of=1)
        assert "60 per hour as of 1m 30s ago" in text, "the clock of another rank"
        ahead = [(1, line(number, time=NOW - 3930 + 60 * number)) for number in (1, 2, 3, 4)]
        text = self.text(*rows, syncs=ahead, syncs_of=2)
        assert "60 per hour as of 1m 30s ago" in text, "by the clock of this machine"

    def test_nothing_is_guessed(self):
        text = self.text(*rows_of(2))
        assert text.splitlines()[-1] == "sync 2"

    def test_time_left_and_dollars_if_all_replicas_say_what_it_takes(self):
        metrics = {"loss": 1.0, "total_steps": 1180, "dollars": 1.5}
        knows, lacks = live(0, metrics=metrics), live(1)
        text = self.text(*rows_of(2, {0: knows, 1: dataclasses.replace(knows, rank=1)}))
        assert text.splitlines()[-1] == "sync 2, 8m 20s left, $3.00 so far"
        text = self.text(*rows_of(2, {0: knows, 1: lacks}))
        assert text.splitlines()[-1] == "sync 2"

    def test_clocks_that_disagree_are_named(self):
        row = facts((NOW - 20, live(time=NOW + 7200)), (NOW, live(time=NOW + 7200, step=251)))
        assert "clocks that differ from the one here: of 0, by up to 2h ahead" in self.text(row)

    def test_a_clock_is_not_blamed_for_what_was_seen_late(self):
        """It was written at some time between two looks."""
        written = live(time=NOW - 3000, step=251)
        assert facts((NOW - 3600, live()), (NOW, written))["clock_off"] is None
        late = facts((NOW - 2900, live()), (NOW, written))
        assert late["clock_off"] == -100
        assert "of 0, by up to 1m 40s behind" in self.text(late)

    def test_a_pace_is_of_one_incarnation_and_never_of_a_clock_that_was_set_back(self):
        syncs = [(1, line(1, time=0.0)), (2, line(2)), (2, line(3))]
        assert syncs_per_hour(syncs) == pytest.approx(60)
        assert syncs_per_hour([(1, line(1)), (1, line(2, time=0.0))]) is None
        assert syncs_per_hour([]) is None

    @pytest.mark.parametrize(
        "values", [[1e308, -1e308, 0.0], [5.0], [5e-324, 0.0], [0.0] * 99, [1e308] * 200]
    )
    def test_a_line_of_blocks_takes_any_numbers(self, values):
        assert len(sparkline(values, 60)) == min(60, len(values))


def test_40_columns():
    rows = rows_of(3, {1: live(1, 3, phase="waiting", waits_for=[0, 2], missing=2)})
    notes = ["the store is silent since 12:00:00: " + "it does not answer " * 4]
    drawn = screenful(view(*rows, syncs=[(1, line(1))], syncs_of=0, notes=notes), 40, 24)
    shown = ["".join(cell.text for cell in each) for each in drawn]
    assert max(map(len, shown)) <= 40
    assert shown[1].split() == ["RANK", "STATE", "SYNC", "PHASE"]
    assert "waiting for 0, 2" in shown[3]


def test_whose_syncs_are_shown():
    rows = rows_of(3, {1: live(1, 3, sync=5)})
    assert choose_rank(rows, None) == 1
    assert choose_rank(rows, 2) == 2
    rows[2] = {**rows[2], "silent_since": NOW}
    assert choose_rank(rows, 2) == 1
    ended = [{**row, "state": "succeeded"} for row in rows]
    assert choose_rank(ended, 2) == 2
    assert choose_rank([], None) is None


class TestChanges:
    def words(self, before, after):
        return [words for _, words in changes(before, after) if words]

    def test_a_line_for_each_sync_and_what_befalls_a_rank(self):
        first = view(*rows_of(2), syncs=[(1, line(1)), (1, line(2))], syncs_of=0)
        assert self.words(None, first) == [
            "sync 2: 3 of 2, loss 2, 4.5MB sent and received, waited 0.25 s",
            "rank 0: running, training, attempt 1",
            "rank 1: running, training, attempt 1",
        ]
        assert list(changes(first, first)) == []
        rows = [rows_of(2)[0], {**rows_of(2)[1], "state": "failed", "reason": "oom", "past": True}]
        syncs = [*first.syncs, (1, line(3, committed=False)), (2, line(1, sync=3))]
        assert self.words(first, view(*rows, syncs=syncs, syncs_of=0, notes=["odd"])) == [
            "sync 3: 3 of 2, not adopted, loss 1.333, 4.5MB sent and received, waited 0.25 s",
            "sync 3: 3 of 2, loss 4, 4.5MB sent and received, waited 0.25 s",
            "rank 1: failed, oom, was training, attempt 1",
            "odd",
        ]

    def test_syncs_of_another_rank_go_on_where_the_first_ended(self):
        before = view(*rows_of(2), syncs=[(1, line(2))], syncs_of=0)
        syncs = [(1, line(1, sync=2)), (1, line(2, sync=3))]  # it joined later
        after = view(*rows_of(2), syncs=syncs, syncs_of=1)
        assert [text[:6] for text in self.words(before, after)] == ["sync 3"]

    def test_a_step_is_a_change_for_programs_alone(self):
        before, after = view(*rows_of(2)), view(*rows_of(2, {1: live(1, step=251)}))
        ((facts, words),) = changes(before, after)
        assert (facts["change"], facts["rank"], words) == ("replica", 1, "")

    def test_why_a_rank_has_failed(self):
        """Once: where its backend says it, that is shown, and not what it has told itself."""
        told = (NOW, live(ended="failed", error="ValueError: no data"))
        alone, status = facts(told), ReplicaStatus(ReplicaState.FAILED, message="the data is gone")
        both = facts(told, word=Word(status))
        ended = facts(told, word=Word(ReplicaStatus(ReplicaState.CANCELLED, message="by a user")))
        assert [self.words(None, view(row))[0] for row in (alone, both, ended)] == [
            "rank 0: failed, attempt 1: ValueError: no data",
            "rank 0: failed, attempt 1: the data is gone",
            "rank 0: cancelled, attempt 1: by a user",
        ]
        assert "rank 0: the data is gone" in foot(view(both))
        assert foot(view(facts((NOW, live())))) == ["sync 2"]

    def test_the_end(self):
        *_, (facts, words) = changes(
            None, view(*({**row, "state": "succeeded"} for row in rows_of(2)))
        )
        assert words == "./run: 2 succeeded"
        assert facts["states"] == {"succeeded": 2}
