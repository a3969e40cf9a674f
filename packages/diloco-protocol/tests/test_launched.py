"""What a launch has started is taken back if the launch fails."""

import pytest

from diloco_protocol import LaunchError, ReplicaHandle, UnavailableError
from diloco_protocol.backend import all_or_nothing

LEFT = [ReplicaHandle(0, "memory", run_id="run-1")]


def launched(error, left):
    taken = []

    def take_back(caught):
        taken.append(caught)
        return left, "cancel rank 0"

    try:
        with all_or_nothing(take_back):
            if error is not None:
                raise error
    except BaseException as raised:
        return raised, taken
    return None, taken


def test_a_launch_that_went_well_is_kept():
    assert launched(None, LEFT) == (None, [])


@pytest.mark.parametrize("error", [UnavailableError("no answer"), KeyboardInterrupt()])
def test_its_own_error_is_raised_if_nothing_is_left(error):
    assert launched(error, []) == (error, [error])
    assert not hasattr(error, "__notes__")


def test_what_is_left_is_named():
    error = UnavailableError("no answer")
    raised, _ = launched(error, LEFT)
    assert (type(raised), str(raised)) == (LaunchError, "no answer. cancel rank 0")
    assert (raised.survivors, raised.__cause__) == (tuple(LEFT), error)


def test_an_interrupt_stays_one_and_names_what_is_left():
    error = KeyboardInterrupt()
    assert launched(error, LEFT) == (error, [error])
    assert error.__notes__ == ["cancel rank 0"]


def test_a_launch_error_of_the_launch_itself_takes_nothing_back():
    error = LaunchError("it runs, and cannot be looked up", LEFT)
    assert launched(error, LEFT) == (error, [])
