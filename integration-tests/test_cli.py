"""The command ``diloco`` beside a backend for a cloud, and with diloco-core."""

import json
import uuid

import boto3
import pytest
import torch
from integration_lab import PATIENCE
from rehearsal_lab import (
    console_script,
    diloco,
    processes_of,
    python_path,
    train_alone,
    wait_for,
    write_programs,
)
from safetensors.torch import load_file
from warm_processes import WarmProcess

from diloco_cli._told import Store
from diloco_core import DiLoCo, connect, open_journal
from diloco_core.testing import run_replicas
from diloco_eks import EKSExecutor
from diloco_local import LocalProcessExecutor
from diloco_localcloud import KubernetesProcesses
from diloco_protocol import Backoff, ReplicaHandle, ReplicaState, ReplicaStatus
from diloco_protocol.telemetry import RunReader

MARK = "DILOCO_CLI_REHEARSAL"


@pytest.mark.processes
def test_a_run_on_kubernetes(tmp_path):
    mark = uuid.uuid4().hex
    write_programs(tmp_path)
    variables = {"PYTHONPATH": python_path(tmp_path), MARK: mark}
    with KubernetesProcesses(backoff_seconds=0.5) as stand_in:
        kubeconfig = str(stand_in.kubeconfig(tmp_path / "kubeconfig"))
        options = {"KUBECONFIG": kubeconfig, "DILOCO_OPTIONS": "eks.image=any/image:1"}
        with EKSExecutor(
            "any/image:1",
            kubeconfig=kubeconfig,
            env=variables,
            grace=2.0,
            on_replica_failure="continue",
            backoff=Backoff(first=0.1, factor=1.2, cap=0.5),
        ) as executor:
            arguments = {"folder": str(tmp_path)}
            handles = executor.launch_replicas(3, "jobs_waiter:waits", arguments, run_id="seen")
            wait_for(
                lambda: all((tmp_path / f"up-{rank}").exists() for rank in range(3)), "the start"
            )
            found = console_script(tmp_path, "status", "seen", **options)  # in all backends
            assert (found.returncode, found.stdout.splitlines()[0][:25]) == (
                0, "seen: 3 running, on eks (",
            ), found  # fmt: skip
            stand_in.pods.newest("seen", 1).kill()
            wait_for(lambda: executor.poll(handles[1]) == "failed", "the failure")
            here = ["--backend", "eks"]
            shown = diloco(tmp_path, "status", "seen", "--json", *here, **options)
            assert shown.returncode == 0, "the run goes on"
            facts = json.loads(shown.stdout)
            assert facts["states"] == {"running": 2, "failed": 1}
            assert facts["replicas"][1]["signal"] == "SIGKILL"
            assert facts["place"]["namespace"] == "default"
            (tmp_path / "go").touch()
            waited = diloco(tmp_path, "wait", "seen", *here, **options)
            assert waited.returncode == 1
            assert "rank 2: result 2" in waited.stdout.splitlines()
            listed = diloco(tmp_path, "ls", *here, **options)
            assert listed.stdout.splitlines()[1].startswith("seen  2 succeeded, 1 failed  eks ")
            logs = diloco(tmp_path, "logs", "seen", "--rank", "0", *here, **options)
            assert (logs.returncode, logs.stdout, logs.stderr) == (0, "", "")
            purged = diloco(tmp_path, "purge", "seen", "--yes", *here, **options)
            assert purged.returncode == 0
            assert "this removes the records, logs and results of 3 replicas" in purged.stderr
            assert not executor.exists("seen")
        checked = diloco(tmp_path, "check", *here, **options)
        assert "ok eks rights: " in checked.stdout
    options["DILOCO_OPTIONS"] += " eks.retry_timeout=2"
    gone = diloco(tmp_path, "status", "seen", *here, **options)
    assert gone.returncode == 4, "the cluster is away"
    wait_for(lambda: not processes_of(MARK, mark), "every process to be gone")


def train(exchange):
    """Take one inner and one outer step; the values that the model ends with."""
    model = torch.nn.Linear(2, 1)
    inner = torch.optim.SGD(model.parameters(), 0.1)
    with DiLoCo(model, inner, exchange, sync_every=1):
        model(torch.ones(1, 2)).sum().backward()
        inner.step()
    return {name: value.tolist() for name, value in model.state_dict().items()}


def test_what_core_adds(tmp_path):
    store = str(tmp_path / "run")
    exchanges = [connect(store, rank=rank, world_size=2) for rank in range(2)]
    values, _ = run_replicas(train, exchanges)
    done = diloco(tmp_path, "export", store, "model.safetensors", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["outer_steps"] == 1
    saved = load_file(tmp_path / "model.safetensors")
    assert {name: value.tolist() for name, value in saved.items()} == values
    missing = diloco(tmp_path, "export", str(tmp_path / "nothing"), "other.safetensors")
    assert missing.returncode == 3
    assert "holds no run" in missing.stderr


def logs(exchange):
    """Take two inner steps with a sync each, and say how it goes."""
    model = torch.nn.Linear(2, 1)
    inner = torch.optim.SGD(model.parameters(), 0.1)
    with DiLoCo(model, inner, exchange, sync_every=1) as outer:
        for step in range(2):
            model(torch.ones(1, 2)).sum().backward()
            outer.log(loss=float("nan"), step=step)
            inner.step()


@pytest.mark.parametrize("options", [{}, {"min_replicas": 2}], ids=["fixed", "elastic"])
def test_a_run_seen_through_its_store_alone(tmp_path, s3, options):
    """From an empty home, by somebody who launched nothing and knows of no backend."""
    uri = "s3://bucket/runs/one"
    exchanges = [connect(uri, rank=rank, world_size=2, **options) for rank in range(2)]
    run_replicas(logs, exchanges)
    done = diloco(tmp_path, "status", uri, "--json", **s3)
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert (facts["world_size"], facts["silent"], facts["skipped"]) == (2, [], 0)
    for rank, replica in enumerate(facts["replicas"]):
        assert (replica["rank"], replica["epoch"], replica["ended"]) == (rank, 1, "left")
        assert (replica["step"], replica["sync"]) == (2, 2)
        assert replica["metrics"] == {"loss": "nan", "step": 1}
    watched = diloco(tmp_path, "watch", uri, "--json", "--every", "60", **s3)  # its patience, too
    assert watched.returncode == 0, watched.stderr
    changes = [json.loads(line) for line in watched.stdout.splitlines()]
    assert [each["change"] for each in changes] == ["sync", "replica", "replica", "end"]
    below = diloco(tmp_path, "status", "s3://bucket/runs/", **s3)
    assert (below.returncode, below.stdout) == (0, f"{uri}\n")
    nothing = diloco(tmp_path, "status", "s3://bucket/none", **s3)
    assert (nothing.returncode, nothing.stdout) == (3, "")
    assert "there is no run in s3://bucket/none" in nothing.stderr
    store = Store(uri)
    told = RunReader(store.list_keys, store.read).look()
    assert [(key.rank, key.first, key.last) for key in told.history] == [(0, 1, 2), (1, 1, 2)]
    for history in told.history.values():
        assert [line.metrics["step"] for line in history.lines] == [0, 1]


@pytest.mark.processes
def test_a_replica_that_was_killed_is_silent_and_comes_back(tmp_path):
    first = WarmProcess(tmp_path / "first", train_alone, str(tmp_path / "run"), 10**9)
    try:
        live = tmp_path / "run/live/00000.json"
        wait_for(lambda: live.exists() and b'"phase":"training"' in live.read_bytes(), "the start")
    finally:
        first.kill()
    seen = json.loads(diloco(tmp_path, "status", "./run", "--json").stdout)["replicas"]
    assert [(each["epoch"], each["phase"], each["ended"]) for each in seen] == [
        (1, "training", None)
    ]
    second = WarmProcess(tmp_path / "second", train_alone, str(tmp_path / "run"), 10)
    assert second.communicate()[0] == 0
    done = diloco(tmp_path, "status", "./run", "--json")
    seen = json.loads(done.stdout)["replicas"]
    assert [(each["epoch"], each["phase"], each["ended"]) for each in seen] == [(2, "idle", "left")]
    assert done.returncode == 0


REPORTED = """
import torch
from diloco_core import DiLoCo, connect, open_journal


def train(steps):
    exchange = connect()
    model = torch.nn.Linear(2, 1)
    inner = torch.optim.SGD(model.parameters(), 0.01)
    with DiLoCo(model, inner, exchange, sync_every=2) as outer:
        for step in range(steps):
            loss = (model(torch.ones(1, 2)) - 1).square().sum()
            loss.backward()
            outer.log(loss=loss.item())
            inner.step()
            inner.zero_grad()
    if exchange.rank == 1:
        raise ValueError("no data")
"""


@pytest.mark.processes
def test_a_report_of_a_local_run(tmp_path):
    """Two replicas, of which one fails behind the block: by the store alone, and by name."""
    (tmp_path / "reported.py").write_text(REPORTED)
    store, state = str(tmp_path / "store"), tmp_path / "state" / "diloco"
    with LocalProcessExecutor(root=state, env={"PYTHONPATH": python_path(tmp_path)}) as executor:
        handles = executor.launch_replicas(
            2,
            "diloco_core.replica_entrypoint:run",
            {
                "trainer_module": "reported",
                "trainer_fn": "train",
                "trainer_kwargs": {"steps": 6},
                "rendezvous_uri": store,
            },
            run_id="monday",
        )
        ends = executor.collect(handles, timeout=PATIENCE)
    assert [end["status"] for end in ends] == ["succeeded", "failed"]
    done = diloco(tmp_path, "report", store, "-o", "page.html", "--json")
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert (facts["run_id"], facts["world_size"], facts["sync"]) == ("monday", 2, 3)
    assert [(each["rank"], each["epoch"], each["syncs"]) for each in facts["incarnations"]] == [
        (0, 1, 3),
        (1, 1, 3),
    ]
    assert [each["counted"] for each in facts["syncs"]] == [[0, 1]] * 3
    assert all(len(each["losses"]) == 3 for each in facts["incarnations"])
    assert all(each["seconds"]["compute"] > 0 for each in facts["incarnations"])
    assert "<title>Run monday</title>" in (tmp_path / "page.html").read_text()
    words = ("report", "monday", "-o", "named.html")  # the backend knows the store
    named = diloco(tmp_path, *words, XDG_STATE_HOME=str(tmp_path / "state"))
    assert (named.returncode, named.stdout) == (0, "named.html\n"), named.stderr
    text = (tmp_path / "named.html").read_text()
    assert f"Store: {store}<br>" in text
    assert "Rank 1: failed, error: AfterRunError: " in text
    assert "raise ValueError(&quot;no data&quot;)" in text, "the end of its log"


def test_a_journal_in_a_bucket(tmp_path, s3):
    """Written by diloco-core, read by the command; empty objects of strangers are counted."""
    uri = "s3://bucket/kept"
    journal = open_journal(uri)
    handles = [ReplicaHandle(rank, "eks", run_id="monday", world_size=2) for rank in range(2)]
    journal.record_launch(handles, {"gpu": "H100"})
    for state in (ReplicaState.SUCCEEDED, ReplicaState.FAILED):  # the backend's last word counts
        journal.record_end(handles[0], ReplicaStatus(state), None)
    journal.keep_log(handles[0], "a line\n")
    for key in ("kept/journal/monday/x", "kept/journal/monday/9.0.launched.json"):
        boto3.client("s3").put_object(Bucket="bucket", Key=key, Body=b"")
    status = diloco(tmp_path, "status", uri, "--json", **s3)
    facts = json.loads(status.stdout)["journal"]
    assert [(end["rank"], end["state"]) for end in facts["ends"]] == [(0, "failed")]
    assert (facts["launches"][0]["options"], facts["skipped"]) == ({"gpu": "H100"}, 2)
    logs = diloco(tmp_path, "logs", uri, **s3)
    assert (logs.returncode, logs.stdout) == (3, "0 | a line\n")
    assert logs.stderr.endswith("the journal in the store keeps no log of these: 1\n")
