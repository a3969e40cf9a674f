"""Time in training and bytes moved on a slow link, beside what the planner foresees.

Replicas are processes. Their inner steps are sleeps, as if a GPU took them, and cost the processor
next to nothing; what they sync has the size of the model whose loss is measured.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diloco_core import ExchangePlan, StoreModel, Transfer, plan_exchange

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .losses import Training
    from .rows import Conditions, Row

_POLL = 0.025
"""Seconds until a replica sees that it need not wait: in a short wait, it looks every 0.05 s."""

_HTTP_SENT, _HTTP_RECEIVED, _HTTP_LISTED = 470.0, 480.0, 300.0
"""Bytes around a request over HTTP, and of a key in a listing: about those of obstore and moto."""
_FULL_STATE_EVERY = 8
"""As long as neither ``DiLoCo`` nor ``plan_exchange`` are told otherwise."""

_PACKAGES = Path(__file__).parents[1]

SERVER = """
import sys
import boto3
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
url = f"http://127.0.0.1:{server.get_host_and_port()[1]}"
boto3.client("s3", endpoint_url=url).create_bucket(Bucket="bucket")
print(url, flush=True)
sys.stdin.read()
server.stop()
"""

S3 = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}


@dataclass(frozen=True, slots=True)
class Time:
    """What was measured of a row, and what was planned.

    Bytes and seconds are those of H inner steps of one replica.

    Attributes:
        topology: Of the exchange: ``"sharded"`` or ``"gather"``, as the planner finds quicker;
            means of gradients are ``"sharded"``.
        utilisation: The share of the time that went into training, as a mean over the replicas.
        bound: That share as the planner has it, for steps as long as they were.
        compute: Seconds of training: the sleeps, and by how much each of them was too long.
        exposed: Seconds in which the training stood still.
        hidden: Seconds of syncs beside the training.
        sent: Bytes that passed through the link up, headers and records included.
        received: Bytes that passed through it down.
        planned_sent: As planned.
        planned_received: As planned.
    """

    topology: str
    utilisation: float
    bound: float
    compute: float
    exposed: float
    hidden: float
    sent: float
    received: float
    planned_sent: float
    planned_received: float


def plan_of(row: Row, parameters: int, training: Training, conditions: Conditions) -> ExchangePlan:
    """Return what the planner says of one sync of a row: a fragment, or a mean of the gradients."""
    latency, bandwidth = conditions.latency, conditions.bandwidth
    store = StoreModel(
        bandwidth, first_byte=latency, put=latency, poll=_POLL, reads=None, writes=None
    )
    # A throttled folder is asked for one thing at a time.
    transfer = Transfer(1) if conditions.over == "folder" else Transfer()
    if row.kind == "synchronous":
        return plan_exchange(
            parameters, training.replicas, bandwidth, outer_state=0, fixed=True, tensors=1,
            store=store, transfer=transfer,
        )  # fmt: skip
    # SGD keeps a momentum for every parameter, if it has one.
    outer_state = 0 if row.more.get("outer_momentum") == 0 else 1
    state_codec = row.more.get("state_codec", "plain")
    plan = partial(
        plan_exchange, parameters, training.replicas, bandwidth, outer_state=outer_state,
        fragments=row.fragments, codec=row.codec, state_codec=state_codec, tensors=row.fragments,
        store=store, transfer=transfer,
    )  # fmt: skip
    plans = [plan(topology="sharded")]
    if state_codec == "plain":
        plans.append(plan(topology="gather", publish_every=row.publish_every))
    return min(plans, key=lambda each: each.seconds)


def task_of(
    row: Row, parameters: int, training: Training, conditions: Conditions
) -> dict[str, Any]:
    """Return what the replicas are told, but for their ranks and their meeting place.

    See :mod:`proof.replica`.
    """
    synchronous = row.kind == "synchronous"
    topology = plan_of(row, parameters, training, conditions).topology
    # The planner has the mean over a whole publication and the syncs after it, up to the next one.
    turn = row.publish_every if topology == "gather" else 1
    if row.more.get("state_codec", "plain") != "plain":
        turn = _FULL_STATE_EVERY
    rounds = turn * math.ceil(conditions.rounds / turn)
    # The planner has a sync in the middle of a run. In gather, listings grow until contributions
    # are deleted for the first time, and over S3 they pass through the link.
    warm = conditions.warm
    if topology == "gather" and conditions.over == "s3":
        warm = max(warm, 3 * row.publish_every)
    return {
        **asdict(conditions),
        "replicas": training.replicas,
        "parameters": parameters,
        "options": None if synchronous else row.options(training.sync_every),
        "topology": topology,
        "publish_every": row.publish_every,
        # Means of gradients are all alike, and so many that a few of them tell enough.
        "warm": 2 if synchronous else warm * row.fragments,
        "syncs": 10 if synchronous else rounds * row.fragments,
    }


def time_of(row: Row, parameters: int, training: Training, conditions: Conditions) -> Time:
    """Measure a row.

    Args:
        row: How it is trained.
        parameters: How many there are, in fp32.
        training: How often is synced, by how many replicas.
        conditions: Under what it is measured.

    Raises:
        SystemExit: A replica failed; what it said is on stderr.
    """
    task = task_of(row, parameters, training, conditions)
    found = _run(task)
    synchronous = row.kind == "synchronous"
    share = _syncs(row, training) / task["syncs"]
    mean = {name: statistics.fmean(each[name] for each in found) for name in found[0]}
    measured = Time(
        "sharded" if synchronous else task["topology"],
        statistics.fmean(each["compute"] / (each["compute"] + each["exposed"]) for each in found),
        0.0,
        share * mean["compute"],
        share * mean["exposed"],
        share * mean["hidden"],
        share * mean["sent"],
        share * mean["received"],
        0.0,
        0.0,
    )
    return planned(measured, row, parameters, training, conditions)


def planned(
    measured: Time, row: Row, parameters: int, training: Training, conditions: Conditions
) -> Time:
    """Return what was measured of a row, beside what the planner says today.

    The arguments are those of :func:`time_of`.
    """
    plan = plan_of(row, parameters, training, conditions)
    syncs = _syncs(row, training)
    period, overlap = measured.compute / syncs, 0.0
    if row.kind != "synchronous":
        delay = row.options(training.sync_every)["delay"]
        overlap = period * delay * syncs / training.sync_every
    sent = received = 0.0
    if conditions.over == "s3":
        requests = plan.gets + plan.puts + plan.lists + plan.deletes
        # In gather, contributions stay until the state has been published twice since; one replica
        # lists them.
        kept = 1.5 * row.publish_every if plan.topology == "gather" else training.replicas
        sent = _HTTP_SENT * requests
        received = _HTTP_RECEIVED * requests + _HTTP_LISTED * (kept + training.replicas)
    return replace(
        measured,
        bound=1 - plan.blocked(period, overlap),
        planned_sent=syncs * (plan.bytes_sent + sent),
        planned_received=syncs * (plan.bytes_received + received),
    )


def _syncs(row: Row, training: Training) -> int:
    """How many there are in H inner steps."""
    return training.sync_every if row.kind == "synchronous" else row.fragments


def _run(task: dict[str, Any]) -> list[dict[str, float]]:
    """What the replicas measured, in rank order."""
    with (
        tempfile.TemporaryDirectory(prefix="diloco-proof-") as folder,
        _store(task, folder) as place,
    ):
        path = [str(_PACKAGES), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {
            **os.environ, **S3, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path),
        }  # fmt: skip
        replicas = [
            subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "proof.replica",
                    json.dumps({**task, **place, "rank": rank}),
                ],
                env=environment,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(task["replicas"])
        ]
        try:
            outputs = [replica.communicate()[0] for replica in replicas]
        finally:
            for replica in replicas:
                replica.kill()
                replica.wait()
        failed = [rank for rank, replica in enumerate(replicas) if replica.returncode]
        if failed:
            raise SystemExit(f"the replicas {failed} failed; see above")
        return [json.loads(output) for output in outputs]


@contextlib.contextmanager
def _store(task: dict[str, Any], folder: str) -> Iterator[dict[str, str]]:
    """Where the replicas meet."""
    if task["over"] == "folder":
        yield {"uri": folder}
        return
    with subprocess.Popen(
        [sys.executable, "-c", SERVER],
        env={**os.environ, **S3},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as server:
        try:
            assert server.stdout is not None
            yield {"uri": "s3://bucket/run", "endpoint": server.stdout.readline().strip()}
        finally:
            server.kill()
