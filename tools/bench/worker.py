"""One replica of the benchmark; started by ``run.py``."""

from __future__ import annotations

import io
import json
import os
import resource
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist

from diloco_core import DiLoCo, ObjectStoreAllReduce, connect

if TYPE_CHECKING:
    from collections.abc import Callable

CHUNK = 2**20
WARM_UP = 3  # from then on, files of earlier rounds are written over


def make_model(parameters: int) -> torch.nn.ParameterList:
    """Tensors of the shapes of a transformer (matrices, vectors) that add up to ``parameters``."""
    width = 512
    sizes: list[int] = []
    while sum(sizes) + 12 * width * width + 9 * width <= parameters:
        sizes += [
            4 * width * width,
            4 * width,
            4 * width * width,
            width,
            3 * width * width,
            3 * width,
            width * width,
            width,
        ]
    sizes.append(parameters - sum(sizes))
    generator = torch.Generator().manual_seed(0)
    return torch.nn.ParameterList(torch.randn(size, generator=generator) for size in sizes if size)


class Gloo:
    """Gloo without torch's default process group: a process in one may not sync over a store.

    Args:
        folder: Where its processes meet.
        rank: Of this process.
        world: How many there are.
    """

    def __init__(self, folder: Path, rank: int, world: int) -> None:
        store = dist.FileStore(str(folder / "gloo"), world)
        self._group = dist.ProcessGroupGloo(store, rank, world, timedelta(minutes=30))

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Replace a tensor by its sum over all processes."""
        self._group.allreduce([tensor]).wait()

    def barrier(self) -> None:
        """Wait for all processes."""
        self._group.barrier().wait()


class Contenders:
    """Everything that is timed. All work in place on the same amount of data."""

    def __init__(self, folder: Path, rank: int, world: int, parameters: int, peer: Gloo) -> None:
        self.folder, self.rank, self.world, self.peer = folder, rank, world, peer
        self.parameters = parameters
        self.model = self._model()
        self.tensors = [tensor.detach() for tensor in self.model]
        self.size = sum(tensor.numel() for tensor in self.tensors)
        self.flat = torch.randn(self.size)
        self.result = torch.randn(self.size)
        self.copy = torch.nn.Parameter(torch.cat([tensor.view(-1) for tensor in self.tensors]))
        self.sgd = torch.optim.SGD([self.copy], lr=0.7, momentum=0.9, nesterov=True, fused=True)
        self.naive = [torch.nn.Parameter(tensor.clone()) for tensor in self.tensors]
        self.naive_sgd = torch.optim.SGD(self.naive, lr=0.7, momentum=0.9, nesterov=True)
        self.rounds = 0
        self.mean = ObjectStoreAllReduce(str(folder / "mean"), rank=rank, world_size=world)
        self.mean.mean([torch.zeros(8)])
        self.trigger = torch.optim.SGD(
            self.model.parameters(), lr=1.0
        )  # without gradients: a step changes nothing
        exchange = connect(str(folder / "outer"), rank=rank, world_size=world)
        self.outer = DiLoCo(self.model, self.trigger, exchange, sync_every=1)
        self.outer.__enter__()
        self.elastic = {topology: self._elastic(topology) for topology in ("sharded", "gather")}

    def _model(self) -> torch.nn.ParameterList:
        model = make_model(self.parameters)
        with torch.no_grad():
            for tensor in model:
                tensor.add_(0.01 * self.rank)
        return model

    def _elastic(
        self, topology: Literal["sharded", "gather"]
    ) -> tuple[DiLoCo, torch.optim.Optimizer]:
        """An elastic outer loop over a model like that of the others."""
        model = self._model()
        trigger = torch.optim.SGD(model.parameters(), lr=1.0)
        exchange = connect(
            str(self.folder / topology),
            rank=self.rank,
            world_size=self.world,
            min_replicas=self.world,
            topology=topology,
        )
        outer = DiLoCo(model, trigger, exchange, sync_every=1, save_inner_every=0)
        outer.__enter__()
        return outer, trigger

    def elastic_sharded_step(self) -> None:
        """Our outer step in an elastic run, sharded."""
        self.elastic["sharded"][1].step()

    def elastic_gather_step(self) -> None:
        """Our outer step in an elastic run, gather (the state is published every fourth time)."""
        self.elastic["gather"][1].step()

    def exchange(self) -> None:
        """Our mean of one flat tensor."""
        self.mean.mean([self.result])

    def plain_copy(self) -> None:
        """Every value, read and written once."""
        self.flat.copy_(self.result)

    def gloo(self) -> None:
        """Gloo's mean of one flat tensor."""
        self.peer.all_reduce(self.flat)
        self.flat.div_(self.world)

    def exchange_floor(self) -> None:
        """The bytes of a mean, in fresh files."""
        self._floor(1, reuse=False)

    def exchange_floor_reused(self) -> None:
        """The bytes of a mean, in files that are written over."""
        self._floor(1, reuse=True)

    def exchange_floor_values(self) -> None:
        """The same, with values written from where they are, and means read into place."""
        self._floor(1, reuse=True, values=memoryview(self.result.numpy()).cast("B"))

    def outer_floor(self) -> None:
        """The bytes of an outer step (the published shard has the momentum too), in new files."""
        self._floor(2, reuse=False)

    def outer_floor_reused(self) -> None:
        """The bytes of an outer step, in files that are written over."""
        self._floor(2, reuse=True)

    def outer_step(self) -> None:
        """Our outer step."""
        self.trigger.step()

    def gloo_step(self) -> None:
        """The outer step over gloo, in place: delta, all_reduce, fused SGD, adopt."""
        offset = 0
        copy = self.copy.detach()
        for tensor in self.tensors:
            part = slice(offset, offset + tensor.numel())
            torch.sub(copy[part], tensor.view(-1), out=self.flat[part])
            offset += tensor.numel()
        self.peer.all_reduce(self.flat)
        self.flat.div_(self.world)
        self.copy.grad = self.flat
        self.sgd.step()
        offset = 0
        for tensor in self.tensors:
            tensor.view(-1).copy_(copy[offset : offset + tensor.numel()])
            offset += tensor.numel()

    def torch_save_step(self) -> None:
        """The outer step as usually written first: state dicts by torch.save, read and averaged."""
        own = self.folder / f"naive-{self.rounds}-{self.rank}.pt"
        deltas = {
            str(i): c.detach() - t
            for i, (c, t) in enumerate(zip(self.naive, self.tensors, strict=True))
        }
        buffer = io.BytesIO()
        torch.save(deltas, buffer)
        own.with_suffix(".tmp").write_bytes(buffer.getvalue())
        own.with_suffix(".tmp").rename(own)
        self.peer.barrier()
        everybody = [
            torch.load(io.BytesIO((self.folder / f"naive-{self.rounds}-{r}.pt").read_bytes()))
            for r in range(self.world)
        ]
        for index, parameter in enumerate(self.naive):
            parameter.grad = torch.stack([deltas[str(index)] for deltas in everybody]).mean(0)
        self.naive_sgd.step()
        self.naive_sgd.zero_grad()
        for tensor, parameter in zip(self.tensors, self.naive, strict=True):
            tensor.copy_(parameter.detach())
        self.peer.barrier()
        own.unlink()

    def _floor(self, published: int, *, reuse: bool, values: memoryview | None = None) -> None:
        """Send contributions to the others' shards, read theirs; send the own shard, read others'.

        Written from ``values`` and read into them, or from and into one buffer that stays in the
        processor's cache.
        """
        buffer = memoryview(bytearray(CHUNK))
        size, shard = 4 * self.size, 4 * self.size // self.world
        kind = f"{published}-reused" if reuse else "fresh"
        delta = [self.folder / f"floor-{kind}-delta-{rank}" for rank in range(self.world)]
        state = [self.folder / f"floor-{kind}-state-{rank}" for rank in range(self.world)]
        self._write(delta[self.rank], size - shard, buffer, values)
        self.peer.barrier()
        for other in self._others():
            self._read(delta[other], shard * (self.rank - (self.rank > other)), shard, buffer)
        self._write(state[self.rank], published * shard, buffer, values)
        self.peer.barrier()
        for other in self._others():
            mean = None if values is None else values[other * shard : (other + 1) * shard]
            self._read(state[other], 0, shard, buffer, mean)
        self.peer.barrier()
        if not reuse:
            delta[self.rank].unlink()
            state[self.rank].unlink()

    def _others(self) -> list[int]:
        return [rank for rank in range(self.world) if rank != self.rank]

    @staticmethod
    def _write(path: Path, size: int, buffer: memoryview, values: memoryview | None = None) -> None:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
        done = 0
        while done < size:
            end = min(done + CHUNK, size)
            done += os.write(
                descriptor, buffer[: end - done] if values is None else values[done:end]
            )
        os.close(descriptor)

    @staticmethod
    def _read(
        path: Path, offset: int, size: int, buffer: memoryview, values: memoryview | None = None
    ) -> None:
        descriptor = os.open(path, os.O_RDONLY)
        done = 0
        while done < size:
            end = min(done + CHUNK, size)
            into = buffer[: end - done] if values is None else values[done:end]
            done += os.preadv(descriptor, [into], offset + done)
        os.close(descriptor)

    def disturb(self) -> None:
        """Move the local parameters, as training does."""
        for tensor in self.tensors:
            tensor.mul_(0.999)
        self.flat.fill_(1.0)
        self.result.fill_(1.0)
        self.rounds += 1


def times(
    folder: Path, rank: int, world: int, parameters: int, rounds: int, peer: Gloo
) -> dict[str, list[float]]:
    """Seconds of every contender in every round, from barrier to barrier."""
    contenders = Contenders(folder, rank, world, parameters, peer)
    table: dict[str, Callable[[], None]] = {
        "plain copy": contenders.plain_copy,
        "exchange": contenders.exchange,
        "gloo": contenders.gloo,
        "exchange floor": contenders.exchange_floor,
        "exchange floor, files reused": contenders.exchange_floor_reused,
        "exchange floor, values": contenders.exchange_floor_values,
        "outer step": contenders.outer_step,
        "elastic sharded step": contenders.elastic_sharded_step,
        "elastic gather step": contenders.elastic_gather_step,
        "gloo step": contenders.gloo_step,
        "outer floor": contenders.outer_floor,
        "outer floor, files reused": contenders.outer_floor_reused,
        "torch.save step": contenders.torch_save_step,
    }
    seconds: dict[str, list[float]] = {name: [] for name in table}
    for number in range(rounds + WARM_UP):
        for name, contender in table.items():
            contenders.disturb()
            peer.barrier()
            start = time.perf_counter()
            contender()
            peer.barrier()
            if number >= WARM_UP:
                seconds[name].append(time.perf_counter() - start)
    # A step after what the other contenders have done to the model, so that nothing is put back
    contenders.outer_step()
    contenders.outer.__exit__(None, None, None)
    for outer, _ in contenders.elastic.values():
        outer.__exit__(None, None, None)
    contenders.mean.close()
    return seconds


def memory(
    folder: Path, rank: int, world: int, parameters: int, rounds: int, **options: Any
) -> dict[str, list[int]]:
    """Growth of peak resident memory from before the model is made to after some outer steps."""

    def outer_steps(name: str, model: torch.nn.ParameterList, steps: int) -> None:
        exchange = connect(str(folder / name), rank=rank, world_size=world, **options)
        trigger = torch.optim.SGD(
            model.parameters(), lr=1.0
        )  # without gradients: a step changes nothing
        with DiLoCo(model, trigger, exchange, sync_every=1, save_inner_every=0):
            for _ in range(steps):
                with torch.no_grad():
                    for tensor in model:
                        tensor.mul_(0.999)
                trigger.step()

    outer_steps("warm", make_model(1000), 1)
    before = _peak_bytes()
    outer_steps("outer", make_model(parameters), min(rounds, 6))
    return {"bytes": [_peak_bytes() - before]}


def _peak_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def main() -> None:
    """Run one replica; rank 0 writes the result."""
    what, folder, world, parameters, rounds, rank = (
        sys.argv[1],
        Path(sys.argv[2]),
        *map(int, sys.argv[3:]),
    )
    torch.set_num_threads(1)
    peer = Gloo(folder, rank, world)
    if what == "times":
        result = times(folder, rank, world, parameters, rounds, peer)
    else:
        options = {} if what == "fixed" else {"min_replicas": world, "topology": what}
        result = memory(folder, rank, world, parameters, rounds, **options)
        (folder / f"bytes-{rank}.json").write_text(json.dumps(result["bytes"]))
        peer.barrier()
        files = [folder / f"bytes-{each}.json" for each in range(world)]
        result = {"bytes": [value for file in files for value in json.loads(file.read_text())]}
    if rank == 0:
        (folder / "result.json").write_text(json.dumps(result))
    peer.barrier()


if __name__ == "__main__":
    main()
