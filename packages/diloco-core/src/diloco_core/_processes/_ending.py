"""The processes of a replica end together, whether one fails or is told to end (SIGTERM)."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch.distributed import DistError

from .._errors import ProcessFailedError
from .._exchange._endings import as_text
from .._host import host_name, is_gone
from .._loop._inner_loop import EXIT_CODE, TrainingProcess
from ._inside import Inside
from ._shared import shared_values


@contextmanager
def put_off(process: TrainingProcess) -> Iterator[None]:
    """While this lasts, SIGTERM waits: the other processes take part in what is done here."""
    # Whoever has been told before carries this out: it is how the replica ends.
    before, waits = process.training, not process.told_to_end
    process.training = True
    yield
    process.training = before
    if process.told_to_end and waits and not before:
        raise SystemExit(EXIT_CODE)


INTERVAL = 0.2
"""Seconds between two looks at what the others have written."""

_MOST_TEXT = 2000
_LOOKS, _PAUSE = 20, 0.1
_PATIENCE = 20.0  # torchrun waits for 30 seconds before it kills


class Ending:
    """Lets the other processes know how this one stands, and watches in a thread how they do.

    What they write for each other is in memory that they share, each at a place of its own: so it
    can be read whatever has become of the others. Whoever fails writes why, and when. If one is
    told to end, the processes tell each other how many steps they have taken, and all go on to the
    same one. Nothing is exchanged for this at a step, until then. A leader that waits for the store
    does not notice that another process has failed: it is interrupted.

    Args:
        inside: The processes; all of them make this together.
        process: Handles the signal in this process.
        taken: Returns how many steps this process has taken.

    Attributes:
        asked: Whether all are to end.
    """

    def __init__(self, inside: Inside, process: TrainingProcess, taken: Callable[[], int]) -> None:
        self._number, self._leads = inside.process, inside.leads
        self._process, self._taken = process, taken
        numbers = torch.empty(5, inside.processes, dtype=torch.int64, device="meta")
        texts = torch.empty(inside.processes, _MOST_TEXT, dtype=torch.int8, device="meta")
        numbers, self._texts = shared_values(inside, [numbers, texts])
        self._at, self._told, self._known_at, self._failed_at, self._pids = numbers.numpy()
        self._pids[self._number] = os.getpid()
        self.asked = False
        self._last = 0
        self._known = threading.Event()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="diloco-ending", daemon=True)

    def start(self) -> None:
        """Handle the signal from now on, if nobody else does."""
        self._process.watch()
        self._thread.start()

    def stop(self) -> None:
        """Leave the signal to others again."""
        self._over.set()
        self._process.stop()
        self._thread.join()

    def fail(self, error: BaseException) -> None:
        """Say that this process has failed.

        Where its error only says that another one has ended, it is not the one.
        """
        if isinstance(error, ProcessFailedError) or _of_collective(error):
            return
        text = as_text(error).encode(errors="replace")[:_MOST_TEXT]
        self._texts[self._number, : len(text)] = torch.frombuffer(bytearray(text), dtype=torch.int8)
        self._failed_at[self._number] = time.monotonic_ns()  # from now on, the others read the text

    def cause(self, error: BaseException) -> BaseException:
        """Return the failure by which another process has broken a collective of the training.

        Errors that are none of a collective, and those of which nobody knows the cause, are
        returned as they are.
        """
        return (self.broken_by() if _of_collective(error) else None) or error

    def broken_by(self, *, late: bool = False) -> ProcessFailedError | None:
        """Return an error that names the process that has broken a collective; None if none has.

        Waits up to two seconds for a process that is about to say why it fails, or to be gone.

        Args:
            late: Whether some process has been waited for until now, in vain.
        """
        for _ in range(_LOOKS):
            if failure := self.failure(late=late):
                return failure
            for process, pid in enumerate(self._pids.tolist()):
                if is_gone(pid, host_name()):
                    how = f"it is gone (pid {pid}): it was killed, or ended without saying why"
                    return _named(process, how)
            time.sleep(_PAUSE)
        return None

    def failure(self, *, late: bool = False) -> ProcessFailedError | None:
        """Return an error that names the process that has failed first; None if none has.

        Args:
            late: Whether some process has been waited for until now, in vain.
        """
        failed = [(at, process) for process, at in enumerate(self._failed_at.tolist()) if at]
        if failed:
            _, process = min(failed)
            text = self._texts[process].numpy().tobytes().rstrip(b"\0")
            return _named(process, text.decode(errors="replace"))
        taken = self._at.tolist()
        least = min(taken)
        if not late or least == max(taken):
            return None
        return _named(
            taken.index(least),
            f"it does not answer. It has taken {least} inner steps inside the block, and "
            f"another process {max(taken)}",
        )

    def last_step(self) -> int:
        """Return the step after which all end; asked for once they are to.

        Raises:
            SystemExit: The others do not answer.
        """
        if not self._known.wait(_PATIENCE):
            raise SystemExit(EXIT_CODE)
        return self._last

    def agree(self, taken: int) -> int | None:
        """Return the step after which all end; None until each process has told its own steps.

        It is the one after the last that any of them has taken: no process has finished it, and all
        can. If one has failed or was killed, there is nothing to wait for.

        Args:
            taken: How many steps this process had taken when it first asked.
        """
        self._known_at[self._number] = 1 + taken
        if any(self._failed_at):
            return 0
        if all(self._known_at):
            return int(max(self._known_at))
        return 0 if any(is_gone(pid, host_name()) for pid in self._pids.tolist()) else None

    def _watch(self) -> None:
        while not self._over.wait(INTERVAL):
            self._at[self._number] = self._taken()
            if self._process.told_to_end:
                self._told[self._number] = 1
            elif not any(self._told):
                if self._leads and (failure := self.failure()):
                    self._process.interrupt(failure)
                continue
            # Before the steps are read: a step that ends later sees it, and waits.
            self.asked = True
            if self._leads and self._process.handles and not self._process.told_to_end:
                os.kill(os.getpid(), signal.SIGTERM)
            taken = self._taken()
            while (last := self.agree(taken)) is None:
                if self._over.wait(INTERVAL / 10):
                    return
            self._last = last
            break
        self._known.set()


def _of_collective(error: BaseException) -> bool:
    # torch raises what gloo says as a plain RuntimeError, with the place in gloo's source.
    by_gloo = isinstance(error, RuntimeError) and "gloo/" in str(error)
    return by_gloo or isinstance(error, DistError)


def _named(process: int, how: str) -> ProcessFailedError:
    return ProcessFailedError(f"process {process} of this replica has failed: {how}", process)
