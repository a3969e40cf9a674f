"""Faults that a test asks for, at the level of HTTP; and a record of the calls."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from ._http import CutError

KINDS = (
    *("throttle", "server_error", "unavailable", "unauthorized", "forbidden", "expired"),
    *("cut", "ambiguous", "delay"),
)


@dataclass
class Fault:
    """One fault to come."""

    kind: str
    verb: str | None
    resource: str | None
    times: int | None
    seconds: int
    after: int
    delay: float = 0.0


@dataclass(frozen=True)
class Call:
    """One call that reached the server.

    Attributes:
        verb: the verb of the API: for Kubernetes as in a Role (``create``, ``get``, ``list``,
            ``watch``, ``patch``, ``update``, ``delete``); for paths that name no objects, the HTTP
            method in lower case.
        resource: such as ``jobs`` or ``pods/log``; for other paths, the path.
        name: the name of the object, if the path has one.
        status: the answer's status; 0 for no answer, as the connection was cut.
        request: the same for all attempts of a client at one request, if the client says so
            (Modal's does); otherwise empty.
    """

    verb: str
    resource: str
    name: str
    status: int
    request: str = ""


class Faults:
    """The faults that calls will meet; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._faults: list[Fault] = []

    def add(
        self,
        kind: str,
        *,
        verb: str | None = None,
        resource: str | None = None,
        times: int | None = 1,
        retry_after: int = 1,
        after: int = 0,
        seconds: float = 1.0,
    ) -> None:
        """Make calls fail.

        Args:
            kind: ``throttle`` (429 with Retry-After), ``server_error`` (500), ``unavailable``
                (503), ``unauthorized`` (401), ``forbidden`` (403), ``expired`` (410, as for a
                continue token that is too old), ``cut`` (the connection is reset before anything
                happens), ``ambiguous`` (the request is carried out, and then the connection is
                reset) or ``delay`` (the request is carried out and answered, but only after
                ``seconds``).
            verb: such as ``create``; None for all.
            resource: such as ``jobs`` or ``pods/log``; None for all.
            times: how many calls; None for all until ``clear``.
            retry_after: seconds, for ``throttle``.
            after: how many such calls succeed before that.
            seconds: in real time, for ``delay``.

        Raises:
            ValueError: no such kind.
        """
        if kind not in KINDS:
            raise ValueError(f"there is no fault {kind!r}; there are {', '.join(KINDS)}")
        with self._lock:
            self._faults.append(Fault(kind, verb, resource, times, retry_after, after, seconds))

    def clear(self) -> None:
        """Drop all faults that are still to come."""
        with self._lock:
            self._faults.clear()

    def take(self, verb: str, resource: str) -> Fault | None:
        """Return the fault that meets this call, if any."""
        with self._lock:
            for fault in self._faults:
                if fault.verb not in (None, verb) or fault.resource not in (None, resource):
                    continue
                if fault.after:
                    fault.after -= 1
                    continue
                if fault.times is not None:
                    fault.times -= 1
                    if fault.times <= 0:
                        self._faults.remove(fault)
                return fault
        return None


def before(fault: Fault | None, refusals: Mapping[str, Callable[[Fault], Exception]]) -> None:
    """Do what a fault does before the call; for a ``delay``, it sleeps.

    Args:
        fault: the fault that meets the call; None if none does.
        refusals: by kind, the refusal in the words of the served API. A kind that is not among
            them is left to the caller: ``ambiguous``, and a refusal whose message needs to know
            more of the call than its fault.

    Raises:
        CutError: the fault is ``cut``.
        Exception: the refusal of the fault's kind.
    """
    if fault is None:
        return
    if fault.kind == "cut":
        raise CutError
    if fault.kind == "delay":
        time.sleep(fault.delay)
    if fault.kind in refusals:
        raise refusals[fault.kind](fault)


class Calls:
    """The latest 100,000 calls, in the order of their answers; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: deque[Call] = deque(maxlen=100_000)

    def note(self, call: Call) -> None:
        """Add a call."""
        with self._lock:
            self._calls.append(call)

    def clear(self) -> None:
        """Forget all calls."""
        with self._lock:
            self._calls.clear()

    def count(self, verb: str | None = None, resource: str | None = None) -> int:
        """Return how many calls there were, of a verb and a resource if given."""
        return sum(verb in (None, call.verb) and resource in (None, call.resource) for call in self)

    def requests(self) -> list[Call]:
        """Return the calls without further attempts at the same request.

        A client may try again, such as after an answer that came too late on a busy machine.
        """
        first: dict[object, Call] = {}
        for index, call in enumerate(self):
            first.setdefault(call.request or index, call)
        return list(first.values())

    def __iter__(self) -> Iterator[Call]:
        with self._lock:
            return iter(list(self._calls))

    def __len__(self) -> int:
        with self._lock:
            return len(self._calls)
