"""The command line: what is taken, and what is not."""

import logging
import subprocess
import sys

import pytest
from click.testing import CliRunner

from diloco_cli import _app, _logs, _runs, _watch

VERBS = [
    "ls", "status", "logs", "wait", "watch", "cancel", "purge", "report", "check", "export", "plan",
]  # fmt: skip


@pytest.fixture
def calls(monkeypatch):
    """What verbs are called with, instead of their work."""
    seen = []
    for module, verb in ((_runs, "ls"), (_runs, "status"), (_logs, "logs"), (_runs, "end")):
        monkeypatch.setattr(
            module, verb, lambda session, *given, **named: seen.append([*given, named]) or 0
        )
    return seen


def invoke(*arguments):
    return CliRunner().invoke(_app.cli, arguments, standalone_mode=False)


def test_the_help_names_every_verb():
    words = [line.split()[:1] for line in invoke("--help").output.splitlines()]
    assert [word for (word,) in filter(None, words) if word in VERBS] == VERBS


@pytest.mark.parametrize(
    ("arguments", "call"),
    [
        (["ls"], [{"limit": 20}]),
        (["ps", "--limit", "3"], [{"limit": 3}]),
        (
            ["logs", "a"],
            [{"target": "a", "follow": False, "ranks": (), "since": None, "grep": None}],
        ),
        (
            ["logs", "-f", "a", "--rank", "1", "--rank", "2", "--since", "1h", "--grep", "x"],
            [{"target": "a", "follow": True, "ranks": ("1", "2"), "since": "1h", "grep": "x"}],
        ),
        (["cancel", "a"], ["cancel", "a", {"yes": False}]),
        (["purge", "a", "--yes"], ["purge", "a", {"yes": True}]),
    ],
)
def test_what_a_verb_is_called_with(calls, arguments, call):
    assert invoke(*arguments, "--backend", "local_process").return_value == 0
    assert calls == [call]


def test_what_watch_is_called_with(monkeypatch):
    seen = []

    def noted(session, target, every):
        seen.append((target, every, session.choice.backend, session.choice.given, session.as_json))
        return 0

    monkeypatch.setattr(_watch, "watch", noted)
    assert invoke("watch", "a").return_value == 0
    options = ["--option", "eks.image=x", "--backend", "eks", "--every", "9", "--json"]
    assert invoke("watch", "./b", *options).return_value == 0
    assert seen == [("a", 5, None, (), False), ("./b", 9, "eks", ("eks.image=x",), True)]


@pytest.mark.parametrize(
    "arguments",
    [
        ["nope"],
        ["status"],
        ["status", "a", "b"],
        ["ls", "--limit", "0"],
        ["logs", "a", "--tail"],
        [],
    ],
)
def test_bad_use(arguments, capsys):
    assert _app.run(arguments) == 2
    assert capsys.readouterr().out == ""


def test_a_fault_is_shown_with_its_place_and_without_secrets(monkeypatch, capsys):
    def fault(session, target):
        raise RuntimeError("token=hunter2 \x1b[2J")

    monkeypatch.setattr(_runs, "status", fault)
    assert _app.run(["status", "a", "--backend", "local_process"]) == 70
    shown = capsys.readouterr().err
    assert "in fault" in shown
    assert "RuntimeError: token=<redacted>" in shown
    assert "\x1b" not in shown


LIGHT = """
import sys
sys.argv = ["diloco", "--help"]
from diloco_cli import main
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
heavy = {"rich", "fsspec", "diloco_protocol", "torch", "importlib.metadata", "json", "logging"}
heavy &= set(sys.modules)
assert not heavy, heavy
"""
ALONE = """
import sys
import diloco_cli._installed, diloco_cli._runs, diloco_cli._logs
import diloco_cli._told, diloco_cli._watch
import diloco_cli._report._page
ours = {name.partition(".")[0] for name in sys.modules if name.startswith("diloco")}
assert ours == {"diloco_cli", "diloco_protocol"}, ours
assert not {"torch", "boto3", "kubernetes", "modal", "rich", "fsspec"} & set(sys.modules)
"""


@pytest.mark.processes
@pytest.mark.parametrize("program", [LIGHT, ALONE])
def test_nothing_is_imported_before_it_is_needed(program):
    subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.DEVNULL)


def test_what_libraries_log_is_text_without_secrets_and_tracebacks(monkeypatch, capsys):
    def ls(session, limit):
        try:
            raise ValueError("of a library")
        except ValueError:
            text = "\x1b[2Jno answer\npassword=hunter2 " + "x" * 100_000
            logging.getLogger("library").exception(text)
            logging.getLogger("asyncio").exception("Task exception was never retrieved")
        return 0

    root, of_asyncio = logging.getLogger(), logging.getLogger("asyncio")
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(of_asyncio, "level", of_asyncio.level)
    monkeypatch.setattr(_runs, "ls", ls)
    assert _app.run(["ls"]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("\\x1b[2Jno answer\\npassword=<redacted> xxx")
    assert len(line) < 2000
