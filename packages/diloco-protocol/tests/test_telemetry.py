"""What a replica tells of itself comes back as it was written, or is refused: whoever wrote it."""

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from json_lab import json_values, odd_values

from diloco_protocol import InvalidRequestError, SpecVersionError
from diloco_protocol.telemetry import (
    HISTORY_BYTES,
    LEAST_SECONDS,
    LINE_BYTES,
    LIVE_BYTES,
    MOST_LINES,
    MOST_METRICS,
    MOST_RANKS,
    NAME_CHARACTERS,
    PUTS_PER_SECOND,
    TEXT_CHARACTERS,
    HistoryKey,
    Live,
    Phase,
    SyncLine,
    check_metrics,
    history_allowance,
    history_seconds,
    is_sealed,
    live_key,
    live_seconds,
    newest_keys,
    parse_live_key,
    read_history,
)

REFUSED = (InvalidRequestError, SpecVersionError)
LARGEST = 2**63 - 1
WEEK = 7 * 24 * 3600

wholes = st.integers(0, LARGEST)
ranks = st.integers(0, 99_999)
seconds = st.floats(0, 1e15)
metrics = st.dictionaries(
    st.text(min_size=1, max_size=NAME_CHARACTERS).filter(str.isprintable),
    st.floats() | st.integers(-LARGEST, LARGEST) | st.text(max_size=TEXT_CHARACTERS),
    max_size=MOST_METRICS,
)
attempts = st.none() | st.integers(1, 9)
lives = st.builds(
    Live,
    run=st.text(),
    rank=ranks,
    world_size=st.integers(1, 100_000),
    epoch=wholes,
    attempt=attempts,
    host=st.text(),
    place=st.text(),
    time=st.floats(0, 1e10),
    step=wholes,
    sync=wholes,
    phase=st.sampled_from(Phase),
    waits_for=st.lists(ranks, max_size=MOST_RANKS),
    seconds_per_step=st.none() | seconds,
    training_share=st.none() | st.floats(0, 1),
    writes=st.none() | wholes,
    reads=st.none() | wholes,
    ended=st.none() | st.text(),
    metrics=metrics,
)
sync_lines = st.builds(
    SyncLine,
    number=wholes,
    time=st.floats(0, 1e10) | st.integers(0, 10**10),
    attempt=attempts,
    sync=wholes,
    fragment=st.text(),
    committed=st.booleans(),
    members=wholes,
    bytes_sent=wholes,
    bytes_received=wholes,
    wait_seconds=seconds,
    exchange_seconds=seconds,
    outer_lr=st.lists(seconds, max_size=8),
    weights=st.lists(st.floats(0, 1), max_size=MOST_RANKS),
    contribution=st.sampled_from(["counted", "carried"]),
    metrics=metrics,
)
records = lives | sync_lines
SMALL = {
    Live: Live(run="", rank=0, world_size=1, epoch=1, time=0, step=0, sync=0, phase="idle"),
    SyncLine: SyncLine(
        number=1, time=0, sync=1, fragment="0", committed=True, members=1, bytes_sent=0,
        bytes_received=0, wait_seconds=0, exchange_seconds=0,
    ),
}  # fmt: skip
NAMES = sorted({*Live.__slots__, *SyncLine.__slots__, "version", "unknown"})


class TestRecords:
    @given(records)
    def test_what_is_written_can_be_read(self, record):
        data = record.to_bytes()
        assert type(record).from_bytes(data) == record
        assert data.count(b"\n") == 1
        assert data.endswith(b"\n")

    @given(records, st.sampled_from(NAMES), json_values | odd_values)
    def test_what_is_read_can_be_written(self, record, name, value):
        """What a stranger writes: nothing else is raised, and what is taken can be written."""
        kind = type(record)
        data = {**json.loads(record.to_bytes()), name: value}
        with contextlib.suppress(*REFUSED):
            read = kind.from_bytes(json.dumps(data).encode())
            assert kind.from_bytes(read.to_bytes()) == read

    @given(st.sampled_from([Live, SyncLine]), st.sampled_from(NAMES), json_values | odd_values)
    def test_what_the_writer_takes_the_reader_takes(self, kind, name, value):
        made = {each: getattr(SMALL[kind], each) for each in kind.__slots__}
        try:
            record = kind(**{**made, **({name: value} if name in made else {})})
        except InvalidRequestError:
            return
        assert kind.from_bytes(record.to_bytes()) == record

    @given(st.binary() | records.map(lambda record: record.to_bytes()), st.integers(0, 400))
    def test_no_bytes_raise_anything_else(self, data, cut):
        for kind in (Live, SyncLine):
            with contextlib.suppress(*REFUSED):
                kind.from_bytes(data[cut:])
            with contextlib.suppress(*REFUSED):
                kind.from_bytes(data[:cut])
        read_history(data[cut:])

    @pytest.mark.parametrize(
        "data",
        [
            b"",
            b"[" * 20_000,
            b'{"version":1,"rank":' + b"9" * 5000 + b"}",
            b"null",
            b"[1]",
            b"\xff\xfe{",
            b'{"version":1}',
            b"x" * (LIVE_BYTES + 1),
        ],
    )
    def test_what_is_no_record_is_refused(self, data):
        for kind in (Live, SyncLine):
            with pytest.raises(REFUSED):
                kind.from_bytes(data)

    @pytest.mark.parametrize("version", [0, 2, True, "1", None, 1.0])
    def test_another_version_is_refused_as_such(self, version):
        data = {**json.loads(SMALL[Live].to_bytes()), "version": version}
        with pytest.raises(SpecVersionError, match="reads version 1"):
            Live.from_bytes(json.dumps(data).encode())

    def test_unknown_fields_are_ignored_and_others_may_be_left_out(self):
        data = json.loads(SMALL[Live].to_bytes()) | {"later": [1]}
        del data["host"], data["metrics"]
        assert Live.from_bytes(json.dumps(data).encode()) == SMALL[Live]
        del data["phase"]
        with pytest.raises(InvalidRequestError, match="lacks phase"):
            Live.from_bytes(json.dumps(data).encode())

    def test_of_two_fields_of_a_name_the_last_one_counts(self):
        data = SMALL[Live].to_bytes().replace(b'"rank":0', b'"rank":7,"rank":3')
        assert Live.from_bytes(data).rank == 3

    def test_texts_do_no_harm(self):
        data = json.loads(SMALL[Live].to_bytes()) | {
            "host": "\x1b[2Jall\r\nis\twell\ud800" + "x" * 999,
            "metrics": {"note": "\u202eevil"},
        }
        read = Live.from_bytes(json.dumps(data).encode())
        assert read.host.startswith("\\x1b[2Jall is well\\ud800xxx")
        assert len(read.host) == TEXT_CHARACTERS
        assert read.metrics == {"note": "\\u202eevil"}

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("waits_for", [1] * (MOST_RANKS + 1)),
            ("waits_for", [100_000]),
            ("waits_for", "12"),
            ("phase", "sleeping"),
            ("time", float("inf")),
            ("step", -1),
            ("step", 1.0),
            ("training_share", 1.01),
            ("host", b"x"),
            ("metrics", [["a", 1]]),
        ],
    )
    def test_what_no_field_holds_is_refused_by_writer_and_reader(self, name, value):
        made = {each: getattr(SMALL[Live], each) for each in Live.__slots__} | {name: value}
        with pytest.raises(InvalidRequestError, match=name):
            Live(**made)
        if type(value) is bytes:
            return
        data = {**json.loads(SMALL[Live].to_bytes()), name: value}
        with pytest.raises(InvalidRequestError):
            Live.from_bytes(json.dumps(data).encode())

    def test_the_largest_records_are_not_too_large(self):
        wide = "\U0001f600" * TEXT_CHARACTERS
        logged = {f"{wide[2:NAME_CHARACTERS]}{n:02}": wide for n in range(MOST_METRICS)}
        numbers = [1.2345678901234567e-100] * MOST_RANKS
        largest = {
            Live: (LIVE_BYTES, dict.fromkeys(("run", "host", "backend", "place", "ended"), wide)),
            SyncLine: (LINE_BYTES, dict.fromkeys(("fragment", "host", "contribution"), wide)),
        }
        largest[Live][1].update(waits_for=[99_999] * MOST_RANKS, metrics=logged)
        largest[SyncLine][1].update(weights=numbers, clipped=numbers, outer_lr=numbers)
        for kind, (most, fields) in largest.items():
            made = {name: getattr(SMALL[kind], name) for name in kind.__slots__}
            for name, value in made.items():
                if type(value) in {int, float} and name not in {"rank", "world_size", "time"}:
                    fields.setdefault(name, LARGEST)
            record = kind(**made | fields | {"metrics": logged})
            assert most / 3 < len(record.to_bytes()) <= most


class TestMetrics:
    def test_nan_and_infinities_travel_as_text(self):
        given_values = {"a": float("nan"), "b": float("inf"), "c": -float("inf"), "d": 0.5, "e": 3}
        assert check_metrics(given_values) == {
            "a": "nan",
            "b": "inf",
            "c": "-inf",
            "d": 0.5,
            "e": 3,
        }

    def test_what_is_no_metric_is_refused_by_name(self):
        text = "x" * (TEXT_CHARACTERS + 1)
        for value in (True, None, 2**63, 10**5000, [1.0], text, 1j, object()):
            with pytest.raises(InvalidRequestError, match="the metric 'loss' must be"):
                check_metrics({"loss": value})

    @pytest.mark.parametrize("name", ["", "a\nb", "\x1b", "\ud800", "x" * (NAME_CHARACTERS + 1), 1])
    def test_what_is_no_name_is_refused(self, name):
        with pytest.raises(InvalidRequestError, match="the name of a metric must be"):
            check_metrics({name: 1.0})

    def test_too_many_are_refused(self):
        with pytest.raises(InvalidRequestError, match="at most 32 by name, not 33"):
            check_metrics({str(number): 1 for number in range(MOST_METRICS + 1)})
        with pytest.raises(InvalidRequestError, match="at most 32 by name, not 1"):
            check_metrics(1)


class TestHistory:
    def test_what_is_no_line_is_skipped_and_counted(self):
        line = SMALL[SyncLine].to_bytes()
        later = line.replace(b'"version":1', b'"version":2')
        read = read_history(b"\n".join([line, b"torn", later, b"", b"\xff", line]) + line[:-9])
        assert read.lines == (SMALL[SyncLine],) * 2
        assert (read.skipped, read.of_another_version) == (3, 1)

    def test_what_is_too_large_is_refused(self):
        assert read_history(b"x" * HISTORY_BYTES).skipped == 1
        with pytest.raises(InvalidRequestError, match="is larger than 1048576 bytes"):
            read_history(b"\n" * (HISTORY_BYTES + 1))

    def test_only_so_many_lines_are_read(self):
        read = read_history(b"x\n" * MOST_LINES + SMALL[SyncLine].to_bytes() * 2)
        assert (read.lines, read.skipped) == ((), MOST_LINES + 2)
        # No object of ours has as many.
        assert len(SMALL[SyncLine].to_bytes()) * MOST_LINES > HISTORY_BYTES


class TestKeys:
    @given(ranks, st.integers(0, 10**17), st.integers(1, 10**17), st.integers(0, 10**6))
    def test_keys_come_back(self, rank, epoch, first, more):
        assert parse_live_key(live_key(rank)) == rank
        key = HistoryKey(rank, epoch, first, first + more)
        assert HistoryKey.parse(key.key) == key

    @pytest.mark.parametrize(
        "key",
        [
            "",
            "live/1.json",
            "live/000001.json",
            "live/00001.json/",
            "live/\N{ARABIC-INDIC DIGIT ONE}0001.json",
            "history/00001/0001.00000002-00000001.jsonl",
            "history/00001/0001.00000000-00000001.jsonl",
            "history/00001/00001.00000001-00000001.jsonl",
            "history/00001/0001.000000001-00000001.jsonl",
            "history/00001/0001.00000001-00000001.json",
        ],
    )
    def test_other_keys_are_ignored(self, key):
        assert parse_live_key(key) is None
        assert HistoryKey.parse(key) is None
        assert newest_keys([key]) == []

    def test_an_object_that_was_replaced_is_left_out(self):
        kept = [HistoryKey(0, 1, 1, 4), HistoryKey(0, 1, 5, 6), HistoryKey(0, 2, 1, 2)]
        replaced = [HistoryKey(0, 1, 1, 2), HistoryKey(0, 1, 1, 3), HistoryKey(0, 1, 5, 5)]
        assert newest_keys(each.key for each in [*kept, *replaced, HistoryKey(1, 1, 1, 1)]) == [
            *kept, HistoryKey(1, 1, 1, 1),
        ]  # fmt: skip


class TestPace:
    @given(st.integers(1, 100_000))
    def test_requests_per_second_are_bounded(self, replicas):
        live, history = live_seconds(replicas), history_seconds(replicas)
        assert live >= LEAST_SECONDS
        assert history >= 60
        assert replicas * (1 / live + 1 / history) <= PUTS_PER_SECOND * 1.000001

    def test_a_small_run_writes_every_ten_seconds_and_every_minute(self):
        for replicas in (1, 4, 85):
            assert (live_seconds(replicas), history_seconds(replicas)) == (10, 60)
        assert live_seconds(1000) == pytest.approx(116.7, abs=0.1)

    def test_an_object_covers_ten_minutes_or_a_fiftieth_of_the_time(self):
        assert not is_sealed(599, 600)
        assert is_sealed(600, 30_000)
        assert not is_sealed(600, 30_001)
        assert is_sealed(WEEK / 50, WEEK)

    @given(
        st.lists(
            st.tuples(
                st.sampled_from([1, 2, 10, 120]),  # minutes from one of these to the next
                st.sampled_from([1, 2, 12, 60, 6000]),  # so many syncs at once
                st.sampled_from([400, 1200, LINE_BYTES]),
                st.integers(1, WEEK // 60),  # for so many minutes
            ),
            min_size=1,
            max_size=4,
        )
    )
    def test_a_week_of_a_replica_makes_at_most_500_objects(self, weeks):
        """The rules by themselves, as they are documented: put once a minute, sealed, left out."""
        objects = total = size = waiting = 0
        opened = 0.0
        pattern = [each for each in weeks for _ in range(each[3])]
        for minute in range(1, WEEK // 60 + 1):
            age = 60.0 * minute
            every, came, line, _ = pattern[minute % len(pattern)]
            came = 0 if minute % every else came
            room = min(history_allowance(age) - total, HISTORY_BYTES - waiting) // line
            taken = line * int(min(came, room))
            total, waiting = total + taken, waiting + taken
            moved = min(waiting, (HISTORY_BYTES - size) // line * line)
            if not moved:
                continue
            objects += not size
            size, waiting = size + moved, waiting - moved
            if waiting or is_sealed(age - opened, age):
                size, opened = 0, age
        assert objects <= 500
