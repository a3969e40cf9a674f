"""The verbs, written once on the few hooks that a backend supplies."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self, Unpack

from ._backoff import Backoff
from ._cancel import cancel_all
from ._checks import check_callable, check_seconds, check_text, check_whole, is_number, shown
from ._collect import Progress, collect
from ._errors import (
    BackendError,
    InvalidRequestError,
    ReplicaNotFoundError,
)
from ._handle import ReplicaHandle
from ._hooks import Finding, LogQuery, Option
from ._journaled import Journaled
from ._launch_error import LaunchError
from ._look_order import LookOrder
from ._redact import redact_json, redact_text
from ._request import LaunchOptions, Plan, RunRequest, check_restarts, is_run_id, make_request
from ._variables import check_variables

if TYPE_CHECKING:
    from types import TracebackType

    from ._journal import RunJournal
    from ._types import ReplicaResult, ReplicaState, ReplicaStatus

_LATEST = 253_402_214_400.0
"""The last day of the year 9999 in Unix seconds, in UTC; in no time zone it is later than a calendar can say."""


class BaseExecutor(Journaled):
    """What every backend shares: checks, the verbs, the wait loop.

    Handles are the whole truth: an executor keeps nothing that matters, so any executor of the same
    backend in any process answers the same. Safe to share between threads if the backend's hooks
    are.

    A backend sets ``backend_name``, ``supports_inter_replica_network`` and ``capabilities``, and
    supplies hooks. Each is called only with what its verb has checked:

    * ``_check_request(request) -> None`` refuses what this backend cannot do. It may be left out.
    * ``_findings(request) -> list[Finding]`` looks at what a launch needs, for ``check``. It may be
      left out.
    * ``_plan(request) -> list[dict]`` gives what would be sent, with secrets redacted, and calls
      nothing.
    * ``_submit(request) -> list[ReplicaHandle]`` sends it: all or nothing, once for each run_id.
    * ``_observe_run(handles) -> Mapping[ReplicaHandle, ReplicaStatus]`` looks at replicas of one
      run.
    * ``_result(handle) -> JSON value`` reads what a replica that has succeeded returned.
    * ``_stop(handle) -> None`` asks for the end of a replica, or of its run where that is the
      scope.
    * ``_purge(handle) -> None`` removes the records of its run, which must have ended.
    * ``_siblings(handle) -> list[ReplicaHandle]`` gives the handles of all its ranks, where
      ``_attach`` does not find it. It may be left out.
    * ``_place(handle) -> tuple[str, ...]`` tells its run from others of that name, where the
      executor works in several places. It may be left out.
    * ``_spelled(handle, known) -> list[ReplicaHandle]`` picks those handles that lead to the same
      run with other metadata. It may be left out.
    * ``_logs(handle, query) -> Iterator[str]`` reads the lines that a :class:`LogQuery` asks for.
    * ``_list_runs() -> list[str]`` names the runs, oldest first.
    * ``_attach(run_id) -> list[ReplicaHandle]`` finds the handles of a run.
    * ``_check_handle(handle) -> None`` refuses handles that are incomplete or belong elsewhere,
      before anything else looks at them. It may be left out.
    * ``_within(seconds) -> context manager`` bounds the backend's calls, and its own retries, while
      ``collect`` waits that long (None: without an end). It may be left out.

    Args:
        run_id: Prefix of the names of runs that are not named by the caller.
        journal: Where launches and ends are written down, besides the backend's own records.
        backoff: Pauses of the wait loop, with its clock and sleep.
        env: Environment variables for every launch; those of the launch itself win.
        max_restarts: How often a failed attempt is started again if the launch does not say.

    Raises:
        InvalidRequestError: ``env`` sets a variable that a launch may not set, or ``max_restarts``
            is not from 0 to 1000.
    """

    def __init__(
        self,
        *,
        run_id: str | None = None,
        journal: RunJournal | None = None,
        backoff: Backoff | None = None,
        env: Mapping[str, str] | None = None,
        max_restarts: int = 0,
    ) -> None:
        self._env = check_variables("env", env)
        self._max_restarts = check_restarts("max_restarts", max_restarts)
        self._run_prefix = run_id
        self._journal = journal
        self._warned_of = set()
        self._looks = LookOrder()
        self._backoff = backoff or Backoff(first=0.2, factor=1.5, cap=5.0)

    # --- launching ---

    def launch_replicas(
        self,
        n_replicas: int,
        entrypoint: str | Callable[..., Any],
        entrypoint_args: Mapping[str, Any] | None = None,
        *,
        gpu: str | None = None,
        timeout: float | None = 3600,
        run_id: str | None = None,
        cpu: str | float | None = None,
        memory: str | None = None,
        env: Mapping[str, str] | None = None,
        secrets: Mapping[str, str] | None = None,
        labels: Mapping[str, str] | None = None,
        spot: bool | None = None,
        max_restarts: int | None = None,
        rank_offset: int = 0,
        world_size: int | None = None,
        cohort: str | None = None,
    ) -> list[ReplicaHandle]:
        """Start a cohort: all of it, or nothing.

        Args:
            n_replicas: How many replicas to start here.
            entrypoint: ``"package.module:function"``, ``"package.module.function"``,
                ``"package.module"`` (its function ``main``), or a function that has such a name.
            entrypoint_args: Its keyword arguments; JSON values, nested as you like, arrive exactly
                as given. Three keys mean something to the launch: ``rank_env`` and
                ``world_size_env`` (both taken out) name variables that are to hold the rank and the
                number of replicas too; ``rendezvous_uri`` is exported as ``RENDEZVOUS_URI`` too.
            gpu: GPUs for each replica, such as ``"H100"``, ``"A100:8"`` or ``"any:2"``; None: no
                GPU. A model that the backend does not know is refused.
            timeout: Seconds for which an attempt may run, from its start; None for no limit.
            run_id: Name of the launch and idempotency key: the same name and the same launch give
                the same handles. 1 to 48 lower-case letters, digits and dashes, with a letter or
                digit at both ends. A new name is made if it is left out.
            cpu: CPUs for each replica.
            memory: Memory for each replica.
            env: Environment variables, each of at most 131,071 bytes with its name.
            secrets: References to secrets that the backend keeps, by variable name; never their
                values.
            labels: Labels that the platform's records of the run carry, for its own tools; no verb
                finds runs by them.
            spot: Whether interruptible capacity is wanted.
            max_restarts: How often a failed attempt is started again: after an error, a signal, a
                timeout, or if memory ran out. A preemption uses up none. Each restart is an attempt
                with the whole timeout.
            rank_offset: The first rank, if the run consists of several launches.
            world_size: Number of replicas of the whole run, if it consists of several launches.
            cohort: Name that all replicas of the whole run share, if it consists of several
                launches: replicas that meet compare it. The run_id if it is left out.

        Returns:
            One handle per replica, in rank order.

        Raises:
            InvalidRequestError: An argument is not allowed; nothing was started.
            RunConflictError: The run_id belongs to another launch; nothing was started.
            LaunchError: The launch failed; everything started was ended again, except
                ``survivors``. Or a run was started and could not be written into the journal; then
                all of its replicas are survivors.
        """
        request = self._request(
            n_replicas, entrypoint, entrypoint_args, gpu=gpu, timeout=timeout, run_id=run_id, cpu=cpu, memory=memory,
            env=env, secrets=secrets, labels=labels, spot=spot, max_restarts=max_restarts, rank_offset=rank_offset,
            world_size=world_size, cohort=cohort,
        )  # fmt: skip
        handles = self._submit(request)
        if self._journal is not None:
            try:
                self._journal.record_launch(handles)
            except BackendError as error:
                raise LaunchError(
                    f"run {request.run_id!r} was started, but could not be written into the "
                    f"journal: {error}. Its replicas are running: they are in this error's "
                    "survivors, and attach(run_id) finds them too",
                    handles,
                ) from error
            except BaseException as error:  # such as Ctrl-C
                error.add_note(
                    f"run {request.run_id!r} was started, and its replicas are running: "
                    f"attach({request.run_id!r}) finds them, and cancel_run({request.run_id!r}) "
                    "ends them"
                )
                raise
        return handles

    def plan(
        self,
        n_replicas: int,
        entrypoint: str | Callable[..., Any],
        entrypoint_args: Mapping[str, Any] | None = None,
        **options: Unpack[LaunchOptions],
    ) -> Plan:
        """The requests that :meth:`launch_replicas` would send for the same arguments; sends nothing."""
        request = self._request(n_replicas, entrypoint, entrypoint_args, **options)
        return Plan(request.run_id, tuple(_shown(each, request) for each in self._plan(request)))

    # --- watching ---

    def poll(self, handle: ReplicaHandle) -> ReplicaState:
        """The state of a replica: ``describe(handle).state``."""
        return self.describe(handle).state

    def describe(self, handle: ReplicaHandle) -> ReplicaStatus:
        """Everything known about a replica.

        Raises:
            ReplicaNotFoundError: There is no record of it, here or in the journal.
            InvalidRequestError: The backend has no record of it, and that of the journal is
                damaged.
            BackendError: The backend could not be asked.
        """
        self._check(handle)
        gone: ReplicaNotFoundError | None = None
        try:
            status = self._observe([handle]).get(handle)
        except ReplicaNotFoundError as error:
            status, gone = None, error
        if status is None:
            if (damage := self._damage(handle)) is not None:
                raise damage
            raise ReplicaNotFoundError(self._missing(handle, gone)) from gone
        return status

    def stream_logs(self, handle: ReplicaHandle, *, n_lines: int = 200) -> str:
        """The last lines of a replica's log; ``""`` when there are none.

        Raises:
            ReplicaNotFoundError: There is no record of it.
        """
        self._check(handle)
        check_whole("n_lines", n_lines, 1)
        return "\n".join(self._logs(handle, LogQuery(n_lines=n_lines)))

    def log_iter(
        self,
        handle: ReplicaHandle,
        *,
        follow: bool = False,
        since: float | None = None,
        until: float | None = None,
        regex: str | None = None,
        streams: str = "combined",
    ) -> Iterator[str]:
        """The lines of a replica's log, without their line ends. Keeps no state between calls.

        Args:
            handle: The replica.
            follow: Go on until the replica has ended and its log is exhausted.
            since: Only lines from this time on, in Unix seconds. One before 1970 is that of all
                lines.
            until: Only lines before this time, in Unix seconds.
            regex: Only lines in which this regular expression is found. It is Python's ``re``,
                which nothing can interrupt: an expression with nested repetitions, such as
                ``(a+)+$``, may take for ever on one line of up to 1 MiB. Use none that somebody
                else has written.
            streams: ``"stdout"``, ``"stderr"`` or ``"combined"``.

        Raises:
            InvalidRequestError: The backend does not have that stream, or an argument is wrong (a
                ``ValueError``).
            ReplicaNotFoundError: There is no record of the replica.
        """
        self._check(handle)
        if streams not in self.capabilities.log_streams:
            raise InvalidRequestError(
                f"{self.backend_name} has no log stream {shown(streams)}; it has "
                f"{', '.join(self.capabilities.log_streams)}"
            )
        for name, value in (("since", since), ("until", until)):
            if value is not None and not is_number(value):
                raise InvalidRequestError(
                    f"{name} must be a Unix time in seconds or None, not {shown(value)}"
                )
        if regex is not None:
            try:
                if not isinstance(regex, str):  # bytes would be compiled, and then match no line
                    raise TypeError("it must be text")
                re.compile(regex)
            except (re.error, TypeError, OverflowError, RecursionError) as error:
                raise InvalidRequestError(
                    f"regex={shown(regex)} is not a regular expression: {error}"
                ) from None
        return self._logs(
            handle,
            LogQuery(
                follow=follow,
                since=_sayable(since),
                until=_sayable(until),
                regex=regex,
                streams=streams,
            ),
        )

    def collect(
        self,
        handles: Sequence[ReplicaHandle],
        *,
        timeout: float | None = None,
        progress: Progress | None = None,
    ) -> list[ReplicaResult]:
        """Wait until all replicas are terminal or the time is up; ends nothing, and may be repeated.

        Args:
            handles: In any order, of any runs of this backend.
            timeout: Seconds for all of them together; None for no limit.
            progress: Called now and then with what is known so far.

        Returns:
            One result per handle, in the given order; a replica without a record is failed with
            reason ``lost``, and a success whose result is gone has the result None and an ``error``
            that says so.

        Raises:
            InvalidRequestError: Something among the handles is none, or belongs elsewhere; nothing
                was waited for.
        """
        if not isinstance(handles, Iterable):
            raise InvalidRequestError(f"collect takes a list of handles, not {shown(handles)}")
        handles = list(handles)  # a generator can be read only once
        if progress is not None:
            check_callable("progress", progress)
        # Endless is a way to say None; every other value that is not finite is refused.
        limit = None if timeout == math.inf else check_seconds("timeout", timeout, none=True)
        begun = self._backoff.clock()
        with self._within(limit):
            for handle in handles:
                self._check(handle)  # a backend may have to ask whose its credentials are
            ends = self._ends(handles)
            passed = self._backoff.clock() - begun
            return collect(
                handles,
                self._observe_or_lost,
                self._result_of,
                place_of=self._place,
                ends=ends,
                timeout=None if limit is None else max(0.0, limit - passed),
                backoff=self._backoff,
                progress=progress,
            )

    # --- ending ---

    def cancel(self, handle: ReplicaHandle) -> None:
        """End a replica, or its whole run (``capabilities.cancel_scope``).

        Repeatable; returns when the backend has accepted it.

        A replica that has ended stays as it is, and one that is gone is ignored. Logs and records
        are kept. The state becomes ``cancelled`` only when the resources are gone.

        Raises:
            BackendError: The backend refused or could not be asked; nothing has changed.
        """
        self._check(handle)
        self._stop(handle)

    def cancel_run(self, run_id: str) -> None:
        """End all replicas of a run that this backend has, with one call if that ends the whole run, otherwise with one per rank.

        Ranks are cancelled at the same time, in threads. Replicas that have ended or are gone are
        passed over. Repeatable.

        Args:
            run_id: Name of the run.

        Raises:
            ReplicaNotFoundError: There is no such run, here or in the journal.
            BackendError: The backend refused or could not be asked. If only some ranks were
                refused, the others are being ended, and the error names the ranks that are not.
        """
        handles = self.attach(run_id)
        if self.capabilities.cancel_scope == "gang":
            self.cancel(handles[0])
        else:
            cancel_all(handles, self.cancel)

    def purge(self, handle: ReplicaHandle) -> None:
        """Remove the records of the run that a replica belongs to: logs, results, evidence.

        Repeatable.

        A journal keeps all ends of the run, with their results: those that nobody has seen yet are
        written down first.

        Raises:
            InvalidRequestError: A replica of the run has not ended; cancel it first.
            BackendError: The backend refused or could not be asked, or the journal could not be
                written. In the second case, nothing was removed.
        """
        self._check(handle)
        if self._journal is not None:
            self._write_last_ends(self._journal, handle)
        self._purge(handle)

    # --- finding ---

    def list_runs(self) -> list[str]:
        """The run_ids that the backend has records of, oldest first."""
        return self._list_runs()

    def attach(self, run_id: str) -> list[ReplicaHandle]:
        """The handles of a run, in rank order.

        Raises:
            ReplicaNotFoundError: There is no such run, here or in the journal.
        """
        try:
            return self._find(run_id)
        except ReplicaNotFoundError:
            if self._journal is None or not (known := self._journal.handles(run_id, self._is_ours)):
                raise
            return known

    def exists(self, run_id: str) -> bool:
        """Whether the backend itself has records of a run; a journal is not asked.

        Raises:
            BackendError: The backend could not be asked, so it is not known.
        """
        try:
            self._find(run_id)
        except ReplicaNotFoundError:
            return False
        return True

    # --- before a launch ---

    def check(self, n_replicas: int = 1, **options: Unpack[LaunchOptions]) -> list[Finding]:
        """What stands in the way of a launch, and what is in order; starts no replica of a run.

        Args:
            n_replicas: As for the launch.
            **options: As for the launch: ``gpu``, ``cpu``, ``memory``, ``spot`` and so on.

        Returns:
            What was found, good and bad; each says what to do. Empty where the backend looks at
            nothing.

        Raises:
            InvalidRequestError: The launch itself would be refused.
        """
        request = self._request(n_replicas, "check:check", None, **options)
        self._plan(request)  # it refuses what only this backend can, and calls nothing
        return self._findings(request)

    def options(self) -> list[Option]:
        """What the constructor takes."""
        return []

    def close(self) -> None:
        """Release local resources; repeatable, never raises, never ends a replica."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # --- shared pieces ---

    def _request(self, *arguments: Any, **options: Any) -> RunRequest:
        """The checked arguments of a launch, with what the constructor says where the launch does not."""
        if unknown := options.keys() - LaunchOptions.__annotations__.keys():
            raise TypeError(
                f"a launch has no argument {min(unknown)!r}; it takes "
                f"{', '.join(LaunchOptions.__annotations__)}"
            )
        env = options.get("env")
        if env is None or isinstance(env, Mapping):  # anything else is refused by make_request
            options["env"] = {**self._env, **(env or {})}
        if options.get("max_restarts") is None:
            options["max_restarts"] = self._max_restarts
        request = make_request(*arguments, **options, run_prefix=self._run_prefix)
        longest = self.capabilities.max_timeout
        if longest is not None and (request.timeout is None or request.timeout > longest):
            raise InvalidRequestError(
                f"{self.backend_name} ends replicas after at most {longest:.0f} s, so "
                f"timeout={shown(request.timeout)} cannot be honoured: give a number of seconds up "
                "to that"
            )
        self._check_request(request)
        return request

    def _find(self, run_id: str) -> list[ReplicaHandle]:
        # Some platforms answer something else for a name that no object of theirs can have.
        if not is_run_id(check_text("run_id", run_id)):
            raise ReplicaNotFoundError(
                f"there is no run {shown(run_id)}: a launch would refuse this name"
            )
        return self._attach(run_id)

    def _check(self, handle: ReplicaHandle) -> None:
        if not isinstance(handle, ReplicaHandle):
            raise InvalidRequestError(
                f"this is not a ReplicaHandle: {shown(handle)}. ReplicaHandle.from_dict and "
                "from_json make one of what to_dict and to_json gave"
            )
        if handle.backend_name != self.backend_name:
            raise InvalidRequestError(
                f"this handle belongs to the backend {shown(handle.backend_name)}, and this "
                f"executor is for {self.backend_name!r}"
            )
        # A run_id becomes part of paths and names of objects, and a handle may have been written by
        # anybody.
        if not is_run_id(handle.run_id):
            raise InvalidRequestError(
                f"this handle of rank {handle.rank} names the run {shown(handle.run_id)}, and no "
                "launch gives a run such a name"
            )
        self._check_handle(handle)


def _sayable(moment: float | None) -> float | None:
    """A time from 1970 to 9999, which every clock and calendar can say: no log has lines before or after."""
    return None if moment is None else min(max(moment, 0.0), _LATEST)


def _shown(planned: dict[str, Any], request: RunRequest) -> dict[str, Any]:
    """What a plan shows of a request: no secrets, but the references to them that the launch was given."""
    shown: dict[str, Any] = redact_json(planned)
    if request.secrets and planned.get("secrets") == request.secrets:
        shown["secrets"] = {name: redact_text(where) for name, where in request.secrets.items()}
    return shown
