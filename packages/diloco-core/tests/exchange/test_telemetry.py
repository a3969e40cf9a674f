"""Test what a replica tells of itself: it is true, it is little, and it does no harm."""

import subprocess
import sys
import threading
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from training_lab import PATIENCE, Clock, identical, push, run, small_model, values

from diloco_core import (
    ConfigurationError,
    DiLoCo,
    FencedError,
    ObjectStoreAllReduce,
    RunExistsError,
    SyncError,
    SyncReport,
    Timing,
    connect,
    export,
    in_process,
)
from diloco_core import _connect as connecting
from diloco_core._exchange import _telemetry
from diloco_core._exchange._base import Schema
from diloco_core._exchange._telemetry import Doing, Telemetry
from diloco_core._store._open import open_store
from diloco_protocol.telemetry import (
    PUTS_PER_SECOND,
    HistoryKey,
    Live,
    Phase,
    RunReader,
    check_metrics,
    end_key,
    history_seconds,
    live_key,
    live_seconds,
    newest_keys,
    parse_live_key,
    read_history,
)

KINDS = {
    "fixed": {},
    "sharded": {"min_replicas": 2},
    "gather": {"min_replicas": 2, "topology": "gather"},
}
WAYS = {
    "at once": {},
    "delayed": {"delay": 1},
    "fragments": {"fragments": 2, "delay": 1, "sync_every": 4},
}


class Ticks:
    """Stands for the threads that repeat something: here it is done when a test says so."""

    def __init__(self):
        self.acts = []

    def __call__(self, seconds, act):
        if seconds != _telemetry._LOOK_SECONDS:
            return bool  # signs of life
        self.acts.append(act)
        return lambda: self.acts.remove(act)

    def tick(self):
        for act in self.acts:
            act()


class Told:
    """A run's store, as somebody sees it who watches the run."""

    def __init__(self, uri):
        self.store = open_store(str(uri), reading=True)

    def live(self, rank):
        return Live.from_bytes(self.store.get(live_key(rank)))

    def lines(self, rank):
        results = []
        for key in newest_keys(self.store.list("history/")):
            if key.rank == rank:
                history = read_history(self.store.get(key.key))
                assert (history.skipped, history.of_another_version) == (0, 0)
                results += history.lines
        return results


class Wrapped:
    """A store that does something else with telemetry."""

    def __init__(self, store, put):
        self._store, self._put = store, put

    def __getattr__(self, name):
        return getattr(self._store, name)

    def put(self, key, parts):
        if key.startswith(("live/", "history/")):
            self._put(key)
        return self._store.put(key, parts)


class Counting:
    """A store that takes everything."""

    requests = None

    def __init__(self):
        self.sent = 0

    def put(self, key, parts):
        self.sent += 1

    def delete(self, keys):
        pass


class Unread(Wrapped):
    """A store in which nobody of a run looks at telemetry."""

    def _ask(self, verb, key, *args, **more):
        assert not key.startswith(("live", "history")), f"{verb} {key}"
        assert key, f"{verb}: everything"
        return getattr(self._store, verb)(key, *args, **more)

    def __getattr__(self, name):
        if name in {"get", "open", "list"}:
            return partial(self._ask, name)
        return super().__getattr__(name)


@pytest.fixture
def through(monkeypatch):
    """Connect through a store that calls a function before it takes telemetry."""

    def use(put):
        monkeypatch.setattr(
            connecting, "open_store", lambda *args, **more: Wrapped(open_store(*args, **more), put)
        )

    return use


def train(exchange, steps=8, *, step=lambda *_: None, **options):
    """Train with a note of every step; return what the model holds, and the reports."""
    model, reports = small_model(), []
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    options = {"sync_every": 2, "on_sync": reports.append, **options}
    with DiLoCo(model, inner, exchange, **options) as outer:
        for number in range(steps):
            outer.log(loss=1 / (number + 1), tokens=np.int64(number), note="a\x1bb")
            step(number, outer)
            push(model, inner, exchange.rank, number)
    return values(model), reports


def connected(uri, ranks=2, **options):
    return [connect(uri, rank=rank, world_size=ranks, **options) for rank in range(ranks)]


class TestWhatIsWritten:
    @pytest.mark.sampled
    @pytest.mark.parametrize("place", ["folder", "memory"])
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("way", WAYS)
    def test_it_is_what_the_reports_say(self, tmp_path, place, kind, way):
        uri = tmp_path / "run" if place == "folder" else f"memory://told/{kind}/{way}"
        told = (open_store(f"{uri}"), Told(uri))[1] if place == "folder" else None
        environ = {"DILOCO_ATTEMPT": "3", "DILOCO_BACKEND": "toy", "DILOCO_PLACE": "here"}
        options = {"run_id": "monday", "environ": environ, **KINDS[kind]}
        results = run(lambda each: train(each, **WAYS[way]), connected(uri, **options))
        assert identical([result for result, _ in results])
        told = told or Told(uri)
        for rank, (_, reports) in enumerate(results):
            live, lines = told.live(rank), told.lines(rank)
            assert (live.run, live.rank, live.world_size) == ("monday", rank, 2)
            assert (live.epoch, live.attempt, live.backend, live.place) == (1, 3, "toy", "here")
            assert (live.step, live.sync) == (8, reports[-1].sync)
            assert (live.phase, live.ended, live.dropped) == (Phase.IDLE, "left", 0)
            assert live.bytes_sent == sum(report.bytes_sent for report in reports)
            assert live.metrics == {"loss": 1 / 8, "tokens": 7, "note": "a\\x1bb"}
            trained = sum(report.compute_seconds for report in reports)
            both = trained + sum(report.exposed_seconds for report in reports)
            assert live.training_share == pytest.approx(trained / both)
            assert abs(live.time - time.time()) < PATIENCE
            assert [line.number for line in lines] == [*range(1, len(reports) + 1)]
            for line, report in zip(lines, reports, strict=True):
                for name, value in asdict(report).items():
                    if name not in {"outer_lr", "weights", "clipped"}:
                        assert getattr(line, name) == value
                assert line.outer_lr == (() if report.outer_lr is None else (report.outer_lr,))
                assert (line.attempt, line.host) == (3, live.host)
            assert "tokens" in lines[0].metrics

    def test_a_metric_is_in_the_line_of_the_sync_after_it_was_logged(self, tmp_path):
        def note(number, outer):
            if number == 4:
                outer.log(accuracy=0.5, loss=float("nan"))

        (exchange,) = connected(tmp_path / "run", 1)
        train(exchange, step=note)
        lines = Told(tmp_path / "run").lines(0)
        assert ["accuracy" in line.metrics for line in lines] == [False, False, True, False]
        assert lines[2].metrics["loss"] == 1 / 6
        assert Told(tmp_path / "run").live(0).metrics["accuracy"] == 0.5

    def test_nan_and_infinities_are_text(self, tmp_path):
        (exchange,) = connected(tmp_path / "run", 1)
        model = small_model()
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        with DiLoCo(model, inner, exchange, sync_every=1) as outer:
            outer.log(loss=float("nan"), norm=np.float32("inf"), least=-float("inf"))
            push(model, inner, 0, 0)
        reader = Told(tmp_path / "run")
        expected = {"loss": "nan", "norm": "inf", "least": "-inf"}
        assert reader.live(0).metrics == reader.lines(0)[0].metrics == expected

    def test_what_is_logged_when_a_sync_is_over_belongs_to_that_sync(self, tmp_path):
        (exchange,) = connected(tmp_path / "run", 1)
        model = small_model()
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        with DiLoCo(
            model, inner, exchange, sync_every=1,
            on_sync=lambda report: outer.log(evaluated=report.sync),
        ) as outer:  # fmt: skip
            for step in range(3):
                push(model, inner, 0, step)
        lines = Told(tmp_path / "run").lines(0)
        assert [line.metrics["evaluated"] for line in lines] == [1, 2, 3]

    def test_means_are_told_too(self, tmp_path):
        with ObjectStoreAllReduce(tmp_path / "run", rank=0, world_size=1) as reduce:
            for _ in range(3):
                reduce.mean([torch.ones(3)])
        live, lines = Told(tmp_path / "run").live(0), Told(tmp_path / "run").lines(0)
        assert (live.sync, live.step, len(lines)) == (3, 0, 3)

    @pytest.mark.sampled
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("way", WAYS)
    def test_it_can_be_turned_off(self, through, kind, way):
        sent = []
        through(sent.append)
        ticks = Ticks()
        uri = f"memory://off/{kind}/{way}"
        options = {"telemetry": False, "timing": Timing(repeat=ticks), **KINDS[kind]}
        run(lambda each: train(each, **WAYS[way]), connected(uri, **options))
        with ObjectStoreAllReduce(f"{uri}/means", rank=0, world_size=1, telemetry=False) as reduce:
            reduce.mean([torch.ones(3)])
        assert (sent, ticks.acts) == ([], [])
        assert not open_store(uri).list("live/")

    def test_nothing_goes_on_after_the_end(self, tmp_path):
        before = set(threading.enumerate())
        run(train, connected(tmp_path / "run"))
        assert not set(threading.enumerate()) - before

    def test_a_store_that_cannot_decide_has_it_below_the_prefix_as_given(self, through, tmp_path):
        class Undecided(Wrapped):
            exclusive = False

        def opened(*args, **more):
            return Undecided(open_store(*args, **more), bool)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(connecting, "open_store", opened)
            for resume in (False, True):
                exchanges = connected(tmp_path / "run", resume=resume)
                run(lambda each: train(each, flush="none"), exchanges)
        store = open_store(str(tmp_path / "run"))
        assert [key for key in store.list("generations/") if key.endswith("manifest.json")]
        assert [parse_live_key(key) for key in store.list("live/")] == [0, 1]
        epochs = [(key.rank, key.epoch) for key in newest_keys(store.list("history/"))]
        assert epochs == [(0, 1), (0, 2), (1, 1), (1, 2)]


class TestWhileItRuns:
    @pytest.fixture
    def ticks(self):
        return Ticks()

    @pytest.fixture
    def timing(self, ticks):
        clock = Clock()
        return Timing(clock=clock, sleep=clock.sleep, repeat=ticks, return_within=0.0)

    def test_the_promised_requests_are_sent(self, through, ticks, timing):
        sent = []
        through(sent.append)

        def step(number, outer):
            timing.sleep(5.0)
            ticks.tick()

        (exchange,) = connected("memory://promised", 1, timing=timing)
        train(exchange, 720, step=step, sync_every=6, save_inner_every=0)
        live = [key for key in sent if key.startswith("live/")]
        assert 3600 / live_seconds(1) - 1 <= len(live) - 1 <= 3600 / live_seconds(1)
        assert sent.count(end_key(0, 1)) == 1
        history = len(sent) - len(live) - 1
        assert 3600 / history_seconds(1) - 2 <= history - 1 <= 3600 / history_seconds(1)
        # As a plan says, for an hour instead of a day.
        at_the_end = 3
        assert len(sent) <= 3600 / live_seconds(1) + 3600 / history_seconds(1) + at_the_end
        store = open_store("memory://promised")
        keys = [key for key in store.list("history/") if key != end_key(0, 1)]
        assert len(keys) == 6  # a new one every ten minutes; none is left over
        assert len(Told("memory://promised").lines(0)) == 120

    def test_it_says_what_runs(self, timing):
        (exchange,) = connected("memory://setup", 1, timing=timing)
        train(exchange, 6, sync_every=3, codec="int8")
        live = Told("memory://setup").live(0)
        assert live.setup["torch"] == str(torch.__version__)
        assert live.setup["sync_every"] == "3"
        assert live.setup["codec"] == "int8"
        assert live.setup["model"].startswith("sha256:")
        assert "committed" not in live.setup, "it is no setting"

    def test_of_many_and_long_settings_it_says_what_fits(self):
        settings = {f"setting{number}": "x" * 500 for number in range(100)} | {"n" * 65: "y"}
        setup = _telemetry._setup(Schema({}, settings))
        assert len(setup) == 32
        assert check_metrics(setup) == setup

    @pytest.mark.parametrize("replicas", [40, pytest.param(300, marks=pytest.mark.slow)])
    def test_many_replicas_send_as_few_together(self, replicas):
        """A sync every two minutes of each; the beginning, in which all write at once, apart."""
        sent = Counting()
        clock, ticks = Clock(), Ticks()
        timing = Timing(clock=clock, repeat=ticks)
        writers = [Telemetry(sent, n, replicas, "", timing, {}, clock) for n in range(replicas)]
        for writer in writers:
            writer.begin(1, Doing(), Schema({}, {}))
        ticks.tick()
        assert sent.sent == replicas
        minutes = []
        for second in range(1, 1801):
            clock.sleep(1.0)
            for writer in writers if second % 120 == 0 else ():
                writer.synced(SyncReport(second // 120, "0", True, replicas, 1, 1, 1.0, 1.0))
            before = sent.sent
            ticks.tick()
            if second % 60 == 1:
                minutes.append(0)
            minutes[-1] += sent.sent - before
        puts = replicas * (1 / live_seconds(replicas) + 1 / history_seconds(replicas))
        assert puts <= PUTS_PER_SECOND
        assert 0.9 * replicas / live_seconds(replicas) < sum(minutes) / 1800 <= puts
        for writer in writers:
            writer.end()

    def test_how_long_a_step_takes(self, tmp_path, ticks, timing):
        seen = []

        def step(number, outer):
            timing.sleep(4.0 if number < 50 else 25.0)
            ticks.tick()
            seen.append(Told(tmp_path / "run").live(0).seconds_per_step)

        (exchange,) = connected(tmp_path / "run", 1, timing=timing)
        train(exchange, 60, step=step, sync_every=40)
        assert seen[0] is None
        assert seen[30] == pytest.approx(4.0)
        assert seen[-1] == pytest.approx(25.0)

    def test_whom_it_waits_for(self, tmp_path, ticks):
        """First while they meet, then in a sync; and its last word stays, if it is killed."""
        timing = Timing(repeat=ticks)
        exchanges = connected(tmp_path / "run", timing=timing)
        go_on = threading.Event()
        reader = Told(tmp_path / "run")

        def await_phase(phase, **more):
            deadline = time.monotonic() + PATIENCE
            while time.monotonic() < deadline:
                for act in ticks.acts[:1]:
                    exchanges[0].telemetry._live_at = 0.0
                    act()
                    live = reader.live(0)
                    if live.phase is phase and {**asdict(live), **more} == asdict(live):
                        return live
                time.sleep(0.001)
            raise AssertionError(phase)

        def step(number, outer):
            if number == 3:
                assert go_on.wait(PATIENCE)

        def second(exchange):
            await_phase(Phase.WAITING, waits_for=(1,), missing=1, step=0)
            return train(exchange, step=step)

        def replica(exchange):
            return train(exchange) if exchange.rank == 0 else second(exchange)

        def watch():
            await_phase(Phase.WAITING, waits_for=(1,), missing=1, step=4, sync=1)
            go_on.set()

        watcher = threading.Thread(target=watch)
        watcher.start()
        run(replica, exchanges)
        watcher.join()

    @pytest.mark.sampled
    @pytest.mark.parametrize("kind", KINDS)
    def test_what_it_does_in_a_sync(self, tmp_path, monkeypatch, ticks, kind):
        """As its requests show: it puts a contribution, decides, and creates shards."""
        seen = set()
        at_work = threading.local()

        class Watched(Wrapped):
            def _ask(self, verb, key):
                exchange = getattr(at_work, "exchange", None)
                if exchange is not None:
                    telemetry = exchange.telemetry
                    phase = Phase.TRAINING if telemetry.training() else telemetry._doing.phase
                    seen.add((verb, key.partition("/")[0], phase))

            def put(self, key, parts):
                self._ask("put", key)
                return self._store.put(key, parts)

            def create(self, key, data):
                self._ask("create", key)
                return self._store.create(key, data)

        monkeypatch.setattr(
            connecting, "open_store", lambda *args, **more: Watched(open_store(*args, **more), bool)
        )

        def replica(exchange):
            at_work.exchange = exchange
            return train(exchange, save_inner_every=0)

        exchanges = connected(tmp_path / "run", timing=Timing(repeat=ticks), **KINDS[kind])
        run(replica, exchanges)
        phases = {phase for verb, folder, phase in seen if folder == "deltas" and verb == "put"}
        assert Phase.CONTRIBUTING in phases
        assert Phase.TRAINING not in {phase for _, _, phase in seen}
        assert ("create", "commits", Phase.WAITING) in seen
        assert kind == "gather" or ("create", "state", Phase.UPDATING) in seen

    def test_beside_a_sync_it_trains(self, tmp_path, ticks, timing):
        seen = []

        def step(number, outer):
            exchange.telemetry._live_at = 0.0
            ticks.tick()
            seen.append((Told(tmp_path / "run").live(0).phase, outer.syncing))

        (exchange,) = connected(tmp_path / "run", 1, timing=timing)
        train(exchange, step=step, delay=1, sync_every=4)
        assert (Phase.TRAINING, True) in seen
        assert {phase for phase, _ in seen} == {Phase.TRAINING}

    def test_a_killed_replica_leaves_its_last_word_and_the_next_one_follows(
        self, tmp_path, monkeypatch, ticks, timing
    ):
        reader = Told(tmp_path / "run")

        class KilledError(BaseException):
            pass

        def dies(number, outer):
            timing.sleep(100.0)
            ticks.tick()
            if number == 5:
                raise KilledError

        (first,) = connected(tmp_path / "run", 1, timing=timing)
        monkeypatch.setattr(type(first), "abort", lambda *_: None)
        with pytest.raises(KilledError):
            train(first, step=dies)
        monkeypatch.undo()
        before = reader.live(0)
        assert (before.epoch, before.phase, before.ended, before.step) == (1, "training", None, 5)
        connecting._open.clear()  # as a new process
        (second,) = connected(tmp_path / "run", 1, timing=timing)
        train(second)
        after = reader.live(0)
        assert (after.epoch, after.ended) == (2, "left")
        keys = newest_keys(reader.store.list("history/"))
        assert [(key.epoch, key.first) for key in keys] == [(1, 1), (2, 1)]
        # The one that was thought dead comes back, is refused, and takes nobody's place.
        first.telemetry.end(FencedError("another one is there", 0, 2))
        assert reader.live(0) == after
        first.telemetry.end(RuntimeError("again"))
        assert reader.live(0) == after
        ends = [Live.from_bytes(reader.store.get(end_key(0, epoch))) for epoch in (1, 2)]
        assert ends[1] == after
        assert (ends[0].epoch, ends[0].ended) == (1, "failed")

    @pytest.mark.parametrize("error", [ValueError("no data"), RunExistsError("not yours")])
    def test_a_replica_that_fails_says_so(self, tmp_path, ticks, timing, error):
        def fails(number, outer):
            if number == 5:
                raise error

        (exchange,) = connected(tmp_path / "run", 1, timing=timing)
        with pytest.raises(type(error)):
            train(exchange, step=fails)
        store = open_store(str(tmp_path / "run"))
        if isinstance(error, RunExistsError):
            assert not store.list("live/")
            assert not store.list("history/")
        else:
            reader = Told(tmp_path / "run")
            assert (reader.live(0).ended, len(reader.lines(0))) == ("failed", 2)
            assert reader.live(0).error == "ValueError: no data"
        assert not ticks.acts

    @pytest.mark.parametrize("steps", [1, 5])
    def test_the_end_of_every_incarnation_stays(self, tmp_path, ticks, timing, steps):
        """Also of one that fails before its first sync, so that it has no line."""

        def fails(number, outer):
            if number % 4 == steps % 4:
                raise ValueError(f"password=hunter2, incarnation {exchange.epoch}")

        for _ in range(3):
            (exchange,) = connected(tmp_path / "run", 1, timing=timing)
            with pytest.raises(ValueError, match="incarnation"):
                train(exchange, step=fails)
            connecting._open.clear()  # as a new process
        store = open_store(str(tmp_path / "run"), reading=True)
        reader = RunReader(
            lambda folder: [(key, None) for key in store.list(folder)],
            lambda key, most: store.get(key),
        )
        look = reader.look()
        assert [(key, end.ended) for key, end in look.ends.items()] == [
            ((0, epoch), "failed") for epoch in (1, 2, 3)
        ]
        assert look.ends[0, 2].error == "ValueError: password=<redacted>, incarnation 2"
        assert look.live[0] == look.ends[0, 3]
        assert look.skipped == 0


class TestNothingIsDecidedByIt:
    @pytest.mark.sampled
    @pytest.mark.parametrize("kind", KINDS)
    def test_no_replica_reads_it(self, monkeypatch, kind):
        """Neither when they meet, nor in syncs, nor when a rank or the run comes back."""
        monkeypatch.setattr(
            connecting, "open_store", lambda *args, **more: Unread(open_store(*args, **more), bool)
        )
        uri = f"memory://unread/{kind}"
        for again in ({}, {} if KINDS[kind] else {"resume": True}):
            run(train, connected(uri, **again, **KINDS[kind]))
        assert len(Told(uri).lines(0)) > 4

    def test_core_has_nothing_that_reads_it(self):
        """Its reader is in the protocol, for those who watch."""
        sources = Path(_telemetry.__file__).parents[1].rglob("*.py")
        text = "".join(source.read_text() for source in sources)
        assert "to_bytes" in text
        for name in ("read_history", "newest_keys", "parse_live_key", "Live.from", "SyncLine.from"):
            assert name not in text


class TestHarm:
    @pytest.fixture
    def expected(self, tmp_path):
        exchanges = connected(tmp_path / "expected", telemetry=False)
        return [result for result, _ in run(train, exchanges)]

    @pytest.mark.sampled
    @pytest.mark.parametrize("error", [OSError("no"), ValueError("a bug"), MemoryError()])
    def test_a_store_that_fails_changes_nothing(self, tmp_path, through, expected, caplog, error):
        def put(key):
            raise error

        through(put)
        results = run(train, connected(tmp_path / "run"))
        assert identical([*expected, *(result for result, _ in results)])
        texts = [record.message for record in caplog.records if "telemetry" in record.message]
        assert len(texts) == 2  # once by each replica
        assert not open_store(str(tmp_path / "run")).list("live/")

    @pytest.mark.parametrize("early", [True, False])
    def test_a_store_that_hangs_changes_nothing(
        self, tmp_path, through, expected, monkeypatch, early
    ):
        """From the first object on, or only at the end, where the last ones are written."""
        monkeypatch.setattr(_telemetry, "_END_SECONDS", 0.01)
        monkeypatch.setattr("diloco_core._timing._STOP_SECONDS", 0.01)
        monkeypatch.setattr(_telemetry, "_LOOK_SECONDS", 0.001)
        release, hanging = threading.Event(), threading.Event()

        def put(key):
            hanging.set()
            assert release.wait(PATIENCE)

        def step(number, outer):
            if early:
                assert hanging.wait(PATIENCE)

        through(put)
        before = set(threading.enumerate())
        timing = Timing() if early else Timing(repeat=Ticks())
        exchanges = connected(tmp_path / "run", timing=timing)
        results = run(lambda each: train(each, step=step), exchanges)
        assert hanging.is_set()
        assert identical([*expected, *(result for result, _ in results)])
        assert not open_store(str(tmp_path / "run")).list("live/")
        release.set()
        for thread in set(threading.enumerate()) - before:
            thread.join(PATIENCE)

    def test_what_strangers_put_there_is_left_alone(self, tmp_path, expected):
        store = open_store(str(tmp_path / "run"))
        keys = {"live/00000.json", "live/x", "history/a", HistoryKey(1, 7, 1, 2).key}
        for key in keys:
            store.put(key, [b"\xff" * 100])
        results = run(train, connected(tmp_path / "run"))
        assert identical([*expected, *(result for result, _ in results)])
        assert keys <= store.list("live/").keys() | store.list("history/").keys()
        assert export(str(tmp_path / "run"), str(tmp_path / "model.safetensors")) == 4

    @pytest.mark.sampled
    @pytest.mark.parametrize("folder", ["live/", "history/"])
    @pytest.mark.parametrize("kind", KINDS)
    def test_a_store_that_fails_in_one_folder(self, tmp_path, through, kind, folder):
        def put(key):
            if key.startswith(folder):
                raise OSError("no")

        options = {**KINDS[kind], "telemetry": False}
        expected = run(train, connected(tmp_path / "expected", **options))
        through(put)
        results = run(train, connected(tmp_path / "run", **KINDS[kind]))
        assert identical([result for result, _ in [*expected, *results]])
        store = open_store(str(tmp_path / "run"))
        assert [bool(store.list(each)) for each in ("live/", "history/")] == [
            folder != "live/",
            folder != "history/",
        ]

    @pytest.mark.parametrize("early", [pytest.param(True, marks=pytest.mark.slow), False])
    def test_a_process_ends_while_its_store_hangs(self, tmp_path, early):
        """The threads that wait for the store do not keep it alive."""
        program = f"""
import threading, torch
from diloco_core import DiLoCo, _connect, _timing, connect
from diloco_core._exchange import _telemetry

_telemetry._END_SECONDS = 0.01
_telemetry._LOOK_SECONDS = {0.001 if early else 1000.0}
_timing._STOP_SECONDS = 0.01
hanging = threading.Event()
opened = _connect.open_store

def opening(*args, **more):
    store = opened(*args, **more)
    put = store.put

    def hang(key, parts):
        if key.startswith(("live/", "history/")):
            hanging.set()
            threading.Event().wait()
        return put(key, parts)

    store.put = hang
    return store

_connect.open_store = opening
model = torch.nn.Linear(1, 1)
inner = torch.optim.SGD(model.parameters(), lr=0.1)
with DiLoCo(model, inner, connect({str(tmp_path / "run")!r}, rank=0, world_size=1), sync_every=1):
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    inner.step()
    {early} and hanging.wait()
assert hanging.is_set()
print("over")
"""
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE
        )
        assert (done.returncode, done.stdout) == (0, "over\n"), done.stderr

    def test_reports_for_which_there_is_no_room_are_counted(self, tmp_path, monkeypatch):
        monkeypatch.setattr(_telemetry, "_MOST_REPORTS", 2)
        (exchange,) = connected(tmp_path / "run", 1, timing=Timing(repeat=Ticks()))
        train(exchange)
        reader = Told(tmp_path / "run")
        assert (reader.live(0).dropped, len(reader.lines(0))) == (2, 2)


class TestLog:
    @pytest.mark.parametrize("kind", KINDS)
    def test_what_is_logged_never_weighs(self, tmp_path, kind):
        def logs(exchange):
            far = 10**9 * exchange.rank
            return train(exchange, step=lambda _, outer: outer.log(tokens=far, weight=far))

        plain = run(train, connected(tmp_path / "plain", **KINDS[kind]))
        odd = run(logs, connected(tmp_path / "odd", **KINDS[kind]))
        assert identical([result for result, _ in [*plain, *odd]])

    @pytest.fixture
    def outer(self, tmp_path):
        (exchange,) = connected(tmp_path / "run", 1)
        model = small_model()
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        with DiLoCo(model, inner, exchange, sync_every=2) as outer:
            yield outer
            push(model, inner, 0, 0)

    @pytest.mark.sampled
    @pytest.mark.parametrize(
        ("value", "text"),
        [
            (torch.tensor(1.0), r"given a tensor: pass its number \(loss=....item\(\)\)"),
            (True, "the metric 'loss' must be"),
            (None, "the metric 'loss' must be"),
            ([1.0], "the metric 'loss' must be"),
            (2**63, "the metric 'loss' must be"),
            ("x" * 129, "the metric 'loss' must be"),
            (1j, "the metric 'loss' must be"),
        ],
    )
    def test_what_is_no_metric_is_refused_by_name(self, outer, value, text):
        with pytest.raises(ConfigurationError, match=text):
            outer.log(loss=value)

    def test_names_are_few_and_short(self, outer):
        outer.log(**{str(number): number for number in range(32)})
        outer.log(**{"31": 1})
        with pytest.raises(ConfigurationError, match=r"at most 32 metrics, and with \['more'\]"):
            outer.log(more=1)
        for name in ("", "a\nb", "x" * 65):
            with pytest.raises(ConfigurationError, match="the name of a metric must be"):
                outer.log(**{name: 1})

    def test_only_inside_the_block(self):
        (exchange,) = in_process(1)
        model = small_model()
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        outer = DiLoCo(model, inner, exchange, sync_every=1)
        with pytest.raises(SyncError, match="inside the block"):
            outer.log(loss=1.0)
        with outer:
            outer.log(loss=1.0, small=np.float32(0.5))  # without a store, it goes nowhere
            with pytest.raises(ConfigurationError):
                outer.log(loss=None)
            push(model, inner, 0, 0)
        with pytest.raises(SyncError, match="inside the block"):
            outer.log(loss=1.0)
