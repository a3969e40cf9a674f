"""Logs: of the right attempt, by tail, time and pattern, followed, and never what is not a log."""

import gc
import io
import weakref
from dataclasses import replace

import pytest
import urllib3

from diloco_eks._client._cluster import Cluster
from diloco_eks._client._errors import NoLogError
from diloco_eks._state._facts import log_is_gone
from diloco_eks._state._reading import read_pod
from diloco_protocol import (
    Backoff,
    FolderJournal,
    ForbiddenError,
    InvalidRequestError,
    ReplicaNotFoundError,
    UnavailableError,
)


def test_the_tail(bench):
    run = bench.launch(2)
    run.pod(0).log("".join(f"line {number} é \r\n" for number in range(600)))
    run.pod(1).log("other\n")
    lines = run.executor.stream_logs(run.handles[0], n_lines=3).split("\n")
    # containerd drops a carriage return before the newline, and other runtimes keep it.
    assert [line.removesuffix("\r") for line in lines] == [
        "line 597 é ", "line 598 é ", "line 599 é ",
    ]  # fmt: skip
    assert len(run.executor.stream_logs(run.handles[0]).split("\n")) == 200
    assert run.executor.stream_logs(run.handles[1]) == "other"


def test_nothing_is_nothing(bench):
    bench.world.schedulable = False
    run = bench.launch(1, start=False)
    assert run.executor.stream_logs(run.handles[0]) == ""
    bench.world.schedulable = True
    run = bench.launch(1, start=False, run_id="run-2")
    run.pod(0).image_error()
    assert run.executor.stream_logs(run.handles[0]) == ""
    assert list(run.executor.log_iter(run.handles[0])) == []
    run.executor._cluster.patch_job("default", "run-2", {"spec": {"suspend": True}})
    bench.world.settle(within=60)
    assert run.executor.stream_logs(run.handles[0]) == ""


@pytest.mark.parametrize("number", [2**31, 2**62, 2**63 - 1, 10**20])
def test_more_lines_than_any_log_has(bench, number):
    run = bench.launch(1)
    run.pod(0).log("one\ntwo\n")
    assert run.executor.stream_logs(run.handles[0], n_lines=number) == "one\ntwo"


@pytest.mark.sampled
@pytest.mark.parametrize("since", [0, -5, -1e18, -1e300, 1e300])
@pytest.mark.parametrize("follow", [False, True])
def test_times_before_all_logs_and_after(bench, report, since, follow):
    run = bench.launch(1)
    run.pod(0).log("one\ntwo\n")
    run.pod(0).succeed(report()[0])
    lines = run.executor.log_iter(run.handles[0], since=since, follow=follow)
    assert list(lines) == ([] if since > 0 else ["one", "two"])


def test_a_log_that_is_refused_is_not_an_empty_one(bench):
    """A pod of the run, as its owners tell, that has no container of ours."""
    run = bench.launch(1, start=False)
    run.pod(0).start()
    pod = run.pod(0).json
    metadata = {
        key: pod["metadata"][key] for key in ("labels", "annotations", "ownerReferences")
    } | {"name": "run-1-0-zzzzz"}
    container = {"name": "another", "image": "another/image:1"}
    body = {"metadata": metadata, "spec": {"restartPolicy": "Never", "containers": [container]}}
    bench.world.advance(5)
    bench.create("/api/v1/namespaces/default/pods", body)
    with pytest.raises(InvalidRequestError, match="container replica is not valid for pod"):
        list(run.executor.log_iter(run.handles[0]))


def test_times_and_patterns(bench):
    run = bench.launch(1)
    began = bench.world.now()
    for number in range(5):
        run.pod(0).log(f"step {number}\n")
        bench.world.advance(10)
    lines = run.executor.log_iter
    assert list(lines(run.handles[0], since=began + 15)) == ["step 2", "step 3", "step 4"]
    assert list(lines(run.handles[0], since=began + 5, until=began + 25)) == ["step 1", "step 2"]
    assert list(lines(run.handles[0], regex=r"[13]$")) == ["step 1", "step 3"]
    with pytest.raises(InvalidRequestError, match="no log stream 'stderr'"):
        lines(run.handles[0], streams="stderr")


def test_following(bench, report):
    run = bench.launch(1, executor=bench.executor(request_timeout=0.5))
    pod = run.pod(0)
    pod.log("one\n")
    lines = run.executor.log_iter(run.handles[0], follow=True)
    assert next(lines) == "one"
    pod.log("two\nth")
    assert next(lines) == "two"
    pod.log("ree\n")
    assert next(lines) == "three"
    pod.log("four")
    pod.succeed(report()[0])
    bench.world.settle()
    assert list(lines) == ["four"]


@pytest.mark.parametrize("how", ["closed", "dropped"])
def test_who_stops_reading_ends_the_connection(bench, how):
    run = bench.launch(1)
    run.pod(0).log("one\n")
    gc.disable()
    try:
        lines = run.executor.log_iter(run.handles[0], follow=True)
        assert next(lines) == "one"
        reading = weakref.ref(lines._lines)
        if how == "closed":
            lines.close()
            assert reading().gi_frame is None
            assert list(lines) == []
        else:
            del lines
            assert reading() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("set_back", [False, True])
def test_following_begins_before_the_pod_and_goes_on_with_the_next_attempt(
    bench, report, monkeypatch, set_back
):
    list_pods = Cluster.list_pods
    if set_back:  # the cluster's clock is, before it makes the second pod
        monkeypatch.setattr(
            Cluster,
            "list_pods",
            lambda *args: (
                [replace(pod, created=-pod.created) for pod in list_pods(*args)[0]],
                "",
            ),
        )
    bench.world.auto_start = 1.0
    # A container that is silent for so long has its log asked for again.
    executor = bench.executor(request_timeout=0.5)
    handles = executor.launch_replicas(1, "trainer:train", run_id="run-1", max_restarts=1)
    waits = []

    def act():
        """What happens in the cluster whenever the reader waits."""
        waits.append(bench.world.now())
        bench.world.settle(within=12)
        pods = bench.world.pods("run-1")
        if len(pods) == 1 and pods[0].alive:
            pods[0].log("first life\n")
            pods[0].fail(1)
        elif len(pods) == 2 and pods[1].alive:
            pods[1].log("second life\n")
            pods[1].succeed(report()[0])
        bench.world.settle(within=12)

    bench.world.advance, advance = (lambda seconds: (advance(seconds), act())), bench.world.advance
    executor._backoff = type(executor._backoff)(
        first=0.5, clock=bench.world.now, sleep=bench.world.advance
    )
    assert list(executor.log_iter(handles[0], follow=True)) == ["first life", "second life"]
    assert 2 <= len(waits) < 20


def test_the_attempt_that_is_asked_for(bench):
    run = bench.launch(1, max_restarts=3)
    for life in (1, 2):
        run.pod(0).log(f"life {life}\n")
        run.pod(0).fail(1)
        bench.world.settle(within=30)
        run.pod(0).start()
    run.pod(0).log("life 3\n")
    logs = run.executor.stream_logs
    assert logs(run.handles[0]) == "life 3"
    assert [logs(run.handles[0], attempt=number) for number in (1, 2, 3)] == [
        "life 1",
        "life 2",
        "life 3",
    ]
    assert list(run.executor.log_iter(run.handles[0], attempt=1, follow=True)) == ["life 1"]
    with pytest.raises(
        ReplicaNotFoundError,
        match="no log of attempt 7; the cluster has those of attempts: 1, 2, 3",
    ):
        logs(run.handles[0], attempt=7)
    with pytest.raises(InvalidRequestError, match="attempt must be"):
        logs(run.handles[0], attempt=0)


def test_logs_stay_until_the_purge_or_are_said_to_be_gone(bench, report):
    run = bench.launch(2)
    run.pod(0).log("done\n")
    run.pod(0).succeed(report()[0])
    bench.world.settle()
    run.executor.cancel(run.handles[0])
    bench.world.settle()
    assert run.executor.stream_logs(run.handles[0]) == "done"
    with pytest.raises(ReplicaNotFoundError, match="removed, and its log with it"):
        run.executor.stream_logs(run.handles[1])
    run.executor.purge(run.handles[0])
    bench.world.settle()
    with pytest.raises(ReplicaNotFoundError):
        run.executor.stream_logs(run.handles[0])


def test_what_is_forbidden_is_no_empty_log(bench):
    run = bench.launch(1)
    bench.stand_in.access.deny("get", "pods/log")
    with pytest.raises(ForbiddenError, match="pods/log"):
        run.executor.stream_logs(run.handles[0])


def test_a_connection_that_breaks_is_opened_again(bench, report):
    run = bench.launch(1)
    pod = run.pod(0)
    pod.log("one\ntwo\n")
    lines = run.executor.log_iter(run.handles[0], follow=True)
    bench.stand_in.faults.add("cut", resource="pods/log", times=2)
    assert next(lines) == "one"
    pod.log("three\n")
    pod.succeed(report()[0])
    bench.world.settle()
    assert list(lines) == ["two", "three"]


def test_the_log_is_that_of_the_newest_attempt_or_an_error(bench):
    """No text stands in for a log that cannot be read, and no other pod's log is shown."""
    run = bench.launch(1, max_restarts=1)
    run.pod(0).log("old life\n")
    run.pod(0).fail(1)
    bench.world.settle(within=30)
    run.pod(0).start()
    run.pod(0).log("new life\n")
    assert run.executor.stream_logs(run.handles[0]) == "new life"
    assert run.executor.stream_logs(run.handles[0], attempt=1) == "old life"
    bench.stand_in.access.deny("get", "pods/log")
    with pytest.raises(ForbiddenError):
        run.executor.stream_logs(run.handles[0])


def test_long_lines_are_lines(bench):
    """The kubelet counts pieces of 16 KiB, and begins wherever the last ones begin."""
    run = bench.launch(1)
    long = ["a" * 100_000, "b" * 40_000, "c"]
    run.pod(0).log("".join(f"{line}\n" for line in ["first", *long]))
    for number in range(1, 6):
        text = run.executor.stream_logs(run.handles[0], n_lines=number)
        assert text.split("\n") == ["first", *long][-number:]


def test_a_short_log_is_asked_for_once(bench):
    run = bench.launch(1)
    run.pod(0).log("".join(f"line {number}\n" for number in range(10)))
    for number in (5, 10, 200):
        bench.stand_in.calls.clear()
        run.executor.stream_logs(run.handles[0], n_lines=number)
        assert [call.resource for call in bench.stand_in.calls].count("pods/log") == 1


def test_no_words_of_the_kubelet_are_in_a_log(bench):
    """An evicted pod that waits has no container, and the kubelet says so in place of the log."""
    run = bench.launch(1)
    run.pod(0).log("mine\n")
    lines = run.executor.log_iter(run.handles[0], follow=True)
    assert next(lines) == "mine"
    run.pod(0).on_term(143, after=0.5)
    run.pod(0).evict()
    texts = set()
    while run.describe(0).attempt == 1:
        texts.add(run.executor.stream_logs(run.handles[0]))
        bench.world.advance(0.25)
    assert texts <= {"mine", ""}
    bench.world.settle(within=30)
    run.pod(0).start()
    run.pod(0).log("second\n")
    assert next(lines) == "second"
    lines.close()


NO_LOG = b"unable to retrieve container logs for containerd://abc"
FAULT = b"rpc error: code = Unavailable desc = connection error: connection refused"


@pytest.fixture
def node_says(monkeypatch):
    """Has the node answer with words in place of the next logs."""
    open_log, left = Cluster.open_log, []

    def answer(*args, **options):
        if not left:
            return open_log(*args, **options)
        return urllib3.HTTPResponse(io.BytesIO(left.pop()), status=200, preload_content=False)

    monkeypatch.setattr(Cluster, "open_log", answer)

    def say(words, times=1):
        left[:] = [words] * times

    return say


@pytest.mark.sampled
@pytest.mark.parametrize("words", [NO_LOG, FAULT])
@pytest.mark.parametrize("kept", [False, True])
def test_a_passing_fault_of_a_node_loses_no_result(bench, report, tmp_path, node_says, words, kept):
    journal = FolderJournal(tmp_path / "journal") if kept else None
    run = bench.launch(1, executor=bench.executor(journal=journal))
    message, lines = report("x" * 50_000)
    run.pod(0).log("\n".join(lines) + "\n")
    run.pod(0).succeed(message)
    bench.world.settle()
    node_says(words)
    (first,) = run.executor.collect(run.handles, timeout=60)
    node_says(words)
    with pytest.raises(UnavailableError, match="the node cannot read the log now: "):
        bench.executor().collect(run.handles, timeout=0)
    (again,) = run.executor.collect(run.handles, timeout=60)
    assert first["result"] == again["result"] == "x" * 50_000


def test_a_result_is_lost_once_the_node_has_had_no_log_for_long(bench, report, node_says):
    run = bench.launch(1, executor=bench.executor(retry_timeout=20))
    message, lines = report("x" * 50_000)
    run.pod(0).log("\n".join(lines) + "\n")
    run.pod(0).succeed(message)
    bench.world.settle()
    node_says(NO_LOG, 100)
    began = bench.world.now()
    (lost,) = run.executor.collect(run.handles)
    assert bench.world.now() - began > 20
    assert (lost["status"], lost["result"]) == ("succeeded", None)
    assert "the result is lost: " in lost["error"]
    assert "unable to retrieve container logs" in lost["error"]
    node_says(FAULT, 100)
    with pytest.raises(UnavailableError):
        run.executor.collect(run.handles, timeout=60)


@pytest.mark.parametrize("words", [NO_LOG, FAULT])
def test_a_passing_fault_of_a_node_leaves_no_log_empty(bench, node_says, words):
    run = bench.launch(1)
    run.pod(0).log("mine\n")
    for read in (
        lambda: run.executor.stream_logs(run.handles[0]),
        lambda: "\n".join(run.executor.log_iter(run.handles[0])),
        lambda: next(run.executor.log_iter(run.handles[0], follow=True)),
    ):
        node_says(words)
        assert read() == "mine"
        node_says(words, 200)
        with pytest.raises(UnavailableError, match="cannot read the log now") as caught:
            read()
        assert caught.value.__notes__ == ["given up after 30 s of trying again"]


def test_a_log_that_a_node_has_no_more_is_gone_but_not_its_pod(bench, report, node_says):
    run = bench.launch(1)
    run.pod(0).log("mine\n")
    run.pod(0).succeed(report()[0])
    bench.world.settle()
    for read in (run.executor.stream_logs, lambda handle: list(run.executor.log_iter(handle))):
        node_says(NO_LOG, 200)
        with pytest.raises(ReplicaNotFoundError) as caught:
            read(run.handles[0])
        assert "is gone: the node cannot read the log now: unable" in str(caught.value)
        assert "removed" not in str(caught.value)
        node_says(FAULT, 200)
        with pytest.raises(UnavailableError):
            read(run.handles[0])
    node_says(NO_LOG, 200)
    with pytest.raises(NoLogError):
        list(run.executor.log_iter(run.handles[0], follow=True))


def test_an_attempt_whose_log_a_node_has_no_more_does_not_hold_up_the_next(
    bench, report, node_says
):
    def sleep(seconds):
        bench.world.advance(seconds)
        newest = bench.world.pods("run-1")[-1]
        if newest.alive and newest.json["status"]["phase"] == "Running":
            node_says(NO_LOG, 0)
            newest.log("second life\n")
            newest.succeed(report()[0])

    backoff = Backoff(first=0.5, clock=bench.world.now, sleep=sleep)
    run = bench.launch(1, executor=bench.executor(backoff=backoff, retry_timeout=3), max_restarts=1)
    run.pod(0).fail(1)
    bench.world.settle()
    bench.world.auto_start = 1.0
    node_says(NO_LOG, 1000)
    assert list(run.executor.log_iter(run.handles[0], follow=True)) == ["second life"]


EVICTED = {"type": "DisruptionTarget", "status": "True", "reason": "TerminationByKubelet"}
ENDED = {"terminated": {"exitCode": 137}}


@pytest.mark.parametrize(
    ("phase", "state", "more", "gone"),
    [
        ("Failed", ENDED, {}, False),
        ("Failed", ENDED, {"deleting": True}, True),
        ("Failed", None, {"conditions": [EVICTED]}, True),
        ("Running", ENDED, {"deleting": True}, True),
        ("Running", None, {"deleting": True}, False),
        ("Failed", ENDED, {"name": "another"}, True),
    ],
)
def test_which_log_is_gone_says_the_pod(a_pod, phase, state, more, gone):
    pod = read_pod(a_pod(0, phase, state, **more))
    assert log_is_gone("run-1-0-abcde", [pod]) is gone


def test_the_last_lines_before_many_of_a_result(bench, report):
    """Also if their number is unknown, since the runner was ended before it could report."""
    _, lines = report("x" * 50_000)
    run = bench.launch(1)
    run.pod(0).log("one\ntwo\nthree\n" + "\n".join(lines * 60) + "\n")
    assert run.executor.stream_logs(run.handles[0], n_lines=2) == "two\nthree"
    assert run.executor.stream_logs(run.handles[0], n_lines=5) == "one\ntwo\nthree"
