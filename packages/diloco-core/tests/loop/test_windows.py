"""A time in place of a number of steps: what it is, and what does not go with it."""

import dataclasses
import math

import numpy as np
import pytest
from loop_lab import exchanges, loop

from diloco_core import (
    ConfigurationError,
    Seconds,
    SyncError,
    Timing,
    plan_exchange,
)


def test_seconds_hold_a_number():
    for value in (60, 0.1, 1e22, np.float32(2.5), np.int64(3)):
        seconds = Seconds(value)
        assert type(seconds.value) is float
        assert seconds.value == value
        assert eval(repr(seconds)) == seconds
        assert hash(seconds) == hash(Seconds(value))
    assert [repr(Seconds(60)), repr(Seconds(0.1))] == ["Seconds(60)", "Seconds(0.1)"]
    assert Seconds(60) == Seconds(60.0) != Seconds(61)
    with pytest.raises(dataclasses.FrozenInstanceError):
        Seconds(60).value = 1.0


@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf, "60", None, True, 10**400, [60]])
def test_what_is_no_time(value):
    with pytest.raises(ConfigurationError, match=r"positive number of seconds, such as Sec") as e:
        Seconds(value)
    assert str(e.value).endswith(f"not {value!r}")


def elastic(place=None, **options):
    return loop(*exchanges("elastic", 1, place), **{"sync_every": Seconds(60), **options})[2]


def test_what_does_not_go_with_a_time():
    for options, message in [
        ({"weight": "equal"}, r"weight='equal'.*Leave weight out, which then is"),
        ({"aggregate": "trimmed"}, r"aggregate='trimmed'.*Leave aggregate out"),
        ({"weight": "size"}, "weight must be one of"),
        ({"alpha": 2}, "alpha is 2"),
        *(({"delay": d}, "delay must be a whole number of at least 0") for d in (-1, 1.5, None)),
    ]:
        with pytest.raises(ConfigurationError, match=message):
            elastic(**options)
    with pytest.raises(ConfigurationError, match=r"With two fragments, pass 30"):
        plan_exchange(1e6, 2, 1e9).blocked(Seconds(60))


@pytest.mark.parametrize(("weight", "meant"), [(None, "steps"), ("tokens", "tokens")])
def test_contributions_are_weighed_by_their_steps(weight, meant):
    with elastic(weight=weight, fragments=2, delay=1) as outer:
        settings = outer.state_dict()["settings"]
    assert (settings["weight"], settings["sync_every"]) == (meant, "Seconds(60)")
    assert outer.sync_every == Seconds(60)


def test_a_window_that_others_would_not_wait_for():
    (exchange,) = exchanges("elastic", 1, grace=30.0, timing=Timing(sync_timeout=90.0))
    with pytest.raises(ConfigurationError, match=r"leaves 60 s.*grace is 30 s.*only 90 s"):
        loop(exchange, sync_every=Seconds(60))
    assert loop(exchange, sync_every=Seconds(60), fragments=2)


def test_training_outside_of_the_block_is_noticed_after_many_steps(lab):
    model, inner, outer, _ = loop(*exchanges("elastic", 1), sync_every=Seconds(60))
    for step in range(99):
        lab.push(model, inner, 0, step)
    with pytest.raises(SyncError, match="100 inner steps were taken"):
        lab.push(model, inner, 0, 99)
    assert outer.inner_steps == 0
