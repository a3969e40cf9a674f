"""The loss that settings lead to, beside what they would cost at the size that is to be trained."""

from __future__ import annotations

import inspect
import itertools
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import fsspec
import torch

from .._checks import check_positive, whole
from .._errors import ConfigurationError, MismatchError
from .._inner._steps import optimizers_of
from .._loop._diloco import DiLoCo
from .._planner._costs import StoreModel, check_amount
from .._planner._plan import USUAL_BANDWIDTH, ExchangePlan, plan_exchange
from .._run._exchange import StoreExchange
from .._store._open import open_store
from .._timing import Timing
from ._turns import Turns

_NO_OPTIONS = {"model", "inner_optimizer", "exchange", "stateful", "save_inner_every", "on_sync"}
_OPTIONS = inspect.signature(DiLoCo).parameters.keys() - _NO_OPTIONS
_OF_PLANS = ("codec", "state_codec", "full_state_every", "clip")
_STORE = "memory://diloco-simulated"


class Simulation(tuple[dict[str, Any], ...]):
    """What :func:`simulate` has found; ``print()`` shows it as a table in Markdown.

    It has a row for each setting, in their order: the ``"setting"`` as it was given, the ``"loss"``
    and the ``"syncs"``; and for the planned run ``"bytes_sent"`` (by each replica, in all syncs),
    ``"seconds"`` (its steps, and what the syncs add to them) and ``"cost"`` (US dollars for
    requests, data and machines). ``json.dumps()`` takes it if it takes the settings.
    """

    __slots__ = ()

    def __str__(self) -> str:
        """Return the table: gigabytes that a replica sends, and hours."""
        names = [", ".join(f"{n}={v!r}" for n, v in row["setting"].items()) for row in self]
        width = max(map(len, names))
        head = f"| {'setting':{width}} |   loss | syncs | GB sent |   hours |        $ |"
        lines = [head, f"| {'-' * width} | -----: | ----: | ------: | ------: | -------: |"]
        for name, row in zip(names, self, strict=True):
            counted, size = f"{row['loss']:6.4f} | {row['syncs']:5}", row["bytes_sent"] / 1e9
            planned = f"{size:7.4g} | {row['seconds'] / 3600:7.3g} | {row['cost']:8.3g}"
            lines.append(f"| {name:{width}} | {counted} | {planned} |")
        return "\n".join(lines)


def simulate(
    model_fn: Callable[[], Any],
    data_fn: Callable[[int], Iterable[Any]],
    *,
    steps: int,
    settings: Sequence[Mapping[str, Any]],
    replicas: int = 8,
    optimizer_fn: Callable[[Any], Any] = lambda model: torch.optim.AdamW(model.parameters()),
    loss_fn: Callable[[Any, Any], torch.Tensor] = lambda model, batch: model(batch),
    evaluate: Callable[[Any], float] | None = None,
    seed: int = 0,
    params: float | None = None,
    bandwidth: float = USUAL_BANDWIDTH,
    step_seconds: float = 1.0,
    hourly_price: float = 0.0,
    store: StoreModel | None = None,
) -> Simulation:
    """Train replicas in this process, once with each setting, and say what a real run would cost.

    The replicas are threads that run :class:`DiLoCo` over a store in memory, with fixed membership.
    One of them runs at a time, with random generators of its own, so the losses are the same every
    time, and those of as many processes, to the bit. Other threads must not draw from torch's
    random generator meanwhile. The costs are those of a planned run, which may be of a larger model
    (``params`` and what follows it); :func:`plan_exchange` estimates them.

    Args:
        model_fn: Makes the model, the same at every call; ``torch.manual_seed(seed)`` was called
            before.
        data_fn: Makes the batches of a rank, at least ``steps`` of them;
            ``torch.manual_seed(seed + rank)`` was called before, and the training goes on from
            there. The generators of Python and numpy begin alike on all ranks.
        steps: Inner steps of every replica.
        settings: What is tried: for each simulation, options of :class:`DiLoCo`, of which
            ``sync_every`` is needed.
        replicas: How many replicas there are.
        optimizer_fn: Makes the inner optimizer of a model, or a list of several; torch's AdamW with
            its defaults if left out.
        loss_fn: Computes the loss from the model and a batch; ``model(batch)`` if left out.
        evaluate: Given the model that all replicas end with, returns its loss on other data. If
            left out, the loss is the mean over all replicas and the last tenth of their steps.
        seed: See ``model_fn`` and ``data_fn``.
        params: Number of parameters of the planned model; those of the simulated one if left out.
        bandwidth: Bytes per second that a replica of the planned run can move in each direction.
        step_seconds: Seconds of an inner step of the planned run.
        hourly_price: US dollars for a replica's machine per hour.
        store: How the store of the planned run behaves; like S3 if left out.

    Raises:
        ConfigurationError: An argument or a setting is not allowed, and nothing was trained; or
            there are too few batches.
        MismatchError: ``model_fn`` makes models that differ.
        Exception: What a replica has raised first.
    """
    for name, value, least in (("replicas", replicas, 1), ("steps", steps, 1), ("seed", seed, 0)):
        whole(name, value, least)
    check_positive("step_seconds", step_seconds)
    check_amount("hourly_price", hourly_price, " of dollars")
    _check(settings)

    def begin(exchange: StoreExchange, setting: Mapping[str, Any]) -> tuple[Any, list[Any], Any]:
        torch.manual_seed(seed)
        optimizers = optimizers_of(optimizer_fn(model := model_fn()))
        options = {"init": "check", **setting, "save_inner_every": 0}  # or models could differ
        return model, optimizers, DiLoCo(model, optimizers, exchange, **options)

    def plan(setting: Mapping[str, Any]) -> ExchangePlan:
        # Nothing public says how it was cut.
        model = begin(_exchange(0, replicas, 0, Timing()), setting)[2]._model  # noqa: SLF001
        cut: dict[str, Any] = {name: setting[name] for name in _OF_PLANS if name in setting}
        cut |= {"fragments": len(model.fragments), "outer_state": model.outer.tensors_kept()}
        size = sum(each.tensor.numel() for each in model.trained) if params is None else params
        return plan_exchange(size, replicas, bandwidth, fixed=True, store=store, **cut)

    def train(setting: Mapping[str, Any], opened: Callable[[], Any], turns: Turns) -> Any:
        model, optimizers, loop = begin(exchange := opened(), setting)
        torch.manual_seed(seed + exchange.rank)
        losses: list[float] = []
        with loop as outer:
            for batch in itertools.islice(data_fn(exchange.rank), steps):
                loss: Any = loss_fn(model, batch)
                loss.backward()
                losses.append(loss.item())
                for optimizer in optimizers:
                    optimizer.step()
                model.zero_grad()
                turns.sleep(0.0)
            if len(losses) < steps:
                raise ConfigurationError(f"data_fn({exchange.rank}) has fewer than {steps} batches")
        if evaluate is None or exchange.rank:
            return statistics.fmean(losses[-max(1, steps // 10) :]), outer.committed
        return float(torch.no_grad()(evaluate)(model)), outer.committed

    rows = []
    plans = Turns().run([partial(plan, setting) for setting in settings])
    for setting, one in zip(settings, plans, strict=True):
        losses, (syncs, *_) = zip(*_run(partial(train, setting), replicas), strict=True)
        seconds = steps * step_seconds + syncs * one.exposed(setting.get("delay", 0) * step_seconds)
        cost = syncs * one.cost + replicas * seconds / 3600 * hourly_price
        loss = losses[0] if evaluate else statistics.fmean(losses)
        row = {"setting": dict(setting), "loss": loss, "syncs": syncs, "seconds": seconds}
        rows.append({**row, "bytes_sent": syncs * one.bytes_sent, "cost": cost})
    return Simulation(rows)


def _run(train: Callable[[Callable[[], Any], Turns], Any], replicas: int) -> list[Any]:
    """Train replicas in turn; return the loss of each, and how many syncs there were."""
    turns, place = Turns(), id(train)
    # Nobody gives signs of life, and a sync with a delay ends before the training goes on.
    still: dict[str, Any] = {"repeat": lambda *_: lambda: None, "return_within": 0.0}
    still |= {"in_background": lambda act: act() or (lambda _: True)}
    timing = Timing(clock=lambda: turns.now, sleep=turns.sleep, **still)
    opened = [partial(_exchange, place, replicas, rank, timing) for rank in range(replicas)]
    try:
        return turns.run([partial(train, each, turns) for each in opened])
    except MismatchError as error:
        error.add_note("model_fn must make the same model at every call, as it would on every rank")
        raise
    finally:
        with suppress(FileNotFoundError):
            fsspec.filesystem("memory").rm(f"{_STORE}/{place}", recursive=True)


def _exchange(place: int, replicas: int, rank: int, timing: Timing) -> StoreExchange:
    return StoreExchange(open_store(f"{_STORE}/{place}"), rank, replicas, timing=timing)


def _check(settings: Any) -> None:
    """Refuse settings that are none, and options that are not known or cannot be simulated."""
    for setting in settings if isinstance(settings, (list, tuple)) and settings else [None]:
        names = setting.keys() if isinstance(setting, Mapping) else set()
        if not {"sync_every"} <= names <= _OPTIONS:
            raise ConfigurationError(
                "settings must be a list of mappings such as {'sync_every': 50}, in which other "
                f"options of DiLoCo may be ({', '.join(sorted(_OPTIONS))}), and not "
                f"{', '.join(sorted(map(str, names - _OPTIONS))) or repr(settings)}"
            )
