"""Which hyperparameters published experiments support: values with their sources, and where the experiments end."""

from __future__ import annotations

from dataclasses import dataclass, field
from numbers import Real
from typing import TYPE_CHECKING

import torch
from torch.nn.parameter import is_lazy

from .._checks import check_positive, check_whole, kind_of
from .._errors import ConfigurationError
from .._seconds import Seconds

if TYPE_CHECKING:
    from collections.abc import Mapping

_SCALING_LAWS = "Scaling Laws (arXiv 2503.09799)"
_DILOCO = "DiLoCo (arXiv 2311.08105)"
_MULOCO = "MuLoCo (arXiv 2505.23725)"
_COVENANT = "Covenant-72B (arXiv 2603.08163)"

_MEASURED_AT = 30
"""H of the experiments behind the scaling laws."""
_LONG = 100
"""From this H on, the best outer learning rate is taken to be a higher one."""
_LONGEST_SWEPT = 300
_LONGEST_USED = 500
_MOST_REPLICAS = 8
_SMALLEST, _LARGEST, _FURTHEST = 35e6, 2.4e9, 10e9
"""Parameters of the smallest and the largest model in the fits, and of the largest to which the paper extrapolates them."""
_SMALLEST_OF_OUTER_LR = 335e6
_TOKENS = 2048

_OUTER_LR = {1: (0.4, 0.6), 2: (0.6, 0.7), 4: (0.6, 0.7), 8: (0.8, 0.8)}
"""By the number of replicas: what was measured at H = 30, and what is inferred for H of 100 and more."""


@dataclass(frozen=True, slots=True)
class Recommendation:
    """Hyperparameters for a run, each with its source. ``print`` shows all of it.

    Attributes:
        parameters: For how many parameters.
        replicas: For how many replicas.
        sync_every: For how many inner steps between two syncs of a parameter (H).
        outer_lr: Learning rate of the outer SGD.
        outer_momentum: Its momentum.
        nesterov: Whether the momentum is Nesterov's.
        inner_lr: Learning rate of AdamW as the inner optimizer; None where there is no data.
        batch: Sequences of 2,048 tokens in one inner step of all replicas together; None where there is no data.
        sources: For the name of each value, where it comes from.
        limits: Sentences that say where the data ends, and what was done about it. Empty if this is a run as in the papers.
        notes: Other published values that may fit the run.
    """

    parameters: int
    replicas: int
    sync_every: int
    outer_lr: float
    outer_momentum: float
    nesterov: bool
    inner_lr: float | None
    batch: int | None
    sources: Mapping[str, str] = field(repr=False, hash=False)
    limits: tuple[str, ...] = field(repr=False)
    notes: tuple[str, ...] = field(repr=False)

    def __str__(self) -> str:
        """The values with their sources, then the sentences."""
        given = (
            f"{_short(self.parameters)} parameters, {self.replicas} replica{'s' * (self.replicas > 1)}, "
            f"sync_every={self.sync_every}"
        )
        lines = [f"Recommended for {given}:"]
        for name, source in self.sources.items():
            value = getattr(self, name)
            lines.append(f"  {name} = {'no data' if value is None else value}: {source}")
        for title, sentences in (("Where the data ends", self.limits), ("Also", self.notes)):
            if sentences:
                lines += [f"{title}:", *(f"  * {sentence}" for sentence in sentences)]
        return "\n".join(lines)


def recommend(
    parameters: float | torch.nn.Module, replicas: int, sync_every: int
) -> Recommendation:
    """Recommend hyperparameters, with their sources: a place to start from, not a result for your model and data.

    All figures are those of language models that were trained from scratch. The outer learning rate for 30 inner steps
    between syncs, and the inner learning rate and the batch, come from "Scaling Laws for DiLoCo" (arXiv 2503.09799). What is
    inferred is called so, and where there is no data at all, the value is None.

    Args:
        parameters: The number of parameters that are trained, or the model itself.
        replicas: The number of replicas.
        sync_every: H, inner steps between two syncs of the same parameter.

    Raises:
        ConfigurationError: An argument is not allowed. The message names it and says what is expected.
    """
    size = _size(parameters)
    check_whole("replicas", replicas)
    _check_counts_steps(sync_every)
    check_whole("sync_every", sync_every)
    replicas, sync_every = int(replicas), int(sync_every)
    outer_lr, outer_source = _outer_lr(replicas, sync_every)
    fits = _SMALLEST <= size <= _FURTHEST and replicas <= _MOST_REPLICAS
    # Two digits: the fits are not more exact than that.
    inner_lr = float(f"{22256 * size**-0.8827 * replicas**0.2929:.2g}") if fits else None
    batch = round(0.00709 * size**0.4695 * replicas**0.3399) if fits else None
    usual = f"{_SCALING_LAWS} and {_DILOCO} use it throughout"
    outside = "the fits do not reach this run (see below)"
    sources = {
        "outer_lr": outer_source,
        "outer_momentum": usual,
        "nesterov": usual,
        "inner_lr": f"AdamW; the fit 22256 N^-0.8827 M^0.2929 of {_SCALING_LAWS}, N parameters and M replicas"
        if fits
        else outside,
        "batch": f"sequences, of all replicas together; the fit 0.00709 N^0.4695 M^0.3399 of {_SCALING_LAWS}. That the "
        f"sequences have {_TOKENS:,} tokens is inferred"
        if fits
        else outside,
    }
    notes = (
        f"With Muon as the inner optimizer, {_MULOCO} uses an outer learning rate of 0.7 and a momentum of 0.6, at H = 30.",
        f"The outer learning rate is constant in the papers. {_COVENANT} changed it by hand: 0.9, then 1.0, then down to 0.4.",
    )
    return Recommendation(
        size,
        replicas,
        sync_every,
        outer_lr,
        outer_momentum=0.9,
        nesterov=True,
        inner_lr=inner_lr,
        batch=batch,
        sources=sources,
        limits=(*_limits_of_size(size), *_limits_of_replicas(replicas), *_limits_of_h(sync_every)),
        notes=notes,
    )


def _short(size: float) -> str:
    """A number of parameters as papers write it: 335M, 2.4B."""
    for unit, letter in ((1e9, "B"), (1e6, "M")):
        if size >= unit:
            return f"{size / unit:.3g}{letter}"
    return f"{size:,.0f}"


def _size(parameters: object) -> int:
    if not isinstance(parameters, torch.nn.Module):
        if not isinstance(parameters, Real):
            raise ConfigurationError(
                f"parameters must be a number of parameters or a torch.nn.Module, not {kind_of(parameters)}"
            )
        check_positive("parameters", parameters)
        return max(1, round(float(parameters)))
    trained = [
        (name, tensor) for name, tensor in parameters.named_parameters() if tensor.requires_grad
    ]
    for name, tensor in trained:
        if is_lazy(tensor):
            raise ConfigurationError(
                f"parameter {name!r} does not have a shape yet: run a batch through the model first"
            )
    if not trained:
        raise ConfigurationError(
            "the model has no trainable parameter (requires_grad is False for all of them), so there is nothing to recommend"
        )
    return sum(tensor.numel() for _, tensor in trained)


def _check_counts_steps(sync_every: object) -> None:
    """Refuse a time in place of a number of inner steps.

    Raises:
        ConfigurationError: It is a :class:`Seconds`.
    """
    if isinstance(sync_every, Seconds):
        raise ConfigurationError(
            f"sync_every must be a number of inner steps, not {sync_every}: all published experiments count steps, and how "
            "many a replica takes in that time depends on its machine. Take a few, see SyncReport.inner_steps, and "
            "pass what a usual replica comes to"
        )


def _outer_lr(replicas: int, sync_every: int) -> tuple[float, str]:
    """The outer learning rate, and where it comes from."""
    column = int(sync_every >= _LONG)
    below = max(count for count in _OUTER_LR if count <= replicas)
    above = min((count for count in _OUTER_LR if count >= replicas), default=below)
    least, most = _OUTER_LR[below][column], _OUTER_LR[above][column]
    value = round((least + most) / 2, 3)
    measured = f"the best at H = {_MEASURED_AT} in {_SCALING_LAWS}"
    if replicas in _OUTER_LR:
        reason = measured
    elif replicas > _MOST_REPLICAS:
        reason = f"{measured} with {_MOST_REPLICAS} replicas, the most that were measured"
    elif least == most:
        reason = f"{measured} with {below} replicas and with {above}"
    else:
        reason = f"half way between {least} and {most}, {measured} with {below} and with {above} replicas"
    if not column:
        return value, reason
    inferred = f"inferred for H of {_LONG} and more: {_OUTER_LR[below][0]} was {measured}"
    if replicas != below:
        inferred += f" with {below} replicas"
    if above != below:
        inferred += f", {_OUTER_LR[above][0]} with {above}"
    return (
        value,
        f"{inferred}, and it rises with H. {_DILOCO} used 0.7 with 8 replicas at H = {_LONGEST_USED}",
    )


def _limits_of_size(size: int) -> list[str]:
    limits = []
    if size < _SMALLEST_OF_OUTER_LR:
        limits.append(
            f"The outer learning rate was measured with models of {_short(_SMALLEST_OF_OUTER_LR)} parameters and more. There "
            "it does not depend on the size."
        )
    if size < _SMALLEST:
        limits.append(
            f"There is no data for the inner learning rate and the batch of models with less than {_short(_SMALLEST)} parameters."
        )
    elif size > _FURTHEST:
        limits.append(
            f"There is no data for the inner learning rate and the batch of models with more than {_short(_FURTHEST)} parameters:"
            f" the fits used models of up to {_short(_LARGEST)}, and the paper extrapolates them to {_short(_FURTHEST)}."
        )
    elif size > _LARGEST:
        limits.append(
            f"The fits for the inner learning rate and the batch used models of up to {_short(_LARGEST)} parameters; the paper "
            f"extrapolates them to {_short(_FURTHEST)}."
        )
    return limits


def _limits_of_replicas(replicas: int) -> list[str]:
    if replicas <= _MOST_REPLICAS:
        return []
    return [
        f"There is no data for more than {_MOST_REPLICAS} replicas. Up to {_MOST_REPLICAS}, the best outer learning rate does "
        "not fall when there are more of them."
    ]


def _limits_of_h(sync_every: int) -> list[str]:
    limits = []
    if sync_every != _MEASURED_AT:
        limits.append(
            f"The figures were measured with {_MEASURED_AT} inner steps between syncs. The best outer learning rate rises with "
            "that number; how the inner learning rate and the batch depend on it is not known."
        )
    if sync_every == 1:
        limits.append("Of all H, 1 was the worst.")
    if sync_every > _LONGEST_USED:
        limits.append(
            f"There is no data for more than {_LONGEST_USED} inner steps between syncs ({_DILOCO}); "
            f"{_SCALING_LAWS} went up to {_LONGEST_SWEPT}."
        )
    elif sync_every > _LONGEST_SWEPT:
        limits.append(
            f"{_SCALING_LAWS} went up to {_LONGEST_SWEPT} inner steps between syncs; {_DILOCO} used {_LONGEST_USED}."
        )
    return limits
