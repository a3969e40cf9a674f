"""``report``: from records to facts and a page, and the verb over a folder and a backend."""

import io
import itertools
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from cli_lab import DONE, FAILED, World, command

from diloco_cli import _app
from diloco_cli._report import _page
from diloco_cli._report._page import page, report
from diloco_cli._report._pictures import Axis
from diloco_cli._report._summary import DEFAULT, read_prices, summarise
from diloco_cli._session import Screen
from diloco_protocol import InvalidRequestError, ReplicaNotFoundError
from diloco_protocol.telemetry import History, HistoryKey, Live, SyncLine, Told, live_key

START = 1.8e9
HOUR = 3600.0
PRICES = read_prices(DEFAULT.read_bytes())
LOST = '<script>alert("x")</script>\x1b[2J & password=hunter2'


def line(number, **more):
    """The line of a sync that took 10 s, of which 6 s were training, 3 s waiting."""
    fields = {
        "number": number, "time": START + 10 * number, "sync": number, "fragment": "0",
        "committed": True, "members": 2, "bytes_sent": 1000, "bytes_received": 2000,
        "wait_seconds": 3.0, "exchange_seconds": 1.0, "compute_seconds": 6.0,
        "exposed_seconds": 4.0, "inner_steps": 5, "total_inner_steps": 5 * number,
        "contribution": "counted", "metrics": {"loss": 3.0 - 0.1 * number},
    }  # fmt: skip
    return SyncLine(**{**fields, **more})


def live(rank, **more):
    fields = {
        "run": "monday", "rank": rank, "world_size": 2, "epoch": 1, "attempt": 1, "host": "node-7",
        "backend": "eks", "place": "us-east-1", "time": START + 60, "step": 25, "sync": 5,
        "phase": "idle", "ended": "left",
    }  # fmt: skip
    return Live(**{**fields, **more})


def told(lives, histories):
    """What replicas have told; histories are lines by rank and incarnation."""
    history = {
        HistoryKey(rank, epoch, lines[0].number, lines[-1].number): History(tuple(lines), 0, 0)
        for (rank, epoch), lines in histories.items()
    }
    lives = {each.rank: each for each in lives}
    return Told(live=lives, history=history, skipped=0, of_another_version=0, left_out=0)


def of(lives, histories=None, prices=PRICES, uri="s3://bucket/run", **more):
    records = told(lives, histories or {})
    facts = summarise(records, prices, uri=uri, **more)
    return {"made_at": START + 90, "made_by": "0.1.0", **facts}


def as_json(summary):
    screen = Screen(io.StringIO(), io.StringIO(), {})
    screen.json(summary)
    return json.loads(screen.out.getvalue())


def five(**more):
    return [line(number, **more) for number in range(1, 6)]


class Page(HTMLParser):
    """Notes the elements of a page, and the texts."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.texts = set(), []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        assert not [name for name, _ in attributes if name.startswith(("on", "src", "href"))]

    def handle_data(self, data):
        self.texts.append(data)

    @property
    def text(self):
        return "\n".join(self.texts)


class TestFacts:
    def test_a_run_of_two(self):
        summary = of([live(0), live(1)], {(0, 1): five(), (1, 1): five()})
        assert (summary["run_id"], summary["world_size"], summary["sync"]) == ("monday", 2, 5)
        assert (summary["first"], summary["last"]) == (START, START + 60)
        first, second = summary["incarnations"]
        assert (first["rank"], second["rank"], first["where"]) == (0, 1, "eks/us-east-1")
        assert first["seconds"] == {"compute": 30.0, "exchange": 5.0, "wait": 15.0}
        assert first["bytes"] == {"sent": 5000, "received": 10000}
        assert first["losses"][0] == (5, START + 10, pytest.approx(2.9))
        assert [(each["sync"], each["counted"], each["members"]) for each in summary["syncs"]] == [
            (number, [0, 1], 2) for number in range(1, 6)
        ]
        assert as_json(summary)["incarnations"][0]["syncs"] == 5

    def test_training_beside_a_sync_hides_the_wait_first(self):
        lines = [line(1, hidden_seconds=2.5, exposed_seconds=1.5)]
        (only,) = of([live(0)], {(0, 1): lines})["incarnations"]
        assert only["seconds"] == {"compute": 6.0, "exchange": 1.0, "wait": 0.5}

    def test_without_an_inner_loop_the_whole_sync_counts(self):
        lines = [line(1, compute_seconds=0.0, exposed_seconds=0.0)]
        (only,) = of([live(0)], {(0, 1): lines})["incarnations"]
        assert only["seconds"] == {"compute": 0.0, "exchange": 1.0, "wait": 3.0}

    def test_several_incarnations_of_which_one_was_killed(self):
        later = [line(n, time=START + 100 + 10 * n, sync=5 + n, members=1) for n in (1, 2)]
        summary = of(
            [live(0, epoch=3, attempt=2, time=START + 130, sync=7), live(1)],
            {(0, 1): five(), (0, 3): later, (1, 1): five()},
        )
        ends = [(each["rank"], each["epoch"], each["ended"]) for each in summary["incarnations"]]
        assert ends == [(0, 1, None), (0, 3, "left"), (1, 1, "left")]
        assert "Rank 0: the end of an earlier incarnation is not known." in summary["missing"]
        told = _page._failures({**summary, "backend": None})
        assert "Rank 0: incarnation 2 ended without a word, as if killed, and 3" in told
        assert "it left no line" in told
        assert [each["counted"] for each in summary["syncs"][4:]] == [[0, 1], [0], [0]]

    def test_clocks_that_disagree_by_hours(self):
        ahead = [line(n, time=START + 10 * n + 3 * HOUR) for n in range(1, 6)]
        lives = [live(0), live(1, time=START + 60 + 3 * HOUR)]
        summary = of(lives, {(0, 1): five(), (1, 1): ahead})
        assert summary["incarnations"][1]["clock_offset"] == pytest.approx(3 * HOUR)
        assert (summary["first"], summary["last"]) == (START, START + 60)
        corrected = "Clocks that were off, by common syncs, and are corrected: of 1, by up to 3h"
        assert any(corrected in each for each in summary["missing"])
        alone = of([live(0), live(1, time=5.0)], {(0, 1): five()})
        assert alone["incarnations"][1]["clock_offset"] is None

    def test_a_clock_that_cannot_be_compared_does_not_stretch_the_time(self):
        three = [live(rank, world_size=3, time=START + 60) for rank in (0, 1)]
        strange = live(2, world_size=3, time=5.0)
        summary = of([*three, strange], {(0, 1): five(), (1, 1): five()})
        assert summary["first"] == START
        assert any("Rank 2: the clock cannot be compared" in each for each in summary["missing"])
        Page(page(summary))

    def test_losses_that_are_no_numbers_and_gaps(self):
        lines = five()
        lines[2] = line(3, metrics={"loss": "nan"})
        lines[3] = line(4, metrics={"loss": 1e300})
        del lines[1]
        summary = of([live(0, dropped=2)], {(0, 1): lines})
        (only,) = summary["incarnations"]
        assert [value for _, _, value in only["losses"]] == [2.9, None, None, 2.5]
        assert (only["losses_wrong"], only["lines_missing"]) == (2, 3)
        text = Page(page(summary)).text
        assert "a loss that is not a number" in text
        assert "Rank 0: lines of the history are missing." in text

    def test_what_is_called_loss(self):
        def named(*names):
            return of([live(0)], {(0, 1): [line(1, metrics=dict.fromkeys(names, 1.0))]})["loss"]

        assert named("a_loss", "loss", "tokens") == "loss"
        assert named("val_loss", "Train/Loss") == "Train/Loss"
        assert named("tokens") is None

    def test_a_rank_that_is_silent_and_no_history(self):
        summary = of([live(0, ended=None, phase="training")])
        assert summary["silent"] == [1]
        assert summary["missing"][0] == "Rank 1: nothing was told."
        assert "No metric with “loss” in its name was logged" in page(summary)

    def test_long_histories_are_thinned_and_keep_what_is_wrong(self):
        lines = [line(n, sync=n) for n in range(1, 20_001)]
        lines[777] = line(778, metrics={"loss": "nan"})
        (only,) = of([live(0)], {(0, 1): lines})["incarnations"]
        assert len(only["losses"]) == 8001
        assert only["losses"][-1][0] == 100_000
        assert sum(value is None for _, _, value in only["losses"]) == 1


class TestCost:
    def test_nothing_is_guessed(self):
        cost = of([live(0)], {(0, 1): five()})["cost"]
        assert {part["part"]: part["cost"] for part in cost["parts"]} == {
            "received_gb": None, "replica_hour": None, "sent_gb": 0.0,
        }  # fmt: skip
        assert of([live(0)], uri="runs/a")["cost"]["known"] is None

    def test_a_table_of_ones_own(self):
        table = {
            "version": 1, "date": "2026-11-28",
            "replica_hour": {"eks/us-east-1": 36, "eks": 1, "*": 2}, "received_gb": {"*": 1e6},
            "writes_1000": {"s3": 0.005}, "reads_1000": {"gs": 7},
        }  # fmt: skip
        prices = read_prices(json.dumps(table).encode())
        lives = [live(0, writes=6000, reads=2), live(1, place="eu-west-1", writes=34_000, reads=3)]
        summary = of(lives, {(0, 1): five(), (1, 1): five()}, prices)
        costs = {(part["part"], part["name"]): part["cost"] for part in summary["cost"]["parts"]}
        assert costs["replica_hour", "eks/us-east-1"] == pytest.approx(36 * 60 / 3600)
        assert costs["replica_hour", "eks/eu-west-1"] == pytest.approx(60 / 3600)
        assert costs["received_gb", "s3"] == pytest.approx(20.0)
        assert costs["sent_gb", "s3"] is None
        assert costs["writes_1000", "s3"] == pytest.approx(0.2)
        assert costs["reads_1000", "s3"] is None
        assert summary["cost"]["known"] == pytest.approx(20.817, abs=1e-3)
        assert "20.82 USD" in (text := Page(page(summary)).text)
        assert "thousands of requests that read" in text
        assert summary["incarnations"][1]["requests"] == {"writes": 34_000, "reads": 3}

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("{", "is not JSON"),
            ("[" * 100_000, "is not JSON"),
            ("[]", "must be an object of version 1 with version, date"),
            ('{"version": 1, "date": "2026-11-28", "put": {}}', "must be an object of version 1"),
            ('{"date": "2026-11-28"}', "must be an object of version 1"),
            ('{"version": 1, "date": "yesterday"}', "date must be a day"),
            ('{"version": 1, "date": "2026-11-28", "sent_gb": 1}', "sent_gb must be an object"),
            ('{"version": 1, "date": "2026-11-28", "sent_gb": {"s3": -1}}', "from 0 to 1e"),
            ('{"version": 1, "date": "2026-11-28", "sent_gb": {"s3": NaN}}', "from 0 to 1e"),
            ('{"version": 1, "date": "2026-11-28", "sent_gb": {"s3": true}}', "from 0 to 1e"),
        ],
    )
    def test_what_is_not_a_table(self, text, said):
        with pytest.raises(InvalidRequestError, match=f"--prices: .*{said}"):
            read_prices(text.encode())


class TestPage:
    def test_it_says_what_ran(self):
        setup = {"torch": "2.13.0", "codec": "<int8>"}
        text = page(of([live(0, setup=setup), live(1)]))
        assert "torch 2.13.0, codec &lt;int8&gt;" in text

    def test_it_needs_neither_a_network_nor_a_script(self):
        text = page(of([live(0), live(1)], {(0, 1): five(), (1, 1): five()}))
        assert "script" not in Page(text).tags
        assert not re.search(r"https?:|@import|url\(", text)
        assert "prefers-color-scheme:dark" in text
        for fact in ("Made on 2027-01-15", "by diloco-cli 0.1.0", "60.0%", "s3://bucket/run"):
            assert fact in text

    def test_every_colour_has_another_one_in_the_dark(self):
        """All colours are variables, and each class that has one finds it in both modes."""
        style = Path(_page.__file__).with_name("style.css").read_text(encoding="utf-8")
        light, rest = style.split("@media(prefers-color-scheme:dark)", 1)
        dark, rules = rest.split("}}", 1)
        named = [dict(re.findall(r"(--\w+):(#\w+)", each)) for each in (light, dark)]
        assert named[0].keys() == named[1].keys() == set(re.findall(r"var\((--\w+)\)", rules))
        assert all(named[0][name] != named[1][name] for name in named[0])
        coloured = re.findall(r"[{;\s](color|fill|stroke|background):([^;}]+)", rules)
        assert {value for _, value in coloured if "var(" not in value} <= {"none"}
        classes = set(re.findall(r"\.([a-z]\w*)", rules))
        lives = [live(0, ended="failed"), live(1)]
        lines = [line(1, metrics={"loss": "nan"}), *five()[1:4], line(5, contribution="carried")]
        text = page(of(lives, {(0, 1): five(), (1, 1): lines}))
        drawn = {
            name for each in re.findall(r'<path class="([^"]+)"', text) for name in each.split()
        }
        assert {"compute", "failed", "later", "mark", "c1"} <= drawn <= classes

    def test_the_loss_is_drawn_against_steps_and_against_time(self):
        text = page(of([live(0), live(1)], {(0, 1): five(), (1, 1): five()}))
        by_steps, by_time = re.findall(r'<div class="chart".*?</div>', text)[:2]
        for chart, ticks in (
            (by_steps, ["5", "10", "15", "20", "25"]),
            (by_time, ["0s", "10s", "20s", "30s", "40s", "50s", "1m"]),
        ):
            assert re.findall("<i[^>]*>([^<]+)</i>", chart) == ticks
            assert re.findall('class="line (c[01])"', chart) == ["c0", "c1"]

    def test_bars_say_how_lives_ended_and_who_was_in_which_sync(self):
        lives = [live(0, ended="failed"), live(1), live(2, ended=None)]
        lines = {(rank, 1): five(contribution=how) for rank, how in enumerate(("counted", "open"))}
        text = page(of([replace(each, world_size=3) for each in lives], lines))
        charts = re.findall(r'<div class="chart".*?</div>', text)[2:]
        bars = [re.findall('<path class="([^"]+)"', chart) for chart in charts]
        assert bars[1:] == [["failed", "left", "open"], ["counted", "later"]]
        assert "<title>rank 0, incarnation 1, attempt 1</title>" in charts[1]
        assert "<title>rank 1, compute: 30s, 60%</title>" in charts[0]

    def test_what_it_cost_stands_by_part(self):
        prices = {**PRICES, "replica_hour": {"eks": 36}}
        text = page(of([live(0), live(1)], {(0, 1): five(), (1, 1): five()}, prices))
        assert "<td>hours of replicas<td>eks/us-east-1<td>0.03333<td>36<td>1.20 USD" in text
        assert f"Known: 1.20 USD, by prices of {PRICES['date']}" in text

    def test_hostile_texts_are_only_texts(self):
        lines = [
            line(1, metrics={LOST[:26]: 1.0, "loss": LOST, "api_key": "open sesame"}, host=LOST)
        ]
        hostile = live(0, run=LOST, host=LOST, backend=LOST, place=LOST, ended=LOST)
        summary = of([hostile, live(1, ended="failed")], {(0, 1): lines, (1, 1): lines})
        text = page(summary)
        shown = Page(text)
        assert "script" not in shown.tags
        assert '<script>alert("x")</script>\\x1b[2J & password=<redacted>' in shown.text
        for secret in ("\x1b", "hunter2", "sesame"):
            assert secret not in text + json.dumps(as_json(summary))

    def test_numbers_at_their_bounds(self):
        most, latest = 2**63 - 1, 253_402_300_799
        lines = [
            line(n, time=time, sync=most, total_inner_steps=most, bytes_sent=most, inner_steps=most,
                 compute_seconds=2.0**62, exposed_seconds=2.0**62, wait_seconds=2.0**62,
                 metrics={"loss": loss})
            for n, time, loss in ((1, 0, -1e30), (2, latest, 1e30), (3, 0, 1e-300))
        ]  # fmt: skip
        lives = [live(0, time=latest, bytes_sent=most, dropped=most), live(1, time=0)]
        shown = Page(page(of(lives, {(0, 1): lines, (1, 10**17): five(sync=most)})))
        assert "nan" not in shown.text

    def test_times_that_no_calendar_has(self):
        histories = {(rank, 1): five() for rank in range(3)}
        histories[0, 1] = [line(n, time=0.0) for n in (1, 2, 3)] + [line(4, time=253_402_300_799)]
        lives = [live(rank, world_size=3) for rank in range(3)]
        assert "9999-12-31 23:59:59 UTC" in page(of(lives, histories))

    def test_failures_show_what_was_told_last(self):
        text = Page(page(of([live(0, ended="failed"), live(1)], {(0, 1): five()}))).text
        assert "Rank 0: said so at 2027-01-15 08:01:00 UTC, on node-7" in text
        assert "sync 5: 2 of 2, loss 2.5, 3kB sent and received, waited 3 s" in text
        assert "sync 2: 2 of 2" not in text

    def test_every_incarnation_that_failed_says_why(self):
        """Also one whose live record the next one has replaced, and that has no line."""
        lives = [live(0, epoch=3, ended="failed", error="ValueError: three"), live(1)]
        ends = [live(0, epoch=epoch, ended="failed", error=f"no {epoch}") for epoch in (1, 2)]
        records = told(lives, {(0, 1): five()})
        records = replace(records, ends={(0, each.epoch): each for each in ends})
        summary = summarise(records, PRICES, uri="s3://bucket/run-1") | {"made_at": START}
        summary["made_by"] = "0.1.0"
        known = [(each["epoch"], each["ended"]) for each in summary["incarnations"]]
        assert known == [(1, "failed"), (2, "failed"), (3, "failed"), (1, "left")]
        assert not any("is not known" in each for each in summary["missing"])
        text = Page(page(summary)).text
        assert text.count("Rank 0: said so at") == 3
        assert re.findall("no 1|no 2|ValueError: three", text) == [
            "no 1",
            "no 2",
            "ValueError: three",
        ]
        assert "without a word" not in text

    def test_an_incarnation_that_was_killed_is_a_failure(self):
        histories = {(0, 1): five(), (0, 2): five()}
        text = Page(page(of([live(0, epoch=2), live(1)], histories))).text
        assert "Rank 0: incarnation 1 ended without a word, as if killed, and 2" in text
        assert text.count("without a word") == 1

    def test_a_rank_that_fails_again_and_again_hides_no_other(self):
        lives = [
            live(0, epoch=50, ended="failed", error="no 50"),
            live(1, ended="failed", error="x"),
        ]
        ends = [live(0, epoch=n, ended="failed", error=f"no {n}") for n in range(1, 50)]
        records = replace(told(lives, {}), ends={(0, each.epoch): each for each in ends})
        text = _page._failures(summarise(records, PRICES, uri="s3://bucket/run-1"))
        assert "Rank 1: said so" in text
        assert re.findall(r"no (\d+)", text) == [str(n) for n in range(32, 51)]
        assert "31 more are not shown." in text

    def test_what_was_not_read_is_not_called_killed(self):
        records = replace(told([live(0, epoch=2), live(1)], {}), left_out=3)
        summary = summarise(records, PRICES, uri="s3://bucket/run-1")
        text = _page._failures(summary)
        assert "Rank 0: incarnation 1 ended without a word that was read, and 2 began" in text
        assert "killed" not in text

    def test_ranks_that_the_run_has_not_are_counted(self):
        records = told([live(0), live(1), live(2)], {(7, 1): five()})
        records = replace(records, ends={(8, 1): live(8), (0, 1): live(0)})
        summary = summarise(records, PRICES, uri="s3://bucket/run-1")
        assert {life["rank"] for life in summary["incarnations"]} == {0, 1}
        assert "Objects that are not what a replica tells: 3." in summary["missing"]

    @pytest.mark.parametrize(
        ("ranks", "syncs"), [(200, 60), (1000, 20), pytest.param(200, 300, marks=pytest.mark.slow)]
    )
    def test_many_ranks_stay_small(self, ranks, syncs):
        lines = {
            (rank, 1): [
                line(n, contribution=("counted", "carried")[(n + rank) % 2])
                for n in range(1, syncs + 1)
            ]
            for rank in range(ranks)
        }
        lives = [live(rank, world_size=ranks) for rank in range(ranks)]
        lives[-1] = live(ranks - 1, world_size=ranks, ended="failed")
        text = page(of(lives, lines))
        assert len(text) < 2_000_000
        assert f"the middle of all ranks ({ranks})" in text
        assert ("200 of 1000 ranks have a row" in text) == (ranks == 1000)
        assert f"<tr><td>{ranks - 1}<" in text, "the one that failed has a row"

    def test_many_losses_stay_small(self):
        lines = [line(n) for n in range(1, 25)]
        text = page(of([live(0), live(1)], {(0, epoch): lines for epoch in range(1, 5000)}))
        assert len(text) < 2_000_000
        assert "the middle of all ranks (1)" in text

    @pytest.mark.slow
    def test_many_incarnations_stay_small(self):
        lines = {(0, epoch): [line(1, sync=epoch)] for epoch in range(1, 30_000)}
        text = page(of([live(0, epoch=30_000), live(1)], lines))
        assert len(text) < 2_000_000
        assert "11 of 30001 incarnations are shown, the newest ones." in text

    @pytest.mark.parametrize("times", [False, True])
    @pytest.mark.parametrize(
        "values", [[], [0], [5, 5], [-1e30, 1e30], [2**63], [0, 1e-9], [0, 1e12]]
    )
    def test_every_axis_has_places(self, values, times):
        axis = Axis(values, times=times)
        assert axis.low < axis.high
        places = [place for place, _ in axis.ticks()]
        assert places
        assert all(0 <= place <= 1 for place in places)
        assert all(a < b for a, b in itertools.pairwise(places))

    def test_round_places(self):
        assert [text for _, text in Axis([0, 10]).ticks()] == ["0", "2", "4", "6", "8", "10"]
        assert [text for _, text in Axis([0, HOUR], times=True).ticks()] == [
            "0s", "10m", "20m", "30m", "40m", "50m", "1h",
        ]  # fmt: skip


@pytest.fixture
def uri(tmp_path):
    """A folder in which a run of two has told something."""
    for key, data in {
        live_key(0): live(0).to_bytes(),
        live_key(1): live(1, ended="failed").to_bytes(),
        HistoryKey(0, 1, 1, 5).key: b"".join(each.to_bytes() for each in five()),
        HistoryKey(1, 1, 1, 5).key: b"".join(each.to_bytes() for each in five()) + b"torn",
    }.items():
        path = tmp_path / "run" / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return str(tmp_path / "run")


class TestVerb:
    def test_a_page_and_json(self, uri, tmp_path, capsys):
        file = tmp_path / "page.html"
        assert _app.run(["report", uri, "-o", str(file)]) == 0
        assert capsys.readouterr().out == f"{file}\n"
        assert "Rank 1: said so" in file.read_text()
        assert _app.run(["report", uri, "--json"]) == 0
        facts = json.loads(capsys.readouterr().out)
        assert (facts["version"], facts["uri"], facts["loss"]) == (1, uri, "loss")
        assert "Lines that are torn, or not of a history: 1." in facts["missing"]

    def test_a_page_without_a_name_has_that_of_the_run(self, uri, tmp_path, capsys, monkeypatch):
        monkeypatch.chdir(tmp_path)
        assert _app.run(["report", f"{uri}/"]) == 0
        assert capsys.readouterr().out == "run.html\n"
        assert _app.run(["report", uri]) == 2
        assert "run.html is there already: --force replaces it" in capsys.readouterr().err
        monkeypatch.chdir(uri)
        assert _app.run(["report", "."]) == 0
        assert (tmp_path / "run" / "run.html").exists()

    def test_a_file_that_is_there_stays(self, uri, tmp_path, capsys):
        file = tmp_path / "page.html"
        file.write_text("mine")
        assert _app.run(["report", uri, "-o", str(file)]) == 2
        assert "is there already: --force replaces it" in capsys.readouterr().err
        assert _app.run(["report", uri, "--json", "--force"]) == 2
        assert "--json alone writes none" in capsys.readouterr().err
        assert file.read_text() == "mine"
        assert _app.run(["report", uri, "-o", str(file), "--force"]) == 0
        assert file.read_text().startswith("<!doctype html>")

    def test_a_file_that_comes_meanwhile_stays(self, uri, tmp_path, capsys, monkeypatch):
        file = tmp_path / "page.html"
        monkeypatch.setattr(_page, "page", lambda summary: file.write_text("mine"))
        assert _app.run(["report", uri, "-o", str(file)]) == 2
        assert "cannot be written: File exists" in capsys.readouterr().err
        assert file.read_text() == "mine"

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (["-o", "{}/none/page.html"], "cannot be written: No such file or directory"),
            (["-o", "{}"], "is a directory"),
            (["--json", "--prices", "{}/none.json"], "none.json': No such file"),
            (["--json", "--prices", "/dev/zero"], "is larger than 1048576 bytes"),
            (["--json", "--store", "{}"], "for runs by name"),
            (["--json", "--backend", "eks"], "for runs by name"),
        ],
    )
    def test_bad_use(self, uri, tmp_path, capsys, arguments, said):
        given = [each.format(tmp_path) for each in arguments]
        assert _app.run(["report", uri, *given]) == 2
        printed = capsys.readouterr()
        assert said in printed.err
        assert printed.out == ""

    def test_what_is_not_one_run(self, uri, tmp_path, capsys):
        assert _app.run(["report", str(tmp_path), "--json"]) == 2
        assert "such as run: give the URI of one" in capsys.readouterr().err
        assert _app.run(["report", f"{tmp_path}/none", "--json"]) == 3

    def test_a_run_by_name(self, uri, tmp_path):
        world = World("eks", {"monday": [DONE, FAILED]}, logs={1: ["first", "last\x1b[2J"]})
        file = tmp_path / "page.html"
        given = {"file": str(file), "force": False, "prices": None}
        made = command(world, as_json=True)
        assert report(made.session, "monday", store=uri, **given) == 0
        facts = json.loads(made.out())
        assert facts["backend"]["replicas"][1]["last_lines"] == ["first", "last\\x1b[2J"]
        assert len(facts["incarnations"]) == 2
        text = Page(file.read_text()).text
        assert "Rank 1: failed, error: ValueError: no data" in text
        assert "first\nlast\\x1b[2J" in text

    def test_what_a_replica_says_is_not_above_its_backend(self, uri):
        world = World("eks", {"monday": [DONE, DONE]})
        made = command(world, as_json=True)
        report(made.session, "monday", store=uri, file=None, force=False, prices=None)
        facts = json.loads(made.out())
        assert [row["state"] for row in facts["backend"]["replicas"]] == ["succeeded"] * 2
        odd = "Rank 1: it calls itself failed, and is recorded as succeeded."
        assert odd in facts["missing"]

    def test_the_store_of_another_run(self, uri):
        world = World("eks", {"tuesday": [DONE]})
        given = {"file": None, "force": False, "prices": None}
        made = command(world, as_json=True)
        with pytest.raises(InvalidRequestError, match=r"is that of \['monday'\], not of tuesday"):
            report(made.session, "tuesday", store=uri, **given)

    def test_a_run_by_name_finds_its_store(self, uri, tmp_path):
        world = World("eks", {"monday": [DONE, FAILED]})
        world.meets["monday"] = f"file://{uri}/"
        file = tmp_path / "page.html"
        made = command(world, as_json=True)
        given = {"file": str(file), "force": False, "prices": None}
        assert report(made.session, "monday", store=None, **given) == 0
        facts = json.loads(made.out())
        assert (facts["uri"], facts["backend"]["name"]) == (uri, "eks")
        assert len(facts["incarnations"]) == 2
        assert f"Store: {uri}" in Page(file.read_text()).text
        assert made.err() == ""

    @pytest.mark.parametrize(
        ("meets", "said"),
        [
            ("runs/monday", "names the relative path 'runs/monday' to meet at"),
            ("{}/none", "none have told nothing"),
            ("nothing://bucket/run", "Protocol not known: nothing"),
            ("s3://me:hunter2@bucket/run", "is not the URI of a run"),
        ],
    )
    def test_a_store_that_cannot_be_read_is_named(self, tmp_path, meets, said):
        world = World("eks", {"monday": [DONE, DONE]})
        world.meets["monday"] = meets.format(tmp_path)
        made = command(world, as_json=True)
        given = {"file": None, "force": False, "prices": None}
        assert report(made.session, "monday", store=None, **given) == 0
        facts = json.loads(made.out())
        assert (facts["uri"], facts["incarnations"]) == (None, [])
        assert said in facts["missing"][0]
        assert "hunter2" not in made.err() + made.out()

    def test_a_run_by_name_without_its_store(self):
        world = World("eks", {"monday": [DONE, None]}, logs={1: ReplicaNotFoundError("gone")})
        given = {"file": None, "force": False, "prices": None}
        made = command(world, as_json=True)
        assert report(made.session, "monday", store=None, **given) == 0
        facts = json.loads(made.out())
        assert (facts["world_size"], facts["incarnations"], facts["uri"]) == (2, [], None)
        assert "--store" in made.err()
        assert "--store" in facts["missing"][0]
        with pytest.raises(ReplicaNotFoundError):
            report(made.session, "tuesday", store=None, **given)
