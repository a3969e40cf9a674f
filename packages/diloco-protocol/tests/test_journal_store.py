"""A journal in a store that others can write to: bounded, and never above the backend."""

import json
from dataclasses import replace

import pytest
from memory_lab import DONE, Memory, lost, unavailable
from store_lab import Objects

from diloco_protocol import (
    FolderJournal,
    InvalidRequestError,
    LogQuery,
    ReplicaHandle,
    ReplicaNotFoundError,
    ReplicaState,
    ReplicaStatus,
    ResultLostError,
    RunJournal,
    StoreJournal,
    UnavailableError,
    retry,
)
from diloco_protocol import _journal as journals
from diloco_protocol import _kept_logs as kept_logs
from diloco_protocol._journal_records import LOG_BYTES, OPTIONS_BYTES

FAILED = ReplicaStatus(ReplicaState.FAILED, message="no data")
RUNNING = ReplicaStatus(ReplicaState.RUNNING)


@pytest.fixture
def objects():
    return Objects()


@pytest.fixture
def journal(objects):
    return objects.journal()


def handles(run_id="a", count=3):
    return [
        ReplicaHandle(rank, "b", {"id": str(rank)}, run_id=run_id, world_size=count)
        for rank in range(count)
    ]


def launched(journal, count=2, **options):
    executor = Memory({}, journal=journal)
    return executor, executor.launch_replicas(count, "m:f", run_id="mine", **options)


def timed(executor):
    """Give an executor a clock, and return the list that holds its time."""
    now = [0.0]

    def sleep(seconds):
        now[0] += seconds

    executor._backoff = replace(executor._backoff, clock=lambda: now[0], sleep=sleep)
    return now


def key_of_end(objects):
    (key,) = [key for key in objects if key.endswith(".ended.json")]
    return key


class TestRecords:
    def test_it_is_a_journal(self, journal):
        assert isinstance(journal, RunJournal)
        assert repr(journal) == "StoreJournal('mem://run/journal')"

    def test_launches_and_ends(self, journal, objects):
        journal.record_launch(handles("a"), {"gpu": "H100"})
        journal.record_launch(handles("b", 11))
        journal.record_launch(handles("a"), {"gpu": "H100"})
        journal.record_end(handles("a")[0], DONE, {"loss": 1.5})
        assert journal.runs() == ["a", "b"]
        assert journal.handles("b") == handles("b", 11)
        assert journal.end(handles("a")[0]) == (DONE, {"loss": 1.5})
        assert journal.end(handles("a")[1]) is None
        run = journal.look("a")
        assert list(run.handles) == handles("a")
        assert run.launches[0].options == {"gpu": "H100"}
        assert run.ends == {handles("a")[0]: (DONE, {"loss": 1.5})}
        assert (run.skipped, run.left_out, run.logged) == (0, 0, frozenset())
        assert len(objects) == 3

    def test_a_launch_again_is_the_latest_one(self, journal, objects):
        first, second = handles("a"), [replace(each, metadata={}) for each in handles("a")]
        for launch in (first, second, first):
            journal.record_launch(launch)
        assert journal.handles("a") == first
        assert len(objects) == 2

    def test_a_forged_record_of_a_launch_is_written_again(self, journal, objects):
        journal.record_launch(handles("a"))
        (key,) = objects
        objects[key] = b'{"version":3,"handles":[]}'
        journal.record_launch(handles("a"))
        assert journal.handles("a") == handles("a")

    def test_without_the_functions_that_write_it_is_only_read(self, journal, objects):
        journal.record_end(handles()[0], DONE, 1)
        reading = StoreJournal("mem://run", list_keys=objects.list_keys, read=objects.read)
        assert reading.end(handles()[0]) == (DONE, 1)
        for write in (
            lambda: reading.record_launch(handles()),
            lambda: reading.record_end(handles()[1], DONE, 1),
            lambda: reading.keep_log(handles()[0], "x"),
        ):
            with pytest.raises(InvalidRequestError, match="this journal can only be read"):
                write()

    @pytest.mark.parametrize("made", ["store", "folder"])
    def test_the_end_of_a_log(self, journal, tmp_path, made):
        journal = journal if made == "store" else FolderJournal(tmp_path / "journal")
        journal.record_launch(handles("a"))
        assert journal.log(handles("a")[0]) is None
        journal.keep_log(handles("a")[0], "é\ud800 first\n" + "x" * LOG_BYTES + "\n" + "last\n" * 9)
        assert journal.log(handles("a")[0]) == "last\n" * 9
        journal.keep_log(handles("a")[0], "x" * (LOG_BYTES + 5))
        assert journal.log(handles("a")[0]) == "x" * LOG_BYTES
        journal.keep_log(handles("a")[0], "é\ud800\n\0")
        assert journal.log(handles("a")[0]) == "é\\ud800\n\0"
        assert journal.look("a").logged == {handles("a")[0]}

    @pytest.mark.parametrize("verb", ["put", "create", "read", "list_keys", "delete"])
    def test_a_store_that_cannot_be_reached_is_named(self, objects, verb):
        def refuse(*_):
            raise ConnectionResetError("reset by peer") if verb == "put" else RuntimeError("403")

        setattr(objects, verb, refuse)
        journal = objects.journal()
        calls = {
            "put": lambda: journal.keep_log(handles()[0], "x"),
            "create": lambda: journal.record_end(handles()[0], DONE, 1),
            "read": lambda: journal.end(handles()[0]),
            "list_keys": journal.runs,
            "delete": lambda: [journal.record_launch(x) for x in [handles(), handles("a", 1)] * 2],
        }
        if verb == "delete":  # an older record that stays is no harm
            calls[verb]()
            return
        why = "reset by peer" if verb == "put" else "RuntimeError: 403"
        with pytest.raises(UnavailableError, match=f"mem://run/journal cannot be .*: {why}"):
            calls[verb]()

    def test_no_secret_is_written(self, journal, objects):
        status = replace(
            DONE, message="password=hunter2", url="s3://me:hunter2@b", native="token=hunter2"
        )
        journal.record_end(handles()[0], status, {"api_key": "hunter2", "loss": 1})
        assert b"hunter2" not in b"".join(objects.values())
        assert journal.end(handles()[0])[1]["loss"] == 1

    def test_what_a_reader_would_refuse_is_not_written(self, journal, objects):
        nested = []
        for _ in range(300):
            nested = [nested]
        for given, options in (
            (handles("a") + handles("a"), {}),
            (handles("a"), {"gpu": nested}),
            (handles("a"), {"gpu": float("nan")}),
        ):
            with pytest.raises(InvalidRequestError):
                journal.record_launch(given, options)
        assert objects == {}


class TestStrangers:
    def test_what_is_nested_too_deeply_is_damaged(self, journal, objects):
        """Python reads 400 levels of JSON, and those who show it, by recursion, fail there."""
        journal.record_launch(handles("a"), {"gpu": "H100"})
        journal.record_end(handles("a")[0], DONE, "H100")
        for key, data in objects.items():
            objects[key] = data.replace(b'"H100"', b"[" * 400 + b"]" * 400)
        run = journal.look("a")
        assert (run.launches, run.ends, run.skipped) == ((), {}, 1)
        with pytest.raises(InvalidRequestError, match="damaged: the JSON value around result"):
            journal.end(handles("a")[0])

    def test_what_is_damaged_or_foreign_is_skipped_and_counted(self, journal, objects):
        journal.record_launch(handles("a"))
        for handle in handles("a"):
            journal.record_end(handle, DONE, 1)
        ends = sorted(key for key in objects if key.endswith(".ended.json"))
        objects[ends[0]] = b"\xff{"
        objects[ends[1]] = json.dumps({"version": 99}).encode()
        objects["a/000009.0.launched.json"] = b"[" * 100_000
        objects["a/999999999.0.launched.json"] = b'{"version":3,"handles":[],"options":[]}'
        objects["a/\x1b[2J"] = b"x"
        objects["%zz/x"] = objects["A/x"] = b""
        run = journal.look("a")
        assert list(run.ends) == [handles("a")[2]]
        assert list(run.handles) == journal.handles("a") == handles("a")
        assert (run.skipped, run.left_out) == (5, 0)
        assert journal.runs() == ["a"]

    def test_after_the_largest_number_of_a_launch_there_is_another(self, journal, objects):
        objects["a/999999999.0.launched.json"] = b"{}"
        journal.record_launch(handles("a"))
        journal.record_launch(handles("a"))
        assert journal.handles("a") == handles("a")

    def test_a_launch_of_another_run_is_not_of_this_one(self, journal, objects):
        journal.record_launch(handles("b"))
        (key,) = objects
        objects["a/000001.0.launched.json"] = objects[key]
        assert journal.look("a").handles == ()
        assert journal.handles("a") == []  # or who cancels one by its name would end the other

    def test_keys_that_are_not_in_the_folder_are_passed_over(self, journal, objects):
        journal.record_launch(handles("b"))
        journal._list_keys = lambda folder: objects
        assert journal.handles("a") == []
        assert journal.look("a").skipped == 0

    def test_no_object_is_read_beyond_what_any_can_have(self, journal, objects, monkeypatch):
        monkeypatch.setattr("diloco_protocol._journal_records.RECORD_BYTES", 500)
        objects["a/000001.0.launched.json"] = b" " * 10_000
        assert journal.handles("a") == []
        assert max(call[2] for call in objects.calls if call[0] == "read") == 501

    def test_one_look_is_bounded(self, journal, objects, monkeypatch):
        journal.record_launch(handles("a", 9))
        for handle in handles("a", 9):
            journal.record_end(handle, DONE, "x" * 1000)
        monkeypatch.setattr(journals, "MOST_BYTES", 5000)
        run = journal.look("a")
        assert 0 < len(run.ends) < 9
        assert run.left_out == 9 - len(run.ends)
        monkeypatch.setattr(journals, "MOST_KEYS", 3)
        assert len(journal.look("a").ends) <= 3


class TestNeverAboveTheBackend:
    def test_a_forged_success_of_a_running_rank_is_no_end(self, journal, objects):
        executor, (first, second) = launched(journal)
        journal.record_end(first, DONE, "forged")
        assert executor.poll(first) is ReplicaState.RUNNING
        assert executor.describe_run([first, second]) == {first: RUNNING, second: RUNNING}
        (result, _) = executor.collect([first, second], timeout=0)
        assert (result["status"], result["result"]) == ("running", None)
        with pytest.raises(InvalidRequestError, match="2 replicas of run 'mine' have not ended"):
            executor.purge(first)
        executor.world[first] = FAILED
        assert executor.poll(first) is ReplicaState.FAILED
        assert journal.end(first) == (FAILED, None)

    def test_it_is_an_end_once_the_backend_has_forgotten_the_rank(self, journal):
        executor, (first, second) = launched(journal)
        executor.world.update({first: DONE, second: FAILED})
        before = executor.collect([first, second])
        executor.purge(first)
        executor.world.clear()
        other = Memory({}, journal=journal)
        assert other.collect([first, second]) == before
        assert other.attach("mine") == [first, second]
        assert other.describe(second) == FAILED

    def test_where_the_backend_does_not_find_the_run(self, journal):
        executor, (first, _) = launched(journal)

        def gone(_):
            raise ReplicaNotFoundError("no such run")

        executor._observe_run = gone
        with pytest.raises(ReplicaNotFoundError):
            executor.describe(first)
        journal.record_end(first, DONE, 1)
        assert executor.describe(first) == DONE

    @pytest.mark.parametrize("has_result", [True, False])
    def test_a_forged_result_is_not_the_result(self, journal, has_result):
        executor, (first, _) = launched(journal)
        executor.world[first] = DONE
        executor.poll(first)
        journal.record_end(first, DONE, "forged")
        if not has_result:
            executor._result = lambda handle: lost()
        (result,) = executor.collect([first])
        assert result["result"] == ({"rank": 0} if has_result else None)

    def test_a_result_that_the_backend_has_lost_is_not_that_of_a_stranger(self, journal):
        executor, (first, _) = launched(journal)
        executor.world[first] = DONE
        journal.record_end(first, DONE, "forged")
        executor._result = lambda handle: lost()
        (result,) = executor.collect([first])
        assert result["result"] is None
        assert "the disk is gone" in result["error"]
        del executor.world[first]
        with pytest.raises(ResultLostError):  # which the backend's word has replaced
            executor._result_of(first)

    def test_a_damaged_record_is_replaced(self, journal, objects):
        executor, (first, second) = launched(journal)
        executor.world.update({first: DONE, second: DONE})
        executor.poll(first)
        objects[key_of_end(objects)] = b"{"
        executor.purge(first)
        assert journal.end(first) == (DONE, {"rank": 0})

    def test_a_forged_launch_hides_no_rank_from_a_purge(self, journal):
        executor, (first, _) = launched(journal)
        executor.world[first] = DONE
        journal.record_launch([first])
        with pytest.raises(InvalidRequestError, match="such as rank 1"):
            executor.purge(first)

    def test_a_result_that_outgrows_its_record_without_secrets_is_lost(
        self, journal, objects, monkeypatch
    ):
        monkeypatch.setattr(journals, "RESULT_BYTES", 100)
        executor, (first, second) = launched(journal)
        executor.world.update({first: DONE, second: DONE})
        executor._result = lambda handle: {"password": [2] * 40 * handle.rank}
        before, result = executor.collect([second, first])
        assert (before["result"], before["error"]) == ({"password": [2] * 40}, None)
        executor.purge(second)
        executor.world.clear()
        executor._result = lambda handle: lost()
        after, same = executor.collect([second, first])
        assert (after["status"], after["result"], same) == ("succeeded", None, result)
        assert "without its secrets it has more than 100 bytes" in after["error"]

    def test_an_end_is_written_once(self, journal, objects):
        executor, (first, _) = launched(journal)
        executor.world[first] = DONE
        for _ in range(3):
            executor.poll(first)
        assert [call[0] for call in objects.calls].count("create") == 1

    def test_a_store_that_cannot_be_written_hides_no_state(self, objects, caplog):
        executor, (first, _) = launched(objects.journal())
        executor.world[first] = DONE
        executor._journal._create = lambda *_: unavailable()
        assert executor.poll(first) is ReplicaState.SUCCEEDED
        assert "is not in the journal yet" in caplog.text


class TestLogs:
    def test_the_log_is_kept_before_a_cancel_removes_it(self, journal):
        executor, (first, second) = launched(journal)
        stop = executor._stop

        def removing(handle):
            stop(handle)
            executor._logs = missing

        def missing(handle, query):
            raise ReplicaNotFoundError("its log is gone")

        executor._stop = removing
        executor.cancel(first)
        assert executor.poll(first) is ReplicaState.CANCELLED
        assert executor.kept_log(first) == "".join(f"line {n}\n" for n in range(5))
        assert executor.kept_log(second) is None

    def test_a_gang_is_kept_whole(self, journal):
        executor, (first, second) = launched(journal)
        executor.capabilities = replace(executor.capabilities, cancel_scope="gang")
        executor.cancel(second)
        assert None not in [executor.kept_log(each) for each in (first, second)]

    def test_a_cancel_is_not_held_up_by_what_cannot_be_read(self, journal, caplog):
        executor, (first, _) = launched(journal)
        executor.capabilities = replace(executor.capabilities, cancel_scope="gang")
        executor._attach = unavailable_run
        executor._patience = 60.0
        now = timed(executor)
        executor.cancel(first)
        assert now[0] <= 10.0
        assert "the logs of run 'mine' are not kept: no list today" in caplog.text
        assert executor.hooks[-1] == "stop"

    @pytest.mark.parametrize("verb", ["poll", "purge"])
    def test_the_log_is_kept_when_the_end_is_first_seen(self, journal, verb):
        executor, run = launched(journal)
        executor.world.update(dict.fromkeys(run, FAILED))
        getattr(executor, verb)(run[0])
        assert executor.kept_log(run[0]).endswith("line 4\n")
        assert (executor.kept_log(run[1]) is None) == (verb == "poll")

    @pytest.mark.parametrize("verb", ["poll", "purge"])
    def test_a_forged_end_does_not_keep_the_log_out(self, journal, verb):
        executor, run = launched(journal)
        for each in run:
            journal.record_end(each, DONE, "forged")
        executor.world.update(dict.fromkeys(run, FAILED))
        getattr(executor, verb)(run[0])
        assert executor.kept_log(run[0]) is not None

    def test_it_is_read_once(self, journal):
        executor, (first, _) = launched(journal)
        executor.world[first] = FAILED
        asked, logs = [], executor._logs
        executor._logs = lambda handle, query: asked.append(query) or logs(handle, query)
        for each in (executor, executor, Memory(executor.world, journal=journal)):
            each.poll(first)
        assert asked == [LogQuery(n_lines=5000)]

    def test_secrets_and_what_is_too_long_are_left_out(self, journal, objects):
        executor, (first, _) = launched(journal)
        executor.world[first] = FAILED
        lines = ["x" * 1000] * 2000 + ["password=hunter2"]
        executor._logs = lambda handle, query: iter(lines)
        executor.poll(first)
        assert b"hunter2" not in b"".join(objects.values())
        assert LOG_BYTES - 1200 < len(executor.kept_log(first)) <= LOG_BYTES

    def test_of_ranks_from_256_on_none_is_kept(self, journal, objects):
        executor, run = launched(journal, 258)
        executor.world.update(dict.fromkeys(run, FAILED))
        executor.describe_run(run)
        assert len(journal.look("mine").logged) == 256
        assert executor.kept_log(run[256]) is None

    @pytest.mark.parametrize("change", [{"version": 99}, {"log": 1}, {"more": 1}, {"handle": 1}])
    def test_a_damaged_log_is_none(self, journal, objects, caplog, change):
        executor, (first, _) = launched(journal)
        executor.cancel(first)
        (key,) = [key for key in objects if key.endswith(".log.json")]
        objects[key] = json.dumps(json.loads(objects[key]) | change).encode()
        assert executor.kept_log(first) is None
        assert key in caplog.text

    def test_a_store_that_takes_no_log_is_named(self, journal, caplog):
        executor, (first, _) = launched(journal)
        executor.world[first] = FAILED
        journal._put = lambda *_: unavailable()
        executor.poll(first)
        of = "the log of rank 0 of run 'mine'"
        assert f"{of} is not in the journal: no result today" in caplog.text

    def test_logs_are_waited_for_for_a_while_only(self, journal, monkeypatch):
        monkeypatch.setattr(kept_logs, "MAX_THREADS", 1)
        executor, run = launched(journal, 40)
        now = timed(executor)

        def slow(handle, query):
            now[0] += 6.0
            return iter(["x"])

        executor._logs = slow
        executor.world.update(dict.fromkeys(run, FAILED))
        executor.describe_run(run)
        assert len(journal.look("mine").ends) == 40
        assert len(journal.look("mine").logged) == 1

    @pytest.mark.parametrize("inside", [False, True])
    def test_a_cancel_waits_ten_seconds_for_logs_that_fail(self, journal, inside):
        """A backend may try again by itself, too."""
        executor, (first, _) = launched(journal)
        now = timed(executor)
        executor._patience = 60.0

        def failing(handle, query):
            patience = 60.0 if inside else 0.0
            return retry(unavailable, executor._backoff, timeout=patience)

        executor._logs = failing
        executor.cancel(first)
        assert executor.hooks[-1] == "stop"
        assert 5.0 < now[0] <= 10.0

    def test_collect_waits_for_no_log_past_its_timeout(self, journal):
        executor, run = launched(journal)
        now = timed(executor)
        executor._patience = 60.0
        executor.world.update(dict.fromkeys(run, FAILED))
        logs = executor._logs
        executor._logs = lambda handle, query: unavailable() if handle.rank else logs(handle, query)
        executor.collect(run, timeout=2.0)
        assert now[0] <= 2.0
        assert executor.kept_log(run[0]).endswith("line 4\n")

    def test_no_cancel_waits_until_all_logs_are_without_secrets(self, journal, monkeypatch):
        executor, run = launched(journal, 40)
        executor.capabilities = replace(executor.capabilities, cancel_scope="gang")
        now = timed(executor)

        def slow(text):
            now[0] += 4.0
            return text

        monkeypatch.setattr(kept_logs, "redact_text", slow)
        executor.cancel(run[0])
        assert now[0] == 12.0
        assert len(journal.look("mine").logged) == 3

    def test_a_journal_without_logs_is_asked_for_none(self, journal):
        class Plain:
            def __getattr__(self, name):
                if name in {"keep_log", "log"}:
                    raise AttributeError(name)
                return getattr(journal, name)

        executor, (first, _) = launched(Plain())
        executor.cancel(first)
        executor.poll(first)
        assert executor.kept_log(first) is None


class TestOptions:
    def test_what_a_launch_asked_for_without_secrets(self, journal, objects):
        launched(
            journal, gpu="H100", env={"API_TOKEN": "hunter2", "MODE": "fast"}, max_restarts=2,
            entrypoint_args={"rendezvous_uri": "mem://run", "lr": 0.1, "password": "hunter2"},
            secrets={"HF_TOKEN": "vault/hunter2"},
        )  # fmt: skip
        (launch,) = journal.look("mine").launches
        assert launch.options["arguments"] == {
            "lr": 0.1,
            "password": "<redacted>",
            "rendezvous_uri": "mem://run",
        }
        names = ("entrypoint", "gpu", "max_restarts", "rendezvous_uri")
        assert [launch.options[name] for name in names] == ["m:f", "H100", 2, "mem://run"]
        assert b"hunter2" not in b"".join(objects.values())

    def test_what_is_too_long_is_left_out(self, journal):
        launched(journal, entrypoint_args={"text": "x" * OPTIONS_BYTES}, cpu="2")
        (launch,) = journal.look("mine").launches
        assert "arguments" not in launch.options
        assert launch.options["cpu"] == "2"


def unavailable_run(run_id):
    raise UnavailableError("no list today")
