"""The executor object and its logs."""

import threading
import time

import pytest
from local_lab import PATIENCE, results_of

import diloco_local
from diloco_local import LocalProcessExecutor
from diloco_protocol import (
    BaseExecutor,
    InvalidRequestError,
    ReplicaNotFoundError,
    ServerlessExecutor,
)

pytestmark = pytest.mark.processes


def test_public_names():
    assert diloco_local.__all__ == sorted(diloco_local.__all__)
    assert {name for name in vars(diloco_local) if not name.startswith("_")} - {"os"} <= {
        "LocalOptions",
        "LocalProcessExecutor",
    }
    executor = LocalProcessExecutor()
    assert isinstance(executor, BaseExecutor)
    assert isinstance(executor, ServerlessExecutor)
    assert (executor.backend_name, executor.supports_inter_replica_network) == (
        "local_process",
        True,
    )


def test_nothing_is_written_before_a_launch(tmp_path):
    executor = LocalProcessExecutor(root=tmp_path / "state")
    plan = executor.plan(2, "json:dumps", {"obj": 1}, run_id="here")
    assert plan.requests[1]["run"] == str(tmp_path / "state/runs/here")
    assert executor.list_runs() == []
    assert not (tmp_path / "state").exists()


def test_a_process_tries_a_rendezvous(tmp_path):
    executor = LocalProcessExecutor(root=tmp_path / "state")
    (finding,) = executor.check(rendezvous_uri=f"file://{tmp_path}/meet", patience=PATIENCE)
    assert (finding.subject, finding.ok) == ("rendezvous", True), finding.message
    assert executor.list_runs() == []


def test_follow_ends_with_the_replica(waiting, until):
    run = waiting()
    lines = []
    thread = threading.Thread(
        target=lambda: lines.extend(run.executor.log_iter(run.handle, follow=True))
    )
    thread.start()
    until(lambda: lines == ["waiting"], "the first line")
    run.go()
    thread.join(PATIENCE)
    assert not thread.is_alive()
    assert lines == ["waiting", "went on"]


def test_a_run_is_cancelled_by_its_name(waiting, tmp_path):
    run = waiting(3, run_id="sweep-1")
    other = waiting(1, run_id="sweep-10", executor=run.executor, signs=tmp_path)
    assert (run.executor.exists("sweep-1"), run.executor.exists("sweep")) == (True, False)
    run.executor.cancel_run("sweep-1")
    results = results_of(run.executor, run.handles)
    assert [result["status"] for result in results] == ["cancelled"] * 3
    assert run.executor.poll(other.handle) == "running"
    run.executor.cancel_run("sweep-1")
    with pytest.raises(ReplicaNotFoundError, match="no run 'sweep'"):
        run.executor.cancel_run("sweep")


def test_streams_and_filters(make):
    executor = make()
    began = time.time()
    (handle,) = executor.launch_replicas(1, "trainer:echo", {})
    results_of(executor, [handle])
    assert list(executor.log_iter(handle, streams="stdout")) == ["echo from 0"]
    assert list(executor.log_iter(handle, streams="stderr")) == ["aside from 0"]
    assert sorted(executor.log_iter(handle)) == ["aside from 0", "echo from 0"]
    assert list(executor.log_iter(handle, regex="^echo")) == ["echo from 0"]
    assert len(list(executor.log_iter(handle, since=began))) == 2
    assert list(executor.log_iter(handle, until=began - 1)) == []
    assert list(executor.log_iter(handle, since=time.time() + 60)) == []
    assert executor.stream_logs(handle, n_lines=1) in {"aside from 0", "echo from 0"}
    with pytest.raises(ValueError, match="syslog"):
        executor.log_iter(handle, streams="syslog")
    with pytest.raises(InvalidRequestError, match="not a regular expression"):
        executor.log_iter(handle, regex="(")


def test_what_a_replica_prints_is_in_its_log(waiting, until):
    """A replica that prints nothing has an empty log, and no placeholder."""
    run = waiting()
    until(lambda: run.executor.stream_logs(run.handle).strip() == "waiting")
    run.go()
    results_of(run.executor, run.handles)
    assert run.executor.stream_logs(run.handle).split("\n")[:2] == ["waiting", "went on"]
    (quiet,) = run.executor.launch_replicas(1, "trainer:environment", {})
    results_of(run.executor, [quiet])
    assert run.executor.stream_logs(quiet) == ""
