"""Time of a launch and a look of many ranks, beside an asyncio loop of the same client calls.

    python packages/diloco-modal/benchmarks/scale.py [ranks] [rounds]

The loop starts each call, writes one entry of a Dict for it, and later asks for its result without
waiting; 32 at once, as the executor does. An executor that has not launched the run reads its
record at its first look, too, and knows nothing of its calls; every other look does so after a
change only. Both talk to a stand-in of Modal in a process of its own, in turns. Needs
``diloco-localcloud[modal]``.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable

AT_ONCE = 32
SERVER = """
import json
import sys

from diloco_localcloud import ModalStandIn

with ModalStandIn() as stand_in:
    stand_in.world.deploy("diloco", ["replica"])
    print(json.dumps(stand_in.environment), flush=True)
    sys.stdin.read()
"""


async def all_of(work: Iterable[Callable[[], Awaitable[object]]]) -> None:
    """Run everything, so many at once."""
    slots = asyncio.Semaphore(AT_ONCE)

    async def one(call: Callable[[], Awaitable[object]]) -> None:
        async with slots:
            await call()

    await asyncio.gather(*(one(call) for call in work))


async def bare(count: int, payload: object) -> tuple[float, float, float, float]:
    """Seconds of a launch and of a look (three times the same), by hand."""
    import modal

    function = modal.Function.from_name("diloco", "replica")
    await function.hydrate.aio()
    record = modal.Dict.from_name(f"bare-{uuid.uuid4().hex}", create_if_missing=True)
    await record.hydrate.aio()
    calls: dict[int, modal.FunctionCall[object]] = {}

    async def start(rank: int) -> None:
        calls[rank] = await function.spawn.aio(payload)
        await record.put.aio(f"call-{rank}", calls[rank].object_id, skip_if_exists=True)

    async def look(rank: int) -> None:
        try:
            await calls[rank].get.aio(timeout=0)
        except TimeoutError:
            return
        raise AssertionError("it cannot have ended")

    began = time.perf_counter()
    await all_of((lambda rank=rank: start(rank)) for rank in range(count))
    started = time.perf_counter()
    await all_of((lambda rank=rank: look(rank)) for rank in range(count))
    looked = time.perf_counter()
    return started - began, *[looked - started] * 3


def ours(count: int) -> tuple[float, float, float, float]:
    """Seconds of a launch, of a first and another look, and of a first look elsewhere."""
    from diloco_modal import ModalSpawnExecutor

    with ModalSpawnExecutor() as executor, ModalSpawnExecutor() as elsewhere:
        began = time.perf_counter()
        handles = executor.launch_replicas(count, "trainer:train", run_id=uuid.uuid4().hex)
        started = time.perf_counter()
        executor.collect(handles, timeout=0)
        looked = time.perf_counter()
        executor.collect(handles, timeout=0)
        again = time.perf_counter()
        elsewhere.collect(handles, timeout=0)
        return started - began, looked - started, again - looked, time.perf_counter() - again


def main() -> None:
    """Measure and print."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 5
    words = [sys.executable, "-c", SERVER]
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        os.environ.update(json.loads(server.stdout.readline()))
        payload = {"spec": "x" * 1000}
        asyncio.run(bare(count, payload))  # the first connection, and imports
        ours(count)
        told = [(asyncio.run(bare(count, payload)), ours(count)) for _ in range(rounds)]
        server.stdin.close()
    print(f"{count} ranks, {AT_ONCE} at once, medians of {rounds} rounds")
    for index, what in enumerate(("launch", "first look", "look", "look elsewhere")):
        loop, executor = (statistics.median(each[who][index] for each in told) for who in (0, 1))
        print(
            f"  {what:14}  bare loop {loop:6.3f} s   executor {executor:6.3f} s   "
            f"{executor / loop:5.2f} x"
        )


if __name__ == "__main__":
    main()
