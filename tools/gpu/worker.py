"""One process of a replica for :mod:`check`: trains, and writes down what it saw."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch

from diloco_core import DiLoCo, SyncReport, connect, export

H, PERIODS, WARM = 20, 5, 25


def main(settings: dict[str, Any]) -> None:
    """Train as the settings say; the result goes into ``result-{rank}-{process}.json``."""
    folder, train = Path(settings["folder"]), settings.get("train", {})
    processes = train.get("processes", 1)
    process = int(os.environ.get("RANK", "0"))
    rank = int(os.environ["REPLICA_RANK"])
    device = "cpu"
    if settings["gpus"]:
        number = (rank * processes + process) % settings["gpus"]
        device = f"cuda:{number}"
        torch.cuda.set_device(number)
    if processes > 1:
        # NCCL wants a GPU for every process.
        backend = "nccl" if settings["gpus"] >= 2 * processes else "gloo"
        meeting = f"file://{folder}/meeting-{rank}"
        torch.distributed.init_process_group(
            backend, init_method=meeting, rank=process, world_size=processes
        )
    exchange = connect(folder / "run", **settings.get("connect", {}))
    model, width = make_model(small=settings["small"])
    model = model.to(device, torch.bfloat16 if train.get("bf16") else None)
    inner = model
    if train.get("wrap") == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(model)
    elif train.get("wrap") == "fsdp":
        shard(model)
    dtype = next(model.parameters()).dtype
    on_gpu = bool(settings["gpus"])
    fused = bool(train.get("fused")) and on_gpu
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused)
    forward = torch.compile(model) if train.get("compile") and on_gpu else model
    data = torch.Generator(device=device).manual_seed(100 * rank + process)
    reports: list[SyncReport] = []
    alone, syncing = [], []
    with DiLoCo(
        model,
        optimizer,
        exchange,
        sync_every=H,
        on_sync=reports.append,
        **settings.get("outer", {}),
    ) as outer:
        for step in range(H * PERIODS):
            start, synced, under_way = now(), len(reports), outer.syncing
            x = torch.randn(8, 128, width, generator=data, device=device, dtype=dtype)
            loss = (forward(x) - x.mean(-1, keepdim=True)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            # Steps that begin or end a sync are not among the others.
            if step >= WARM and len(reports) == synced and outer.syncing == under_way:
                (syncing if under_way else alone).append(now() - start)
    result = {
        "digest": digest(inner),
        "exported": None,
        "alone": alone,
        "syncing": syncing,
        "report": json.loads(reports[-1].to_json()),
        "gpu_bytes": torch.cuda.max_memory_allocated() if on_gpu else 0,
        "host_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    if (rank, process) == (0, 0):
        export(folder / "run", folder / "model.safetensors")
        from safetensors.torch import load_file

        again, _ = make_model(small=settings["small"])
        again = again.to(dtype)
        again.load_state_dict(load_file(folder / "model.safetensors"))
        result["exported"] = digest(again)
    (folder / f"result-{rank}-{process}.json").write_text(json.dumps(result))
    if processes > 1:
        torch.distributed.destroy_process_group()


def make_model(*, small: bool) -> tuple[torch.nn.Module, int]:
    """A transformer of 100 million parameters, or a small one, and the width of its inputs."""
    torch.manual_seed(0)
    width, layers = (64, 2) if small else (1024, 8)
    block = torch.nn.TransformerEncoderLayer(
        width, 8, 4 * width, dropout=0.0, batch_first=True, norm_first=True
    )
    encoder = torch.nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
    return torch.nn.Sequential(encoder, torch.nn.Linear(width, 1)), width


def shard(model: torch.nn.Module) -> None:
    """Wrap the layers and the model for FSDP2."""
    from torch.distributed.fsdp import fully_shard

    for layer in model[0].layers:  # type: ignore[index,union-attr]
        fully_shard(layer)
    fully_shard(model)


def digest(model: torch.nn.Module) -> str:
    """A digest of the bytes of a model's state."""
    found = hashlib.sha256()
    for value in model.state_dict().values():
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        found.update(whole.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def now() -> float:
    """The time, once the GPU has done its work."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
