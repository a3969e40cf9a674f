"""After which inner step which fragment is sent and adopted: laws of the pure schedule."""

from hypothesis import given
from hypothesis import strategies as st

from diloco_core._terms._schedule import Due, Schedule


@st.composite
def schedules(draw):
    fragments = draw(st.integers(1, 5))
    period = draw(st.integers(1, 9))
    delay = draw(st.integers(0, period - 1))
    return Schedule(fragments * period, fragments, delay)


def run(schedule, steps, half_taken=lambda step: False):
    """Inner steps after which something is sent and adopted, with the fragment, as an outer loop
    would do it.
    """
    since, sent, decisions = 0, False, 0
    sends, adoptions = [], []
    for step in range(1, steps + 1):
        since += 1
        due = schedule.due(since, sent=sent, half_taken=half_taken(step))
        fragment = schedule.turn(decisions)
        if due.send:
            sent = True
            sends.append((step, fragment))
        if due.adopt:
            assert sent, "adopted before it was sent"
            since, sent, decisions = 0, False, decisions + 1
            adoptions.append((step, fragment))
    return sends, adoptions


@given(schedules(), st.integers(1, 4))
def test_each_fragment_is_adopted_once_per_cycle_at_its_offset(schedule, cycles):
    _, adoptions = run(schedule, cycles * schedule.sync_every)
    wanted = [
        ((fragment + 1) * schedule.period + cycle * schedule.sync_every, fragment)
        for cycle in range(cycles)
        for fragment in range(schedule.fragments)
    ]
    assert adoptions == wanted


@given(schedules(), st.integers(1, 4))
def test_a_fragment_is_sent_so_many_steps_before_it_is_adopted(schedule, cycles):
    sends, adoptions = run(schedule, cycles * schedule.sync_every)
    assert [(step + schedule.delay, fragment) for step, fragment in sends] == adoptions


@given(schedules(), st.sets(st.integers(1, 60)))
def test_a_half_taken_step_is_waited_for_but_no_longer_than_a_period(schedule, half):
    sends, adoptions = run(schedule, 60, half_taken=half.__contains__)
    before = 0
    for step, _ in adoptions:
        waited = step - before
        assert schedule.period <= waited <= 2 * schedule.period
        assert step not in half or waited == 2 * schedule.period
        before = step
    assert len(sends) - len(adoptions) in {0, 1}
    assert all(sent <= adopted for (sent, _), (adopted, _) in zip(sends, adoptions, strict=False))


@given(schedules())
def test_an_optimizer_that_never_steps_again_is_waited_for_one_period(schedule):
    _, adoptions = run(schedule, 4 * schedule.period, half_taken=lambda step: True)
    assert [step for step, _ in adoptions] == [2 * schedule.period, 4 * schedule.period]


def test_what_is_due():
    schedule = Schedule(sync_every=10, fragments=2, delay=2)
    assert schedule.period == 5
    assert schedule.due(2) == Due(send=False, adopt=False)
    assert schedule.due(3) == Due(send=True, adopt=False)
    assert schedule.due(4, sent=True) == Due(send=False, adopt=False)
    assert schedule.due(5, sent=True) == Due(send=False, adopt=True)
    assert schedule.due(7) == Due(send=True, adopt=True)
