"""Launching: validation, plan, idempotency, races, environment of real processes."""

import os
import shutil
import subprocess
import sys
import sysconfig
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from local_lab import PATIENCE, results_of

import diloco_local
import diloco_protocol
from diloco_local import LocalProcessExecutor
from diloco_local._launch import _ISOLATED, _PATH
from diloco_local._processes import members
from diloco_local._runs import locate
from diloco_protocol import (
    InvalidRequestError,
    LaunchError,
    ReplicaHandle,
    ReplicaNotFoundError,
    ReplicaState,
    RunConflictError,
)

pytestmark = pytest.mark.processes


def test_handles_are_in_rank_order_and_survive_json(make):
    executor = make()
    handles = executor.launch_replicas(3, "trainer:echo", {"deep": {"a": [1, None, {"b": "ü"}]}})
    assert [handle.rank for handle in handles] == [0, 1, 2]
    again = [ReplicaHandle.from_json(handle.to_json()) for handle in handles]
    assert again == handles
    assert [r["result"] for r in results_of(LocalProcessExecutor(), again)] == [
        {"deep": {"a": [1, None, {"b": "ü"}]}}
    ] * 3


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


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
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
        assert (proc / "cmdline").read_bytes().decode().split("\0")[:-1] == request["argv"]
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
        import json

        assert json.loads(files.replica(handle.rank).attempt(1).spec.read_text()) == request["spec"]
    assert (
        executor.plan(*arguments, run_id="planned", env={"B": "2"}) is not None
    )  # a plan minds no run


def test_rank_offset_and_world_size(make, monkeypatch):
    # The launcher is itself one of eight processes: a replica that took itself for one of them would wait for the others.
    for name in ("WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "8")
    executor = make()
    handles = executor.launch_replicas(
        2, "trainer:environment", {}, rank_offset=3, world_size=8, cohort="whole"
    )
    seen = [r["result"] for r in results_of(executor, handles)]
    assert [(handle.rank, handle.world_size) for handle in handles] == [(3, 8), (4, 8)]
    assert [(env["REPLICA_RANK"], env["REPLICA_WORLD_SIZE"]) for env in seen] == [
        ("3", "8"),
        ("4", "8"),
    ]
    assert {env["DILOCO_COHORT"] for env in seen} == {"whole"}
    assert not seen[0].keys() & {"WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RUN_ID"}
    assert executor.attach(handles[0].run_id) == handles


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"spot": True}, "interruptible"),
        ({"secrets": {"TOKEN": "store/x"}}, "secret store"),
        ({"cpu": "4"}, "confined to CPUs"),
        ({"memory": "16Gi"}, "memory"),
        ({"gpu": "many"}, "GPU"),
        ({"n": 0}, "n_replicas"),
        ({"run_id": "../up"}, "run_id"),
        ({"timeout": 0}, "timeout"),
        ({"entrypoint": "trainer:nothing"}, "no attribute 'nothing'"),
        ({"entrypoint": "no_such_module:f"}, "no_such_module"),
        ({"args": {"x": float("nan")}}, "nan"),
        ({"env": {"REPLICA_RANK": "3"}}, "REPLICA_RANK"),
    ],
)
def test_bad_input_is_named_before_anything_starts(
    make, tmp_path, nothing_survives, options, words
):
    executor = make(gpus=[])
    n = options.pop("n", 1)
    entrypoint = options.pop("entrypoint", "trainer:echo")
    args = options.pop("args", {})
    with pytest.raises(InvalidRequestError, match=words):
        executor.launch_replicas(n, entrypoint, args, **options)
    assert nothing_survives() == []
    assert executor.list_runs() == []
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"grace": -1}, "grace"),
        ({"grace": float("inf")}, "grace"),
        ({"pythonpath": "/a"}, "pythonpath must be a list"),
        ({"inherit_env": "PATH"}, "inherit_env must be a list"),
        ({"gpus": "0,1"}, "gpus must be a list"),
        ({"gpus": ["0", "0"]}, "names a GPU twice"),
    ],
)
def test_bad_options_are_named(options, words):
    with pytest.raises(InvalidRequestError, match=words):
        LocalProcessExecutor(**options)


@pytest.mark.parametrize(
    ("options", "words"),
    [({"python": "/no/python"}, "/no/python"), ({"cwd": "/no/folder"}, "/no/folder")],
)
def test_bad_places_are_named_at_the_launch(make, options, words):
    with pytest.raises(InvalidRequestError, match=words):
        make(**options).launch_replicas(1, "trainer:echo", {})


def test_a_launch_is_idempotent_by_its_run_id(waiting, make, folder):
    run = waiting(2, run_id="once")
    again = make().launch_replicas(2, "trainer:wait", {"folder": str(folder)}, run_id="once")
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


def test_a_launcher_that_died_in_between_does_not_block_the_name(make, tmp_path):
    """Published and never started: no handle was ever given, so the name is free."""
    from diloco_local._files import write_json
    from diloco_local._rundir import Root

    executor = make()
    root = Root(tmp_path / "state")
    (handle,) = executor.launch_replicas(1, "trainer:echo", {}, run_id="good")
    _, record = locate(handle)
    staged = root.stage()
    write_json(staged.record, replace(record, run_id="dead", uid="x").to_dict())
    staged.lock.touch()
    assert root.publish(staged, "dead")
    assert executor.list_runs() == ["good"]
    with pytest.raises(ReplicaNotFoundError, match="'dead'"):
        executor.attach("dead")
    handles = executor.launch_replicas(1, "trainer:echo", {"k": 1}, run_id="dead")
    assert results_of(executor, handles)[0]["result"] == {"k": 1}
    assert executor.list_runs() == ["good", "dead"]


def test_an_interrupted_launch_leaves_nothing(make, folder, nothing_survives, monkeypatch, until):
    from diloco_local import _launch

    executor = make()

    def interrupted(descriptor, patience):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(_launch, "_read_line", interrupted)
        with pytest.raises(KeyboardInterrupt):
            executor.launch_replicas(2, "trainer:wait", {"folder": str(folder)}, run_id="cut")
    until(lambda: nothing_survives() == [])
    for handle in executor.attach("cut") if executor.list_runs() else []:
        assert executor.poll(handle) is ReplicaState.CANCELLED


def test_run_directories_are_private(make, tmp_path):
    executor = make(env={"HF_TOKEN": "very secret"})
    (handle,) = executor.launch_replicas(1, "trainer:echo", {})
    results_of(executor, [handle])
    run, _ = locate(handle)
    assert run.path.stat().st_mode & 0o077 == 0
    held = [
        path
        for path in run.path.rglob("*")
        if path.is_file() and "very secret" in path.read_text(errors="replace")
    ]
    assert held == []  # the environment is never written to disk


def test_the_replica_s_processes_are_its_own_session(make):
    executor = make()
    handles = executor.launch_replicas(2, "trainer:where", {})
    seen = [r["result"] for r in results_of(executor, handles)]
    assert len({place["session"] for place in seen} | {os.getsid(0)}) == 3


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


def test_a_root_that_cannot_be_written_is_named(make, tmp_path):
    (tmp_path / "file").write_text("no folder")
    executor = LocalProcessExecutor(root=tmp_path / "file" / "state", pythonpath=[tmp_path])
    make()  # for the trainer module
    with pytest.raises(InvalidRequestError, match="cannot be written below root"):
        executor.launch_replicas(1, "trainer:echo", {})


def test_the_supervisor_is_of_the_launchers_version_whatever_is_installed(tmp_path):
    for package in (diloco_local, diloco_protocol):
        folder = Path(package.__file__).parent
        shutil.copytree(folder, tmp_path / folder.name, ignore=shutil.ignore_patterns("*.pyc"))
    (tmp_path / "json.py").write_text("raise ImportError('the standard library comes first')")
    program = _PATH.format(folders=[str(tmp_path)])
    program += "; import json, diloco_local._supervisor as a, diloco_protocol as b"
    program += "; print(a.__file__); print(b.__file__); print(*sys.path, sep='\\n')"
    done = subprocess.run(
        [sys.executable, *_ISOLATED, "-c", program],
        capture_output=True, text=True, check=True, cwd=tmp_path,
    )  # fmt: skip
    local, protocol, *path = done.stdout.splitlines()
    assert Path(local).parent == tmp_path / "diloco_local"
    assert Path(protocol).parent == tmp_path / "diloco_protocol"
    assert path.index(str(tmp_path)) < path.index(sysconfig.get_path("purelib")), "psutil is found"


def test_a_launch_is_all_or_nothing(make, folder, tmp_path, nothing_survives, monkeypatch):
    """When one replica cannot be started, those before it are ended."""
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
    assert [r["result"] for r in results_of(executor, handles)] == [0, 1, 2]


def test_environment_and_folder_can_be_chosen(make, tmp_path, monkeypatch):
    """Rank and rendezvous are set, and only what is wanted is inherited."""
    monkeypatch.setenv("LEAKED", "yes")
    (tmp_path / "elsewhere").mkdir()
    executor = make(
        inherit_env=["PATH", "DILOCO_LOCAL_TEST"],
        env={"A": "1", "B": "1"},
        cwd=tmp_path / "elsewhere",
    )
    handles = executor.launch_replicas(2, "trainer:echo", {"rendezvous_uri": "file:///meet"})
    assert [r["result"] for r in results_of(executor, handles)] == [
        {"rendezvous_uri": "file:///meet"}
    ] * 2
    (handle,) = executor.launch_replicas(1, "trainer:environment", {}, env={"B": "2"})
    seen = results_of(executor, [handle])[0]["result"]
    assert (seen["A"], seen["B"], seen["REPLICA_RANK"], seen["REPLICA_WORLD_SIZE"]) == (
        "1",
        "2",
        "0",
        "1",
    )
    assert "LEAKED" not in seen
    assert "OMP_NUM_THREADS" not in seen
    (handle,) = executor.launch_replicas(1, "trainer:where", {})
    seen = results_of(executor, [handle])[0]["result"]
    assert Path(seen["cwd"]).samefile(tmp_path / "elsewhere")


def test_gpus_are_shared_out_among_the_replicas(make):
    """Each replica sees its own, and too few are an error before the start."""
    executor = make(gpus=["0", "1", "2", "3"])
    handles = executor.launch_replicas(2, "trainer:environment", {}, gpu="2")
    seen = [r["result"]["CUDA_VISIBLE_DEVICES"] for r in results_of(executor, handles)]
    assert seen == ["0,1", "2,3"]
    with pytest.raises(InvalidRequestError, match="needs 6 GPU"):
        executor.launch_replicas(3, "trainer:echo", {}, gpu="2")


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
    executor = LocalProcessExecutor()
    assert executor.poll(handle) in {ReplicaState.PENDING, ReplicaState.RUNNING}
    (folder / "go").touch()
    assert results_of(executor, [handle])[0]["result"] == 1


def test_the_launcher_has_no_zombies(waiting):
    """Ended replicas are nobody's to poll for."""
    run = waiting(2)
    run.go()
    results_of(run.executor, run.handles)
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)  # no child at all, dead or alive
