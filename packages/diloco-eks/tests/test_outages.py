"""A cluster that throttles, fails, is away or refuses the token: verbs wait as they promise."""

import json
import time

import pytest

from diloco_protocol import (
    AuthError,
    BackendError,
    Backoff,
    FolderJournal,
    ForbiddenError,
    UnavailableError,
)

AWAY = 14.0
KINDS = ["throttle", "unavailable", "cut", "unauthorized"]
VERBS = {
    "poll": lambda executor, handle: str(executor.poll(handle)),
    "describe": lambda executor, handle: executor.describe(handle).attempt,
    "collect": lambda executor, handle: executor.collect([handle], timeout=100)[0]["result"],
    "stream_logs": lambda executor, handle: executor.stream_logs(handle),
    "log_iter": lambda executor, handle: list(executor.log_iter(handle)),
    "follow": lambda executor, handle: list(executor.log_iter(handle, follow=True)),
    "list_runs": lambda executor, handle: executor.list_runs(),
    "attach": lambda executor, handle: executor.attach("run-1") == [handle],
    "check": lambda executor, handle: [finding.ok for finding in executor.check(1)],
    "cancel": lambda executor, handle: executor.cancel(handle),
    "purge": lambda executor, handle: executor.purge(handle),
}


def outage(bench, kind, end, *, back=None, **values):
    """An executor for which nothing works until ``end`` seconds from now; ``back`` happens then."""
    faults, begin = bench.stand_in.faults, bench.world.now()
    over = []

    def sleep(seconds):
        bench.world.advance(seconds)
        if bench.world.now() >= begin + end and not over:
            over.append(True)
            faults.clear()
            if back is not None:
                back()

    backoff = Backoff(first=0.5, cap=4.0, clock=bench.world.now, sleep=sleep)
    executor = bench.executor(backoff=backoff, **values)
    executor.list_runs()
    if kind is not None:
        faults.add(kind, times=None)
    return executor


def ended(bench, report):
    run = bench.launch(1)
    run.pod(0).log("one\ntwo\n")
    run.pod(0).succeed(report("done")[0])
    bench.world.settle()
    return run


@pytest.mark.sampled
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_waits_for_a_cluster_that_is_away(bench, report, kind, verb):
    (handle,) = ended(bench, report).handles
    wanted = VERBS[verb](bench.executor(), handle) if verb != "purge" else None
    executor = outage(bench, kind, AWAY)
    assert VERBS[verb](executor, handle) == wanted


@pytest.mark.sampled
@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_gives_up_in_time(bench, report, verb):
    (handle,) = ended(bench, report).handles
    executor = outage(bench, "unavailable", 1000.0, retry_timeout=20)
    begin = bench.world.now()
    if verb == "check":
        (finding,) = executor.check(1)
        assert (finding.subject, finding.ok) == ("cluster", False)
    else:
        with pytest.raises(UnavailableError) as caught:
            VERBS[verb](executor, handle)
        assert verb == "collect" or "given up after 20 s" in caught.value.__notes__[0]
    most = 100 if verb == "collect" else 20
    assert most - 5 < bench.world.now() - begin <= most


@pytest.mark.sampled
@pytest.mark.parametrize("kind", KINDS)
def test_a_follower_goes_on_where_it_was(bench, report, kind):
    run = bench.launch(1)
    pod = run.pod(0)
    pod.log("one\n")

    def back():
        pod.log("three\n")
        pod.succeed(report()[0])
        bench.world.settle()

    executor = outage(bench, None, AWAY, back=back, request_timeout=0.3)
    lines = executor.log_iter(run.handles[0], follow=True)
    assert next(lines) == "one"
    bench.stand_in.faults.add(kind, times=None)
    pod.log("two\n")
    assert list(lines) == ["two", "three"]


def test_a_log_that_breaks_at_its_end_is_not_taken_for_whole(bench, report):
    """The replica has ended, its log is being read, and the node's kubelet answers no more."""
    run = ended(bench, report)
    executor = outage(bench, None, 1000.0, retry_timeout=10)
    bench.stand_in.faults.add("server_error", resource="pods/log", times=None)
    lines = executor.log_iter(run.handles[0], follow=True)
    with pytest.raises(UnavailableError):
        next(lines)


@pytest.mark.parametrize("verb", ["cancel", "collect"])
def test_what_waits_for_a_log_that_a_journal_would_keep(bench, report, tmp_path, verb):
    run = bench.launch(2)
    journal = FolderJournal(tmp_path / "journal")
    executor = outage(bench, None, 1000.0, retry_timeout=60, journal=journal)
    bench.stand_in.faults.add("server_error", resource="pods/log", times=None)
    begin = bench.world.now()
    if verb == "cancel":
        executor.cancel(run.handles[0])
        assert bench.world.now() - begin <= 10
        return
    for rank in (0, 1):
        run.pod(rank).succeed(report("done")[0])
    bench.world.settle()
    begin = bench.world.now()
    results = executor.collect(run.handles, timeout=1.0)
    assert [result["result"] for result in results] == ["done", "done"]
    assert bench.world.now() - begin <= 1


def test_a_refusal_is_not_waited_out(bench, report):
    run = ended(bench, report)
    begin = bench.world.now()
    bench.stand_in.access.deny("list", "pods")
    for verb in (run.executor.poll, lambda h: list(run.executor.log_iter(h, follow=True))):
        with pytest.raises(ForbiddenError):
            verb(run.handles[0])
    assert bench.world.now() == begin


def test_each_try_reads_the_token_anew(bench, report):
    run = ended(bench, report)
    config = json.loads(bench.kubeconfig.read_text())

    def renew():
        config["users"][0]["user"]["token"] = "renewed"
        bench.kubeconfig.write_text(json.dumps(config))

    for verb in ("poll", "follow", "collect"):
        executor = outage(bench, None, AWAY, back=renew)
        bench.stand_in.access.token = "renewed"  # the file comes later
        VERBS[verb](executor, run.handles[0])
        bench.stand_in.access.token = config["users"][0]["user"]["token"] = "old"
        bench.kubeconfig.write_text(json.dumps(config))


@pytest.mark.parametrize("content", ["", "{", None])
def test_a_kubeconfig_that_is_being_replaced(bench, report, content):
    run = ended(bench, report)
    whole = bench.kubeconfig.read_text()
    executor = outage(bench, None, AWAY, back=lambda: bench.kubeconfig.write_text(whole))
    bench.stand_in.faults.add("unauthorized", times=1)
    if content is None:
        bench.kubeconfig.unlink()
    else:
        bench.kubeconfig.write_text(content)
    assert executor.poll(run.handles[0]) == "succeeded"


def test_credentials_that_stay_refused_are_logged_once(bench, caplog):
    run = bench.launch(1)
    executor = outage(bench, "unauthorized", 1000.0)
    with pytest.raises(AuthError, match="log in again"):
        executor.poll(run.handles[0])
    assert [record.name for record in caplog.records] == ["diloco_eks"]


def test_collect_keeps_its_deadline(bench):
    run = bench.launch(1)
    executor = outage(bench, "unauthorized", 1000.0)
    begin = bench.world.now()
    with pytest.raises(BackendError, match="credentials"):
        executor.collect(run.handles, timeout=50)
    assert bench.world.now() == begin + 50


def test_no_answer_is_waited_for_past_the_deadline(bench):
    run = bench.launch(1)
    client = run.executor._client
    told = []

    def progress(_):
        told.append(client.pause())

    run.executor.collect(run.handles, timeout=20.0, progress=progress)
    assert told[0] == pytest.approx(20.0)
    assert told == sorted(told, reverse=True)
    assert told[-1] == 5.0  # one look has as long as that
    assert client.pause() == 30.0
    with client.until(5.0, lambda: 0.0), client.until(time.monotonic() + 500, time.monotonic):
        assert client.pause() == 30.0
