"""The verbs that this package adds to the command ``diloco``, by the group ``diloco.commands``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import KW_ONLY, asdict, dataclass, field
from pathlib import Path
from typing import Literal

import torch

from diloco_protocol import InvalidRequestError, UnavailableError
from diloco_protocol.backend import (
    Answer,
    Options,
    check_path,
    check_text,
    command,
    details,
    option,
)

from . import probe as _probe
from ._checks import number, one_of
from ._errors import ObjectNotFoundError, StoreUnavailableError
from ._export._export import export as export_model
from ._planner._plan import USUAL_BANDWIDTH, plan_exchange
from ._run._records._keys import BEGINNING, FOLDERS, MANIFEST
from ._store._open import open_store
from ._store._reread import copy_key

DTYPES = ("float64", "float32", "bfloat16", "float16")
_DAY = 86_400.0


@contextlib.contextmanager
def _reachable() -> Iterator[None]:
    """Turn the error of a store that cannot be used into one that the command knows."""
    try:
        yield
    except StoreUnavailableError as error:
        raise UnavailableError(str(error)) from error


@dataclass(frozen=True, eq=False, repr=False)
class ExportOptions(Options):
    """The options of ``diloco export``.

    Attributes:
        uri: The run's prefix; for a folder also a path.
        file: The file to write; its name ends in ``.safetensors``, or has no ending.
        at: The number of outer steps after which the state was saved.
        dtype: Dtype of floating-point tensors.
        synced_only: Leave out the tensors that were not synced.
        force: Replace the file if it is there.
    """

    uri: str = field(metadata=details(check=check_text))
    file: str = field(metadata=details(check=check_path, type="path"))
    _: KW_ONLY
    at: int | None = option(None, shown="the newest whole state")
    dtype: Literal["float64", "float32", "bfloat16", "float16"] | None = option(
        None, shown="the model's"
    )
    synced_only: bool = option(False)
    force: bool = option(False)


@command(ExportOptions)
def export(options: ExportOptions) -> Answer:
    """Write the model of a run from its store to a safetensors file.

    URI is the run's prefix, such as s3://bucket/run-1, and FILE the file to write. A run that is
    going on is not disturbed.
    """
    dtype = options.dtype and getattr(torch, one_of("dtype", options.dtype, DTYPES))
    if Path(options.file).is_file() and not options.force:
        raise InvalidRequestError(f"{options.file} is there already: --force replaces it")
    with _reachable():
        steps = export_model(
            options.uri, options.file, dtype=dtype, at=options.at, synced_only=options.synced_only
        )
    return Answer(
        {"uri": options.uri, "file": options.file, "outer_steps": steps},
        (f"{options.file} holds the model after {steps} outer steps",),
    )


@dataclass(frozen=True, eq=False, repr=False)
class PlanOptions(Options):
    """The options of ``diloco plan``; :func:`plan_exchange` checks them.

    Attributes:
        params: Number of parameters that are synced.
        replicas: Number of replicas.
        bandwidth: Bytes per second that one replica can move in each direction.
        period: Seconds of training between two syncs.
        bytes_per_param: Bytes of a parameter where it is not encoded.
        outer_state: Tensors of a parameter's size that the outer optimizer keeps.
        fragments: The number of fragments; a sync moves one of them.
        topology: The way in which results are shared.
        fixed: Membership is fixed.
        publish_every: In the gather topology, syncs from one publication of the state to the next.
        codec: How contributions are sent.
        state_codec: How results are published.
        full_state_every: With a state codec, syncs from one whole publication to the next.
    """

    params: float
    replicas: int
    _: KW_ONLY
    bandwidth: float = option(USUAL_BANDWIDTH)
    period: float | None = option(None)
    bytes_per_param: float = option(4.0)
    outer_state: float = option(1.0)
    fragments: int = option(1)
    topology: Literal["auto", "sharded", "gather"] = option("auto")
    fixed: bool = option(False)
    publish_every: int | None = option(None, shown="4")
    codec: str = option("plain")
    state_codec: str = option("plain")
    full_state_every: int | None = option(None, shown="8")


@command(PlanOptions)
def plan(options: PlanOptions) -> Answer:
    """Estimate what one sync takes and costs, over a store like S3.

    PARAMS is the number of parameters, such as 7e9, and REPLICAS the number of replicas.
    """
    arguments = asdict(options)
    period = arguments.pop("period")
    planned = plan_exchange(arguments.pop("params"), arguments.pop("replicas"), **arguments)
    values = asdict(planned)
    sent, received = planned.bytes_sent / 1e9, planned.bytes_received / 1e9
    lines = [
        f"a sync takes {planned.seconds:.3g} s ({planned.topology} topology)",
        f"each replica sends {sent:.3g} GB and receives {received:.3g} GB, with "
        f"{planned.puts:.4g} PUT, {planned.gets:.4g} GET, {planned.lists:.4g} LIST and "
        f"{planned.deletes:.4g} DELETE requests",
        f"the requests of all replicas cost ${planned.cost:.3g}",
        f"the outer loop takes {planned.memory_bytes / 1e9:.3g} GB of memory on each replica",
    ]
    if period is not None:
        blocked = planned.blocked(number("period", period))
        per_day = planned.cost * _DAY / (period + planned.seconds)
        values |= {"blocked": blocked, "cost_per_day": per_day}
        lines.append(
            f"with {period:g} s of training between two syncs, syncs take {blocked:.1%} of the "
            f"time and ${per_day:.3g} a day"
        )
    lines.append(
        f"telemetry takes at most {planned.telemetry_puts:.4g} PUT requests of each replica and "
        f"${planned.telemetry_cost:.3g} in all a day (connect(telemetry=False): none)"
    )
    return Answer(values, tuple(lines))


@dataclass(frozen=True, eq=False, repr=False)
class ProbeOptions(Options):
    """The options of the probe.

    Attributes:
        uri: The prefix to try.
    """

    uri: str


@command(ProbeOptions)
def probe(options: ProbeOptions) -> Answer:
    """Try a store as a run would use it, and measure how fast it is."""
    with _reachable():
        report = _probe.run(options.uri, measured=True)
    return Answer(report, (_probe.in_words(report), _probe.speed_in_words(report)))


@dataclass(frozen=True, eq=False, repr=False)
class RemoveOptions(Options):
    """The options of the removal of a run from its store.

    Attributes:
        uri: The run's prefix.
        really: Delete the objects, and not only count them.
    """

    uri: str
    _: KW_ONLY
    really: bool = option(False)


@command(RemoveOptions)
def remove(options: RemoveOptions) -> Answer:
    """Count the objects that a run has in its store, or delete them; others there stay."""
    with _reachable():
        store = open_store(options.uri)
        listed = {folder: store.list(f"{folder}/") for folder in FOLDERS}
        sizes = {key: size for listing in listed.values() for key, size in listing.items()}
        try:
            store.get(MANIFEST)
        except ObjectNotFoundError:
            raise InvalidRequestError(f"there is no run in {store.uri}") from None
        if options.really:
            store.delete(sizes)
            store.delete([BEGINNING, copy_key(MANIFEST), MANIFEST])  # so it can be tried again
    count, total = len(sizes) + 1, sum(sizes.values())
    return Answer(
        {"uri": options.uri, "objects": count, "bytes": total},
        (f"{count} objects, {total / 1e6:.3g} MB",),
    )
