"""Workers of pytest-xdist look at a harness once for all of them."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from diloco_conformance import HarnessFault
from diloco_conformance._one_look import once


class TestMine:
    pass


@pytest.mark.parametrize(("wrong", "times"), [(None, 1), ("living() is missing", 2)])
def test_the_first_worker_looks_and_the_others_hear_of_it(tmp_path, wrong, times):
    looks = []

    def look():
        looks.append(1)
        if wrong:
            raise HarnessFault(wrong)

    with ThreadPoolExecutor(4) as workers:
        told = list(workers.map(lambda _: once(TestMine, tmp_path, look), range(8)))
    assert told == [wrong] * 8
    assert len(looks) == times


@pytest.mark.parametrize("together", [False, True])
def test_a_world_that_fails_once_is_looked_at_again(tmp_path, together):
    looks = []

    def look():
        looks.append(1)
        if len(looks) == 1:
            raise HarnessFault("a container ended meanwhile")

    assert once(TestMine, tmp_path if together else None, look) is None
    assert len(looks) == 2


def test_a_look_that_was_broken_off_is_done_by_the_next(tmp_path):
    def broken():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        once(TestMine, tmp_path, broken)
    looks = []
    assert once(TestMine, tmp_path, lambda: looks.append(1)) is None
    assert looks


def test_every_class_is_looked_at_by_itself(tmp_path):
    class TestLocal:
        pass

    class Other:
        pass

    Other.__qualname__ = "TestOther"
    looks = []
    for cls in (TestMine, Other, TestMine, TestLocal, TestLocal):  # local ones may share a name
        once(cls, tmp_path, lambda: looks.append(1))
    assert len(looks) == 4


def test_one_process_alone_looks_itself(tmp_path):
    looks = []
    for _ in range(2):
        once(TestMine, None, lambda: looks.append(1))
    assert len(looks) == 2
    assert not list(tmp_path.iterdir())
