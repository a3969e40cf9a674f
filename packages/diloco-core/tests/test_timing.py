"""One wait for others: when to look around, when it is over, and how long to sleep."""

import pytest
import torch

from diloco_core import ConfigurationError, ProcessGroupExchange, Timing, in_process
from diloco_core._timing import Wait


class _Clock:
    def __init__(self):
        self.now, self.slept = 100.0, []

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        assert seconds >= 0.0, "time.sleep() refuses that"
        self.slept.append(seconds)
        self.now += seconds


def _wait(clock, timeout=10.0, look_around=lambda: None, alarms=()):
    timing = Timing(clock=clock, sleep=clock.sleep)
    return Wait(timing, False, timeout, look_around, lambda: TimeoutError("over"), alarms)


def test_a_pause_ends_at_the_next_alarm_and_at_the_deadline():
    clock, looks = _Clock(), []
    wait = _wait(clock, look_around=lambda: looks.append(clock.now), alarms=[2.0])
    for _ in range(1000):
        if clock.now > 109.999:
            break
        wait.pause()
    wait.pause()
    with pytest.raises(TimeoutError, match="over"):
        wait.pause()
    assert clock.now == pytest.approx(110.0)
    assert looks[0] == pytest.approx(102.0)
    assert looks[-1] == pytest.approx(110.0)
    assert max(clock.slept) <= 0.5


@pytest.mark.parametrize("late", [0.0, 1.0, 1000.0])
@pytest.mark.parametrize("slow", [0.0, 60.0])
def test_past_the_deadline_it_looks_around_once(late, slow):
    """Even if looking around takes so long that it is due again."""
    clock, looks = _Clock(), []

    def look_around():
        looks.append(clock.now)
        clock.now += slow

    wait = _wait(clock, look_around=look_around)
    clock.now += 10.0 + late
    wait.pause()
    assert looks == [110.0 + late]
    with pytest.raises(TimeoutError, match="over"):
        wait.pause()
    assert len(looks) == 1


def test_progress_in_the_last_moment_gives_the_whole_time_again():
    clock = _Clock()
    wait = _wait(clock, look_around=lambda: None)
    clock.now += 11.0
    wait.pause()
    wait.extend()
    clock.now += 9.0
    wait.pause()
    clock.now += 2.0
    wait.pause()
    with pytest.raises(TimeoutError, match="over"):
        wait.pause()


@pytest.mark.parametrize("limit", ["beat_interval", "lost_after", "return_within"])
def test_without_a_store_there_are_no_signs_of_life(limit):
    timing = Timing(**{limit: {"lost_after": 33.0}.get(limit, 9.0)})
    with pytest.raises(ConfigurationError, match=f"{limit}, which has no effect in InProcess"):
        in_process(2, timing=timing)


def test_the_limits_of_a_process_group_are_its_own(tmp_path):
    group = torch.distributed
    group.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        ProcessGroupExchange(timing=Timing(sleep=print))
        with pytest.raises(ConfigurationError, match="sync_timeout, which has no effect in Proc"):
            ProcessGroupExchange(timing=Timing(sync_timeout=9.0))
    finally:
        group.destroy_process_group()
