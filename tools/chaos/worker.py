"""One incarnation of a replica: it trains until the run has made the syncs of the stop file.

Exit statuses: 0, finished; 3, a newer incarnation of the rank has taken over; 4, another named
error; 1, anything else.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from fixed import leave_contributions
from safetensors.torch import load_file
from training import Batches, Model, examples

from diloco_core import CoreError, DiLoCo, FencedError, SyncReport, connect, export

FINISHED, FAILED, FENCED, NAMED = 0, 1, 3, 4


@dataclass(frozen=True)
class Settings:
    """What an incarnation is told.

    Attributes:
        uri: Where the replicas meet.
        rank: Which replica it is.
        world_size: How many there are.
        incarnation: Which incarnation of the rank it is, as the one who starts them counts.
        log: Where it leaves a JSON line per event.
        stop: Once this file exists, it says after how many syncs to end.
        min_replicas: As in ``connect``; None for fixed membership.
        contributions: With fixed membership, where every replica leaves its contributions.
        grace: As in ``connect``; with fixed membership, seconds after which a replica counts as
            lost.
        sync_timeout: As in ``connect``.
        topology: As in ``connect``.
        fragments: 1 or 2.
        delay: As in ``DiLoCo``.
        codec: As in ``DiLoCo``.
        state_codec: As in ``DiLoCo``.
        outer_lr: As in ``DiLoCo``.
        outer_momentum: As in ``DiLoCo``.
        sync_every: As in ``DiLoCo``.
        save_inner_every: As in ``DiLoCo``.
        step_seconds: How long an inner step takes at least.
    """

    uri: str
    rank: int
    world_size: int
    incarnation: int
    log: str
    stop: str
    min_replicas: int | None
    contributions: str
    grace: float
    sync_timeout: float
    topology: str
    fragments: int
    delay: int
    codec: str
    state_codec: str
    outer_lr: float
    outer_momentum: float
    sync_every: int
    save_inner_every: int
    step_seconds: float


class Log:
    """A line of JSON per event, each written by one call: incarnations can share a file."""

    def __init__(self, settings: Settings) -> None:
        self._own = {"rank": settings.rank, "incarnation": settings.incarnation, "pid": os.getpid()}
        self._file = os.open(settings.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def __call__(self, event: str, **fields: Any) -> None:
        """Write a line."""
        line = json.dumps({"event": event, "time": time.time(), **self._own, **fields}) + "\n"
        os.write(self._file, line.encode())


class Witness:
    """Something stateful that sees inner state saved and restored, and if it is the same."""

    def __init__(self, batches: Batches, inner: torch.optim.Optimizer, log: Log) -> None:
        self._batches = batches
        self._inner = inner
        self._log = log
        self.restored: dict[str, Any] | None = None
        self.outer: DiLoCo | None = None

    def state_dict(self) -> dict[str, Any]:
        """Position and inner state of this moment."""
        state = {"position": self._batches.position, "inner": digest(self._inner)}
        self._log("save", counted=self.outer.inner_steps if self.outer else 0, **state)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.restored = state
        self._batches.position = state["position"]


def digest(inner: torch.optim.Optimizer) -> str:
    """Digest of an inner optimizer's momentum and of torch's random generator."""
    state = xxhash.xxh3_64()
    for _, values in sorted(inner.state_dict()["state"].items()):
        for tensor in filter(torch.is_tensor, values.values()):
            state.update(tensor.contiguous().numpy().tobytes())
    state.update(torch.get_rng_state().numpy().tobytes())
    return state.hexdigest()


def train(settings: Settings, log: Log) -> None:
    """Train to the end."""
    torch.set_num_threads(1)
    model = Model(settings.world_size)
    inner = model.optimizer()
    batches = Batches(settings.rank)
    witness = Witness(batches, inner, log)
    torch.manual_seed(settings.rank)
    fixed = settings.min_replicas is None
    membership: dict[str, Any] = {
        "min_replicas": settings.min_replicas,
        "grace": settings.grace,
        "topology": settings.topology,
    }
    if fixed:
        membership = {"lost_after": settings.grace, "beat_interval": settings.grace / 4}
    exchange = connect(
        settings.uri,
        rank=settings.rank,
        world_size=settings.world_size,
        sync_timeout=settings.sync_timeout,
        **membership,
    )
    if fixed:
        leave_contributions(exchange, Path(settings.contributions))

    def seen(report: SyncReport) -> None:
        state = xxhash.xxh3_64()
        for fragment in outer.state_dict()["fragments"]:
            for copy in fragment["copy"]:
                state.update(copy.numpy().tobytes())
        own = {"position": batches.position, "counted": outer.inner_steps}
        log("sync", digest=state.hexdigest(), **own, report=json.loads(report.to_json()))
        for _ in range(report.batches_to_skip):
            next(batches)

    outer = DiLoCo(
        model,
        inner,
        exchange,
        sync_every=settings.sync_every,
        fragments=[model.first, model.second] if settings.fragments == 2 else 1,
        delay=settings.delay,
        codec=settings.codec,
        state_codec=settings.state_codec,
        full_state_every=None if settings.state_codec == "plain" else 4,
        outer_lr=settings.outer_lr,
        outer_momentum=settings.outer_momentum,
        on_sync=seen,
        stateful={"witness": witness},
        save_inner_every=settings.save_inner_every,
    )
    witness.outer = outer
    with outer:
        restored = witness.restored and {
            **witness.restored,
            "same": witness.restored["inner"] == digest(inner),
        }
        log(
            "enter",
            restored=restored,
            skip=outer.batches_to_skip,
            counted=outer.inner_steps,
            sync=outer.committed,
        )
        for _ in range(outer.batches_to_skip):
            next(batches)
        while not is_over(settings.stop, outer.committed):
            number, inputs, labels = next(batches)
            torch.rand(1)  # dropout, say: the generator's state moves on
            model.loss(settings.rank, number, inputs, labels).backward()
            inner.step()
            inner.zero_grad()
            # Rank 0 is slow, so that the others are often stopped and killed while they wait in a
            # sync.
            time.sleep(settings.step_seconds * (1 if settings.rank else 2))


def is_over(stop: str, committed: int) -> bool:
    """Whether the run has made all of its syncs."""
    try:
        return committed >= int(Path(stop).read_text())
    except (FileNotFoundError, ValueError):
        return False


def examine(uri: str, world_size: int, path: str) -> int:
    """What ``export`` makes of the run: the model, and beside it how good it is."""
    export(uri, path)
    model = Model(world_size).eval()
    model.load_state_dict(load_file(path))
    inputs, labels = examples(1, 2000)
    with torch.no_grad():
        scores = model(inputs)
    loss = torch.nn.functional.cross_entropy(scores, labels).item()
    accuracy = (scores.argmax(1) == labels).float().mean().item()
    Path(path).with_suffix(".json").write_text(
        json.dumps({"loss": round(loss, 4), "accuracy": round(accuracy, 4)})
    )
    return FINISHED


def live(arguments: dict[str, Any]) -> int:
    """One incarnation; returns its exit status, and says in the log why it ended."""
    settings = Settings(**arguments)
    log = Log(settings)
    log("start")
    try:
        train(settings, log)
    except FencedError as error:
        log("end", how="fenced", text=str(error))
        return FENCED
    except CoreError as error:
        traceback.print_exc()
        log("end", how=type(error).__name__, text=str(error))
        return NAMED
    except BaseException as error:  # noqa: BLE001 - whatever it is, it is to be told
        traceback.print_exc()
        log("end", how=f"unnamed {type(error).__name__}", text=str(error))
        return FAILED
    log("end", how="finished")
    return FINISHED


if __name__ == "__main__":
    sys.exit(live(json.loads(sys.argv[1])))
