"""The defects that an earlier, multiprocessing-based local executor had, each as a test that fails on them."""

import inspect
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from diloco_local import LocalProcessExecutor
from diloco_local._identity import ProcessId
from diloco_local._runs import locate
from diloco_protocol import InvalidRequestError, LaunchError, Reason, ReplicaHandle, ReplicaState

FINAL = {"succeeded", "failed", "cancelled"}


def statuses(executor, handles):
    return [str(executor.poll(handle)) for handle in handles]


def test_l1_failure_stays_failure(make, until):
    """L1: a failed replica became "succeeded" once it had been polled, or when it was collected twice."""
    executor = make()
    handles = executor.launch_replicas(2, "trainer:fail", {})
    until(lambda: statuses(executor, handles) == ["failed", "failed"])
    first = executor.collect(handles, timeout=10)
    assert [(r["status"], r["exit_code"]) for r in first] == [("failed", 1)] * 2
    assert executor.collect(handles, timeout=10) == first
    assert statuses(executor, handles) == ["failed", "failed"]


def test_l2_poll_does_not_eat_results(make, until):
    """L2: polling before collecting lost every return value."""
    executor = make()
    handles = executor.launch_replicas(2, "trainer:echo", {"a": [1, {"b": None}]})
    until(lambda: statuses(executor, handles) == ["succeeded", "succeeded"])
    assert [r["result"] for r in executor.collect(handles, timeout=10)] == [
        {"a": [1, {"b": None}]}
    ] * 2


def test_l3_cancelled_is_called_cancelled(waiting):
    """L3: a cancelled replica was reported as failed with exit code -15."""
    run = waiting()
    run.executor.cancel(run.handle)
    (result,) = run.executor.collect(run.handles, timeout=10)
    assert (result["status"], result["exit_code"]) == ("cancelled", None)
    assert run.executor.poll(run.handle) is ReplicaState.CANCELLED
    assert run.executor.describe(run.handle).reason is Reason.CANCEL_REQUESTED
    assert run.executor.describe(run.handle).signal == "SIGTERM"


def test_l4_a_second_launch_leaves_the_first_alone(waiting):
    """L4: a second launch took over the handles of the first: its status was shown, its processes were not ended."""
    first = waiting()
    second = first.executor.launch_replicas(1, "trainer:echo", {"k": 2})
    assert first.executor.collect(second, timeout=10)[0]["result"] == {"k": 2}
    assert first.executor.poll(first.handle) is ReplicaState.RUNNING
    victim = ProcessId.of(first.pid())
    first.executor.cancel(first.handle)
    assert first.executor.collect(first.handles, timeout=10)[0]["status"] == "cancelled"
    assert not victim.alive()
    assert first.executor.poll(second[0]) is ReplicaState.SUCCEEDED


def test_l5_any_process_can_use_a_handle(waiting):
    """L5: in another process, or with a new executor, a running job was called cancelled and could not be ended."""
    run = waiting()
    program = """if True:
        import sys
        from diloco_local import LocalProcessExecutor
        from diloco_protocol import ReplicaHandle
        handle = ReplicaHandle.from_json(sys.stdin.read())
        executor = LocalProcessExecutor()
        print(executor.poll(handle), executor.stream_logs(handle).strip())
        executor.cancel(handle)
        print(executor.collect([handle], timeout=10)[0]["status"])
    """
    done = subprocess.run(
        [sys.executable, "-c", program],
        input=run.handle.to_json(),
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert done.stdout.splitlines() == ["running waiting", "cancelled"]
    assert run.executor.poll(run.handle) is ReplicaState.CANCELLED


def test_l6_results_of_any_size(make):
    """L6: collect hung for ever, whatever its timeout, when a result was larger than a pipe's buffer."""
    executor = make()
    handles = executor.launch_replicas(1, "trainer:big", {"size": 20_000_000})
    (result,) = executor.collect(handles, timeout=30)
    assert result["status"] == "succeeded"
    assert len(result["result"]) == 20_000_000


def test_l7_the_timeout_is_enforced(waiting):
    """L7: the timeout was stored and never looked at."""
    began = time.monotonic()
    run = waiting(timeout=1.0)
    (result,) = run.executor.collect(run.handles, timeout=15)
    status = run.executor.describe(run.handle)
    assert (result["status"], status.reason) == ("failed", Reason.TIMEOUT)
    assert time.monotonic() - began < 8
    assert ProcessId.of(run.pid()) is None


def test_l8_a_result_that_is_no_json_is_a_failure(make):
    """L8: a return value that could not be carried was reported as success with result None."""
    executor = make()
    (result,) = executor.collect(
        executor.launch_replicas(1, "trainer:unserialisable", {}), timeout=10
    )
    assert result["status"] == "failed"
    assert result["result"] is None
    assert "object" in result["error"]


@pytest.mark.skipif(
    sys.platform != "linux", reason="orphans without a marker are found by the kernel's subreaper"
)
def test_l9_the_whole_tree_ends(waiting, folder, nothing_survives):
    """L9: grandchildren survived a cancel; here also those in sessions of their own and orphans."""
    run = waiting(function="family")
    family = [
        ProcessId.of(int((folder / f"pid-{name}").read_text()))
        for name in ("group", "session", "orphan")
    ]
    assert all(member.alive() for member in family)
    run.executor.cancel(run.handle)
    assert run.executor.collect(run.handles, timeout=10)[0]["status"] == "cancelled"
    # Cancelled is said only when all of it is gone, so no waiting here.
    assert not any(member.alive() for member in family)


def test_l10_results_belong_to_their_handles(make):
    """L10: collecting handles of two runs gave the results of one run for both."""
    executor = make()
    a = executor.launch_replicas(2, "trainer:echo", {"run": "a"})
    b = executor.launch_replicas(2, "trainer:echo", {"run": "b"})
    order = [b[1], a[0], b[0], a[1], a[0]]
    results = executor.collect(order, timeout=10)
    assert [r["result"]["run"] for r in results] == ["b", "a", "b", "a", "a"]
    assert [r["rank"] for r in results] == [1, 0, 0, 1, 0]


def test_l11_a_terminal_replica_has_its_result(make, until):
    """L11: a result still on its way was missed; here it is there whenever the state is terminal."""
    executor = make()
    for k in range(3):
        handles = executor.launch_replicas(2, "trainer:echo", {"k": k})
        until(lambda handles=handles: all(executor.poll(handle).terminal for handle in handles))
        assert [r["result"] for r in executor.collect(handles, timeout=0)] == [{"k": k}] * 2


def test_l12_collect_does_not_kill(waiting):
    """L12: when the deadline of collect passed, it killed the replicas, one after the other."""
    run = waiting(2)
    results = run.executor.collect(run.handles, timeout=0.2)
    assert [(r["status"], r["exit_code"]) for r in results] == [("running", None)] * 2
    assert all(ProcessId.of(run.pid(rank)) for rank in (0, 1))
    run.go()
    assert [r["result"] for r in run.executor.collect(run.handles, timeout=10)] == [0, 1]


def test_l12_stubborn_replicas_share_one_grace(waiting):
    """L12: ending n replicas that ignore SIGTERM took n times the grace."""
    run = waiting(4, "stubborn")
    began = time.monotonic()
    for handle in run.handles:
        run.executor.cancel(handle)
    results = run.executor.collect(run.handles, timeout=20)
    assert [r["status"] for r in results] == ["cancelled"] * 4
    assert 1.0 <= time.monotonic() - began < 3.5  # the grace is 1 s
    assert {run.executor.describe(handle).signal for handle in run.handles} == {"SIGKILL"}


def test_l13_logs_are_captured(waiting, until):
    """L13: stdout and stderr went nowhere, and a placeholder was given instead."""
    run = waiting()
    until(lambda: run.executor.stream_logs(run.handle).strip() == "waiting")
    run.go()
    run.executor.collect(run.handles, timeout=10)
    assert run.executor.stream_logs(run.handle).split("\n")[:2] == ["waiting", "went on"]
    (quiet,) = run.executor.launch_replicas(1, "trainer:environment", {})
    run.executor.collect([quiet], timeout=10)
    assert run.executor.stream_logs(quiet) == ""


@pytest.mark.parametrize(
    ("function", "kwargs", "exit_code", "name", "words"),
    [
        ("fail", {"message": "the cause"}, 1, None, "ValueError: the cause"),
        ("leave", {"code": 7}, 7, None, "7"),
        ("leave", {"code": "no data"}, 1, None, "no data"),
        ("interrupt", {}, 1, None, "KeyboardInterrupt"),
        ("hard_exit", {"code": 9}, 9, None, "9"),
        ("die", {"number": int(signal.SIGSEGV)}, 139, "SIGSEGV", "SIGSEGV"),
        ("die", {"number": int(signal.SIGKILL)}, 137, "SIGKILL", "SIGKILL"),
    ],
)
def test_l14_ends_are_told_truly(make, function, kwargs, exit_code, name, words):
    """L14: SystemExit, KeyboardInterrupt, os._exit and signals gave only a number, and exceptions no traceback."""
    executor = make()
    handles = executor.launch_replicas(1, f"trainer:{function}", kwargs)
    (result,) = executor.collect(handles, timeout=10)
    status = executor.describe(handles[0])
    assert (result["status"], result["exit_code"]) == ("failed", exit_code)
    assert (status.exit_code, status.signal) == (exit_code, name)
    assert words in result["error"]
    if function == "fail":
        assert "Traceback" in executor.stream_logs(handles[0])


def test_l15_a_launch_is_all_or_nothing(make, folder, tmp_path, nothing_survives, monkeypatch):
    """L15: when the start of replica k failed, the replicas before it went on running."""
    with pytest.raises(InvalidRequestError, match="lambda"):
        make().launch_replicas(2, lambda: None, {})
    executor = make()
    orders = LocalProcessExecutor._orders

    def spoil(self, request, setting):
        first, second, third = orders(self, request, setting)
        return [first, second, replace(third, argv=("/no/such/interpreter", *third.argv[1:]))]

    with monkeypatch.context() as patch:
        patch.setattr(LocalProcessExecutor, "_orders", spoil)
        with pytest.raises(LaunchError, match="/no/such/interpreter") as caught:
            executor.launch_replicas(3, "trainer:wait", {"folder": str(folder)}, run_id="half")
    assert caught.value.survivors == ()
    assert (
        nothing_survives() == []
    )  # at once: the launch returns when those that were started are gone
    assert executor.list_runs() == []
    # And the name is free again.
    (folder / "go").touch()
    handles = executor.launch_replicas(3, "trainer:wait", {"folder": str(folder)}, run_id="half")
    assert [r["result"] for r in executor.collect(handles, timeout=10)] == [0, 1, 2]


def test_l16_environment_and_folder_are_chosen(make, tmp_path, monkeypatch):
    """L16: only the rank was set, everything was inherited, and neither environment nor folder could be chosen."""
    monkeypatch.setenv("LEAKED", "yes")
    (tmp_path / "elsewhere").mkdir()
    executor = make(
        inherit_env=["PATH", "DILOCO_LOCAL_TEST"],
        env={"A": "1", "B": "1"},
        cwd=tmp_path / "elsewhere",
    )
    handles = executor.launch_replicas(2, "trainer:echo", {"rendezvous_uri": "file:///meet"})
    assert [r["result"] for r in executor.collect(handles, timeout=10)] == [
        {"rendezvous_uri": "file:///meet"}
    ] * 2
    (handle,) = executor.launch_replicas(1, "trainer:environment", {}, env={"B": "2"})
    seen = executor.collect([handle], timeout=10)[0]["result"]
    assert (seen["A"], seen["B"], seen["REPLICA_RANK"], seen["WORLD_SIZE"]) == ("1", "2", "0", "1")
    assert "LEAKED" not in seen
    assert "OMP_NUM_THREADS" not in seen
    (handle,) = executor.launch_replicas(1, "trainer:where", {})
    seen = executor.collect([handle], timeout=10)[0]["result"]
    assert Path(seen["cwd"]).samefile(tmp_path / "elsewhere")


def test_l16_gpus_are_shared_out(make):
    """L16: gpu= was ignored; here each replica sees its own, and too few are an error before the start."""
    executor = make(gpus=["0", "1", "2", "3"])
    handles = executor.launch_replicas(2, "trainer:environment", {}, gpu="2")
    seen = [r["result"]["CUDA_VISIBLE_DEVICES"] for r in executor.collect(handles, timeout=10)]
    assert seen == ["0,1", "2,3"]
    with pytest.raises(InvalidRequestError, match="needs 6 GPU"):
        executor.launch_replicas(3, "trainer:echo", {}, gpu="2")


def test_l16_pending_comes_before_running(make, tmp_path):
    """L16: "pending" was never reported, so a replica that is not started yet was called running."""
    from diloco_local._files import open_lock, try_lock
    from diloco_local._observe import observe_replica

    executor = make()
    (handle,) = executor.launch_replicas(1, "trainer:echo", {})
    executor.collect([handle], timeout=10)
    run, record = locate(handle)
    files = run.replica(0)
    files.final.unlink()
    files.state.unlink()
    lock = open_lock(run.lock)
    try:
        assert try_lock(lock, wait=5.0)  # as a supervisor does that has started nothing yet
        assert observe_replica(run, record, 0).state is ReplicaState.PENDING
    finally:
        os.close(lock)


def test_l17_the_launcher_may_end(tmp_path, folder, make, until):
    """L17: the interpreter could not end while replicas ran; zombies stayed; there was no close."""
    program = """if True:
        import sys
        from diloco_local import LocalProcessExecutor
        with LocalProcessExecutor(root=sys.argv[1], pythonpath=[sys.argv[2]]) as executor:
            handles = executor.launch_replicas(2, "trainer:wait", {"folder": sys.argv[3]})
        executor.close()
        print(handles[1].to_json())
    """
    make()
    done = subprocess.run(
        [
            sys.executable,
            "-W",
            "error",
            "-c",
            program,
            str(tmp_path / "state"),
            str(tmp_path),
            str(folder),
        ],
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert done.stderr == ""
    handle = ReplicaHandle.from_json(done.stdout)
    executor = LocalProcessExecutor()
    assert executor.poll(handle) in {ReplicaState.PENDING, ReplicaState.RUNNING}
    (folder / "go").touch()
    assert executor.collect([handle], timeout=20)[0]["result"] == 1


def test_l17_no_zombies_in_the_launcher(waiting):
    """L17: ended children stayed zombies until somebody polled them."""
    run = waiting(2)
    run.go()
    run.executor.collect(run.handles, timeout=10)
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)  # no child at all, dead or alive


def test_l18_a_reused_pid_is_not_the_replica(waiting, until):
    """L18: the handle's pid alone said nothing, since pids are used again."""
    run = waiting()
    files, _ = locate(run.handle)
    state = json.loads(files.replica(0).state.read_text())
    watchers = json.loads((files.path / "supervisor.json").read_text())
    processes = [ProcessId.from_dict(watchers[key]) for key in ("supervisor", "parent")]
    processes.append(ProcessId.from_dict(state["runner"]))
    for process in processes:
        process.send(signal.SIGKILL)
    os.kill(run.pid(), signal.SIGKILL)
    until(
        lambda: not any(process.alive() for process in processes)
        and ProcessId.of(run.pid()) is None
    )
    # Somebody else now has the pid: this very process.
    state["runner"]["pid"] = os.getpid()
    files.replica(0).state.write_text(json.dumps(state))
    assert run.executor.poll(run.handle) is ReplicaState.FAILED
    run.executor.cancel(run.handle)  # and is not signalled


def test_l19_nothing_is_swallowed(make):
    """L19: poll swallowed every exception; here damage on disk is an error and not a state."""
    executor = make()
    (handle,) = executor.launch_replicas(1, "trainer:echo", {})
    executor.collect([handle], timeout=10)
    run, _ = locate(handle)
    good = run.replica(0).final.read_text()
    run.replica(0).final.write_text("{ damaged")
    with pytest.raises(ValueError, match="Expecting"):
        executor.poll(handle)
    run.replica(0).final.write_text(good)
    assert executor.poll(handle) is ReplicaState.SUCCEEDED


def test_every_defect_has_its_test():
    """The list has 19 entries; none may be dropped."""
    tested = {
        name.split("_")[1]
        for name, value in globals().items()
        if name.startswith("test_l") and inspect.isfunction(value)
    }
    assert tested == {f"l{k}" for k in range(1, 20)}
