"""What a backend supplies: the five verbs, or a few private methods on which they are built."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from ._backoff import Patiently
from ._errors import BackendError
from ._handle import ReplicaHandle
from ._texts import as_shown
from ._types import ReplicaResult, ReplicaState

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ._handle import ReplicaHandle
    from ._request import RunRequest
    from ._types import Capabilities, ReplicaStatus


@dataclass(frozen=True, slots=True)
class Option:
    """An option of a backend's constructor.

    Attributes:
        name: Its name.
        type: Its type, in words.
        default: Its default, in words.
        help: Its purpose.
    """

    name: str
    type: str
    default: str
    help: str


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that :meth:`BaseExecutor.check` has looked at before a launch.

    Attributes:
        subject: What was checked, in a word or two, such as ``"rights"`` or ``"quota"``.
        ok: Whether it is as it must be; None if that could not be determined.
        message: What was found, and what to do about it. Like the message of an error, it is
            without secrets and control characters.
    """

    subject: str
    ok: bool | None
    message: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "message", as_shown(self.message))


@dataclass(frozen=True, slots=True)
class LogQuery:
    """The selection of lines of a log.

    Attributes:
        n_lines: How many lines, counted from the end; None for all.
        follow: Whether to continue until the replica has ended and its log is exhausted.
        since: Only lines from this time on, in Unix seconds.
        until: Only lines before this time, in Unix seconds.
        regex: Only lines in which this regular expression is found.
        streams: ``"stdout"``, ``"stderr"`` or ``"combined"``.
    """

    n_lines: int | None = None
    follow: bool = False
    since: float | None = None
    until: float | None = None
    regex: str | None = None
    streams: str = "combined"

    def selects(self, text: str, at: float | None = None) -> bool:
        """Return whether a line is selected by its text and its time in Unix seconds.

        A line whose time is not known is selected at any time.
        """
        return self.covers(at) and (self.regex is None or re.search(self.regex, text) is not None)

    def covers(self, at: float | None) -> bool:
        """Return whether a time is from ``since`` on and before ``until``."""
        return at is None or (
            (self.since is None or at >= self.since) and (self.until is None or at < self.until)
        )


class Hooks(ABC):
    """The hooks of :class:`BaseExecutor`, which a backend supplies.

    Everything that does not depend on the backend has been checked before a hook is called.
    """

    backend_name: str
    supports_inter_replica_network: bool
    capabilities: Capabilities
    replica_word = "replica"
    """What the platform calls a replica, such as ``"pod"``."""
    probe_seconds = 600.0
    """Seconds for which ``check`` waits for the replica that tries a rendezvous by default."""

    # Not abstract, since a backend may have nothing to refuse
    def _check_request(self, request: RunRequest) -> None:  # noqa: B027
        """Refuse a launch or a plan that asks for something this backend cannot do.

        Called before anything else.

        Raises:
            InvalidRequestError: The request is refused; the error says what was asked for and what
                to do instead.
        """

    # Not abstract, since a backend may have one place and no metadata
    def _check_handle(self, handle: ReplicaHandle) -> None:  # noqa: B027
        """Refuse a handle that is incomplete, or that names another account, cluster or host.

        Every verb calls this first, before it queries the platform or a journal. So an executor
        that shares a journal with others takes from it only what is its own. It is called often and
        from several threads, and must not make calls to the platform itself.

        Raises:
            InvalidRequestError: The handle is refused; the error says what is missing, or where the
                handle belongs.
        """

    def _findings(self, request: RunRequest) -> list[Finding]:  # noqa: ARG002
        """Look at what a launch needs, for :meth:`BaseExecutor.check`; starts nothing.

        By default there are no findings.
        """
        return []

    def _probe(self, patience: float) -> tuple[Any, dict[str, Any]]:  # noqa: ARG002
        """Return what launches the replica that tries a rendezvous, and further launch options.

        That replica needs no GPU, and is over in a minute or after ``patience`` seconds. By default
        this executor launches it like any other.
        """
        return self, {}

    def _seen_by_probe(self) -> list[Finding]:
        """Return what else is certain once the replica that tried a rendezvous has run."""
        return []

    def _within(self, seconds: float | None) -> AbstractContextManager[object]:  # noqa: ARG002
        """Bound this thread's calls while ``collect`` waits that many seconds (None: no limit).

        By default they are not bounded.
        """
        return nullcontext()

    def _where(self) -> str:
        """Return where the replicas of a launch run, such as a region, as their handles name it.

        The replicas are told, and tell it in their telemetry. Nothing is asked for it: it is empty
        as long as the platform would have to be asked, and by default.
        """
        return ""

    @abstractmethod
    def _plan(self, request: RunRequest) -> list[dict[str, Any]]:
        """Return the requests for a launch, as JSON values with secrets redacted.

        Sends nothing. Makes the checks that only this method can make.
        """

    @abstractmethod
    def _submit(self, request: RunRequest) -> list[ReplicaHandle]:
        """Send the requests: all of them or none, idempotent by run_id."""

    @abstractmethod
    def _observe_run(
        self, handles: Sequence[ReplicaHandle]
    ) -> Mapping[ReplicaHandle, ReplicaStatus]:
        """Return the statuses of replicas of one run.

        The number of calls must not depend on the number of replicas. A backend that has no such
        call makes one call per replica given, and declares ``calls_per_look="rank"``.

        A replica without a record is left out. Where the whole run has no record,
        ReplicaNotFoundError may be raised instead.
        """

    @abstractmethod
    def _result(self, handle: ReplicaHandle) -> Any:
        """Return the result of a replica that has succeeded.

        Raises:
            ResultLostError: The result is gone for good.
            BackendError: The result could not be read this time.
        """

    @abstractmethod
    def _stop(self, handle: ReplicaHandle) -> None:
        """Ask the platform to end a replica (or its run).

        Called from several threads at once where the scope is the replica.
        """

    @abstractmethod
    def _purge(self, handle: ReplicaHandle) -> None:
        """Remove the records of the replica's run."""

    def _place(self, handle: ReplicaHandle) -> tuple[str, ...]:  # noqa: ARG002
        """Return what tells the run of a handle apart from others of the same name.

        An executor that works in one place needs nothing for that, and returns ``()``.
        """
        return ()

    def _spelled(
        self,
        handle: ReplicaHandle,  # noqa: ARG002
        known: Sequence[ReplicaHandle],  # noqa: ARG002
    ) -> list[ReplicaHandle]:
        """Return those of the known handles that lead to the run of this one with other metadata.

        By default, all handles of a run have the same metadata.
        """
        return []

    def _siblings(self, handle: ReplicaHandle) -> list[ReplicaHandle]:
        """Return the handles of all ranks whose records ``_purge`` removes with this one's.

        It is called where ``_attach`` does not find the run. A backend whose handles lead to places
        in which ``_attach`` does not look overrides it.
        """
        return [handle]

    def _rendezvous(self, handle: ReplicaHandle) -> str | None:  # noqa: ARG002
        """Return the ``rendezvous_uri`` of the launch that the replica is of; None without one.

        It comes from what the launch has written on the platform, never from a handle or a journal.
        By default the backend does not know it.

        Raises:
            ReplicaNotFoundError: The platform has no record of the replica.
        """
        return None

    @abstractmethod
    def _logs(self, handle: ReplicaHandle, query: LogQuery) -> Iterator[str]:
        """Yield the lines that the query selects."""

    @abstractmethod
    def _list_runs(self) -> list[str]:
        """Return the known run_ids, oldest first."""

    @abstractmethod
    def _attach(self, run_id: str) -> list[ReplicaHandle]:
        """Return the handles of a run."""


def findings_of(
    subject: str,
    look: Callable[[], Iterable[Finding]],
    patiently: Patiently,
    *,
    ok: bool | None = False,
) -> list[Finding]:
    """Return what a look finds, or a finding with its error.

    Args:
        subject: The subject of the finding with the error.
        look: Asks the platform.
        patiently: Repeats the look if its error may pass.
        ok: The verdict if the look fails: False if a launch would fail too, None if the answer is
            only not known.
    """
    try:
        return patiently(lambda: list(look()))
    except BackendError as error:
        known = "" if ok is False else "this is not known: "
        return [Finding(subject, ok, f"{known}{error}")]


@runtime_checkable
class ServerlessExecutor(Protocol):
    """Launches, watches, cancels and collects replicas.

    ``isinstance`` checks only the names; the conformance suite checks the rest.
    """

    @property
    def backend_name(self) -> str:
        """Return the name of the backend, as its handles carry it."""
        ...

    @property
    def supports_inter_replica_network(self) -> bool:
        """Return whether replicas can reach each other over a network."""
        ...

    def launch_replicas(
        self,
        n_replicas: int,
        entrypoint: str | Callable[..., Any],
        entrypoint_args: Mapping[str, Any],
        *,
        gpu: str | None = None,
        timeout: float | None = 3600,
    ) -> list[ReplicaHandle]:
        """Start a cohort, and return its handles in rank order."""
        ...

    def poll(self, handle: ReplicaHandle) -> ReplicaState:
        """Return the state of a replica."""
        ...

    def stream_logs(self, handle: ReplicaHandle, *, n_lines: int = 200) -> str:
        """Return the last lines of a replica's log; ``""`` if there are none."""
        ...

    def cancel(self, handle: ReplicaHandle) -> None:
        """End a replica (or its whole run, as the backend declares); repeatable."""
        ...

    def collect(
        self, handles: Sequence[ReplicaHandle], *, timeout: float | None = None
    ) -> list[ReplicaResult]:
        """Wait for replicas, and return one result per handle, in the given order."""
        ...
