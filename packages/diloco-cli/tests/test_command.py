"""The console script on real local runs, without a terminal."""

import json
import os
import signal
import subprocess
import sys

import pytest
from cli_lab import PATIENCE

from diloco_local import LocalProcessExecutor
from diloco_protocol import FolderJournal

pytestmark = pytest.mark.processes


def test_a_run_that_fails(laptop):
    laptop.launch("steps", {"count": 2, "fails": 1}, "fails", n=2, wait=True)
    listed = laptop.diloco("ls")
    assert listed.returncode == 0
    assert listed.stdout.splitlines()[1].split()[:5] == ["fails", "1", "succeeded,", "1", "failed"]
    shown = laptop.diloco("status", "fails", "--json")
    assert shown.returncode == 1
    replicas = json.loads(shown.stdout)["replicas"]
    assert [each["state"] for each in replicas] == ["succeeded", "failed"]
    assert replicas[1]["message"] == "ValueError: no data"
    waited = laptop.diloco("wait", "fails")
    assert waited.returncode == 1
    assert waited.stderr == "fails: 1 succeeded, 1 failed\n"
    assert waited.stdout.splitlines()[-2:] == [
        "rank 0: result {'steps': 2}",
        "rank 1: ValueError: no data",
    ]
    logs = laptop.diloco("logs", "fails", "--grep", "^step")
    assert logs.returncode == 0
    assert logs.stdout.splitlines() == [
        "0 | step 0 of rank 0",
        "0 | step 1 of rank 0",
        "1 | step 0 of rank 1",
        "1 | step 1 of rank 1",
    ]
    assert laptop.diloco("logs", "fails", "--since", "2999-01-01").stdout == ""


def test_a_run_is_found_in_all_backends(laptop):
    """The others of this environment are asked too: some have it not, others cannot be reached."""
    laptop.launch("steps", {"count": 1}, "found", wait=True)
    shown = laptop.diloco("status", "found", backend=None)
    assert shown.returncode == 0
    assert shown.stdout.startswith("found: 1 succeeded, on local_process (")
    unknown = laptop.diloco("status", "no-such-run", backend=None)
    assert unknown.returncode in {3, 4}
    assert unknown.stdout == ""
    assert "there is no run no-such-run on " in unknown.stderr


def test_cancel_and_purge(laptop):
    laptop.launch("waits", {"folder": str(laptop.folder)}, "ends", n=2)
    refused = laptop.diloco("cancel", "ends")
    assert refused.returncode == 2
    assert "this ends 2 replicas of run ends, on local_process (" in refused.stderr
    assert "Add --yes" in refused.stderr
    assert laptop.diloco("status", "ends").returncode == 0
    assert laptop.diloco("purge", "ends", "--yes").returncode == 2, "it has not ended"
    cancelled = laptop.diloco("cancel", "ends", "--yes")
    assert cancelled.returncode == 0
    assert "  diloco wait ends --backend local_process" in cancelled.stdout
    waited = laptop.diloco("wait", "ends")
    assert waited.returncode == 1
    assert waited.stdout.startswith("ends: 2 cancelled, on ")
    assert laptop.diloco("purge", "ends", "--yes").returncode == 0
    gone = laptop.diloco("status", "ends")
    assert (gone.returncode, gone.stdout) == (3, "")
    assert "there is no run 'ends'" in gone.stderr


def test_a_journal_knows_the_end_after_the_backend_has_forgotten_it(laptop):
    folder = laptop.folder / "journal"
    laptop.executor = LocalProcessExecutor(
        pythonpath=[laptop.folder], journal=FolderJournal(folder)
    )
    laptop.launch("steps", {"count": 1, "fails": 0}, "kept", wait=True)
    assert laptop.diloco("purge", "kept", "--yes").returncode == 0
    assert laptop.diloco("status", "kept").returncode == 3
    kept = laptop.diloco("status", "kept", "--option", f"journal={folder}")
    assert kept.returncode == 1
    assert kept.stdout.splitlines()[-1] == "rank 0: ValueError: no data"


def test_what_replicas_print_and_report_is_escaped_bounded_and_without_secrets(laptop):
    laptop.launch("hostile", {"secret": "hunter2"}, "hostile", wait=True)
    for verb in ("status", "wait", "logs"):
        for more in ([], ["--json"]):
            done = laptop.diloco(verb, "hostile", *more)
            printed = done.stdout + done.stderr
            assert not set(printed) & {"\x1b", "\x07"}
            assert "hunter2" not in printed
            assert len(printed) < 60_000
    assert "\\x1b[2Jcleared\ttoken=<redacted>" in laptop.diloco("logs", "hostile").stdout


def test_options_reach_the_executor(laptop, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    laptop.launch("steps", {"count": 1}, "here", wait=True)
    assert laptop.diloco("ls", "--option", f"root={elsewhere}").stdout == ""
    kept = f"local_process.root={elsewhere}"
    assert laptop.diloco("ls", DILOCO_OPTIONS=kept).stdout == ""
    refused = laptop.diloco("ls", "--option", "rot=x")
    assert refused.returncode == 2
    assert "local_process has no option 'rot'; it has root, " in refused.stderr


def test_a_follower_sees_lines_as_they_come_and_ends_with_the_run(laptop):
    laptop.launch("waits", {"folder": str(laptop.folder)}, "follow", n=2)
    with laptop.started("logs", "follow", "-f") as follower:
        first = {follower.stdout.readline() for _ in range(2)}
        assert first == {"0 | waiting\n", "1 | waiting\n"}
        (laptop.folder / "go").touch()
        assert sorted(follower.stdout) == ["0 | went on\n", "1 | went on\n"]
        assert follower.wait(PATIENCE) == 0


@pytest.mark.parametrize("verb", ["wait", "logs"])
def test_ctrl_c_leaves_the_run_alone(laptop, verb):
    handles = laptop.launch("waits", {"folder": str(laptop.folder)}, "left")
    with laptop.started(verb, "left", *(["-f"] if verb == "logs" else [])) as looker:
        stream = looker.stderr if verb == "wait" else looker.stdout
        while "running" not in (line := stream.readline()) and "waiting" not in line:
            assert line, "it ended too early"
        looker.send_signal(signal.SIGINT)
        _, said = looker.communicate(timeout=PATIENCE)
    assert looker.returncode == 130
    options = "-f --since 1m " if verb == "logs" else ""
    again = f"  diloco {verb} left {options}--backend local_process\n"
    assert said.endswith(f"run left is left as it is. Come back with:\n{again}")
    assert laptop.executor.poll(handles[0]) == "running"
    (laptop.folder / "go").touch()
    assert laptop.diloco("wait", "left").returncode == 0


def test_a_reader_that_goes_away(laptop):
    laptop.launch("steps", {"count": 30_000}, "long", wait=True)
    with laptop.started("logs", "long") as reader:
        assert reader.stdout.readline() == "0 | step 0 of rank 0\n"
        reader.stdout.close()
        assert reader.stderr.read() == ""
        assert reader.wait(PATIENCE) == 141


@pytest.mark.parametrize("words", [["status", "no-such-run"], ["ls", "--no-such-option"]])
def test_a_reader_of_errors_that_goes_away(laptop, words):
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            laptop.words(*words), cwd=laptop.folder, stderr=writer, timeout=PATIENCE, check=False
        )
    finally:
        os.close(writer)
    assert done.returncode == 141


def test_streams_that_are_closed(laptop):
    def without(streams, *words):
        shell = ["sh", "-c", f'exec "$@" {streams}', "sh", *laptop.words(*words)]
        done = subprocess.run(
            shell, capture_output=True, text=True, timeout=PATIENCE, check=False, cwd=laptop.folder
        )
        return done.returncode, done.stdout, done.stderr

    laptop.launch("steps", {"count": 1}, "closed", wait=True)
    assert without(">&-", "status", "closed") == (0, "", "")
    assert without("2>&-", "status", "no-such-run") == (3, "", "")
    code, _, said = without("<&-", "purge", "closed")
    assert (code, said.endswith("Add --yes\n")) == (2, True)


def test_characters_that_the_encoding_of_the_output_lacks_are_shown_as_text(laptop):
    laptop.launch("says", {"text": "gr\u00fc\u00df Gott"}, "says", wait=True)
    done = laptop.diloco("logs", "says", PYTHONIOENCODING="ascii:strict")
    assert (done.returncode, done.stdout) == (0, "0 | gr\\xfc\\xdf Gott\n")


def test_without_any_backend(tmp_path):
    """An environment that has the command and the protocol alone."""
    import click
    import rich

    import diloco_cli
    import diloco_protocol

    bare = tmp_path / "bare"
    bare.mkdir()
    for module in (click, rich, diloco_cli, diloco_protocol):
        folder = module.__path__[0]
        (bare / module.__name__).symlink_to(folder)
    program = f"import sys; sys.path.insert(0, {str(bare)!r}); from diloco_cli import main; main()"
    done = {
        verb: subprocess.run(
            [sys.executable, "-I", "-S", "-c", program, verb, *arguments],
            capture_output=True,
            text=True,
            check=False,
        )
        for verb, arguments in (("--help", []), ("ls", []), ("export", ["a", "b"]), ("plan", []))
    }
    assert done["--help"].returncode == 0
    assert done["ls"].returncode == 2
    assert "no backend is installed here: install the one" in done["ls"].stderr
    for verb in ("export", "plan"):
        assert done[verb].returncode == 2
        assert f"`{verb}` needs diloco-core" in done[verb].stderr
