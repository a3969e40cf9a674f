"""Launching: plan, idempotency, races, and a launcher that ends before its replicas."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from local_lab import PATIENCE, locate, results_of

from diloco_local import LocalProcessExecutor
from diloco_local._processes import members
from diloco_protocol import (
    ReplicaHandle,
    ReplicaState,
    RunConflictError,
)

pytestmark = pytest.mark.processes


def test_handles_are_in_rank_order_and_survive_json(make, tmp_path):
    executor = make()
    handles = executor.launch_replicas(3, "trainer:echo", {"deep": {"a": [1, None, {"b": "ü"}]}})
    assert [handle.rank for handle in handles] == [0, 1, 2]
    again = [ReplicaHandle.from_json(handle.to_json()) for handle in handles]
    assert again == handles
    assert [
        r["result"] for r in results_of(LocalProcessExecutor(root=tmp_path / "state"), again)
    ] == [{"deep": {"a": [1, None, {"b": "ü"}]}}] * 3


def test_the_dotted_form_and_functions_are_named(make, tmp_path, monkeypatch):
    executor = make()
    monkeypatch.syspath_prepend(tmp_path)
    import trainer

    for entrypoint in ("trainer.echo", trainer.echo):
        assert results_of(executor, executor.launch_replicas(1, entrypoint, {"k": 1}))[0][
            "result"
        ] == {"k": 1}
    del sys.modules["trainer"]


def test_a_module_beside_the_launching_script_is_found(make, tmp_path, nothing_survives):
    """The default import path is the launcher's own."""
    import subprocess

    make()
    (tmp_path / "launch.py").write_text(
        "import sys\n"
        "from diloco_local import LocalProcessExecutor\n"
        "executor = LocalProcessExecutor(root=sys.argv[1])\n"
        "handles = executor.launch_replicas(1, 'trainer:echo', {'x': 1})\n"
        "print(executor.collect(handles)[0]['result'])\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", str(tmp_path / "launch.py"), str(tmp_path / "state")],
        capture_output=True,
        text=True,
        check=True,
        cwd="/",
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert (done.stdout, done.stderr) == ("{'x': 1}\n", "")


@pytest.mark.skipif(
    sys.platform != "linux", reason="processes are found in /proc, which only Linux has"
)
def test_the_plan_is_what_is_started(waiting, make, folder, until):
    executor = make(env={"A": "1", "HF_TOKEN": "very secret"})
    arguments = (2, "trainer:wait", {"folder": str(folder)})
    plan = executor.plan(*arguments, run_id="planned", env={"B": "2"})
    assert plan.run_id == "planned"
    assert "very secret" not in repr(plan)
    run = waiting(2, executor=executor, run_id="planned", env={"B": "2"})
    for handle, request in zip(run.handles, plan.requests, strict=True):
        files, record = locate(handle)
        runner = min(members(record.marker(handle.rank)))
        proc = Path(f"/proc/{runner}")
        attempt = files.replica(handle.rank).attempt(1)
        names = {"{spec}": str(attempt.spec), "{outcome}": str(attempt.outcome)}
        names["{restarts}"] = "0"  # nothing is started again
        argv = [names.get(word, word) for word in request["argv"]]
        assert (proc / "cmdline").read_bytes().decode().split("\0")[:-1] == argv
        assert str((proc / "cwd").readlink()) == request["cwd"]
        seen = dict(
            entry.split("=", 1)
            for entry in (proc / "environ").read_bytes().decode().split("\0")
            if entry
        )
        # The marker of the run is new with every launch.
        assert set(seen) == {*request["env"], *request["inherited"], "DILOCO_LOCAL_REPLICA"}
        assert request["env"].pop("HF_TOKEN") == "<redacted>"
        assert request["env"].items() <= seen.items()
        assert json.loads(attempt.spec.read_text()) == request["spec"]
    assert (
        executor.plan(*arguments, run_id="planned", env={"B": "2"}) is not None
    )  # a plan minds no run


def test_a_launch_is_idempotent_by_its_run_id(waiting, make, folder, caplog):
    run = waiting(2, run_id="once")
    again = make().launch_replicas(2, "trainer:wait", {"folder": str(folder)}, run_id="once")
    assert "run 'once' was launched before" in caplog.text
    assert again == run.handles
    with pytest.raises(RunConflictError, match="other arguments"):
        run.executor.launch_replicas(
            2, "trainer:wait", {"folder": str(folder), "seconds": 1}, run_id="once"
        )
    with pytest.raises(RunConflictError, match="other arguments"):
        run.executor.launch_replicas(3, "trainer:wait", {"folder": str(folder)}, run_id="once")
    run.go()
    results_of(run.executor, run.handles)
    # Also after its end: the same launch is not done twice.
    assert (
        run.executor.launch_replicas(2, "trainer:wait", {"folder": str(folder)}, run_id="once")
        == run.handles
    )
    assert run.executor.poll(run.handles[0]) is ReplicaState.SUCCEEDED


def test_racing_launchers_start_one_run(make, folder, until):
    found, errors = [], []
    gate = threading.Barrier(4)

    def contend():
        executor = make()
        gate.wait()
        try:
            found.append(
                executor.launch_replicas(2, "trainer:wait", {"folder": str(folder)}, run_id="race")
            )
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=contend) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert all(handles == found[0] for handles in found)
    (folder / "go").touch()
    executor = make()
    assert [r["result"] for r in results_of(executor, found[0])] == [0, 1]
    assert executor.list_runs() == ["race"]
    assert sorted(path.name for path in folder.glob("up-*")) == ["up-0-1", "up-1-1"]


def test_many_replicas_start_with_one_import_check(make, folder, monkeypatch):
    from diloco_local import _executor

    calls = []
    check = _executor.check_entrypoint
    monkeypatch.setattr(
        _executor, "check_entrypoint", lambda *a, **k: (calls.append(a), check(*a, **k))
    )
    executor = make()
    handles = executor.launch_replicas(8, "trainer:echo", {})
    assert len(calls) == 1
    assert {r["status"] for r in results_of(executor, handles)} == {"succeeded"}


def test_the_launcher_may_end_before_its_replicas(tmp_path, folder, make, until):
    """It leaves without a warning, and others go on with the handles."""
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
        timeout=PATIENCE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert done.stderr == ""
    handle = ReplicaHandle.from_json(done.stdout)
    executor = LocalProcessExecutor(root=tmp_path / "state")
    assert executor.poll(handle) in {ReplicaState.PENDING, ReplicaState.RUNNING}
    (folder / "go").touch()
    assert results_of(executor, [handle])[0]["result"] == 1


def test_the_launcher_has_no_zombies(waiting):
    """Ended replicas are nobody's to poll for."""

    def children():
        found = subprocess.run(
            ["pgrep", "-P", str(os.getpid())], capture_output=True, text=True, check=False
        )
        return set(found.stdout.split())

    before = children()  # what tests before this one keep warm
    run = waiting(2)
    run.go()
    results_of(run.executor, run.handles)
    assert children() <= before, "no child at all, dead or alive"
