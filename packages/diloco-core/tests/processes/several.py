"""Replicas of one or several processes, as torchrun would start them, and what they train."""

import contextlib
import functools
import json
import logging
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from pathlib import Path

import torch
from torch import distributed
from warm_processes import WarmProcess

from diloco_core import ConfigurationError, DiLoCo, Seconds, SyncError, connect
from diloco_core._model._values import plain_name
from diloco_core._processes import _values
from diloco_core._processes._values import reshard

BATCH = 8


class Block(torch.nn.Module):
    """A layer with a dimension that no number of processes divides."""

    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(7, 10)
        self.down = torch.nn.Linear(10, 7)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Net(torch.nn.Module):
    """Three layers and a head; one parameter is frozen."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(Block() for _ in range(3))
        self.head = torch.nn.Linear(7, 1)
        self.head.bias.requires_grad_(False)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def unreadable(_):
    """Stand for a device whose memory cannot be read any more."""
    raise RuntimeError("CUDA error: an illegal memory access was encountered" + 500 * ". Why? So!")


class Codes(torch.Tensor):
    """A tensor of another class, as libraries make them for quantised weights."""


class KeepsWeights(torch.optim.Optimizer):
    """Steps a copy of each parameter, and writes it over the parameter."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                kept = self.state[parameter].setdefault("kept", parameter.detach().clone())
                kept -= 0.01 * parameter.grad
                parameter.copy_(kept)


def dressed(model, how):
    """The model as people also have it: with tied weights, checkpoints, compiled, or empty."""
    if how == "tied":
        model.layers[2].up.weight = model.layers[0].up.weight
    elif how == "checkpointed":
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

        for number, layer in enumerate(model.layers):
            model.layers[number] = checkpoint_wrapper(layer)
    elif how == "compiled":
        warnings.simplefilter("default")  # of torch's own
        for layer in model.layers:
            layer.compile(backend="eager")
    elif how == "meta":
        model.to("meta")
    elif how == "buffers":  # some that are saved, and one that comes later and is not
        norm = torch.nn.BatchNorm1d(7).double()
        model.layers[2] = torch.nn.Sequential(norm, model.layers[2])
        norm.register_forward_hook(
            lambda module, *_: module.register_buffer("cache", torch.ones(3), persistent=False)
        )
    elif how == "stages":  # each process has other layers than the next one
        model.layers[1 - int(os.environ["RANK"])] = torch.nn.Identity()
    elif how == "quantised":
        model.layers[0].up.weight = torch.nn.Parameter(model.layers[0].up.weight.as_subclass(Codes))
    elif how == "views":  # of each other's memory
        up = model.layers[0].up.weight
        model.layers[1].up.weight = torch.nn.Parameter(up.data.view(10, 7))
    return model


def wrapped(model, kind, group=None, how=None):
    """The model as the processes of a replica hold it together."""
    if kind == "ddp":
        return torch.nn.parallel.DistributedDataParallel(model, process_group=group)
    if kind == "plain":
        return model
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    processes = distributed.get_world_size()
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    if kind == "parts":
        for layer in model.layers:
            parallelize_module(layer, init_device_mesh("cpu", (processes,)), plan)
        return model
    shape = (processes,) if kind == "fsdp" else (2, processes // 2)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "part")[: len(shape)])
    if kind == "tensor":
        for layer in model.layers:
            parallelize_module(layer, mesh["part"], plan)
        mesh = mesh["data"]
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if how == "bf16" else None
    more = {} if policy is None else {"mp_policy": policy}
    if how == "offload":
        more["offload_policy"] = CPUOffloadPolicy(pin_memory=False)  # there is no GPU to pin it for
    for layer in model.layers if how != "tied" else ():  # FSDP2 keeps ties in one group alone
        fully_shard(layer, mesh=mesh, **more)
    fully_shard(model, mesh=mesh, **more)
    return model.to_empty(device="cpu") if how == "meta" else model


def spanning(model, by):
    """The model as processes of two replicas hold it together: all, or one of each replica."""
    from torch.distributed.fsdp import fully_shard

    if by == "fsdp":
        return fully_shard(model)
    pairs = [distributed.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    return wrapped(model, "ddp", pairs[distributed.get_rank() % 2])


def part_of(kind, batch):
    """The rows of a batch that this process learns from: half of them where two share the work."""
    if kind in {"plain", "parts"}:
        return batch
    process, processes = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if kind == "tensor":  # processes with the same data hold parts of the layers
        process, processes = process // (processes // 2), 2
    return [row[process::processes] for row in batch]


def member(folder, kind, case):
    """Train as one process of a replica; its part of the result goes into a file."""
    folder = Path(folder)
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.INFO)
    process, processes = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    group = None
    if case.get("one_world"):  # two replicas of two processes share torch's default group
        number = 2 * int(os.environ["REPLICA_RANK"]) + process
        meeting = f"file://{folder}/meeting"
        distributed.init_process_group("gloo", init_method=meeting, rank=number, world_size=4)
        groups = [distributed.new_group(ranks) for ranks in ([0, 1], [2, 3])]
        group = groups[number // 2]
    elif processes > 1:
        meeting = f"file://{folder}/meeting-{os.environ['REPLICA_RANK']}"
        distributed.init_process_group(
            "gloo", init_method=meeting, rank=process, world_size=processes
        )
    settings = {**case.get("connect", {}), **case.get("connect_on", {}).get(process, {})}
    exchange = connect(folder / "store", process_group=group, **settings)
    torch.manual_seed(0)
    how = case.get("how")
    model = Net().double()
    # A frozen parameter would have to be loaded where the model begins empty.
    model.head.bias.requires_grad_(how == "meta")
    if how == "tied" or kind != "plain" or processes > 1:
        model = dressed(model, how)
    model = wrapped(model, kind, group, how)
    if case.get("spans"):
        model = spanning(model, case["spans"])
    make = torch.optim.SGD if case.get("sgd") else torch.optim.AdamW
    inner = {"lr": 0.01, **case.get("inner", {})}
    optimizer = make([p for p in model.parameters() if p.requires_grad], **inner)
    if case.get("foreign") == process:
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
    if case.get("evaluate"):
        with torch.no_grad():
            model(torch.ones(BATCH, 7).double())
    reports, seen, shown = [], [], []

    def on_sync(report):
        reports.append(report)
        seen.append(outer.committed)

    options = {"sync_every": 6, "on_sync": on_sync, **case.get("options", {})}
    options |= case.get("options_on", {}).get(process, {})
    if "seconds" in case:
        options["sync_every"] = Seconds(case["seconds"])
    if case.get("keeps_weights"):
        optimizer = KeepsWeights(optimizer.param_groups[0]["params"])
    optimizers = [optimizer]
    if case.get("alternates"):
        first, *others = optimizer.param_groups[0]["params"]
        optimizers = [torch.optim.SGD([first], lr=0.01), torch.optim.SGD(others, lr=0.01)]
    if case.get("groups"):
        inner = getattr(model, "module", model)
        groups = [{"params": inner.layers, "lr": 0.4}, {"params": [inner.head.weight]}]
        options |= {"outer_groups": groups, "clip": "median"}
    if "seconds_on" in case:
        options["sync_every"] = Seconds(100 if case["seconds_on"] == process else 1000)
    raised, began_at, batches = None, None, 0
    if case.get("told_at_join", [None])[0] == process:
        told_by = (folder / "store", case["told_at_join"][1])
        threading.Thread(target=tell_when_joined, args=told_by, daemon=True).start()
    try:
        kind_of_loop = type("Mine", (DiLoCo,), {}) if case.get("subclass") else DiLoCo
        loop = kind_of_loop(model, optimizers, exchange, **options)
        with contextlib.nullcontext(loop) if case.get("never_entered") else loop as outer:
            began_at = outer.inner_steps
            if case.get("asks"):
                assert outer.batches_to_skip >= 0
            if case.get("kill_after", [None])[0] == process:
                kill = functools.partial(os.kill, os.getpid(), signal.SIGKILL)
                threading.Timer(case["kill_after"][1], kill).start()
            while outer.inner_steps < case.get("steps", 20) and batches < 1000:
                time.sleep(case.get("pause", 0))
                data = torch.Generator().manual_seed(1000 * exchange.rank + outer.inner_steps)
                x = torch.randn(BATCH, 7, generator=data, dtype=torch.float64)
                if case.get("apart"):
                    x += process
                if case.get("remade_at") == outer.inner_steps:
                    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01)]
                if case.get("unfrozen_at") == outer.inner_steps:
                    model.requires_grad_(True)
                if case.get("fork") == [outer.inner_steps, process]:
                    fork()
                x, y = part_of(kind, [x, x.sum(1, keepdim=True)])
                loss = (model(x) - y).square().mean()
                if case.get("log"):
                    outer.log(loss=loss.item(), process=process)
                if case.get("nan_at") == outer.inner_steps:
                    loss = loss * float("nan")
                if case.get("unreduced"):
                    model.set_requires_gradient_sync(False)
                loss.backward()
                if case.get("signal") == [outer.inner_steps, process]:
                    for _ in range(case.get("times", 1)):
                        os.kill(os.getpid(), signal.SIGTERM)
                    while not outer._ending.asked:  # the others wait for this one's next step
                        time.sleep(0.01)
                if case.get("raise_on") == [outer.inner_steps, process]:
                    raise ArithmeticError("a bad batch")
                if (rate := case.get("rate")) and (outer.inner_steps, process) == tuple(rate[:2]):
                    for value in rate[2:]:
                        outer.set_outer_lr(value)
                if options.get("weight") == "tokens" or "signs" in case:
                    sign = case.get("signs", [1, 1])[process % 2]
                    outer.count_tokens(sign * len(x) * (1 + exchange.rank))
                if case.get("unreadable") == [outer.inner_steps, process]:
                    _values.part_here = unreadable
                if outer.inner_steps in case.get("global_at", []):
                    state = outer.global_state_dict()
                    shown.append({name: tensor.tolist() for name, tensor in state.items()})
                    with contextlib.suppress(ConfigurationError):
                        outer.state_dict()
                        assert processes == 1
                if outer.inner_steps in case.get("evaluated_at", []):
                    shown.append(evaluated(outer, model, optimizer, x))
                if case.get("load_at") == outer.inner_steps:
                    model.load_state_dict({k: v / 2 for k, v in model.state_dict().items()})
                if case.get("destroy_at") == outer.inner_steps:
                    distributed.destroy_process_group()
                if case.get("kill") == [outer.inner_steps, process]:
                    os.kill(os.getpid(), case.get("by", signal.SIGKILL))
                if case.get("hang") == [outer.inner_steps, process]:
                    while not (folder / "0-0.json").exists():
                        time.sleep(0.1)
                if case.get("leave") == [outer.inner_steps, process]:
                    break
                batches += 1
                # Where they alternate, the others step after every second batch.
                for each in optimizers[: 1 + batches % 2]:
                    each.step()
                    each.zero_grad()
                if case.get("evaluate"):
                    with torch.no_grad():
                        model(x)  # leaves the root of FSDP whole
            if case.get("alone") == process:
                with outer.global_model():
                    pass
            if case.get("load_last"):
                state = model.state_dict()
                trained = {name: values / 2 for name, values in state.items() if "bias" not in name}
                model.load_state_dict(state | trained)
    except Exception as error:
        raised = f"{type(error).__name__}: {error}"
    whole = {
        name.removeprefix("module.").replace("_checkpoint_wrapped_module.", ""): (
            value.full_tensor() if hasattr(value, "full_tensor") else value
        )
        .detach()
        .as_subclass(torch.Tensor)
        for name, value in model.state_dict().items()
    }
    name = f"{exchange.rank}-{process}"
    torch.save(whole, folder / f"{name}.pt")
    outcome = {
        "committed": outer.committed if raised is None else None,
        "inner_steps": outer.inner_steps if began_at is not None else None,
        "reports": [report.sync for report in reports],
        "seen": seen,
        "rates": [report.outer_lr for report in reports],
        "raised": raised,
        "began_at": began_at,
        "shown": shown,
        "place": [exchange.rank, exchange.world_size, exchange.process, exchange.processes],
    }
    (folder / f"{name}.json").write_text(json.dumps(outcome))
    if processes > 1 and raised is None:
        distributed.destroy_process_group()


def plain_values(model):
    """Copies of the whole values of a model, by the names of a plain one."""
    names = {name: plain_name(model, name) for name in model.state_dict()}
    return {
        names[name]: (part.full_tensor() if hasattr(part, "full_tensor") else part).detach().clone()
        for name, part in model.state_dict().items()
    }


def evaluated(outer, model, optimizer, x):
    """Return what the committed model says, and whether all is as before, also after an error."""
    own, gradients = plain_values(model), [parameter.grad for parameter in model.parameters()]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    trained[0].requires_grad_(False)
    with contextlib.suppress(ArithmeticError), outer.global_model(), torch.no_grad():
        inside, answers = plain_values(model), model(x).flatten().tolist()
        model.load_state_dict(model.state_dict())  # what is loaded here is no concern
        state = outer.global_state_dict()
        refused = []
        for act in (outer.flush, optimizer.step, outer.global_model().__enter__):
            try:
                act()
            except SyncError as error:
                refused.append("came inside `with outer.global_model()" in str(error))
        model.requires_grad_(False)
        raise ArithmeticError
    for parameter in trained:
        parameter.requires_grad_(True)
    reshard(model)
    assert refused == [True] * 3
    assert all(torch.equal(inside[name], each) for name, each in state.items())
    assert all(torch.equal(own[name], each) for name, each in plain_values(model).items())
    assert all(each.grad is was for each, was in zip(model.parameters(), gradients, strict=True))
    return {"answers": answers, "differ": any(not torch.equal(own[n], inside[n]) for n in own)}


def tell_when_joined(store, by):
    """Send this process a signal once it waits for its leader, which waits in the run."""
    while not (any(store.glob("beats/*")) and follows()):
        time.sleep(0.01)
    os.kill(os.getpid(), by)


def follows():
    """Say whether the main thread does what the leader says."""
    frames = traceback.walk_stack(sys._current_frames()[threading.main_thread().ident])
    return any(frame.f_code.co_name == "follow" for frame, _ in frames)


def fork():
    """Have a child that leaves the block by itself."""
    warnings.simplefilter("ignore")  # there are threads
    if not (child := os.fork()):
        raise SystemExit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3


def trained(folder, name, replicas, case):
    """Run replicas, each given as (kind, processes); return the outcomes of all processes.

    Of each: what it has trained, and what it told.
    """
    for (rank, process), (status, errors) in run(folder, name, replicas, case).items():
        assert status == 0, f"rank {rank}, process {process}: {errors}"
    return results(folder / name, replicas)


def run(folder, name, replicas, case):
    """Run replicas; return for each of their processes its exit status and what it has logged."""
    started = {rank: start(folder / name, replicas, rank, case) for rank in range(len(replicas))}
    return {
        (rank, process): ended
        for rank, processes in started.items()
        for process, ended in enumerate(wait(processes))
    }


def start(folder, replicas, rank, case):
    """Start the processes of one replica, and return them."""
    folder.mkdir(exist_ok=True)
    attempt = len(list(folder.glob(f"output-*-{rank}-0")))
    (folder / f"meeting-{rank}").unlink(missing_ok=True)
    kind, processes = replicas[rank]
    started = []
    for process in range(processes):
        variables = {
            "REPLICA_RANK": str(rank),
            "REPLICA_WORLD_SIZE": str(len(replicas)),
            "RANK": str(process),
            "WORLD_SIZE": str(processes),
        }
        if processes > 1:
            variables |= {"LOCAL_RANK": str(process), "LOCAL_WORLD_SIZE": str(processes)}
        output = folder / f"output-{attempt}-{rank}-{process}"
        started.append(WarmProcess(output, member, str(folder), kind, case, **variables))
    return started


def wait(processes):
    """Return the exit status of each process and what it has logged."""
    ended = [process.communicate() for process in processes]
    return [(status, errors) for status, _, errors in ended]


def results(folder, replicas):
    """Return what each process of each replica has trained, and what it told."""
    return [
        (
            torch.load(folder / f"{rank}-{process}.pt"),
            json.loads((folder / f"{rank}-{process}.json").read_text()),
        )
        for rank, (_, processes) in enumerate(replicas)
        for process in range(processes)
    ]
