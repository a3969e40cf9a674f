"""Calls do not grow with the number of replicas, but for pages of 500 pods."""

from diloco_eks._client._cluster import PAGE


def test_a_large_run_costs_few_calls(bench, report):
    count = PAGE + 3
    run = bench.launch(count)
    calls = bench.stand_in.calls
    assert calls.count() == 1
    calls.clear()
    ticks = []
    executor = bench.executor()
    results = executor.collect(run.handles, timeout=7, progress=ticks.append)
    assert {result["status"] for result in results} == {"running"}
    assert calls.count("get", "jobs") == len(ticks)
    assert calls.count("list", "pods") == 2 * len(ticks)
    assert len(calls) == 3 * len(ticks)
    for rank in range(count):
        run.pod(rank).succeed(report(rank)[0])
    bench.world.settle()
    calls.clear()
    results = executor.collect(run.handles, timeout=60)
    assert [result["result"] for result in results] == list(range(count))
    assert len(calls) == 3
    calls.clear()
    executor.cancel(run.handles[7])
    assert len(calls) == 1
