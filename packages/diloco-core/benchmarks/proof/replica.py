"""One replica whose time is measured, in a process of its own.

The process is ``python -m proof.replica TASK``; see :mod:`proof.timing`.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from typing import TYPE_CHECKING, Any

import torch

from diloco_core import DiLoCo, Elastic, ObjectStoreAllReduce, StoreExchange
from diloco_core._store._open import open_store

from .throttle import Link, ThrottledEndpoint, ThrottledStore

if TYPE_CHECKING:
    from collections.abc import Iterator

    from diloco_core._store._api import Store


def main(task: dict[str, Any]) -> dict[str, float]:
    """Train and sync as the task says; returns what that took: seconds, and bytes on the link."""
    torch.set_num_threads(1)
    torch.manual_seed(task["rank"])
    link = Link(task["bandwidth"], task["latency"])
    with _opened(task, link) as store:
        measure = _means if task["options"] is None else _outer_loop
        return measure(task, store, link)


@contextlib.contextmanager
def _opened(task: dict[str, Any], link: Link) -> Iterator[Store]:
    """The store, behind the link from the start."""
    if task["over"] == "folder":
        yield ThrottledStore(open_store(task["uri"]), link)
    else:
        with ThrottledEndpoint(task["endpoint"], link) as endpoint:
            os.environ["AWS_ENDPOINT_URL"] = endpoint.url
            yield open_store(task["uri"])


class Meter:
    """What has passed since the warm-up."""

    def __init__(self, link: Link, warm: int) -> None:
        self._link = link
        self._warm = warm
        self._before = 0, 0
        self._syncs = 0
        self.compute = self.exposed = self.hidden = 0.0

    def count(self, compute: float, exposed: float, hidden: float = 0.0) -> None:
        """A sync is over; the seconds are those since the one before."""
        self._syncs += 1
        if self._syncs == self._warm:
            self._before = self._link.up.bytes, self._link.down.bytes
        elif self._syncs > self._warm:
            self.compute += compute
            self.exposed += exposed
            self.hidden += hidden

    def result(self) -> dict[str, float]:
        """What has passed until now."""
        up, down = self._before
        return {
            "compute": self.compute,
            "exposed": self.exposed,
            "hidden": self.hidden,
            "sent": self._link.up.bytes - up,
            "received": self._link.down.bytes - down,
        }


def _means(task: dict[str, Any], store: Store, link: Link) -> dict[str, float]:
    """Gradients are averaged at every step."""
    meter = Meter(link, task["warm"])
    gradients = torch.randn(task["parameters"])
    result: dict[str, float] = {}
    with ObjectStoreAllReduce(StoreExchange(store, task["rank"], task["replicas"])) as everybody:
        for _ in range(task["warm"] + task["syncs"]):
            times = [time.monotonic()]
            time.sleep(task["step"])
            times.append(time.monotonic())
            everybody.mean([gradients])
            times.append(time.monotonic())
            meter.count(times[1] - times[0], times[2] - times[1])
            result = meter.result()
    return result


def _outer_loop(task: dict[str, Any], store: Store, link: Link) -> dict[str, float]:
    """The replicas train as DiLoCo does."""
    meter = Meter(link, task["warm"])
    count, options = task["replicas"], task["options"]
    # As many tensors as fragments, so that all fragments have the same size.
    tensors = torch.zeros(task["parameters"]).tensor_split(options["fragments"])
    model = torch.nn.ParameterList(tensor.clone() for tensor in tensors)
    gradients = [1e-3 * torch.randn_like(tensor) for tensor in model]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    elastic = Elastic(count, topology=task["topology"], publish_every=task["publish_every"])
    exchange = StoreExchange(store, task["rank"], count, elastic)
    result: dict[str, float] = {}
    syncs = task["warm"] + task["syncs"]
    with DiLoCo(
        model,
        optimizer,
        exchange,
        flush="none",
        save_inner_every=0,
        on_sync=lambda report: meter.count(
            report.compute_seconds, report.exposed_seconds, report.hidden_seconds
        ),
        **options,
    ) as outer:
        while outer.committed < syncs:
            time.sleep(task["step"])
            for parameter, gradient in zip(model, gradients, strict=True):
                parameter.grad = gradient
            optimizer.step()
            result = meter.result()
    return result


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
