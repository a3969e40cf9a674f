"""Logs, as a real kubelet gives them."""

from __future__ import annotations

import threading

import pytest
from standin_lab import PATIENCE


@pytest.fixture
def pod(clients):
    clients.create(clients.indexed("run", 1))
    clients.world.settle()
    made = clients.world.pod("run", 0, "ns")
    made.start()
    return made


def test_before_the_start(clients):
    clients.world.schedulable = False
    clients.create(clients.indexed("run", 1))
    clients.world.settle()
    pod = clients.world.pod("run", 0, "ns")
    assert clients.log(pod.name) == b""
    clients.world.schedulable = True
    pod.wait_with("ContainerCreating")
    with clients.refused(
        400,
        "BadRequest",
        'container "main" in pod "run-0-.*" is waiting to start: ContainerCreating',
    ):
        clients.log(pod.name)
    pod.image_error()
    with clients.refused(400, "BadRequest", "is waiting to start: image can't be pulled"):
        clients.log(pod.name)


def test_parts_of_a_log(clients, pod):
    pod.log("one\ntwo\n")
    clients.world.advance(10)
    pod.log("thr")
    pod.log("ee\nf\u00fcr\n")
    assert clients.log(pod.name) == "one\ntwo\nthree\nf\u00fcr\n".encode()
    assert clients.log(pod.name, tail_lines=2) == "three\nf\u00fcr\n".encode()
    assert clients.log(pod.name, tail_lines=0) == b""
    assert clients.log(pod.name, since_seconds=5) == "three\nf\u00fcr\n".encode()
    assert clients.log(pod.name, since_seconds=5, tail_lines=1) == "f\u00fcr\n".encode()
    assert clients.log(pod.name, limit_bytes=5) == b"one\nt"
    first = clients.log(pod.name, timestamps=True).splitlines()[0].decode()
    assert first == "2026-01-01T00:00:01.060000000Z one" or first.endswith("Z one")


def test_what_no_log_is_given_for(clients, pod):
    with clients.refused(400, "BadRequest", "container other is not valid for pod run-0-"):
        clients.log(pod.name, container="other")
    with clients.refused(400, "BadRequest", "does not serve previous of a log"):
        clients.log(pod.name, previous=True)
    path = f"/api/v1/namespaces/ns/pods/{pod.name}/log?sinceTime=2026-01-01T00:00:00Z"
    refused, _ = clients.raw("GET", path)
    assert refused["message"] == "the stand-in does not serve sinceTime of a log"


def test_the_log_of_an_ended_pod_stays_and_goes_with_it(clients, pod):
    pod.log("last words\n")
    pod.succeed()
    clients.world.settle()
    assert clients.log(pod.name) == b"last words\n"
    clients.delete("run", propagation_policy="Background")
    clients.world.settle()
    with clients.refused(404, "NotFound", "pods"):
        clients.log(pod.name)


@pytest.mark.processes
def test_follow_ends_with_the_container(clients, pod):
    pod.log("one\n")
    pieces: list[bytes] = []

    def read():
        answer = clients.core.read_namespaced_pod_log(
            name=pod.name, namespace="ns", follow=True, _preload_content=False
        )
        pieces.extend(answer.stream(decode_content=True))
        answer.release_conn()

    thread = threading.Thread(target=read)
    thread.start()
    while b"one\n" not in b"".join(pieces):
        thread.join(0.01)
    pod.log("two\nthree\n")
    while b"three\n" not in b"".join(pieces):
        thread.join(0.01)
    pod.succeed()
    thread.join(PATIENCE)
    assert not thread.is_alive()
    assert b"".join(pieces) == b"one\ntwo\nthree\n"


def test_a_long_line_is_several_entries(clients, pod):
    """As observed: ``tailLines`` counts entries of at most 16 KiB; 100,000 characters are seven."""
    pod.log("first\n" + "x" * 100_000 + "\nlast\n")
    whole = clients.log(pod.name)
    assert whole == b"first\n" + b"x" * 100_000 + b"\nlast\n"
    assert clients.log(pod.name, tail_lines=2) == b"x" * (100_000 - 6 * 16384) + b"\nlast\n"
    assert clients.log(pod.name, tail_lines=8) == whole.removeprefix(b"first\n")
    stamped = clients.log(pod.name, timestamps=True)
    assert [len(line.split(b" ", 1)[1]) for line in stamped.splitlines()] == [5, 100_000, 4]
    cut = clients.log(pod.name, timestamps=True, tail_lines=3)
    assert [len(line.split(b" ", 1)[1]) for line in cut.splitlines()] == [18_080, 4]


def test_a_carriage_return_before_the_newline_is_dropped(clients, pod):
    pod.log("one\r\ntwo\rthree\r")
    pod.log("\n\r\n")
    assert clients.log(pod.name) == b"one\ntwo\rthree\n\n"
