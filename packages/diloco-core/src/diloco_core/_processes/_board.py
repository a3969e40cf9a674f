"""What a process of a replica lets the others know at any time, without waiting for them."""

from __future__ import annotations

import time

from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined] # both public

from .._errors import ProcessFailedError
from .._exchange._endings import as_text
from ._inside import Inside

_MOST_TEXT = 2000
_LOOKS, _PAUSE = 20, 0.1


class Board:
    """A few texts that each process of a replica may leave for the others. Thread-safe.

    They are kept by the leader's process, in a key-value store of torch's, which does not ask who
    reads and writes; nothing in it is decoded but numbers.

    Args:
        inside: The processes; all of them make their board together.
    """

    def __init__(self, inside: Inside) -> None:
        self._process, self._processes = inside.process, inside.processes
        if inside.leads:
            self._store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        port: int = inside.share(self._store.port if inside.leads else None)
        if not inside.leads:
            self._store = TCPStore("localhost", port, is_master=False)

    def fail(self, error: BaseException) -> None:
        """Say that this process has failed, if no other has said that before.

        Where its error only says that another one has ended, it is not the one.
        """
        if isinstance(error, ProcessFailedError) or _of_collective(error):
            return
        text = f"{self._process} {as_text(error)}"[:_MOST_TEXT]
        self._store.compare_set("failed", "", text.encode(errors="replace").decode())

    def cause(self, error: BaseException) -> BaseException:
        """Return the failure by which another process has broken a collective of the training.

        Errors that are none of a collective, and those of which nobody knows the cause, are
        returned as they are.
        """
        for _ in range(_LOOKS if _of_collective(error) else 0):
            if failure := self.failure():
                return failure
            time.sleep(_PAUSE)  # the process that has failed may be about to say so
        return error

    def note(self, taken: int) -> None:
        """Say how many inner steps this process has taken."""
        self._store.set(f"at/{self._process}", str(taken))

    def failure(self, *, late: bool = False) -> ProcessFailedError | None:
        """Return an error that names the process that has failed first; None if none has.

        Args:
            late: Whether some process has been waited for until now, in vain.
        """
        try:
            if self._store.check(["failed"]):
                number, _, text = self._store.get("failed").decode(errors="replace").partition(" ")
                return _named(int(number), text[:_MOST_TEXT])
            if not late:
                return None
            taken = list(map(int, self._store.multi_get(self._keys("at"))))
            least = min(taken)
            if least == max(taken):
                return None
            return _named(
                taken.index(least),
                f"it does not answer. It has taken {least} inner steps inside the block, and "
                f"another process {max(taken)}",
            )
        except (RuntimeError, ValueError):  # the board is gone with the leader, or a stranger's
            return None

    def end(self) -> None:
        """Say that all processes are to end."""
        self._store.set("end", "")

    def ends(self) -> bool:
        """Say whether all are to end."""
        return self._store.check(["end"])

    def last_step(self, taken: int) -> int | None:
        """Return the step after which all end; None until each process has told its own steps.

        It is the one after the last that any of them has taken: no process has finished it, and all
        can. If one has failed, there is nothing to wait for.

        Args:
            taken: How many steps this process had taken when it first asked.
        """
        self._store.set(f"taken/{self._process}", str(taken))
        if self._store.check(["failed"]):
            return 0
        if not self._store.check(keys := self._keys("taken")):
            return None
        return 1 + max(map(int, self._store.multi_get(keys)))

    def _keys(self, what: str) -> list[str]:
        return [f"{what}/{process}" for process in range(self._processes)]


def _of_collective(error: BaseException) -> bool:
    # torch raises what gloo says as a plain RuntimeError, with the place in gloo's source.
    by_gloo = isinstance(error, RuntimeError) and "gloo/" in str(error)
    return by_gloo or isinstance(error, DistError)


def _named(process: int, how: str) -> ProcessFailedError:
    return ProcessFailedError(f"process {process} of this replica has failed: {how}", process)
