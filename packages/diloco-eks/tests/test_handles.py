"""Finding runs again, and handles that lead to none."""

import pytest

from diloco_protocol import (
    InvalidRequestError,
    ReplicaHandle,
    ReplicaNotFoundError,
)


def test_runs_are_found_again_from_elsewhere(bench):
    first = bench.launch(2, run_id="b-first", rank_offset=3, world_size=9)
    bench.world.advance(5)
    bench.launch(1, run_id="a-second")
    elsewhere = bench.executor()
    assert elsewhere.list_runs() == ["b-first", "a-second"]
    assert elsewhere.attach("b-first") == first.handles
    assert [handle.rank for handle in first.handles] == [3, 4]
    assert first.states(elsewhere) == ["running"] * 2
    with pytest.raises(ReplicaNotFoundError, match="no run 'none'"):
        elsewhere.attach("none")


def test_a_run_can_be_found_by_its_id_and_its_labels(bench):
    """Pods carry the run, its owner and our version."""
    run = bench.launch(2, executor=bench.executor(owner="ada"), cohort="whole")
    labels = run.pod(0).json["metadata"]["labels"]
    assert (labels["diloco.dev/run-id"], labels["diloco.dev/cohort"]) == ("run-1", "whole")
    assert labels["diloco.dev/owner"] == "ada"
    assert labels["app.kubernetes.io/version"]
    assert bench.executor().attach("run-1") == run.handles


def test_ranks_are_the_launchs_not_the_indexes(bench, report):
    run = bench.launch(2, rank_offset=3, world_size=9)
    run.pod(1).succeed(report("from rank 4")[0])
    bench.world.settle()
    assert run.states() == ["running", "succeeded"]
    run.pod(0).log("I am rank 3\n")
    assert run.executor.stream_logs(run.handles[0]) == "I am rank 3"
    run.pod(0).fail(9)
    (failed, _) = run.executor.collect(run.handles, timeout=60)
    assert (failed["rank"], failed["exit_code"]) == (3, 9)


@pytest.mark.parametrize(
    "handle",
    [
        ReplicaHandle(0, "eks", {}, run_id="a"),
        ReplicaHandle(
            0,
            "eks",
            {"first_rank": "x", "job_name": "a", "job_uid": "u", "namespace": "d", "server": "s"},
            run_id="a",
        ),
    ],
)
def test_a_handle_that_leads_nowhere(bench, handle):
    executor = bench.executor()
    for verb in (
        executor.poll,
        executor.cancel,
        executor.purge,
        executor.stream_logs,
        lambda h: executor.collect([h]),
    ):
        with pytest.raises(InvalidRequestError, match="does not lead to a Job"):
            verb(handle)


def test_a_rank_that_the_job_does_not_have(bench):
    run = bench.launch(2)
    stranger = ReplicaHandle(2, "eks", run.handles[0].metadata, run_id="run-1", world_size=3)
    with pytest.raises(InvalidRequestError, match="ranks 0 to 1, and not 2"):
        run.executor.poll(stranger)
