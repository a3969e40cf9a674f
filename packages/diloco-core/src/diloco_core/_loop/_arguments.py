"""Checks of the arguments of an outer loop, made before anything is started."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from numbers import Integral
from typing import TYPE_CHECKING, NamedTuple

import torch

from .._arithmetic._weights import Weighting
from .._checks import kind_of, one_of, whole
from .._codecs._codec import Codec, is_sparse
from .._codecs._compiled import CompiledCodec
from .._codecs._named import CODECS, find_codec
from .._codecs._state import check_state_codec
from .._errors import ConfigurationError
from .._model._layers import PATTERNS, Pattern
from .._seconds import Seconds
from ._membership import is_elastic, keeps_state
from ._schedule import Schedule
from ._windows import Windows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .._arithmetic._weights import Amount
    from .._exchange._base import Exchange
    from .._inner._state import Stateful

_NOT_LOCAL = {"rda", "rfa", "krum", "multi-krum", "geometric-median"}
_MOST_TOKENS = 10**18 - 1  # keys have 18 digits for them
FULL_STATE_EVERY = 8
# SparseLoCo, arXiv 2508.15706.
_SPARSE_DECAY = 0.95
_EXCHANGE_METHODS = ("join", "begin", "shards", "leave", "abort")


def check_parties(model: object, exchange: object, on_sync: object) -> None:
    """Refuse a model, an exchange or a callback of the wrong kind.

    Raises:
        ConfigurationError: An argument is refused. The message names it and says what is expected.
    """
    if torch.is_inference_mode_enabled():
        raise ConfigurationError(
            "an outer loop cannot be made inside torch.inference_mode(), because tensors that are made there cannot be trained. "
            "Make it outside."
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
            if missing == ["begin"] and hasattr(exchange, "sync"):
                given += ". An exchange of your own implements begin(), which returns a Pending, in place of sync()"
        else:
            given += " is neither"
        raise ConfigurationError(
            "exchange must be an object that connect() or in_process() returned, or one with the methods "
            f"{', '.join(_EXCHANGE_METHODS)}; {given}"
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


def codec_over(exchange: Exchange, given: object) -> Codec:
    """The codec with which contributions are sent over an exchange.

    Raises:
        ConfigurationError: There is no such codec, or the exchange sends values as they are.
    """
    codec = find_codec(given)
    if not codec.plain and not getattr(exchange, "codecs", False):
        raise ConfigurationError(
            f"codec={codec.name!r} cannot be used with {type(exchange).__name__}, which sends values as they are in memory. "
            "Leave codec out, or use an exchange that connect() or in_process() returned"
        )
    return codec


def feedback_of(given: object, codec: Codec) -> float:
    """The decay of error feedback; 0 without it.

    Raises:
        ConfigurationError: The value is something else, the codec loses nothing, or it needs error feedback.
    """
    if given is None:
        return _SPARSE_DECAY if is_sparse(codec) else 0.0
    if given is False and is_sparse(codec):
        raise ConfigurationError(
            f"codec={codec.name!r} needs error feedback, but error_feedback is False: it sends only a few of the values, and the "
            "others would be lost. Leave error_feedback out, or give a number above 0 and at most 1"
        )
    if given is False:
        return 0.0
    is_number = isinstance(given, (int, float)) and not isinstance(given, bool)
    if given is not True and not (is_number and 0 < given <= 1):  # type: ignore[operator]
        raise ConfigurationError(
            f"error_feedback is {given!r}, but it must be True, False, or a number above 0 and at most 1: how much of what a "
            "codec has lost of earlier contributions is added to the next one"
        )
    if codec.plain:
        raise ConfigurationError(
            f"error_feedback={given!r} cannot be used with codec={codec.name!r}, which loses nothing of a contribution. Leave it "
            "out, or choose a codec that sends fewer bytes, such as codec='int8'"
        )
    return float(given)  # type: ignore[arg-type]


def init_over(exchange: Exchange, given: object) -> str:
    """With which values the replicas of an exchange begin.

    Raises:
        ConfigurationError: The value is not allowed, or does not fit the exchange.
    """
    init = one_of("init", given, ("rank0", "check"))
    if init == "check" and is_elastic(exchange):
        raise ConfigurationError(
            "init='check' cannot be used in an elastic run: every replica takes the run's state, and "
            "nobody compares what it held before. Leave init out"
        )
    return init


def weighting_over(exchange: Exchange, given: str) -> Weighting:
    """By what contributions are weighed over an exchange.

    Raises:
        ConfigurationError: There is no such weight, or the exchange counts all contributions the same.
    """
    weighting = Weighting(one_of("weight", given, Weighting))
    if weighting is not Weighting.EQUAL and not getattr(exchange, "weighs", False):
        raise ConfigurationError(
            f"weight={str(weighting)!r} cannot be used with {type(exchange).__name__}, where all contributions count the same. "
            "Leave weight out, or use an exchange that connect() or in_process() returned"
        )
    return weighting


def trim_over(exchange: Exchange, aggregate: object, trim: object, weighting: Weighting) -> int:
    """How many values are left out at either end of every element; 0 for the mean.

    Raises:
        ConfigurationError: The values are not allowed, do not fit together, or do not fit the exchange.
    """
    if isinstance(aggregate, str) and aggregate.lower() in _NOT_LOCAL:
        raise ConfigurationError(
            f"aggregate={aggregate!r} needs inner products of whole tensors, but a replica that updates a shard reads only that "
            "shard of each contribution. Use aggregate='trimmed', which decides in every element by itself"
        )
    if aggregate == "median":
        raise ConfigurationError(
            "aggregate='median' is not offered. aggregate='trimmed' with trim= leaves the largest and smallest values of every "
            "element out, and clip='median' scales contributions down that are larger than most"
        )
    if one_of("aggregate", aggregate, ("mean", "trimmed")) == "mean":
        if trim is not None:
            raise ConfigurationError(
                f"trim is {trim!r}, but aggregate='mean' leaves nothing out. Pass aggregate='trimmed', or leave trim out"
            )
        return 0
    number = 1 if trim is None else whole("trim", trim)
    if weighting is not Weighting.EQUAL:
        raise ConfigurationError(
            f"aggregate='trimmed' cannot be used with weight={str(weighting)!r}: who is left out differs by element. "
            "Leave one of them out"
        )
    if not getattr(exchange, "weighs", False):
        raise ConfigurationError(
            f"aggregate='trimmed' cannot be used with {type(exchange).__name__}, which takes plain means. Leave it out, or use "
            "an exchange that connect() or in_process() returned"
        )
    settings = getattr(exchange, "settings", None)
    fewest = getattr(settings, "min_replicas", exchange.world_size)
    if fewest < 2 * number + 1:
        needed = "min_replicas" if hasattr(settings, "min_replicas") else "world_size"
        raise ConfigurationError(
            f"trim={number} leaves out {2 * number} of the values of every element, so at least {2 * number + 1} replicas must "
            f"take part in every sync, but {needed} is {fewest}. Choose a smaller trim, or more replicas"
        )
    return number


def check_trimmed(trim: int, codec: Codec) -> None:
    """Refuse to leave out extremes of contributions that hold few values.

    Raises:
        ConfigurationError: A sparse codec goes with a trimmed mean.
    """
    if trim and is_sparse(codec):
        raise ConfigurationError(
            f"aggregate='trimmed' cannot be used with codec={codec.name!r}: most replicas send nothing of an element, so the "
            "values that were sent would be left out as extremes. Leave one of them out"
        )


def clip_over(exchange: Exchange, given: object, trim: int) -> bool:
    """Whether contributions over an exchange are clipped to the median of their norms.

    Raises:
        ConfigurationError: The value is not allowed, does not fit the exchange, or does not fit a trimmed mean.
    """
    if given is None:
        return False
    if given != "median":
        raise ConfigurationError(
            "clip must be 'median' (a tensor is scaled down to the median of its norms over the replicas) or None (no clipping), "
            f"not {repr(given) if isinstance(given, (str, int, float)) else kind_of(given)}"
        )
    if trim:
        raise ConfigurationError(
            "clip='median' cannot be used with aggregate='trimmed': a contribution that was scaled down is no longer among the "
            "extremes, so the trimmed mean would leave out those of other replicas instead. Leave one of them out"
        )
    if not getattr(exchange, "weighs", False):
        raise ConfigurationError(
            f"clip='median' cannot be used with {type(exchange).__name__}, which takes plain means. Leave it out, or use an "
            "exchange that connect() or in_process() returned"
        )
    return True


def check_counted(weighting: Weighting, amount: Amount, rank: int) -> None:
    """Refuse to contribute inner steps without tokens where contributions are weighed by their tokens.

    Raises:
        ConfigurationError: No tokens were counted.
    """
    if weighting is Weighting.TOKENS and amount.steps and not amount.tokens:
        raise ConfigurationError(
            f"weight='tokens' weighs contributions by their tokens, but rank {rank} has counted none in its last {amount.steps} "
            "inner steps. Call outer.count_tokens(n) before every inner_optimizer.step(), with the number of tokens of that step"
        )


def tokens_counted(weighting: Weighting, given: object, before: int) -> int:
    """The tokens that :meth:`DiLoCo.count_tokens` was given.

    Raises:
        ConfigurationError: They are not a whole number of at least 0, there are too many of them since the last sync, or
            contributions are not weighed by tokens.
    """
    tokens = whole("n in count_tokens(n)", given, 0)
    if weighting is not Weighting.TOKENS:
        raise ConfigurationError(
            f"count_tokens() was called, but contributions are weighed by weight={str(weighting)!r}, which ignores tokens. Pass "
            "weight='tokens' to the outer loop, or leave this call out"
        )
    if before + tokens > _MOST_TOKENS:
        raise ConfigurationError(
            f"n is {tokens}, which makes {before + tokens} tokens since the last sync, but there may be at most {_MOST_TOKENS}. "
            "Count in a larger unit, the same on all replicas"
        )
    return tokens


class StateCoding(NamedTuple):
    """How published state is encoded.

    Attributes:
        codec: The codec.
        full_every: Every so many syncs of a fragment, its values are published whole.
    """

    codec: Codec
    full_every: int

    @property
    def settings(self) -> dict[str, str]:
        """Both by name: settings that all replicas must have in common."""
        return {"state_codec": self.codec.name, "full_state_every": str(self.full_every)}


def state_coding_over(exchange: Exchange, given: object, full_every: object) -> StateCoding | None:
    """How state is published over an exchange; None if values and outer state are published as they are.

    Raises:
        ConfigurationError: There is no such codec, the exchange cannot publish encoded state, or the arguments do not fit.
    """
    if isinstance(given, CompiledCodec):
        codec: Codec = given  # it makes the bytes of the codec that it is named after
    elif isinstance(given, str) and given in CODECS:
        codec = CODECS[given]
    else:
        names = ", ".join(name for name, each in CODECS.items() if not is_sparse(each))
        raise ConfigurationError(
            f"state_codec must be one of {names}, not {repr(given) if isinstance(given, str) else kind_of(given)}. "
            "(A codec of your own can only be given as codec: export() has to read the state without your program.)"
        )
    if codec.plain:
        if full_every is not None:
            raise ConfigurationError(
                f"full_state_every={full_every!r} needs a state_codec: without one, the whole state is published in every sync"
            )
        return None
    able = getattr(exchange, "state_codecs", False)
    topology = getattr(getattr(exchange, "settings", None), "topology", None)
    check_state_codec(codec, gather=not able and topology == "gather")
    every = whole("full_state_every", FULL_STATE_EVERY if full_every is None else full_every)
    if not able:
        raise ConfigurationError(
            f"state_codec={codec.name!r} cannot be used with {type(exchange).__name__}, which does not publish encoded state: "
            "only runs over a store and replicas in one process do. Leave it out, or use an exchange that connect() or "
            "in_process() returned"
        )
    if full_every is not None and not keeps_state(exchange):
        raise ConfigurationError(
            f"full_state_every={every} cannot be used with {type(exchange).__name__}, which keeps no state. Leave it out, or "
            "use connect()"
        )
    return StateCoding(codec, every)


def schedule_over(
    exchange: Exchange, sync_every: object, fragments: int, delay: object, alpha: object
) -> Schedule | Windows:
    """When fragments are sent and adopted.

    Raises:
        ConfigurationError: The numbers do not fit together, or the exchange cannot sync while the replica trains, or cannot
            sync by the time.
    """
    late = whole("delay", delay, 0)
    if isinstance(sync_every, Seconds):
        windows = Windows(sync_every, fragments, late, _alpha_over(exchange, alpha, late))
        check_window = getattr(exchange, "check_window", None)
        assert check_window is not None  # check_exchange() has seen to that
        check_window(windows.seconds)
        return windows
    steps = steps_per_cycle(sync_every, fragments)
    period = steps // fragments
    if late >= period:
        raise ConfigurationError(
            f"delay is {late}, but it must be less than {period}, the number of inner steps between two syncs (sync_every = "
            f"{steps} in {fragments} fragment{'s' * (fragments > 1)}): a sync is adopted before the next one is sent"
        )
    return Schedule(steps, fragments, late, _alpha_over(exchange, alpha, late))


def _alpha_over(exchange: Exchange, alpha: object, late: int) -> float:
    """How much of its own values a replica keeps; ``late`` is the delay, which is refused here if the exchange knows none."""
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not 0 <= alpha <= 1:
        raise ConfigurationError(
            f"alpha is {alpha!r}, but it must be a number from 0 (adopt what was synced) to 1 (keep the replica's own values)"
        )
    if (late or alpha) and not getattr(exchange, "delays", False):
        name = "delay" if late else "alpha"
        raise ConfigurationError(
            f"{name}={late or alpha} cannot be used with {type(exchange).__name__}, which cannot sync while its replica trains. "
            "Leave it out, or use an exchange that connect() or in_process() returned"
        )
    return float(alpha)


def steps_per_cycle(sync_every: object, fragments: int) -> int:
    """``sync_every`` as a number that is a multiple of the number of fragments.

    Raises:
        ConfigurationError: The value is something else.
    """
    if isinstance(sync_every, bool) or not isinstance(sync_every, Integral) or sync_every < 1:
        raise ConfigurationError(
            f"sync_every must be a whole number of inner steps, at least 1, not {sync_every!r}. In an elastic run it may also be "
            "a time: sync_every=Seconds(60)"
        )
    steps = int(sync_every)
    if steps % fragments:
        raise ConfigurationError(
            f"sync_every is {steps}, but it must be a multiple of the number of fragments, which is {fragments}: every fragment "
            "is synced once in sync_every inner steps, at equal intervals"
        )
    return steps


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
            "fragments must be a number, 'strided', 'sequential', one of these words with a number such as ('strided', 4), or a "
            "list of modules that become one fragment each, not "
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
            f'stateful must be a mapping from names, such as {{"loader": loader}}, not {kind_of(given)}'
            if not isinstance(given, Mapping)
            else f"the names in stateful must be text, not {next(n for n in given if not isinstance(n, str))!r}"
        )
    return dict(given)
