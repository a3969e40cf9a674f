"""After which inner step fragments are sent and adopted if H is a time, by the rule; and what does
not go with that.
"""

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from diloco_core import (
    ConfigurationError,
    DiLoCo,
    Elastic,
    ManagerExchange,
    MockManager,
    ProcessGroupExchange,
    Seconds,
    StoreExchange,
    Timing,
    in_process,
    make_diloco_outer_loop,
    plan_exchange,
)
from diloco_core._store._open import open_store
from diloco_core._terms._schedule import Due
from diloco_core._terms._windows import Windows


class TestSeconds:
    @pytest.mark.parametrize("value", [60, 0.1, 1e22, np.float32(2.5), np.int64(3)])
    def test_hold_a_number(self, value):
        seconds = Seconds(value)
        assert type(seconds.value) is float
        assert seconds.value == value
        assert eval(repr(seconds)) == seconds
        assert hash(seconds) == hash(Seconds(value))

    def test_say_what_makes_them(self):
        assert [repr(Seconds(60)), repr(Seconds(0.1))] == ["Seconds(60)", "Seconds(0.1)"]
        assert Seconds(60) == Seconds(60.0) != Seconds(61)

    @pytest.mark.parametrize(
        "value", [0, -1.0, math.nan, math.inf, "60", None, True, 10**400, [60]]
    )
    def test_refuse_what_is_no_time(self, value):
        with pytest.raises(
            ConfigurationError, match=r"positive number of seconds, such as Sec"
        ) as e:
            Seconds(value)
        assert str(e.value).endswith(f"not {value!r}")

    def test_do_not_change(self):
        with pytest.raises(dataclasses.FrozenInstanceError):
            Seconds(60).value = 1.0


@st.composite
def incarnations(draw):
    """How long each step of an incarnation takes, how long after a send its record is seen, and how
    it is cut.
    """
    steps = draw(st.lists(st.integers(1, 40), min_size=1, max_size=50))
    seen_after = draw(st.lists(st.integers(0, 90), min_size=40, max_size=40))
    windows = Windows(
        Seconds(draw(st.sampled_from([30.0, 60.0]))),
        draw(st.integers(1, 3)),
        draw(st.sampled_from([0, 0, 1, 2, 5])),
    )
    return windows, steps, seen_after


@given(incarnations(), st.sets(st.integers(1, 50)))
@example((Windows(Seconds(60.0), 2, 1), [10] * 20, [3] * 40), set())
def test_a_fragment_is_sent_at_the_first_boundary_and_adopted_so_many_steps_later(
    incarnation, half
):
    """As an outer loop uses it, against the rule: time T/F since the record was seen, s - 1
    applied, and a step taken.
    """
    windows, steps, seen_after = incarnation
    now = seen = applied = 0
    sent, sends, boundaries = None, [], [0]
    for step, seconds in enumerate(steps, 1):
        now += seconds
        boundaries.append(now)
        since_sent = None if sent is None else step - sent
        due = windows.due(now - seen, since_sent=since_sent, half_taken=step in half)
        if due.send:
            sent = step
            sends.append((step, seen, applied))
        if due.adopt:
            assert sent is not None
            # Its record was seen some time after the send; without a delay the replica stands still
            # until then.
            seen = boundaries[sent] + seen_after[len(sends)]
            now = max(now, seen)
            applied, sent = step, None
            assert step == sends[-1][0] + windows.delay or step - 1 in half
    length = windows.seconds
    for step, seen, applied in sends:
        whole = [
            number
            for number in range(applied + 1, step + 1)
            if boundaries[number] - seen >= (2 * length if number in half else length)
        ]
        assert whole == [step], "the first boundary, and no other"
        assert step > applied, "never without a step"


@given(st.floats(0, 200), st.integers(0, 9), st.booleans())
def test_a_sync_never_waits_longer_for_half_a_step_than_twice_the_window(elapsed, since, half):
    windows = Windows(Seconds(60.0), 2, 3)
    due = windows.due(elapsed, half_taken=half)
    assert due == Due(send=elapsed >= (60.0 if half else 30.0), adopt=False)
    due = windows.due(elapsed, since_sent=since, half_taken=half)
    assert due == Due(send=False, adopt=since >= 3 and (not half or elapsed >= 60.0))


def test_without_a_delay_it_is_sent_and_adopted_at_once():
    windows = Windows(Seconds(60.0), 2)
    assert windows.due(29.9) == Due(send=False, adopt=False)
    assert windows.due(30.0) == Due(send=True, adopt=True)
    assert [windows.turn(decisions) for decisions in range(4)] == [0, 1, 0, 1]
    assert windows.settings == {}
    assert Windows(Seconds(60.0), 2, 1, 0.5).settings == {"delay": "1", "alpha": "0.5"}


def test_who_is_slow_and_who_looks():
    windows = Windows(Seconds(60.0), 2)
    assert windows.late(60.0, 1)
    assert not windows.late(59.9, 1)
    assert not windows.late(300.0, 2), "it was stopped, and its steps are quick enough"
    assert windows.may_look(1.5)
    assert not windows.may_look(1.4)


def loop(exchange, **options):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    return DiLoCo(model, inner, exchange, **{"sync_every": Seconds(60), **options})


def elastic(path, grace=30.0, **timing):
    return StoreExchange(
        open_store(str(path)), 0, 1, Elastic(1, grace=grace), timing=Timing(**timing)
    )


class TestRefusals:
    @pytest.mark.parametrize("kind", ["threads", "fixed", "manager", "process group"])
    def test_where_all_take_the_same_number_of_steps(self, kind, tmp_path):
        exchange = {
            "threads": lambda: in_process(1)[0],
            "fixed": lambda: StoreExchange(open_store(str(tmp_path)), 0, 1),
            "manager": lambda: ManagerExchange(MockManager(in_process(1)[0])),
            "process group": lambda: ProcessGroupExchange.__new__(ProcessGroupExchange),
        }[kind]()
        if kind == "process group":
            exchange.rank, exchange.world_size = 0, 1
        with pytest.raises(
            ConfigurationError, match=r"sync_every=Seconds\(60\) cannot be use"
        ) as e:
            loop(exchange)
        assert type(exchange).__name__ in str(e.value)
        assert "connect with min_replicas=" in str(e.value)

    def test_weights_and_aggregates_that_do_not_fit(self, tmp_path):
        exchange = elastic(tmp_path)
        with pytest.raises(
            ConfigurationError, match=r"weight='equal'.*Leave weight out, which then is"
        ):
            loop(exchange, weight="equal")
        with pytest.raises(ConfigurationError, match=r"aggregate='trimmed'.*Leave aggregate out"):
            loop(exchange, aggregate="trimmed")
        with pytest.raises(ConfigurationError, match="weight must be one of"):
            loop(exchange, weight="size")

    @pytest.mark.parametrize(
        ("weight", "meant"), [(None, "steps"), ("steps", "steps"), ("tokens", "tokens")]
    )
    def test_contributions_are_weighed_by_their_steps(self, tmp_path, weight, meant):
        outer = loop(elastic(tmp_path), weight=weight, fragments=2, delay=1)
        assert outer._model.settings["weight"] == meant
        assert outer._model.settings["sync_every"] == "Seconds(60)"
        assert outer.sync_every == Seconds(60)
        assert outer._model.fragments[0].terms.weighting == meant

    def test_a_window_that_others_would_not_wait_for(self, tmp_path):
        exchange = elastic(tmp_path, sync_timeout=90.0)
        with pytest.raises(ConfigurationError, match=r"leaves 60 s.*grace is 30 s.*only 90 s"):
            loop(exchange)
        assert loop(exchange, fragments=2)._schedule.seconds == 30.0

    @pytest.mark.parametrize("delay", [-1, 1.5, None])
    def test_delays(self, tmp_path, delay):
        with pytest.raises(ConfigurationError, match="delay must be a whole number of at least 0"):
            loop(elastic(tmp_path), delay=delay)
        with pytest.raises(ConfigurationError, match="alpha is 2"):
            loop(elastic(tmp_path), alpha=2)

    def test_the_period_of_a_plan_is_a_number(self):
        plan = plan_exchange(1e6, 2, 1e9)
        with pytest.raises(ConfigurationError, match=r"With two fragments, pass 30"):
            plan.blocked(Seconds(60))

    def test_the_factory_takes_them_too(self, tmp_path):
        model = torch.nn.Linear(2, 2)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        outer = make_diloco_outer_loop(model, inner, elastic(tmp_path), sync_every=Seconds(5))
        assert outer.sync_every == Seconds(5)


def test_training_outside_of_the_block_is_noticed_after_many_steps(tmp_path):
    model = torch.nn.Linear(2, 2)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    outer = DiLoCo(model, inner, elastic(tmp_path), sync_every=Seconds(60))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    for _ in range(99):
        inner.step()
    with pytest.raises(Exception, match="100 inner steps were taken"):
        inner.step()
    assert outer.inner_steps == 0
