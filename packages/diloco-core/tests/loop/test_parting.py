"""What is refused when another replica has left, and how many steps later."""

import pytest

from diloco_core import UnequalSyncsError
from diloco_core._loop._flight import Parting


def left():
    """The error that says so, as it was raised."""
    with pytest.raises(UnequalSyncsError) as raised:
        raise UnequalSyncsError("rank 3 has left", 3)
    return raised.value


def test_as_long_as_nobody_has_left_nothing_is_refused():
    parting = Parting()
    parting.check_sync()
    parting.check_steps(0)


def test_another_sync_is_refused_at_once():
    """The errors differ: one that was raised keeps the frames of whoever caught it in memory."""
    parting, error = Parting(), left()
    parting.part(error, 0)
    raised = []
    for _ in range(2):
        with pytest.raises(UnequalSyncsError, match=r"^rank 3 has left$") as info:
            parting.check_sync()
        assert info.value.rank == 3
        raised.append(info.value)
    assert len({id(each) for each in (error, parting._error, *raised)}) == 4
    assert parting._error.__traceback__ is None


def test_steps_are_refused_once_as_many_were_taken_in_vain_as_between_two_syncs():
    """They are counted from sync to sync."""
    parting = Parting()
    parting.part(left(), 2)
    parting.check_steps(4)
    parting.part(left(), 1)
    parting.check_steps(4)
    parting.part(left(), 1)
    with pytest.raises(UnequalSyncsError, match=r"^rank 3 has left This replica is still") as info:
        parting.check_steps(4)
    assert info.value.rank == 3
    assert "Rank 3 has taken fewer inner steps" in str(info.value)
