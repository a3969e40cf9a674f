"""One life of one container: whatever happens, its end is told."""

import os
import re
import subprocess
import sys
import threading
from dataclasses import replace

import pytest
from standin_lab import PATIENCE

from diloco_localcloud._server._container import Command, Container


@pytest.fixture
def command(tmp_path):
    streams = [os.open(os.devnull, os.O_RDWR) for _ in range(3)]
    yield Command([sys.executable, "-c", ""], dict(os.environ), tmp_path, streams=streams)
    for stream in streams:
        os.close(stream)


@pytest.mark.processes
def test_a_signal_that_comes_too_late_does_not_hide_the_end(command):
    """The kubelet may end a container whose shim has gone before it has heard of that end."""
    events, heard, go_on = [], threading.Event(), threading.Event()

    def told(event):
        events.append(event["event"])
        if event["event"] == "started":
            heard.set()
            go_on.wait(PATIENCE)

    container = Container(command, told)
    assert heard.wait(PATIENCE)
    container._shim.wait(PATIENCE)
    container.term()
    container.kill()
    go_on.set()
    container.join()
    assert events == ["started", "ended"]


@pytest.mark.processes
def test_a_container_that_nobody_would_hear_of_is_not_left(command, monkeypatch):
    started, pipes, made = [], [], os.pipe

    def piped():
        pipes.append(made())
        return pipes[-1]

    class Seen(subprocess.Popen):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            started.append(self)

    def refused(_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(subprocess, "Popen", Seen)
    monkeypatch.setattr(threading.Thread, "start", refused)
    monkeypatch.setattr(os, "pipe", piped)
    with pytest.raises(RuntimeError, match="new thread"):
        Container(replace(command, streams=()), lambda _: None, lambda _: None)
    (shim,) = started
    assert shim.returncode is not None
    assert shim.stdin.closed
    assert shim.stdout.closed
    for end in (end for pipe in pipes for end in pipe):
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(end)


def test_a_command_that_cannot_be_told_starts_nothing(command, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("started"))
    with pytest.raises(TypeError, match="JSON"):
        Container(Command([object()], {}, command.cwd), lambda _: None)


@pytest.mark.processes
@pytest.mark.parametrize("word", ["a\0b", "\ud800"])
def test_a_word_that_no_process_can_have_is_refused_with_the_reason(command, word):
    events = []
    for argv, env in (([*command.argv, word], {}), (command.argv, {"A": word})):
        Container(replace(command, argv=argv, env=env), events.append).join()
    assert [event["event"] for event in events] == ["refused", "refused"]
    assert all(re.search("null byte|surrogates", event["message"]) for event in events)
