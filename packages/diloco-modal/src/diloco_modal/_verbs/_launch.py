"""Start the calls of a run: all or none, and one call per rank even if answers are lost."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import uuid
from collections.abc import Mapping
from itertools import compress
from typing import Any

from diloco_protocol import (
    BackendError,
    Backoff,
    ReplicaHandle,
    ReplicaState,
    RunConflictError,
    RunRequest,
)
from diloco_protocol.backend import Patiently, all_or_nothing, redact_text

from .._client import _event_loop as loop
from .._client._client import Client
from .._client._errors import MissingError
from .._request._options import DAY, ModalOptions
from .._request._payload import payloads, record_name
from .._request._resources import bound_options
from .._state._handles import make_handle
from .._state._record import DamagedRecordError, call_of, calls_of, launch_of, written
from .._state._states import Trace, ended
from ._withdraw import Withdrawal

_AGREED = ("ranks", "world_size", "app", "function", "environment", "grace")
_FADING = 6.0 * DAY
"""Age from which entries may be missing: Modal removes each entry 7 days after its last use."""


def _fingerprint(request: RunRequest, options: ModalOptions) -> str:
    """Return the digest of everything that two launches of one run_id must agree on.

    This is the request, and what this executor makes of it.
    """
    agreed = [
        request.fingerprint(),
        options.app,
        options.function,
        list(options.app_secrets or ()),
        options.region,
        options.cloud,
        options.pending_timeout,
        options.grace,
    ]
    return hashlib.sha256(json.dumps(agreed).encode()).hexdigest()


def _other(run_id: str, *, started: bool) -> str:
    """Explain that a name is taken by another launch."""
    text = f"there is another launch of the name {run_id!r} already"
    if started:
        return f"{text}: choose another run_id; attach({run_id!r}) finds a run again"
    return f"{text}, which has started nothing yet: repeat it as it was, or {_freed(run_id)}"


def _freed(run_id: str) -> str:
    return f"cancel_run({run_id!r}) frees the name, as long as nothing was started under it"


class Launcher:
    """Launches runs."""

    def __init__(
        self, client: Client, options: ModalOptions, backoff: Backoff, patiently: Patiently
    ) -> None:
        self._client, self._options, self._backoff = client, options, backoff
        self._patiently = patiently

    def launch(self, request: RunRequest) -> list[ReplicaHandle]:
        """Start the calls that a run still lacks.

        Raises:
            RunConflictError: The run_id belongs to another launch; or this launch was cancelled or
                taken back and has ended, or has ended in part and cannot be completed.
            LaunchError: The launch failed, and some of its calls may be running: they could not be
                ended, or an earlier or another launcher has started them.
            BackendError: The launch failed, and no call that it knows is left running.
        """
        wanted, began = self._entry(request), self._options.clock()
        launch: Mapping[str, Any] = wanted
        mine: bool | None = False
        made: dict[int, str] = {}
        holders: dict[int, str | None] = {}
        record: Any = None

        def take_back(error: BaseException) -> tuple[list[ReplicaHandle], str]:
            if record is None:
                return [], ""
            others = {rank: call for rank, call in holders.items() if call and rank not in made}
            if isinstance(error, DamagedRecordError):  # its text already says what there may be
                others = {}
            withdrawal = Withdrawal(
                self._client, self._options, self._backoff, record, made, others
            )
            try:
                withdrawal.run(
                    request, mine=self._is_mine(record, wanted) if mine is None else mine
                )
                if isinstance(error, Exception):  # an interrupt must not wait for that
                    calls = withdrawal.others
                    alive = loop.at_once(self._may_live, list(calls.values()))
                    withdrawal.others = dict(compress(calls.items(), alive))
            except BaseException as again:  # a second Ctrl-C
                left = (
                    f"of the run {request.run_id!r} only its record may be left: "
                    f"cancel_run({request.run_id!r}) removes it"
                )
                again.add_note(withdrawal.note() or left)
                raise
            survivors = [
                make_handle(launch, rank, call, request.run_id)
                for rank, call in withdrawal.calls().items()
            ]
            return survivors, withdrawal.note()

        with all_or_nothing(take_back):
            # The first step: it shows what an earlier try has started, even if this one fails then.
            record, entries = self._look(request.run_id, create=False)
            if entries:
                launch = self._same(request, wanted, entries, holders)
            bound, secrets = bound_options(request, self._options), request.secrets
            function = self._patiently(lambda: self._client.function(bound, secrets))
            if not entries:
                record, entries = self._look(request.run_id, create=True)
            if not entries:
                mine, entries = None, {"launch": written(wanted)}
                if not self._patiently(lambda: self._client.put_once(record, "launch", wanted)):
                    # The entry may exist because it was made and the answer lost: its id shows
                    # which launch has made it.
                    entries = self._patiently(lambda: self._client.entries(record))
            if launch is wanted:
                launch = self._same(request, wanted, entries, holders)
                mine = launch["id"] == wanted["id"]
            missing = [rank for rank in request.ranks if holders[rank] is None]
            if missing and began - launch["at"] > _FADING:
                days = (began - launch["at"]) / DAY
                raise RunConflictError(
                    f"the run {request.run_id!r} was launched {days:.1f} days ago, and its record "
                    f"on Modal does not say what became of rank {missing[0]}, which may have been "
                    "trained: entries fade after 7 days. Choose another run_id"
                )
            if missing and any(holders.values()):
                self._check_not_over(request.run_id, missing[0], holders)
            start_by = began + self._options.pending_timeout
            sent = payloads(request, self._options, launch["id"], start_by, launch["environment"])

            async def start(payload: Mapping[str, Any]) -> None:
                rank = payload["rank"]
                call = await self._soon(lambda: self._client.spawn(function, payload))
                made[rank] = call
                entry = f"call-{rank}", {"call": call}
                try:
                    holders[rank] = (await self._soon(lambda: self._client.hold(record, *entry)))[
                        "call"
                    ]
                except MissingError:  # after a second Ctrl-C the launch was taken back meanwhile
                    await self._drop(call)
                    raise
                if holders[rank] != call:
                    del made[rank]
                    await self._drop(call)

            loop.at_once(start, [payload for payload in sent if payload["rank"] in missing])
            voided = [rank for rank in request.ranks if not holders[rank]]
            if voided:
                how = "choose another run_id" if any(holders.values()) else _freed(request.run_id)
                raise RunConflictError(
                    f"the run {request.run_id!r} was cancelled before rank {voided[0]} was "
                    f"started: {how}"
                )
            theirs = [str(call) for rank, call in holders.items() if made.get(rank) != call]
            loop.at_once(self._check_app, theirs)
            # So the first look need not read what was written here.
            known = {f"call-{rank}": written({"call": call}) for rank, call in holders.items()}
            self._client.keep_entries(record, {**entries, **known}, began)
            return [
                make_handle(launch, rank, str(holders[rank]), request.run_id)
                for rank in request.ranks
            ]

    def _look(self, run_id: str, *, create: bool) -> tuple[Any, Mapping[str, str]]:
        """Return the record of a run and its entries; None and no entries if there is no record."""
        try:
            record = self._patiently(lambda: self._client.record(run_id, create=create))
            return record, self._patiently(lambda: self._client.entries(record))
        except MissingError:
            if create:
                raise
            return None, {}

    def _same(
        self,
        request: RunRequest,
        wanted: Mapping[str, Any],
        entries: Mapping[str, str],
        holders: dict[int, str | None],
    ) -> Mapping[str, Any]:
        """Return the launch's entry in a record, and fill ``holders`` with the calls of its ranks.

        Raises:
            RunConflictError: It is another launch.
        """
        name = record_name(request.run_id)
        not_ours = (
            f"there is a Dict {name!r} on Modal that is not the record of a run: choose another "
            "run_id"
        )
        if "launch" not in entries:
            raise RunConflictError(not_ours)
        try:
            launch = launch_of(entries)
        except DamagedRecordError as damage:
            raise RunConflictError(f"{not_ours}. {damage}") from damage
        if launch["fingerprint"] != wanted["fingerprint"]:
            raise RunConflictError(_other(request.run_id, started=any(calls_of(entries).values())))
        if any(launch[key] != wanted[key] for key in _AGREED):  # then the digest in it is wrong
            raise RunConflictError(not_ours)
        holders.update({rank: call_of(entries, rank) for rank in request.ranks})
        return launch

    def _entry(self, request: RunRequest) -> dict[str, Any]:
        options, uri = self._options, request.rendezvous_uri
        return {
            "id": uuid.uuid4().hex,
            "fingerprint": _fingerprint(request, options),
            "ranks": list(request.ranks),
            "world_size": request.world_size,
            "app": options.app,
            "function": options.function,
            "environment": self._client.environment(),
            "labels": dict(request.labels),
            # A password in it is not kept, and then it is equal to no URI.
            "rendezvous": uri and redact_text(uri),
            "grace": options.grace,
            "at": options.clock(),
        }

    def _is_mine(self, record: Any, wanted: Mapping[str, Any]) -> bool:
        """Return whether the record belongs to this launch.

        Creating its entry failed or was interrupted. If there is no entry yet, it is created now.
        """
        with contextlib.suppress(BackendError):
            made = self._client.put_once(record, "launch", wanted)
            return made or (self._client.get(record, "launch") or {}).get("id") == wanted["id"]
        return False

    async def _drop(self, call: str) -> None:
        """End a call that would train nothing, since another call or no call may hold its rank."""
        with contextlib.suppress(BackendError):
            await asyncio.to_thread(self._client.cancel, call)

    def _check_not_over(self, run_id: str, missing: int, holders: Mapping[int, str | None]) -> None:
        """Refuse to complete a run of which a rank was ended or has failed.

        The others would wait for it, and cost money. A rank that has succeeded is no reason: it may
        belong to a launcher that is still at work.

        Raises:
            RunConflictError: A rank was ended or has failed.
        """
        calls = {rank: call for rank, call in holders.items() if call}
        fallen = loop.at_once(self._has_fallen, list(calls.values()))
        for rank in compress(calls, fallen):
            raise RunConflictError(
                f"rank {rank} of an earlier try of this launch has ended, and rank {missing} was "
                f"not started: end what runs with cancel_run({run_id!r}), and purge that run, "
                f"which attach({run_id!r}) finds, or choose another run_id"
            )

    async def _has_fallen(self, call: str) -> bool:
        with contextlib.suppress(BackendError):
            end = await self._client.end(call)
            if end is not None and not end.late:
                return ended(end, Trace(), "")[0].state is not ReplicaState.SUCCEEDED
        return False

    async def _may_live(self, call: str) -> bool:
        with contextlib.suppress(BackendError):
            return await self._client.end(call, value=False) is None
        return True

    async def _check_app(self, call: str) -> None:
        options = self._options
        await self._soon(lambda: self._client.check_app(call, options.app, options.function))

    async def _soon(self, call: Any) -> Any:
        return await loop.patiently(call, self._backoff, self._options.retry_timeout)
