"""Checking what the user of an outer loop passed, and making :class:`.Terms` of it.

Both come before anything is started.
"""

from __future__ import annotations

from collections.abc import Sequence

from .._checks import is_whole, kind_of, one_of, whole
from .._codecs._codec import Codec, check_state_codec, is_sparse, whole_state_every
from .._codecs._named import CODECS, find_codec
from .._errors import ConfigurationError
from .._seconds import Seconds
from ._schedule import Schedule, Windows
from ._support import support_of
from ._terms import OuterGroup, StateCoding, Terms, Weighting

# SparseLoCo, arXiv 2508.15706.
_SPARSE_DECAY = 0.95


def make_terms(  # noqa: D417 - the others are those of DiLoCo
    exchange: object,
    *,
    sync_every: object,
    fragments: int,
    groups: Sequence[OuterGroup],
    delay: object = 0,
    alpha: object = 0.0,
    codec: object = "plain",
    error_feedback: object = None,
    weight: object = None,
    aggregate: object = "mean",
    trim: object = None,
    clip: object = None,
    state_codec: object = "plain",
    full_state_every: object = None,
    buffers: object = "mean",
    init: object = "rank0",
    flush: object = "partial",
) -> Terms:
    """Make the terms of a run from the arguments of :class:`.DiLoCo`.

    Args:
        exchange: The exchange; its :class:`.Support` says what it can do.
        fragments: The number of fragments into which the model was cut.
        groups: How the outer parameter groups are stepped.

    Raises:
        ConfigurationError: An argument is not allowed, does not fit another one, or does not fit
            the exchange. The message names it, and says what is allowed and what to do.
    """
    _check_time(exchange, sync_every)
    _check_rates(exchange, groups)
    weighting = _weighting(exchange, weight, sync_every)
    trimmed = _trim(exchange, aggregate, trim, weighting, sync_every)
    contributions = _codec(exchange, codec)
    _check_trimmed(trimmed, contributions)
    return Terms(
        schedule=_schedule(exchange, sync_every, fragments, delay, alpha),
        codec=contributions,
        feedback=_feedback(error_feedback, contributions),
        weighting=weighting,
        trim=trimmed,
        clip=_clip(exchange, clip, trimmed),
        coding=_coding(exchange, state_codec, full_state_every),
        groups=tuple(groups),
        buffers=one_of("buffers", buffers, ("mean", "rank0", "none")),
        init=_init(exchange, init),
        flush=one_of("flush", flush, ("partial", "none")),
    )


def _unfit(exchange: object, what: str, why: str) -> ConfigurationError:
    """The error for an argument that an exchange cannot do."""
    return ConfigurationError(
        f"{what} cannot be used with {type(exchange).__name__}, {why}. Leave it out, or use an "
        "exchange that connect() or in_process() returned"
    )


def _check_time(exchange: object, sync_every: object) -> None:
    """Refuse a time over an exchange whose replicas have to take the same number of inner steps."""
    if isinstance(sync_every, Seconds) and support_of(exchange).check_window is None:
        raise ConfigurationError(
            f"sync_every={sync_every} cannot be used with {type(exchange).__name__}, whose "
            "replicas all take the same number of inner steps between two syncs. Pass a number of "
            "inner steps, or make the run elastic: connect with min_replicas="
        )


def _check_rates(exchange: object, groups: Sequence[OuterGroup]) -> None:
    """Refuse functions of the sync if the exchange cannot make all replicas use the same rates."""
    support = support_of(exchange)
    if support.agrees_on_lr or support.compares_lr or not any(group.schedule for group in groups):
        return
    raise ConfigurationError(
        f"outer_lr is a function, which cannot be used with {type(exchange).__name__}: it does not "
        "see to it that all replicas use the same learning rate. Pass a number, or use an exchange "
        "that connect() or in_process() returned. (An exchange of your own that does so says it by "
        "agrees_on_lr in its attribute support.)"
    )


def _codec(exchange: object, given: object) -> Codec:
    """The codec with which contributions are sent over an exchange."""
    codec = find_codec(given)
    if not codec.plain and not support_of(exchange).codecs:
        why = "which sends values as they are in memory"
        raise _unfit(exchange, f"codec={codec.name!r}", why)
    return codec


def _feedback(given: object, codec: Codec) -> float:
    """The decay of error feedback; 0 without it."""
    if given is None:
        return _SPARSE_DECAY if is_sparse(codec) else 0.0
    if given is False and is_sparse(codec):
        raise ConfigurationError(
            f"codec={codec.name!r} needs error feedback, but error_feedback is False: it sends "
            "only a few of the values, and the others would be lost. Leave error_feedback out, or "
            "give a number above 0 and at most 1"
        )
    if given is False:
        return 0.0
    is_number = isinstance(given, (int, float)) and not isinstance(given, bool)
    if given is not True and not (is_number and 0 < given <= 1):  # type: ignore[operator]
        raise ConfigurationError(
            f"error_feedback is {given!r}, but it must be True, False, or a number above 0 and at "
            "most 1: how much of what a codec has lost of earlier contributions is added to the "
            "next one"
        )
    if codec.plain:
        raise ConfigurationError(
            f"error_feedback={given!r} cannot be used with codec={codec.name!r}, which loses "
            "nothing of a contribution. Leave it out, or choose a codec that sends fewer bytes, "
            "such as codec='int8'"
        )
    return float(given)  # type: ignore[arg-type]


def _weighting(exchange: object, given: object, sync_every: object) -> Weighting:
    """Return by what contributions are weighed.

    Replicas that contribute by the time take different numbers of steps.
    """
    by_time = isinstance(sync_every, Seconds)
    if by_time and given == Weighting.EQUAL:
        raise ConfigurationError(
            f"weight='equal' cannot be used with sync_every={sync_every}: a replica that takes few "
            "inner steps in that time would count as much as one that takes many. Leave weight "
            "out, which then is 'steps', or pass 'tokens'"
        )
    if given is None:
        given = Weighting.STEPS if by_time else Weighting.EQUAL
    weighting = Weighting(one_of("weight", given, Weighting))
    if weighting is not Weighting.EQUAL and not support_of(exchange).weighs:
        why = "where all contributions count the same"
        raise _unfit(exchange, f"weight={str(weighting)!r}", why)
    return weighting


def _trim(
    exchange: object, aggregate: object, trim: object, weighting: Weighting, sync_every: object
) -> int:
    """Return how many values are left out at either end of every element; 0 for the mean."""
    if one_of("aggregate", aggregate, ("mean", "trimmed")) == "mean":
        if trim is not None:
            raise ConfigurationError(
                f"trim is {trim!r}, but aggregate='mean' leaves nothing out. Pass "
                "aggregate='trimmed', or leave trim out"
            )
        return 0
    if isinstance(sync_every, Seconds):
        raise ConfigurationError(
            f"aggregate='trimmed' cannot be used with sync_every={sync_every}, which weighs "
            "contributions by their inner steps, since who is left out differs by element. Leave "
            "aggregate out, or pass a number of inner steps"
        )
    number = 1 if trim is None else whole("trim", trim)
    if weighting is not Weighting.EQUAL:
        raise ConfigurationError(
            f"aggregate='trimmed' cannot be used with weight={str(weighting)!r}: who is left out "
            "differs by element. Leave one of them out"
        )
    support = support_of(exchange)
    if not support.weighs:
        raise _unfit(exchange, "aggregate='trimmed'", "which takes plain means")
    world_size = whole("exchange.world_size", getattr(exchange, "world_size", None))
    fewest = world_size if support.fewest is None else support.fewest
    if fewest < 2 * number + 1:
        needed = "world_size" if support.fewest is None else "min_replicas"
        raise ConfigurationError(
            f"trim={number} leaves out {2 * number} of the values of every element, so at least "
            f"{2 * number + 1} replicas must take part in every sync, but {needed} is {fewest}. "
            "Choose a smaller trim, or more replicas"
        )
    return number


def _check_trimmed(trim: int, codec: Codec) -> None:
    """Refuse to leave out extremes of contributions that hold few values."""
    if trim and is_sparse(codec):
        raise ConfigurationError(
            f"aggregate='trimmed' cannot be used with codec={codec.name!r}: most replicas send "
            "nothing of an element, so the values that were sent would be left out as extremes. "
            "Leave one of them out"
        )


def _clip(exchange: object, given: object, trim: int) -> bool:
    """Say whether contributions over an exchange are clipped to the median of their norms."""
    if given is None:
        return False
    if given != "median":
        raise ConfigurationError(
            "clip must be 'median' (a tensor is scaled down to the median of its norms over the "
            "replicas) or None (no clipping), not "
            f"{repr(given) if isinstance(given, (str, int, float)) else kind_of(given)}"
        )
    if trim:
        raise ConfigurationError(
            "clip='median' cannot be used with aggregate='trimmed': a contribution that was scaled "
            "down is no longer among the extremes, so the trimmed mean would leave out those of "
            "other replicas instead. Leave one of them out"
        )
    if not support_of(exchange).weighs:
        raise _unfit(exchange, "clip='median'", "which takes plain means")
    return True


def _init(exchange: object, given: object) -> str:
    """With which values the replicas begin."""
    init = one_of("init", given, ("rank0", "check"))
    takes_run = support_of(exchange).takes_run
    if init == "check" and (takes_run or getattr(exchange, "resumes", False)):
        raise ConfigurationError(
            f"init='check' cannot be used {'in an elastic run' if takes_run else 'with resume='}: "
            "every replica takes the run's state, and what it held before is not compared. Leave "
            "init out"
        )
    return init


def _coding(exchange: object, given: object, full_every: object) -> StateCoding | None:
    """Return how state is published; None if values and outer state are published as they are."""
    if not isinstance(given, str) or given not in CODECS:
        names = ", ".join(name for name, each in CODECS.items() if not is_sparse(each))
        raise ConfigurationError(
            f"state_codec must be one of {names}, not "
            f"{repr(given) if isinstance(given, str) else kind_of(given)}. (A codec of your own "
            "can only be given as codec: export() has to read the state without your program.)"
        )
    codec = CODECS[given]
    every = whole_state_every(codec, full_every)
    if codec.plain:
        return None
    support = support_of(exchange)
    check_state_codec(codec, gather=support.gather)
    if not support.state_codecs:
        why = (
            "which does not publish encoded state: only runs over a store and replicas in one "
            "process do"
        )
        raise _unfit(exchange, f"state_codec={codec.name!r}", why)
    if full_every is not None and not support.keeps_state:
        raise ConfigurationError(
            f"full_state_every={every} cannot be used with {type(exchange).__name__}, which keeps "
            "no state. Leave it out, or use connect()"
        )
    return StateCoding(codec, every)


def _schedule(
    exchange: object, sync_every: object, fragments: int, delay: object, alpha: object
) -> Schedule | Windows:
    """Return when fragments are sent and adopted."""
    late = whole("delay", delay, 0)
    if isinstance(sync_every, Seconds):
        windows = Windows(sync_every, fragments, late, _alpha(exchange, alpha, late))
        check_window = support_of(exchange).check_window
        assert check_window is not None  # _check_time() has seen to that
        check_window(windows.seconds)
        return windows
    steps = _steps_per_cycle(sync_every, fragments)
    period = steps // fragments
    if late >= period:
        raise ConfigurationError(
            f"delay is {late}, but it must be less than {period}, the number of inner steps "
            f"between two syncs (sync_every = {steps} in {fragments} "
            f"fragment{'s' * (fragments > 1)}): a sync is adopted before the next one is sent"
        )
    return Schedule(steps, fragments, late, _alpha(exchange, alpha, late))


def _alpha(exchange: object, alpha: object, late: int) -> float:
    """Return how much of its own values a replica keeps.

    ``late`` is the delay, which is refused here if the exchange knows none.
    """
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not 0 <= alpha <= 1:
        raise ConfigurationError(
            f"alpha is {alpha!r}, but it must be a number from 0 (adopt what was synced) to 1 "
            "(keep the replica's own values)"
        )
    if (late or alpha) and not support_of(exchange).delays:
        what = f"{'delay' if late else 'alpha'}={late or alpha}"
        raise _unfit(exchange, what, "which cannot sync while its replica trains")
    return float(alpha)


def _steps_per_cycle(sync_every: object, fragments: int) -> int:
    """``sync_every`` as a number that is a multiple of the number of fragments."""
    if not is_whole(sync_every) or sync_every < 1:
        raise ConfigurationError(
            f"sync_every must be a whole number of inner steps, at least 1, not {sync_every!r}. In "
            "an elastic run it may also be a time: sync_every=Seconds(60)"
        )
    steps = int(sync_every)
    if steps % fragments:
        raise ConfigurationError(
            f"sync_every is {steps}, but it must be a multiple of the number of fragments, which "
            f"is {fragments}: every fragment is synced once in sync_every inner steps, at equal "
            "intervals"
        )
    return steps
