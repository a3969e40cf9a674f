"""Checks of the arguments of an outer loop, made before anything is started."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence

import torch

from .._arithmetic._contribution import Amount
from .._checks import kind_of, one_of, whole
from .._errors import ConfigurationError, SyncError
from .._exchange._base import Exchange
from .._inner._state import Stateful
from .._model._layers import PATTERNS, Pattern
from .._terms._support import ONE_PROCESS, WITHOUT_STORE, check_process_group, support_of
from .._terms._terms import Weighting

_MOST_TOKENS = 10**18 - 1  # keys have 18 digits for them
# Module and class of each wrapper, and what it has once it talks to other processes. The classes
# are looked up and not imported: what nobody has imported, no model has.
_WRAPPERS = (
    ("torch.nn.parallel.distributed", "DistributedDataParallel", "process_group"),
    ("torch.distributed.fsdp", "FullyShardedDataParallel", "process_group"),
    ("torch.distributed.fsdp", "FSDPModule", "reshard"),
)
_EXCHANGE_METHODS = ("join", "begin", "shards", "leave", "abort")


def check_parties(model: object, exchange: object, on_sync: object) -> None:
    """Refuse a model, an exchange or a callback of the wrong kind.

    Raises:
        ConfigurationError: An argument is refused. The message names it and says what is expected.
    """
    if torch.is_inference_mode_enabled():
        raise ConfigurationError(
            "an outer loop cannot be made inside torch.inference_mode(), because tensors that are "
            "made there cannot be trained. Make it outside."
        )
    if not isinstance(model, torch.nn.Module):
        raise ConfigurationError(f"model must be a torch.nn.Module, not {kind_of(model)}")
    missing = [name for name in _EXCHANGE_METHODS if not callable(getattr(exchange, name, None))]
    if missing or isinstance(exchange, type):
        # Not its repr: a URI may hold a password.
        given = f"this {type(exchange).__name__}"
        if isinstance(exchange, type):
            given = f"{exchange.__name__} is a class"
        elif len(missing) < len(_EXCHANGE_METHODS):
            given += f" lacks {', '.join(missing)}"
        else:
            given += " is neither"
        raise ConfigurationError(
            "exchange must be an object that connect() or in_process() returned, or one with the "
            f"methods {', '.join(_EXCHANGE_METHODS)}; {given}"
        )
    world_size = whole("exchange.world_size", getattr(exchange, "world_size", None))
    rank = whole("exchange.rank", getattr(exchange, "rank", None), 0)
    if rank >= world_size:
        raise ConfigurationError(
            f"exchange.rank must be less than exchange.world_size ({world_size}), but it is {rank}"
        )
    if on_sync is not None and not callable(on_sync):
        raise ConfigurationError(
            f"on_sync must be a function that takes a report, not {kind_of(on_sync)}"
        )


def check_topology(model: torch.nn.Module, exchange: Exchange) -> None:
    """Refuse a model that several processes hold together, and a process that is one of several.

    A DistributedDataParallel of a single process is as good as the model in it. Over a process
    group or a manager, each process of a replica may have an exchange of its own.

    Raises:
        ConfigurationError: The message says what was found, and what to do.
    """
    for name, parameter in model.named_parameters():
        if _is(parameter, "torch.distributed.tensor", "DTensor"):
            raise ConfigurationError(
                f"parameter {name!r} is a DTensor, of which this process holds a part: "
                f"{ONE_PROCESS}. Give every replica a whole model in one process"
            )
    support = support_of(exchange)
    if support.lanes:
        return
    for name, module in model.named_modules():
        for place, wrapper, sign in _WRAPPERS:
            if _is(module, place, wrapper) and hasattr(module, sign):
                if wrapper == "DistributedDataParallel" and module.process_group.size() == 1:
                    continue
                where = f"module {name!r} is" if name else "the model is"
                raise ConfigurationError(
                    f"{where} wrapped for several processes ({wrapper}): {ONE_PROCESS}. Pass the "
                    "plain model, as it was before it was wrapped, in one process for each "
                    f"replica. {WITHOUT_STORE}"
                )
    check_process_group(exchange)


def check_not_entered(entered: bool) -> None:
    """Refuse to enter an outer loop a second time.

    Raises:
        SyncError: It has been entered.
    """
    if entered:
        raise SyncError("this outer loop has been entered already; make a new one for another run")


def check_counted(weighting: Weighting, amount: Amount, rank: int) -> None:
    """Refuse to contribute inner steps without tokens if contributions are weighed by their tokens.

    Raises:
        ConfigurationError: No tokens were counted.
    """
    if weighting is Weighting.TOKENS and amount.steps and not amount.tokens:
        raise ConfigurationError(
            f"weight='tokens' weighs contributions by their tokens, but rank {rank} has counted "
            f"none in its last {amount.steps} inner steps. Call outer.count_tokens(n) before every "
            "inner_optimizer.step(), with the number of tokens of that step"
        )


def tokens_counted(weighting: Weighting, given: object, before: int) -> int:
    """The tokens that :meth:`DiLoCo.count_tokens` was given.

    Raises:
        ConfigurationError: They are not a whole number of at least 0, there are too many of them
            since the last sync, or contributions are not weighed by tokens.
    """
    tokens = whole("n in count_tokens(n)", given, 0)
    if weighting is not Weighting.TOKENS:
        raise ConfigurationError(
            "count_tokens() was called, but contributions are weighed by "
            f"weight={str(weighting)!r}, which ignores tokens. Pass weight='tokens' to the outer "
            "loop, or leave this call out"
        )
    if before + tokens > _MOST_TOKENS:
        raise ConfigurationError(
            f"n is {tokens}, which makes {before + tokens} tokens since the last sync, but there "
            f"may be at most {_MOST_TOKENS}. Count in a larger unit, the same on all replicas"
        )
    return tokens


def fragments_of(
    given: object,
) -> int | Pattern | Sequence[torch.nn.Module | Sequence[torch.nn.Module]]:
    """``fragments`` as a number, a pattern, or a list of modules or of lists of modules.

    Raises:
        ConfigurationError: The value is something else.
    """
    if isinstance(given, str) and given in PATTERNS:
        return Pattern(given)
    if isinstance(given, (list, tuple)) and len(given) == 2 and isinstance(given[0], str):
        kind = one_of("the pattern in fragments", given[0], PATTERNS)
        return Pattern(kind, whole("the number of fragments", given[1]))
    if isinstance(given, (list, tuple, torch.nn.ModuleList, torch.nn.Sequential)):
        return list(given)
    if isinstance(given, (Iterable, torch.nn.Module)):
        raise ConfigurationError(
            "fragments must be a number, 'strided', 'sequential', one of these words with a number "
            "such as ('strided', 4), or a list of modules that become one fragment each, not "
            f"{repr(given) if isinstance(given, str) else kind_of(given)}"
        )
    return whole("fragments", given)


def stateful_of(given: object) -> dict[str, Stateful]:
    """The objects to save besides the inner optimizer, by name.

    Raises:
        ConfigurationError: The value is not a mapping from names.
    """
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise ConfigurationError(
            'stateful must be a mapping from names, such as {"loader": loader}, not '
            f"{kind_of(given)}"
            if not isinstance(given, Mapping)
            else "the names in stateful must be text, not "
            f"{next(n for n in given if not isinstance(n, str))!r}"
        )
    return dict(given)


def _is(value: object, module: str, name: str) -> bool:
    kind = getattr(sys.modules.get(module), name, None)
    return isinstance(kind, type) and isinstance(value, kind)
