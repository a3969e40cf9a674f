"""``status URI``: what the replicas of a run tell, over a folder and over fsspec."""

import io
import json
import os
import re
from pathlib import Path

import fsspec
import pytest
from cli_lab import NOW, Terminal

from diloco_cli import _app
from diloco_cli._session import Screen, Session
from diloco_cli._told import Store, is_uri, status
from diloco_protocol import (
    InvalidRequestError,
    MissingDependencyError,
    ReplicaNotFoundError,
    SpecVersionError,
    UnavailableError,
)
from diloco_protocol.telemetry import Live, RunReader, live_key


def live(rank, **more):
    fields = {
        "run": "monday", "rank": rank, "world_size": 3, "epoch": 1, "time": NOW - 12, "step": 250,
        "sync": 2, "phase": "training", "place": "z1", "host": "node-7",
        "seconds_per_step": 0.51234, "training_share": 0.934,
        "metrics": {"loss": 2.3123456, "tokens": 4096},
    }  # fmt: skip
    return Live(**{**fields, **more}).to_bytes()


def write(folder, objects):
    for key, data in objects.items():
        path = folder / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return str(folder)


def run_of(*lives):
    return {live_key(rank): data for rank, data in enumerate(lives)} | {"manifest.json": b"{}"}


def shown(uri, *, as_json=False, out=None):
    out, err = out or io.StringIO(), io.StringIO()
    session = Session(as_json=as_json, screen=Screen(out, err, {}), clock=lambda: NOW)
    code = status(session, uri)
    return code, out.getvalue(), err.getvalue()


class TestStatus:
    def test_what_every_rank_says(self, tmp_path):
        waits = live(1, phase="waiting", waits_for=[0, 2], missing=2, metrics={"loss": "nan"})
        uri = write(tmp_path / "run", run_of(live(0), waits, live(2, ended="left", phase="idle")))
        code, out, err = shown(uri)
        assert out.splitlines() == [
            f"{uri}: run monday, 2 running, 1 succeeded, sync 2",
            "RANK  STATE      SYNC  PHASE              LOSS  STEPS/S  TRAINS  LAST SIGN             PLACE",  # noqa: E501
            "   0  running       2  training          2.312    1.952     93%  12s ago by its clock  z1 node-7",  # noqa: E501
            "   1  running       2  waiting for 0, 2    nan    1.952     93%  12s ago by its clock  z1 node-7",  # noqa: E501
            "   2  succeeded     2  left              2.312    1.952     93%  12s ago by its clock  z1 node-7",  # noqa: E501
        ]
        assert (code, err) == (0, "")

    def test_why_replicas_have_failed(self, tmp_path):
        """Below the table, as ``status RUN`` says it: each text once."""
        fails = {"ended": "failed", "error": "ValueError: \x1b[2J no data"}
        uri = write(tmp_path / "run", run_of(live(0, **fails), live(1), live(2, **fails)))
        code, out, _ = shown(uri)
        assert out.splitlines()[-1] == "ranks 0, 2: ValueError: \\x1b[2J no data"
        assert (code, out.count("no data")) == (0, 1)

    def test_json(self, tmp_path):
        uri = write(tmp_path / "run", run_of(live(0, metrics={"api_key": "hunter2"})))
        code, out, _ = shown(uri, as_json=True)
        facts = json.loads(out)
        (replica,) = facts.pop("replicas")
        assert facts == {
            "version": 1,
            "uri": uri,
            "run_id": "monday",
            "world_size": 3,
            "sync": 2,
            "silent": [1, 2],
            "skipped": 0,
            "of_another_version": 0,
            "left_out": 0,
            "journal": None,
        }
        assert (replica["phase"], replica["ended"], replica["time"]) == ("training", None, NOW - 12)
        assert replica["metrics"] == {"api_key": "<redacted>"}
        assert code == 0

    @pytest.mark.parametrize(
        ("ends", "code"),
        [
            (("left", "left", "left"), 0),
            (("left", "failed", None), 0),
            (("left", "failed", "left"), 1),
            (("left", "left"), 3),
            (("failed", "left"), 1),
            (("left", "left", "in a way of its own"), 3),
        ],
    )
    def test_exit_codes(self, tmp_path, ends, code):
        lives = [live(rank, ended=ended) for rank, ended in enumerate(ends)]
        found, out, _ = shown(write(tmp_path / "run", run_of(*lives)))
        assert found == code
        assert ("silent so far: rank 2" in out) == (len(ends) == 2)

    def test_a_narrow_terminal_and_clocks_that_disagree(self, tmp_path, monkeypatch):
        uri = write(tmp_path / "run", run_of(*(live(n, time=NOW + 7200) for n in range(3))))
        for columns, has_clocks in ((40, False), (70, True)):
            monkeypatch.setenv("COLUMNS", str(columns))
            _, out, _ = shown(uri, out=Terminal())
            out = re.sub(r"\x1b\[\d*m", "", out)
            assert max(map(len, out.splitlines()[1:])) <= columns
            assert ("2h ahead by its clock" in out) == has_clocks

    def test_hostile_objects(self, tmp_path):
        objects = run_of(live(0, host="\x1b[2J\u202e" + "x" * 999), b"torn", b"")
        objects |= {"live/x": b"", live_key(7): live(7), live_key(9): live(8)}
        objects[live_key(5)] = live(5).replace(b'"version":1', b'"version":9')
        uri = write(tmp_path / "run", objects)
        (tmp_path / "run/live/00004.json").symlink_to("/dev/zero")
        os.mkfifo(tmp_path / "run/live/00006.json")
        (tmp_path / "run/live/a").symlink_to(".")
        (tmp_path / "run/live/b").symlink_to(".")
        code, out, err = shown(uri)
        assert code == 0
        assert "\\x1b[2J" in out
        assert not {"\x1b", "\u202e"} & set(out)
        assert "silent so far: ranks 1-2" in out
        assert "objects that are not what a replica tells: 9" in err
        assert "objects that are of another version: 1" in err


class TestWhatIsThere:
    def test_several_runs_below_a_prefix(self, tmp_path):
        for name in ("b", "a"):
            write(tmp_path / name, run_of(live(0)))
        write(tmp_path / "other", {"file.txt": b""})
        code, out, err = shown(f"{tmp_path}/")
        assert (code, out) == (0, f"{tmp_path}/a\n{tmp_path}/b\n")
        assert "there are runs below" in err
        _, out, _ = shown(str(tmp_path), as_json=True)
        assert json.loads(out)["runs"] == [f"{tmp_path}/a", f"{tmp_path}/b"]

    @pytest.mark.parametrize("name", ["empty", "missing", "file"])
    def test_no_run(self, tmp_path, name):
        (tmp_path / "empty").mkdir()
        (tmp_path / "file").touch()
        with pytest.raises(ReplicaNotFoundError, match="there is no run in"):
            shown(f"{tmp_path}/{name}")

    def test_a_run_that_tells_nothing(self, tmp_path):
        uri = write(tmp_path / "run", {"manifest.json": b"{}"})
        with pytest.raises(ReplicaNotFoundError, match="have told nothing"):
            shown(uri)

    def test_a_run_of_another_version(self, tmp_path):
        later = live(0).replace(b'"version":1', b'"version":2')
        uri = write(tmp_path / "run", run_of(later))
        with pytest.raises(SpecVersionError, match="of another version"):
            shown(uri)


class TestStore:
    def test_over_fsspec_only_what_has_changed_is_read_again(self, monkeypatch):
        memory = fsspec.filesystem("memory")
        for key, data in run_of(live(0), live(1), live(2)).items():
            memory.pipe_file(f"/told/run/{key}", data)
        read = []
        cat_file = type(memory).cat_file

        def noted(self, path, **more):
            read.append(path)
            return cat_file(self, path, **more)

        monkeypatch.setattr(type(memory), "cat_file", noted)
        store = Store("memory://told/run/")
        reader = RunReader(store.list_keys, store.read)
        assert list(reader.look().live) == [0, 1, 2]
        assert len(read) == 3
        memory.pipe_file(f"/told/run/{live_key(1)}", live(1, step=251))
        assert reader.look().live[1].step == 251
        assert len(read) == 4

    @pytest.mark.parametrize(
        "uri", ["s3://user:hunter2@bucket/run", "simplecache::s3://bucket", "nonsense://a/b"]
    )
    def test_what_is_no_prefix_is_refused(self, uri):
        with pytest.raises(InvalidRequestError) as refused:
            Store(uri)
        assert "hunter2" not in str(refused.value)

    def test_what_was_empty_is_read_when_it_is_not(self, tmp_path):
        uri = write(tmp_path / "run", {**run_of(live(0)), live_key(1): b""})
        store = Store(uri)
        reader = RunReader(store.list_keys, store.read)
        told = reader.look()
        assert (list(told.live), told.skipped) == ([0], 1)
        write(tmp_path / "run", {live_key(1): live(1)})
        told = reader.look()
        assert (list(told.live), told.skipped) == ([0, 1], 0)

    def test_what_has_become_a_folder_since_it_was_listed(self, tmp_path):
        store = Store(write(tmp_path / "run", run_of(live(0))))
        (tmp_path / "run/live/00007.json").mkdir()
        assert store.read(live_key(7), 100) is None

    def test_a_missing_driver(self, monkeypatch):
        def missing(*_, **__):
            raise ImportError("Install s3fs")

        monkeypatch.setattr("fsspec.core.url_to_fs", missing)
        with pytest.raises(MissingDependencyError, match=r"pip install 'diloco-cli\[s3\]'"):
            Store("s3://bucket/run")
        with pytest.raises(MissingDependencyError, match="Install s3fs"):
            Store("other://bucket/run")

    def test_a_store_that_cannot_be_read(self, tmp_path, monkeypatch):
        store = Store(write(tmp_path / "run", run_of(live(0))))

        def refused(*_, **__):
            raise PermissionError("password=hunter2")

        monkeypatch.setattr(type(store._fs), "ls", refused)
        with pytest.raises(UnavailableError, match="cannot be read: PermissionError") as error:
            store.names("")
        assert "hunter2" not in str(error.value)


class TestCommand:
    @pytest.mark.parametrize("run", ["s3://b/r", "/tmp/run", "./run", "runs/one", ".", "..", "~/a"])
    def test_what_is_a_uri(self, run):
        assert is_uri(run)
        assert not is_uri("monday")

    def test_no_backend_is_asked(self, tmp_path, monkeypatch, capsys):
        monkeypatch.setattr("diloco_cli._session.read_choice", None)
        monkeypatch.chdir(
            write(tmp_path, {f"runs/a/{key}": b for key, b in run_of(live(0)).items()})
        )
        assert _app.run(["status", "runs/a", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["uri"] == "runs/a"
        assert _app.run(["status", "runs/a", "--backend", "eks"]) == 2
        assert "for runs by name" in capsys.readouterr().err
        assert _app.run(["status", "runs/b"]) == 3
        assert _app.run(["status", f"{Path.home()}x/none"]) == 3
