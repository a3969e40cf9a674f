"""What a backend supplies: a few private methods, on which all the verbs are written."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ._causes import as_shown

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
        help: What it is for.
    """

    name: str
    type: str
    default: str
    help: str


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that :meth:`BaseExecutor.check` has looked at before a launch.

    Attributes:
        subject: What was looked at, in a word or two, such as ``"rights"`` or ``"quota"``.
        ok: Whether it is as it must be; None if that could not be found out.
        message: What was found, and what to do about it; without secrets and control characters, as
            the message of an error.
    """

    subject: str
    ok: bool | None
    message: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "message", as_shown(self.message))


@dataclass(frozen=True, slots=True)
class LogQuery:
    """Which lines of a log are asked for.

    Attributes:
        n_lines: How many lines, counted from the end; None for all.
        follow: Go on until the replica has ended and its log is exhausted.
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


class Hooks(ABC):
    """The side of :class:`BaseExecutor` that a backend fills in.

    What does not depend on the backend has been checked before.
    """

    backend_name: str
    supports_inter_replica_network: bool
    capabilities: Capabilities

    # A backend may have nothing to refuse
    def _check_request(self, request: RunRequest) -> None:  # noqa: B027
        """Refuse a launch or a plan that asks for something this backend cannot do; called before anything else.

        Raises:
            InvalidRequestError: Says what was asked for and what to do instead.
        """

    # A backend may have one place and no metadata
    def _check_handle(self, handle: ReplicaHandle) -> None:  # noqa: B027
        """Refuse a handle whose metadata is incomplete, or that names another account, cluster or host.

        Every verb calls this first, before it asks the platform or a journal, so that a journal
        which several executors share speaks for each of them alone. It is called often and from
        several threads, and is to call nothing itself.

        Raises:
            InvalidRequestError: Says what is missing, or where the handle belongs.
        """

    def _findings(self, request: RunRequest) -> list[Finding]:  # noqa: ARG002
        """Look at what a launch needs, for :meth:`BaseExecutor.check`; starts nothing.

        By default there are no findings.
        """
        return []

    def _within(self, seconds: float | None) -> AbstractContextManager[object]:  # noqa: ARG002
        """Bound this thread's calls while ``collect`` waits that many seconds (None: endlessly).

        By default they are not.
        """
        return nullcontext()

    @abstractmethod
    def _plan(self, request: RunRequest) -> list[dict[str, Any]]:
        """The requests for a launch, as JSON values with secrets redacted.

        Sends nothing; checks what only it can check.
        """

    @abstractmethod
    def _submit(self, request: RunRequest) -> list[ReplicaHandle]:
        """Send the requests: all of them or none, idempotent by run_id."""

    @abstractmethod
    def _observe_run(
        self, handles: Sequence[ReplicaHandle]
    ) -> Mapping[ReplicaHandle, ReplicaStatus]:
        """The statuses of replicas of one run, with a number of calls that does not depend on their number.

        A backend without such a call asks once per replica given, and declares
        ``calls_per_look="rank"``.

        A replica without a record is left out; where the whole run has no record, raising
        ReplicaNotFoundError is just as good.
        """

    @abstractmethod
    def _result(self, handle: ReplicaHandle) -> Any:
        """The result of a replica that has succeeded.

        Raises:
            ResultLostError: It is gone for good.
            BackendError: It could not be read this time.
        """

    @abstractmethod
    def _stop(self, handle: ReplicaHandle) -> None:
        """Ask for the end of a replica (or its run).

        Called from several threads at once where the scope is the replica.
        """

    @abstractmethod
    def _purge(self, handle: ReplicaHandle) -> None:
        """Remove the records of its run."""

    def _place(self, handle: ReplicaHandle) -> tuple[str, ...]:  # noqa: ARG002
        """What tells the run of a handle from others of that name.

        An executor that works in one place has none of them.
        """
        return ()

    def _spelled(
        self,
        handle: ReplicaHandle,  # noqa: ARG002
        known: Sequence[ReplicaHandle],  # noqa: ARG002
    ) -> list[ReplicaHandle]:
        """Those of some handles that lead to the run of this one with other metadata.

        By default a run has only one spelling.
        """
        return []

    def _siblings(self, handle: ReplicaHandle) -> list[ReplicaHandle]:
        """The handles of all ranks whose records ``_purge`` removes with this one's, where ``_attach`` does not find it.

        A backend overrides it whose handles lead to places in which ``_attach`` does not look.
        """
        return [handle]

    @abstractmethod
    def _logs(self, handle: ReplicaHandle, query: LogQuery) -> Iterator[str]:
        """The lines asked for."""

    @abstractmethod
    def _list_runs(self) -> list[str]:
        """The known run_ids, oldest first."""

    @abstractmethod
    def _attach(self, run_id: str) -> list[ReplicaHandle]:
        """The handles of a run."""
