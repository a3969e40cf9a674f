"""How much of a replica's time goes into training on a slow link, with and without a delay: ``hatch run bench-overlap``.

Two replicas train as on GPUs (an inner step is a sleep), and sync through a folder whose reads and writes pass through one link
per replica and direction, of a given bandwidth and latency. Each line is one run: seconds per sync that the training stood
still, seconds of the sync beside the training, and the share of the time that went into training. The last column is what the
link alone would allow: with a delay, a sync that takes no longer than the steps in between costs nothing.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import time
from typing import TYPE_CHECKING, Any, Self

import torch

from diloco_core import DiLoCo, ObjectStoreExchange
from diloco_core._store._open import open_store
from diloco_core.testing import run_replicas

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from diloco_core import SyncReport
    from diloco_core._exchange._base import Exchange
    from diloco_core._store._api import Buffer, ObjectReader, Store

STEP = 0.02  # seconds
SYNCS = 5


class Link:
    """One direction of a replica's link: bytes take their turn. Thread-safe."""

    def __init__(self, bandwidth: float) -> None:
        self._bandwidth = bandwidth
        self._free = 0.0
        self._lock = threading.Lock()
        self.bytes = 0

    def carry(self, size: int) -> None:
        """Wait until so many bytes have passed."""
        with self._lock:
            self.bytes += size
            self._free = max(self._free, time.monotonic()) + size / self._bandwidth
            until = self._free
        time.sleep(max(0.0, until - time.monotonic()))


class Far:
    """A store at the other end of a link; see :class:`diloco_core._store._api.Store`. Requests that carry no values are free."""

    near = False

    def __init__(self, store: Store, bandwidth: float, latency: float) -> None:
        self._store = store
        self.up, self.down = Link(bandwidth), Link(bandwidth)
        self._latency = latency

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def put(self, key: str, parts: Iterable[Buffer]) -> int:
        """Write an object through the link."""
        time.sleep(self._latency)
        return self._store.put(key, self._carried(parts))

    def open(self, key: str, size: int | None = None) -> FarReader:
        """Open an object at the other end."""
        time.sleep(self._latency)
        return FarReader(self._store.open(key, size), self.down)

    def _carried(self, parts: Iterable[Buffer]) -> Iterator[Buffer]:
        for part in parts:
            self.up.carry(memoryview(part).nbytes)
            yield part


class FarReader:
    """An open object at the other end of a link."""

    def __init__(self, reader: ObjectReader, link: Link) -> None:
        self._reader = reader
        self._link = link
        self.size = reader.size

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill a buffer through the link."""
        self._link.carry(buffer.nbytes)
        self._reader.read_into(offset, buffer)

    def close(self) -> None:
        """Release the object."""
        self._reader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def run(arguments: argparse.Namespace, delay: int, codec: str) -> tuple[list[SyncReport], float]:
    """The reports of rank 0's syncs but the first, and the bytes that its busier direction carried per sync."""
    with tempfile.TemporaryDirectory() as folder:
        bandwidth = arguments.bandwidth * 1e6
        stores = [Far(open_store(folder), bandwidth, arguments.latency) for _ in range(2)]

        def train(exchange: Exchange) -> list[SyncReport]:
            model = torch.nn.ParameterList([torch.zeros(int(arguments.params * 1e6))])
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
            reports: list[SyncReport] = []
            options = {"sync_every": arguments.steps, "delay": delay, "codec": codec}
            with DiLoCo(model, optimizer, exchange, on_sync=reports.append, **options) as outer:
                while outer.inner_steps < SYNCS * arguments.steps:
                    time.sleep(STEP)
                    optimizer.step()
            return reports

        results = run_replicas(
            train, [ObjectStoreExchange(store, rank, 2) for rank, store in enumerate(stores)]
        )
        for result in results:
            if isinstance(result, BaseException):
                raise result
        carried = max(stores[0].up.bytes, stores[0].down.bytes) / (SYNCS + 1)
        return results[0][1:], carried


def main() -> int:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--params", type=float, default=8.0, help="millions (default: 8)")
    parser.add_argument("--bandwidth", type=float, default=25.0, help="MB/s (default: 25)")
    parser.add_argument("--latency", type=float, default=0.02, help="seconds (default: 0.02)")
    parser.add_argument(
        "--steps", type=int, default=200, help="inner steps per sync (default: 200)"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print("  delay  codec   still  beside  training   the link alone")
    for delay, codec in [(0, "plain"), (0, "int8"), (100, "plain"), (190, "plain"), (190, "int8")]:
        reports, carried = run(arguments, delay, codec)
        still = statistics.median(report.exposed_seconds for report in reports)
        beside = statistics.median(report.hidden_seconds for report in reports)
        compute = statistics.median(report.compute_seconds for report in reports)
        on_link = carried / (arguments.bandwidth * 1e6)
        left = max(0.0, on_link - delay * STEP)
        share, possible = compute / (compute + still), compute / (compute + left)
        print(
            f"  {delay:5d}  {codec:6s} {still:5.2f} s {beside:5.2f} s   {share:7.1%}   {possible:7.1%}"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
