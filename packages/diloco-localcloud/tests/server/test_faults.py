"""Faults on demand, and a count of the calls, at the level of HTTP."""

from __future__ import annotations

import pytest
import urllib3.exceptions

from diloco_localcloud._server._faults import Call, Calls, Faults, before
from diloco_localcloud._server._http import CutError


def test_throttling(clients):
    clients.stand_in.faults.add("throttle", verb="get", resource="jobs", retry_after=7)
    clients.create(clients.indexed("run", 1))
    with clients.refused(429, "TooManyRequests", "try again later") as caught:
        clients.job("run")
    assert caught.value.headers["Retry-After"] == "7"
    clients.job("run")


@pytest.mark.parametrize(
    ("kind", "status", "reason"),
    [
        ("server_error", 500, "InternalError"),
        ("unavailable", 503, "ServiceUnavailable"),
        ("unauthorized", 401, "Unauthorized"),
        ("forbidden", 403, "Forbidden"),
        ("expired", 410, "Expired"),
    ],
)
def test_failures(clients, kind, status, reason):
    clients.create(clients.indexed("run", 1))
    clients.stand_in.faults.add(kind, times=2)
    for _ in range(2):
        with clients.refused(status, reason, ""):
            clients.job("run")
    clients.job("run")


@pytest.mark.parametrize(("kind", "exists"), [("cut", False), ("ambiguous", True)])
def test_a_create_whose_answer_is_lost(clients, kind, exists):
    clients.stand_in.faults.add(kind, verb="create", resource="jobs")
    with pytest.raises(urllib3.exceptions.HTTPError):
        clients.create(clients.indexed("run", 1))
    names = [job.metadata.name for job in clients.batch.list_namespaced_job(namespace="ns").items]
    assert names == (["run"] if exists else [])
    assert [call.status for call in clients.stand_in.calls if call.verb == "create"] == [0]


def test_a_fault_after_some_calls(clients):
    clients.stand_in.faults.add("forbidden", verb="create", resource="jobs", times=None, after=2)
    for number in range(2):
        clients.create(clients.indexed(f"run-{number}", 1))
    for number in range(2, 4):
        with clients.refused(403, "Forbidden", ""):
            clients.create(clients.indexed(f"run-{number}", 1))


def test_faults_until_cleared(clients):
    clients.stand_in.faults.add("unavailable", resource="jobs", times=None)
    for _ in range(3):
        with clients.refused(503, "ServiceUnavailable", ""):
            clients.job("run")
    assert clients.pods() == []
    clients.stand_in.faults.clear()
    with clients.refused(404, "NotFound", "run"):
        clients.job("run")


def test_an_unknown_fault(stand_in):
    with pytest.raises(ValueError, match="there is no fault 'explode'; there are throttle"):
        stand_in.faults.add("explode")


def test_the_latest_calls_are_kept():
    calls = Calls()
    for number in range(100_001):
        calls.note(Call("get", "jobs", str(number), 200))
    assert (len(calls), next(iter(calls)).name) == (100_000, "1")


def test_calls_are_counted(clients):
    clients.create(clients.indexed("run", 1))
    clients.job("run")
    clients.job("run")
    clients.pods()
    calls = clients.stand_in.calls
    assert (
        calls.count(),
        calls.count("get"),
        calls.count("get", "jobs"),
        calls.count("list", "pods"),
    ) == (4, 2, 2, 1)
    assert [(call.verb, call.resource, call.name, call.status) for call in calls][:2] == [
        ("create", "jobs", "", 201),
        ("get", "jobs", "run", 200),
    ]
    assert calls.requests() == list(calls)
    calls.clear()
    assert len(calls) == 0


def test_nothing_listens_any_more(clients):
    clients.stand_in.stop()
    with pytest.raises(urllib3.exceptions.HTTPError):
        clients.job("run")


class SlowDownError(Exception):
    """What some other cloud says."""


def met(faults):
    fault = faults.take("create", "jobs")
    before(fault, {"throttle": lambda fault: SlowDownError(f"in {fault.seconds} s")})
    return fault


def test_the_words_of_a_refusal_are_handed_in():
    faults = Faults()
    faults.add("throttle", retry_after=7)
    with pytest.raises(SlowDownError, match="in 7 s"):
        met(faults)
    faults.add("cut")
    with pytest.raises(CutError):
        met(faults)
    assert met(faults) is None


@pytest.mark.parametrize("kind", ["ambiguous", "forbidden"])
def test_what_comes_later_is_left_to_the_caller(kind):
    faults = Faults()
    faults.add(kind)
    assert met(faults).kind == kind


def test_an_answer_that_comes_late(clients, monkeypatch):
    clients.create(clients.indexed("run", 1))
    slept = []
    monkeypatch.setattr("diloco_localcloud._server._faults.time.sleep", slept.append)
    clients.stand_in.faults.add("delay", verb="get", resource="jobs", seconds=2.5)
    for _ in range(2):
        assert clients.job("run")["metadata"]["name"] == "run"
    assert slept == [2.5]
