"""The verbs of an executor, written once on the few hooks that a backend supplies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self, Unpack

from ._backoff import Backoff
from ._cancel import all_or_nothing, cancel_all
from ._checks import (
    check_seconds,
    check_text,
    shown,
)
from ._errors import (
    BackendError,
    InvalidRequestError,
    ReplicaNotFoundError,
    SpecVersionError,
)
from ._handle import ReplicaHandle
from ._hooks import Finding, Option
from ._journal_records import options_of_launch
from ._options import Options, options_of
from ._recent import LookOrder
from ._redact import redact_and_cut, redact_json, redact_text
from ._rendezvous import try_rendezvous
from ._request import LaunchOptions, Plan, RunRequest, check_restarts, is_run_id, make_request
from ._spec import check_variables
from ._texts import readable
from ._watched import Watched

if TYPE_CHECKING:
    from ._journal import RunJournal

_PLACE = 120
"""Most characters of the place that replicas are told."""


class BaseExecutor(Watched):
    """The base class of every backend: argument checks, the verbs and the wait loop.

    A handle holds everything that is needed to find its replica. An executor keeps no state that
    matters, so any executor of the same backend gives the same answers in any process. Safe to
    share between threads if the backend's hooks are.

    A backend sets ``backend_name``, ``supports_inter_replica_network`` and ``capabilities``, and
    ``options_class`` to the ``Options`` that its constructor takes, if it has them. It supplies
    hooks. Each is called only with arguments that its verb has checked:

    * ``_check_request(request) -> None`` refuses what this backend cannot do. Optional.
    * ``_findings(request) -> list[Finding]`` looks at what a launch needs, for ``check``. Optional.
    * ``_probe(patience) -> tuple[executor, options]`` chooses what launches the replica that tries
      a rendezvous, where this executor would give it more than it needs. Optional.
    * ``_seen_by_probe() -> list[Finding]`` says what that replica has shown by running. Optional.
    * ``_plan(request) -> list[dict]`` returns what would be sent, with secrets redacted, and calls
      nothing.
    * ``_where() -> str`` says where the replicas of a launch run, such as a region. Optional.
    * ``_submit(request) -> list[ReplicaHandle]`` sends it: all or nothing, once for each run_id.
    * ``_observe_run(handles) -> Mapping[ReplicaHandle, ReplicaStatus]`` looks at replicas of one
      run.
    * ``_result(handle) -> JSON value`` reads the result of a replica that has succeeded.
    * ``_stop(handle) -> None`` asks the platform to end a replica, or its run where the scope is
      the run.
    * ``_purge(handle) -> None`` removes the records of the replica's run, which must have ended.
    * ``_siblings(handle) -> list[ReplicaHandle]`` returns the handles of all ranks of the replica's
      run, where ``_attach`` does not find it. Optional.
    * ``_place(handle) -> tuple[str, ...]`` tells the replica's run apart from others of the same
      name, where the executor works in several places. Optional.
    * ``_spelled(handle, known) -> list[ReplicaHandle]`` picks those known handles that lead to the
      same run with other metadata. Optional.
    * ``_rendezvous(handle) -> str | None`` says where the replica meets the others, as the
      platform's own records have it. Optional.
    * ``_logs(handle, query) -> Iterator[str]`` reads the lines that a :class:`LogQuery` asks for.
    * ``_list_runs() -> list[str]`` names the runs, oldest first.
    * ``_attach(run_id) -> list[ReplicaHandle]`` finds the handles of a run.
    * ``_check_handle(handle) -> None`` refuses handles that are incomplete or belong elsewhere,
      before any other hook gets them. Optional.
    * ``_within(seconds) -> context manager`` bounds the backend's calls, and its own retries, while
      ``collect`` waits that long (None: no limit). Optional.

    Args:
        run_id: Prefix of the names of runs that the caller does not name.
        journal: Records launches and ends, in addition to the backend's own records.
        backoff: Delays of the wait loop, with its clock and sleep.
        env: Environment variables for every launch; those of the launch itself take precedence.
        max_restarts: How often a failed attempt is started again, if the launch does not say.
        patience: Seconds for which ``describe``, ``describe_run`` (for each run), ``log_iter``,
            ``stream_logs``, ``purge``, ``list_runs``, ``attach``, ``exists`` and ``meets_at`` try
            again while the backend's errors may pass. So their hooks need not, and have to be
            repeatable.

    Raises:
        InvalidRequestError: ``env`` sets a variable that a launch may not set, or ``max_restarts``
            is not from 0 to 1000.
    """

    options_class: type[Options] | None = None
    """The class of the constructor's options, from which :meth:`options` lists them."""

    def __init__(
        self,
        *,
        run_id: str | None = None,
        journal: RunJournal | None = None,
        backoff: Backoff | None = None,
        env: Mapping[str, str] | None = None,
        max_restarts: int = 0,
        patience: float = 0.0,
    ) -> None:
        self._env = check_variables("env", env)
        self._max_restarts = check_restarts("max_restarts", max_restarts)
        self._run_prefix = run_id
        self._journal = journal
        self._warned_of = set()
        self._noted = set()
        self._failures = {}
        self._looks = LookOrder()
        self._backoff = backoff or Backoff(first=0.2, factor=1.5, cap=5.0)
        self._patience = patience

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
            n_replicas: Number of replicas to start in this launch.
            entrypoint: ``"package.module:function"``, ``"package.module.function"``,
                ``"package.module"`` (its function ``main``), or a function that has such a name.
            entrypoint_args: Its keyword arguments. JSON values, nested at most 200 levels deep,
                arrive exactly as given. Three keys mean something to the launch: ``rank_env`` and
                ``world_size_env`` (both removed from the arguments) name further variables that
                hold the rank and the number of replicas; the value of ``rendezvous_uri`` is also
                exported as ``RENDEZVOUS_URI``.
            gpu: GPUs for each replica, such as ``"H100"``, ``"A100:8"`` or ``"any:2"``; None: no
                GPU. A model that the backend does not know is refused.
            timeout: Seconds for which an attempt may run, from its start; None for no limit.
            run_id: Name of the launch and idempotency key: the same name and the same launch give
                the same handles. 1 to 48 lower-case letters, digits and dashes, with a letter or
                digit at both ends. If it is left out, a new name is made.
            cpu: CPUs for each replica.
            memory: Memory for each replica.
            env: Environment variables, each of at most 131,071 bytes including its name.
            secrets: References to secrets that the backend keeps, by variable name; never their
                values.
            labels: Labels that the platform's records of the run carry, for the platform's own
                tools; no verb finds runs by them.
            spot: Whether interruptible capacity is requested.
            max_restarts: How often a failed attempt is started again: after an error, a signal, a
                timeout, or if memory ran out. A preemption uses up no restart. Each restart is an
                attempt with the whole timeout.
            rank_offset: The first rank, if the run consists of several launches.
            world_size: Number of replicas of the whole run, if it consists of several launches.
            cohort: Name that all replicas of the whole run share, if it consists of several
                launches: replicas that meet compare it. By default it is the run_id.

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
            n_replicas, entrypoint, entrypoint_args, gpu=gpu, timeout=timeout, run_id=run_id,
            cpu=cpu, memory=memory, env=env, secrets=secrets, labels=labels, spot=spot,
            max_restarts=max_restarts, rank_offset=rank_offset, world_size=world_size,
            cohort=cohort,
        )  # fmt: skip
        handles = self._submit(request)
        words = (
            f"Run {request.run_id!r} was started, and its replicas are running, but it is not in "
            f"the journal: attach({request.run_id!r}) finds them, and "
            f"cancel_run({request.run_id!r}) ends them"
        )
        with all_or_nothing(lambda _: (handles, words)):
            if self._journal is not None:
                self._journal.record_launch(handles, options_of_launch(request))
        return handles

    def plan(
        self,
        n_replicas: int,
        entrypoint: str | Callable[..., Any],
        entrypoint_args: Mapping[str, Any] | None = None,
        **options: Unpack[LaunchOptions],
    ) -> Plan:
        """Return the requests that :meth:`launch_replicas` would send, and send nothing."""
        request = self._request(n_replicas, entrypoint, entrypoint_args, **options)
        return Plan(request.run_id, tuple(_shown(item, request) for item in self._plan(request)))

    # --- ending ---

    def cancel(self, handle: ReplicaHandle) -> None:
        """End a replica, or its whole run (``capabilities.cancel_scope``).

        Repeatable. Returns as soon as the backend has accepted the request.

        A replica that has ended stays as it is, and a replica that is gone is ignored. Logs and
        records are kept. The state becomes ``cancelled`` only when the resources are gone. With a
        journal, the ends of the logs are first read for it, for at most ten seconds or so.

        Raises:
            BackendError: The backend refused, or could not be reached; nothing has changed.
        """
        self._check(handle)
        logs = self._logs_before_cancel(handle)  # which some backends then remove
        self._stop(handle)
        self._keep_logs(logs)

    def cancel_run(self, run_id: str) -> None:
        """End all replicas of a run that this backend has.

        One call is made if it ends the whole run, otherwise one per rank, at the same time, in
        threads. Replicas that have ended or are gone are skipped. Repeatable.

        Args:
            run_id: Name of the run.

        Raises:
            ReplicaNotFoundError: There is no such run, here or in the journal.
            BackendError: The backend refused, or could not be reached. If it refused only some
                ranks, the others are being ended, and the error names the ranks that are not.
        """
        handles = self.attach(run_id)
        if self.capabilities.cancel_scope == "gang":
            self.cancel(handles[0])
        else:
            cancel_all(handles, self.cancel)

    def purge(self, handle: ReplicaHandle) -> None:
        """Remove the records of the run that a replica belongs to: logs, results, ends. Repeatable.

        A journal keeps all ends of the run, with their results. Ends that no executor has recorded
        yet are first written into the journal.

        Raises:
            InvalidRequestError: A replica of the run has not ended; cancel it first.
            BackendError: The backend refused or could not be reached, or the journal could not be
                written. In the second case, nothing was removed.
        """
        self._check(handle)

        def record_and_purge() -> None:
            if self._journal is not None:
                self._write_last_ends(self._journal, handle)
            self._purge(handle)

        self._patiently(record_and_purge)

    # --- finding ---

    def list_runs(self) -> list[str]:
        """Return the run_ids that the backend has records of, oldest first."""
        return self._patiently(self._list_runs)

    def attach(self, run_id: str) -> list[ReplicaHandle]:
        """Return the handles of a run, in rank order.

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
        """Return whether the backend itself has records of a run; the journal is not read.

        Raises:
            BackendError: The backend could not be queried, so the answer is not known.
        """
        try:
            self._find(run_id)
        except ReplicaNotFoundError:
            return False
        return True

    def meets_at(self, handle: ReplicaHandle) -> str | None:
        """Return the ``rendezvous_uri`` with which a replica was launched.

        The backend's own records say it, so neither a forged handle nor a journal can. All replicas
        of a launch have the same one.

        Returns:
            None if the launch named no rendezvous, or the backend does not keep it.

        Raises:
            ReplicaNotFoundError: The backend has no record of the replica.
            BackendError: The backend could not be queried, or its record cannot be read.
        """
        self._check(handle)
        try:
            return self._patiently(lambda: self._rendezvous(handle))
        except SpecVersionError as error:
            raise BackendError(f"rank {handle.rank} of run {handle.run_id!r}: {error}") from error

    # --- before a launch ---

    def check(
        self,
        n_replicas: int = 1,
        *,
        rendezvous_uri: str | None = None,
        patience: float | None = None,
        **options: Unpack[LaunchOptions],
    ) -> list[Finding]:
        """Report what would prevent a launch and what is in order; starts no replica of a run.

        Only a replica can find out whether replicas reach their rendezvous: with
        ``rendezvous_uri``, one without GPUs is started with the run's image and environment, tries
        the prefix, and is removed. It costs what such a replica costs.

        Args:
            n_replicas: As for the launch.
            rendezvous_uri: The prefix to try. The replica's image needs ``diloco-core``.
            patience: Seconds that this replica may take, with the start of its machine and image.
                None: 600, or what its backend says.
            **options: As for the launch: ``gpu``, ``cpu``, ``memory``, ``spot`` and so on.

        Returns:
            The findings, good and bad; each says what to do, and its ``ok`` is None if the answer
            is not known. One of them is ``"rendezvous"`` if a replica has tried it, and there is a
            ``"cleanup"`` if that replica could not be removed.

        Raises:
            InvalidRequestError: The launch itself would be refused.
        """
        request = self._request(n_replicas, "check:check", None, **options)
        self._plan(request)  # it makes checks that only this backend can make, and calls nothing
        findings = self._findings(request)
        if rendezvous_uri is None or any(finding.ok is False for finding in findings):
            return findings
        patience = self.probe_seconds if patience is None else patience
        executor, more = self._probe(check_seconds("patience", patience, positive=True))
        more = {"env": options.get("env"), "secrets": options.get("secrets"), **more}
        tried = try_rendezvous(executor, rendezvous_uri, patience, more, self.replica_word)
        if tried[0].ok:
            tried = [*self._seen_by_probe(), *tried]
        subjects = {finding.subject for finding in tried}
        return [finding for finding in findings if finding.subject not in subjects] + tried

    @classmethod
    def options(cls) -> list[Option]:
        """Return the options that the constructor takes; the class itself can be asked, too."""
        return [] if cls.options_class is None else options_of(cls.options_class)

    def close(self) -> None:
        """Release local resources. Repeatable; never raises, and never ends a replica."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- shared pieces ---

    def _request(self, *arguments: Any, **options: Any) -> RunRequest:
        """Return the checked arguments of a launch, completed with the constructor's defaults."""
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
        place = readable(redact_and_cut(self._where(), _PLACE))
        return replace(request, backend=self.backend_name, place=place)

    def _find(self, run_id: str) -> list[ReplicaHandle]:
        # Some platforms answer with another error for a name that none of their objects can have.
        if not is_run_id(check_text("run_id", run_id)):
            raise ReplicaNotFoundError(
                f"there is no run {shown(run_id)}: a launch would refuse this name"
            )
        return self._patiently(lambda: self._attach(run_id))


def _shown(planned: dict[str, Any], request: RunRequest) -> dict[str, Any]:
    """Return what a plan shows of a request: no secrets, only the references to them."""
    shown: dict[str, Any] = redact_json(planned)
    if request.secrets and planned.get("secrets") == request.secrets:
        shown["secrets"] = {name: redact_text(where) for name, where in request.secrets.items()}
    return shown
