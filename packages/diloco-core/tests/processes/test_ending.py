"""The thread in which a process of a replica watches whether all are to end."""

import threading

from diloco_core._loop._inner_loop import TrainingProcess
from diloco_core._processes._ending import Ending


class Silent:
    """A board on which all are told to end, and the other processes do not answer."""

    def __init__(self):
        self.asked = threading.Event()

    def note(self, taken):
        """Forget it."""

    def ends(self):
        return True

    def last_step(self, taken):
        self.asked.set()


def test_it_is_gone_when_the_block_is_left():
    board = Silent()
    ending = Ending(TrainingProcess(), board, lambda: 3, leads=False)
    ending.start()
    assert board.asked.wait(60)
    ending.stop()
    assert not ending._thread.is_alive(), "it would talk to the board while Python ends"
