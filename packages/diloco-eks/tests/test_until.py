"""A log followed up to a time: it ends then, whatever the pod does, with all written before."""

import pytest


@pytest.fixture
def executor(bench):
    return bench.executor(request_timeout=0.3)  # a silent log is asked for again after that


def test_a_silent_pod_is_followed_up_to_that_time(bench, executor):
    run = bench.launch(1, executor=executor)
    begin = bench.world.now()
    run.pod(0).log("one\n")
    lines = executor.log_iter(run.handles[0], follow=True, until=begin + 10)
    assert next(lines) == "one"
    assert bench.world.now() < begin + 5
    run.pod(0).log("two\n")
    assert list(lines) == ["two"]
    assert begin + 10 <= bench.world.now() < begin + 20
    assert run.states() == ["running"]


def test_what_comes_later_is_left_out_and_ends_it(bench, executor):
    run = bench.launch(1, executor=executor)
    until = bench.world.now() + 10
    run.pod(0).log("one\n")
    lines = executor.log_iter(run.handles[0], follow=True, until=until)
    assert next(lines) == "one"
    bench.world.advance(11)
    run.pod(0).log("late\n")
    assert list(lines) == []


def test_who_wakes_up_late_reads_what_is_there_and_no_more(bench, executor):
    run = bench.launch(1, executor=executor)
    for word in ("one", "two"):
        run.pod(0).log(f"{word}\n")
        bench.world.advance(10)
    now = bench.world.now()
    lines = executor.log_iter(run.handles[0], follow=True, until=now - 1)
    assert list(lines) == ["one", "two"]
    assert bench.world.now() == now


def test_a_pod_that_does_not_come_is_not_waited_for(bench, executor):
    bench.world.schedulable = False
    handles = executor.launch_replicas(1, "trainer:train", run_id="run-1")
    begin = bench.world.now()
    assert list(executor.log_iter(handles[0], follow=True, until=begin + 10)) == []
    assert begin + 10 <= bench.world.now() < begin + 20


def test_no_answer_is_waited_for_past_that_time(bench, monkeypatch):
    executor = bench.executor()
    run = bench.launch(1, executor=executor)
    run.pod(0).log("one\n")
    client, cluster, told = executor._client, executor._cluster, []
    open_log = cluster.open_log

    def watched(*place, **query):
        told.append((query.get("follow", False), client.pause()))
        bench.world.advance(10)  # nothing comes
        return open_log(*place, **{**query, "follow": False})

    monkeypatch.setattr(cluster, "open_log", watched)
    list(executor.log_iter(run.handles[0], follow=True, until=bench.world.now() + 15))
    assert [follow for follow, _ in told] == [True, True, False]
    assert [seconds for _, seconds in told] == pytest.approx([15.0, 4.5, 30.0], abs=0.1)
