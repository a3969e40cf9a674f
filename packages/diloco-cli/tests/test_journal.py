"""The journal in a run's store: what it adds to ``status``, ``report`` and ``logs`` by URI."""

import json
import re
from dataclasses import replace

import pytest
from cli_lab import DONE, FAILED, NOW, RUNNING, World, command
from test_told import live, run_of, shown, write

from diloco_cli import _app
from diloco_cli._logs import logs
from diloco_cli._report._page import report
from diloco_protocol import FolderJournal, ReplicaHandle, ReplicaNotFoundError, StoreJournal

GONE = ReplicaNotFoundError("Kubernetes has removed its log")


def journal_in(folder):
    """The journal in the store of a folder, as an executor writes it."""

    def put(key, data):
        write(folder / "journal", {key: data})

    def create(key, data):
        return not (folder / "journal" / key).exists() and put(key, data) is None

    def list_keys(below):
        root = folder / "journal"
        return [p.relative_to(root).as_posix() for p in (root / below).rglob("*") if p.is_file()]

    def read(key, most):
        path = folder / "journal" / key
        return path.read_bytes()[:most] if path.is_file() else None

    return StoreJournal("here", list_keys=list_keys, read=read, put=put, create=create)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "run"


@pytest.fixture
def world(folder):
    """A backend that has seen two of three replicas end, and has written that into the journal."""
    lines = ["step 1", "password=hunter2", "out of \x1b[2Jmemory"]
    made = World(
        "eks", {"monday": [DONE, FAILED, RUNNING]}, logs={0: ["fine"], 1: lines},
        results={0: {"loss": 1.5}}, journal=journal_in(folder),
    )  # fmt: skip
    handles = made.handles("monday")
    made._journal.record_launch(handles, {"gpu": "H100", "env": {"API_KEY": "hunter2"}})
    made.describe_run(handles)
    return made


@pytest.fixture
def uri(folder, world):
    return write(folder, run_of(*(live(rank, time=NOW - 100) for rank in range(3))))


def run(*arguments):
    return _app.run([str(each) for each in arguments])


class TestStatus:
    def test_ends_that_no_replica_has_told(self, uri):
        code, out, err = shown(uri)
        assert (code, err) == (0, "")
        lines = [line.rstrip() for line in out.splitlines()]
        assert lines[0] == f"{uri}: run monday, 1 running, 1 succeeded, 1 failed, sync 2"
        assert lines[5:] == [
            "ended, as the journal in the store says:",
            "RANK  STATE      REASON     ATTEMPT  EXIT  STARTED     TOOK",
            "   0  succeeded  completed        1  0     1m 30s ago  1m",
            "   1  failed     error            1  1",
            "rank 1: ValueError: no data",
        ]

    def test_json(self, uri):
        _, out, _ = shown(uri, as_json=True)
        journal = json.loads(out)["journal"]
        assert "hunter2" not in out
        (launch,) = journal["launches"]
        assert (launch["run_id"], launch["backend"], launch["replicas"]) == ("monday", "eks", 3)
        assert (launch["place"], launch["options"]["gpu"]) == ({"zone": "z1"}, "H100")
        assert [(end["rank"], end["state"]) for end in journal["ends"]] == [
            (0, "succeeded"), (1, "failed"),
        ]  # fmt: skip
        assert (journal["skipped"], journal["left_out"], journal["disproved"]) == (0, 0, [])

    def test_that_the_backend_forgets_its_records_changes_nothing(self, uri, world):
        before = shown(uri)
        world.runs.clear()
        assert shown(uri) == before

    def test_a_run_that_has_told_nothing(self, folder, world):
        code, out, _ = shown(str(folder))
        assert code == 1
        assert out.startswith(f"{folder}: run monday, 1 succeeded, 1 failed, 1 unknown, sync 0\n")
        assert "silent so far: ranks 0-2" in out

    def test_an_end_of_a_rank_that_goes_on_telling_is_none(self, folder, world):
        """Somebody else has written it, or has set a clock back."""
        uri = write(folder, run_of(live(0, time=NOW + 60), live(1), live(2)))
        _, out, err = shown(uri)
        assert "2 running, 1 failed" in out
        assert err == "ended by the journal, and have told something since: 0\n"

    def test_ends_of_another_launch_are_not_of_this_one(self, folder, world):
        uri = write(folder, run_of(*(live(rank, run="tuesday") for rank in range(3))))
        _, out, _ = shown(uri)
        assert "3 running" in out
        assert "ended" not in out

    def test_hostile_objects_are_counted_and_shown_as_text(self, folder, uri):
        journal, evil = journal_in(folder), World("\x1b[2J", {"x": [DONE]}).handles("x")[0]
        journal.record_launch([replace(evil, rank=5, world_size=6)])
        journal.record_launch([replace(evil, rank=2**31 - 1, world_size=2**31 - 1)])
        journal.record_end(
            replace(evil, rank=5, world_size=6), replace(FAILED, message="\x1b[1m"), 0
        )
        write(folder / "journal", {"x/\x1b.ended.json": b"{", "x/9.9.launched.json": b"", "y": b""})
        _, out, err = shown(uri)
        assert "\x1b" not in out + err
        assert "rank 5: \\x1b[1m" in out
        assert err == "objects of the journal that are no records, or too many: 2\n"

    def test_of_many_runs_those_are_read_that_the_ranks_name(self, folder, world, uri):
        for number in range(20):
            other = replace(world.handles("monday")[0], run_id=f"x-{number:02}")
            journal_in(folder).record_launch([other])
        journal = json.loads(shown(uri, as_json=True)[1])["journal"]
        assert (len(journal["launches"]), journal["left_out"]) == (16, 5)
        assert [end["rank"] for end in journal["ends"]] == [0, 1]

    def test_a_journal_alone_is_a_run(self, folder, world, capsys):
        assert run("status", folder.parent / ".") == 0
        assert capsys.readouterr().out == f"{folder}\n"


class TestReport:
    def facts(self, uri, *worlds, run_id=None):
        made = command(*worlds, as_json=True)
        store = uri if run_id else None
        options = {"file": None, "force": False, "prices": None}
        report(made.session, run_id or uri, store=store, **options)
        return json.loads(made.out())

    def test_of_a_store(self, uri):
        facts = self.facts(uri, World("eks", {}))
        assert facts["backend"]["name"] == "eks"
        by_rank = {each["rank"]: each for each in facts["backend"]["replicas"]}
        assert [each["state"] for each in by_rank.values()] == ["succeeded", "failed"]
        assert by_rank[1]["last_lines"] == [
            "step 1",
            "password=<redacted>",
            "out of \\x1b[2Jmemory",
        ]
        assert "the journal of the store" in facts["missing"][-1]

    def test_of_a_run_that_the_backend_has_forgotten(self, uri, world):
        world = World("eks", dict(world.runs), logs=dict(world.logs))  # without a journal
        before = self.facts(uri, world, run_id="monday")
        world.runs["monday"] = [None, None, RUNNING]
        world.logs[1] = GONE
        partly = self.facts(uri, world, run_id="monday")
        del world.runs["monday"]
        after = self.facts(uri, world)
        for facts in (partly, after):
            ends = {each["rank"]: each for each in facts["backend"]["replicas"]}
            for each in before["backend"]["replicas"][:2]:
                assert {**ends[each["rank"]], "last_lines": each["last_lines"]} == each

    def test_what_the_backend_says_comes_first(self, uri, world, folder):
        journal_in(folder).record_end(world.handles("monday")[2], DONE, "forged")
        facts = self.facts(uri, world, run_id="monday")
        assert facts["backend"]["replicas"][2]["state"] == "running"

    def test_nothing_but_a_journal(self, folder, world):
        facts = self.facts(str(folder), World("eks", {}))
        assert (facts["run_id"], facts["world_size"]) == ("monday", 3)

    def test_of_a_run_of_which_nobody_knows(self, folder):
        write(folder, run_of(live(0)))
        with pytest.raises(ReplicaNotFoundError):
            self.facts(str(folder), World("eks", {}), run_id="monday")


class TestLogs:
    def test_of_a_store(self, uri, capsys):
        assert run("logs", uri) == 3
        out, err = capsys.readouterr()
        assert out == "0 | fine\n1 | step 1\n1 | password=<redacted>\n1 | out of \\x1b[2Jmemory\n"
        assert err == (
            "these are the last lines, as the journal in the store keeps them\n"
            "the journal in the store keeps no log of these: 2\n"
        )

    def test_chosen_lines(self, uri, capsys):
        assert run("logs", uri, "--rank", "1", "--grep", "^st", "--json") == 0
        assert json.loads(capsys.readouterr().out) == {"rank": 1, "line": "step 1"}

    def test_without_a_journal(self, folder, capsys):
        write(folder, run_of(live(0)))
        assert run("logs", folder) == 3
        out, err = capsys.readouterr()
        assert (out, err) == ("", "the journal in the store keeps no log of these: 0\n")

    def test_a_damaged_log_is_none(self, uri, folder, capsys):
        for path in (folder / "journal").rglob("*.log.json"):
            path.write_bytes(b"{")
        assert run("logs", uri) == 3
        assert capsys.readouterr().err.endswith("keeps no log of these: 0-2\n")

    @pytest.mark.parametrize(
        ("given", "says"),
        [
            (["-f"], "-f and --since are for runs by name"),
            (["--since", "1m"], "-f and --since are for runs by name"),
            (["--grep", "("], "--grep is not a regular expression"),
            (["--rank", "7"], "the run has the ranks 0-2"),
            (["--backend", "eks"], "a URI asks no backend"),
        ],
    )
    def test_what_a_store_does_not_have_is_refused(self, uri, capsys, given, says):
        assert run("logs", uri, *given) == 2
        assert says in capsys.readouterr().err

    def test_of_a_run_whose_log_is_gone(self, tmp_path):
        world = World("eks", {"monday": [DONE, DONE]}, logs={0: ["one", "two"], 1: GONE})
        world._journal = FolderJournal(tmp_path / "journal")
        world.describe_run(world.handles("monday"))
        world.logs[0] = GONE
        made = command(world)
        assert logs(made.session, "monday", grep="w") == 3
        assert made.out() == "0 | two\n"
        assert made.err() == (
            f"rank 0: {GONE}. The lines are the last ones, from the journal\nrank 1: {GONE}\n"
        )

    def test_what_has_been_printed_is_not_printed_again(self, tmp_path):
        world = World("eks", {"monday": [DONE]}, logs={0: ["one"]})
        world._journal = FolderJournal(tmp_path / "journal")
        world.describe_run(world.handles("monday"))

        def gone_later(handle, query):
            yield "one"
            raise GONE

        world._logs = gone_later
        made = command(world)
        assert logs(made.session, "monday") == 3
        assert (made.out(), made.err()) == ("0 | one\n", f"rank 0: {GONE}\n")


def test_a_journal_of_many_ranks_is_listed_once_and_read_once(folder, monkeypatch):
    """A refresh costs a listing for the journal, one per run in it, and a read per record."""
    from diloco_cli import _told

    handles = [ReplicaHandle(n, "eks", run_id="monday", world_size=50) for n in range(50)]
    journal = journal_in(folder)
    journal.record_launch(handles)
    for handle in handles:
        journal.record_end(handle, DONE, None)
    asked = []
    for name in ("list_keys", "read"):
        real = getattr(_told.Store, name)
        monkeypatch.setattr(
            _told.Store, name,
            lambda self, key, *more, name=name, real=real: asked.append((name, key)) or real(self, key, *more),  # noqa: E501
        )  # fmt: skip
    shown(str(folder))
    assert [key for name, key in asked if name == "list_keys"] == [
        "live/", "journal/", "journal/monday/",
    ]  # fmt: skip
    reads = [key for name, key in asked if name == "read"]
    assert len(reads) == len(set(reads)) == 51
    assert all(re.match(r"journal/monday/", key) for key in reads)
