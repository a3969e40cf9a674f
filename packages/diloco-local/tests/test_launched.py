"""What a launched process has: environment, folder, GPUs, session and supervisor version."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from local_lab import locate, results_of

import diloco_local
import diloco_protocol
from diloco_local._launch import _PROGRAM
from diloco_protocol import (
    InvalidRequestError,
)

pytestmark = pytest.mark.processes


def test_rank_offset_and_world_size(make, monkeypatch):
    # The launcher is itself one of eight processes: a replica that took itself for one of them
    # would wait for the others.
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


def test_the_supervisor_is_of_the_launchers_version_whatever_is_installed(tmp_path):
    for package in (diloco_local, diloco_protocol):
        folder = Path(package.__file__).parent
        shutil.copytree(folder, tmp_path / folder.name, ignore=shutil.ignore_patterns("*.pyc"))
    (tmp_path / "json.py").write_text("raise ImportError('the standard library comes first')")
    program = _PROGRAM.partition("from diloco_local")[0].format(folders=[str(tmp_path)])
    program += "import json, diloco_local._supervisor as a, diloco_protocol as b"
    program += "; print(a.__file__); print(b.__file__); print(*sys.path, sep='\\n')"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program],
        capture_output=True, text=True, check=True, cwd=tmp_path,
    )  # fmt: skip
    local, protocol, *path = done.stdout.splitlines()
    assert Path(local).parent == tmp_path / "diloco_local"
    assert Path(protocol).parent == tmp_path / "diloco_protocol"
    assert path.index(str(tmp_path)) < path.index(sysconfig.get_path("purelib")), "psutil is found"


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


@pytest.fixture
def planted(tmp_path):
    """A folder of modules that leave a mark when imported, named like some that are common."""
    folder = tmp_path / "planted"
    folder.mkdir()
    for name in ("argparse", "json", "diloco_protocol", "traceback"):
        (folder / f"{name}.py").write_text(
            f"open({str(tmp_path / 'ran')!r}, 'w').close(); raise SystemExit({name!r})"
        )
    return folder


def test_what_lies_in_the_launcher_s_folder_does_not_run(make, tmp_path, planted, monkeypatch):
    """Neither in the check, nor in the runner, nor in the replica itself."""
    monkeypatch.chdir(planted)
    executor = make()
    (result,) = results_of(executor, executor.launch_replicas(1, "trainer:where"))
    assert result["status"] == "succeeded"
    assert result["result"]["cwd"] == str(planted)
    assert not (tmp_path / "ran").exists()


def test_a_chosen_folder_is_a_place_for_modules(make, tmp_path):
    """The caller has named it."""
    folder = tmp_path / "chosen"
    folder.mkdir()
    (folder / "lying_here.py").write_text("def main(): return 'found'")
    for options in ({}, {"pythonpath": None}):
        executor = make(cwd=folder, **options)
        (result,) = results_of(executor, executor.launch_replicas(1, "lying_here:main"))
        assert result["result"] == "found"


def test_what_the_launcher_finds_in_its_folder_the_replicas_find(make, tmp_path):
    """A launcher at the prompt, or started with -c or -m, imports from its working folder."""
    make()
    folder = tmp_path / "chosen"
    folder.mkdir()
    (folder / "lying_here.py").write_text("def main(): return 'found'")
    program = """if True:
        import sys
        from diloco_local import LocalProcessExecutor
        executor = LocalProcessExecutor(root=sys.argv[1])
        print(executor.collect(executor.launch_replicas(1, "lying_here:main"))[0]["result"])
    """
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "state")],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert done.stdout == "found\n"
