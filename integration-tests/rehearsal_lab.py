"""What the launches of every cloud train in these tests, and how good the resulting model is."""

import os
import subprocess
import sys
import time
from pathlib import Path

import torch
from integration_lab import PATIENCE
from safetensors.torch import load_file
from warm_command import warm_command

from diloco_core import DiLoCo, connect, export
from diloco_local import LocalProcessExecutor

DILOCO = Path(sys.executable).parent / "diloco"
CHAOS = Path(__file__).parents[1] / "tools" / "chaos"
RUN = "diloco_core.replica_entrypoint:run"
# Starts at once, since it imports no torch.
WAITER = """
import os
import time
from pathlib import Path


def waits(folder):
    rank = int(os.environ["REPLICA_RANK"])
    with Path(folder, f"up-{rank}").open("x"):  # fails if this rank is trained twice
        pass
    while not Path(folder, "go").exists():
        time.sleep(0.02)
    return rank
"""
TRAINER = """
import time

import torch
from diloco_core import DiLoCo, connect
from training import CLASSES, FEATURES, examples


def make_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(FEATURES, 64), torch.nn.ReLU(), torch.nn.Linear(64, CLASSES)
    )


class Batches:
    def __init__(self, rank):
        self.rank, self.position = rank, 0

    def __next__(self):
        self.position += 1
        return examples(1_000_003 * (self.rank + 1) + self.position, 16)

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


def train(syncs, step_seconds):
    torch.set_num_threads(1)
    exchange = connect()
    model = make_model()
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = Batches(exchange.rank)
    report = lambda sync: print(sync.to_json(), flush=True)
    outer = DiLoCo(
        model, inner, exchange, sync_every=10, stateful={"batches": batches}, on_sync=report
    )
    with outer:
        for _ in range(outer.batches_to_skip):
            next(batches)
        while outer.committed < syncs:
            images, labels = next(batches)
            torch.nn.functional.cross_entropy(model(images), labels).backward()
            inner.step()
            inner.zero_grad()
            time.sleep(step_seconds)
    return outer.committed
"""
# A replica of several processes.
NODE = """
import hashlib

import torch
from diloco_core import DiLoCo, connect


def train():
    exchange = connect()
    torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with DiLoCo(model, inner, exchange, sync_every=5) as outer:
        while outer.inner_steps < 10:
            seed = 1000 * exchange.rank + 100 * exchange.process + outer.inner_steps
            x = torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))
            (model(x) - x).square().mean().backward()
            inner.step()
            inner.zero_grad()
    values = b"".join(value.numpy().tobytes() for value in model.state_dict().values())
    torch.distributed.destroy_process_group()
    return [exchange.process, exchange.processes, hashlib.sha256(values).hexdigest()]
"""


def wait_for(condition, what):
    """The first true value of ``condition()``."""
    deadline = time.monotonic() + PATIENCE
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited {PATIENCE:g} s for {what}"
        time.sleep(0.02)
    return found


def write_programs(folder):
    """The modules that the replicas run: ``jobs_waiter``, ``jobs_trainer`` and ``jobs_node``."""
    (folder / "jobs_waiter.py").write_text(WAITER)
    (folder / "jobs_node.py").write_text(NODE)
    (folder / "jobs_trainer.py").write_text(TRAINER)


def python_path(folder):
    """PYTHONPATH with the programs that are in a folder, and all that this process can import."""
    return os.pathsep.join([str(CHAOS), str(folder), *(entry for entry in sys.path if entry)])


def empty_home(folder, **variables):
    """The environment of somebody whose home is empty, and who knows of no cluster."""
    known = {"KUBECONFIG", "COLUMNS", "NO_COLOR"}
    return {
        **{name: value for name, value in os.environ.items() if name not in known},
        "HOME": str(folder / "home"),
        "PYTHONPATH": python_path(folder),
        **variables,
    }


def diloco(folder, *words, **variables):
    """Run the command, from a home that is empty."""
    return warm_command(folder, words, empty_home(folder, **variables))


def console_script(folder, *words, **variables):
    """Run the command as it is installed, from a home that is empty."""
    return subprocess.run(
        [DILOCO, *words],
        cwd=folder,
        env=empty_home(folder, **variables),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


def elastic(uri, syncs, step_seconds):
    """Arguments of ``RUN`` for a run that loses replicas and gets them back."""
    return {
        "trainer_module": "jobs_trainer",
        "trainer_kwargs": {"syncs": syncs, "step_seconds": step_seconds},
        "connect_options": {"min_replicas": 2, "grace": 3.0, "topology": "sharded"},
        "rendezvous_uri": uri,
    }


def train_alone(uri, steps):
    """Train a run of one replica, without a sync before its last step."""
    model = torch.nn.Linear(2, 1)
    inner = torch.optim.SGD(model.parameters(), 0.1)
    with DiLoCo(model, inner, connect(uri, rank=0, world_size=1), sync_every=1000):
        for _ in range(steps):
            model(torch.ones(1, 2)).sum().backward()
            inner.step()


def train_on_nodes(executor, uri, processes=2):
    """Launch two replicas with eight GPUs each, which the processes only pretend to have.

    Each replica trains as two processes. Returns the request of the launch as text.
    """
    arguments = {"trainer_module": "jobs_node", "processes": processes, "rendezvous_uri": uri}
    planned = executor.plan(2, RUN, arguments, run_id="nodes", gpu="H100:8")
    handles = executor.launch_replicas(2, RUN, arguments, run_id="nodes", gpu="H100:8")
    results = executor.collect(handles, timeout=PATIENCE)
    assert [each["status"] for each in results] == ["succeeded"] * 2, results
    (process, number, first), second = (each["result"] for each in results)
    assert (process, number) == (0, processes)
    assert second == [0, processes, first], "both replicas hold the same bytes"
    log = list(executor.log_iter(handles[1]))
    assert any(line.startswith("[process0]:") and "outer step 2" in line for line in log), log
    return str(planned.requests)


def processes_of(mark, value):
    """Every process that has a mark in its environment."""
    wanted, found = f"{mark}={value}".encode(), []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def loss_of(path):
    """The loss of an exported model on images that no replica has seen."""
    sys.path.insert(0, str(CHAOS))
    try:
        from training import examples
    finally:
        sys.path.remove(str(CHAOS))
    values = load_file(path)
    images, labels = examples(7, 1000)
    hidden = torch.relu(images @ values["0.weight"].T + values["0.bias"])
    logits = hidden @ values["2.weight"].T + values["2.bias"]
    return float(torch.nn.functional.cross_entropy(logits, labels))


def synced(executor, handle, count):
    """A condition: the replica runs, and its log has the reports of so many syncs."""
    return lambda: executor.poll(handle) == "running" and count <= len(
        [line for line in executor.log_iter(handle) if line.startswith("{")]
    )


def losses_beside_undisturbed(uri, syncs, folder, variables):
    """The loss of a run's model, and of the same run by undisturbed processes on this machine."""
    undisturbed = str(folder / "undisturbed")
    local = LocalProcessExecutor(root=folder / "local", env=variables)
    handles = local.launch_replicas(4, RUN, elastic(undisturbed, syncs, 0.0), run_id="undisturbed")
    assert {result["result"] for result in local.collect(handles, timeout=PATIENCE)} == {syncs}
    losses = []
    for number, place in enumerate((uri, undisturbed)):
        export(place, folder / f"{number}.safetensors")
        losses.append(loss_of(folder / f"{number}.safetensors"))
    return losses
