from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from diloco_local._oom import OomWatch, counter_file, own_counter


def test_version_2(tmp_path):
    path = tmp_path / "user" / "memory.events"
    path.parent.mkdir(parents=True)
    path.write_text("low 0\noom 1\noom_kill 1\n")
    assert counter_file("4:memory:/box\n0::/user\n", tmp_path) == path


def test_the_path_of_a_container_is_the_host_s(tmp_path):
    (tmp_path / "memory.events").write_text("oom_kill 0\n")
    assert counter_file("0::/docker/abc\n", tmp_path) == tmp_path / "memory.events"


def test_no_counter_no_evidence(tmp_path):
    assert counter_file("0::/\n", tmp_path) is None
    assert not OomWatch(lambda: None).take()


def test_this_machine():
    value = own_counter()()
    assert value is None or value >= 0
    assert Path("/proc").exists() or value is None


@given(st.lists(st.integers(0, 3), max_size=20))
def test_every_kill_explains_one_death(rises):
    count = [7]
    watch = OomWatch(lambda: count[0])
    explained = 0
    for rise in rises:
        count[0] += rise
        explained += watch.take()
        assert explained <= count[0] - 7
    while watch.take():
        explained += 1
    assert explained == sum(rises)
