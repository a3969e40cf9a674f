"""What stands in the way of a launch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from diloco_protocol import BackendError, BaseExecutor, Finding, ReplicaHandle, RunRequest
from diloco_protocol.backend import redact_text

from ._client import Client
from ._launch import bound_options
from ._options import ModalOptions
from ._payload import PAYLOAD_VERSION

T = TypeVar("T")
_CLEANUP_SECONDS = 300.0


class Patiently(Protocol):
    """Calls, and tries again for a while as long as Modal throttles or fails."""

    def __call__(self, call: Callable[[], T], /) -> T:
        """Return what ``call`` returns."""


def check_launch(
    client: Client, options: ModalOptions, request: RunRequest, patiently: Patiently
) -> list[Finding]:
    """Everything that can be known without a call; ends at the first thing that stands in the way.

    Args:
        client: To ask.
        options: Of the executor.
        request: The launch.
        patiently: Makes a call of the client.
    """
    try:
        patiently(client.client)
    except BackendError as error:
        return [Finding("token", False, str(error))]
    findings = [Finding("token", True, "Modal's client has one")]
    bound = bound_options(request, options)
    try:
        patiently(lambda: client.function(bound, {}))
    except BackendError as error:
        return [*findings, Finding("app", False, str(error))]
    findings.append(
        Finding("app", True, f"{options.app} is deployed, with a function {options.function!r}")
    )
    if request.secrets:
        try:
            patiently(lambda: client.function(bound, request.secrets))
        except BackendError as error:
            return [*findings, Finding("secrets", False, str(error))]
        findings.append(Finding("secrets", True, "they are there, with the keys of the launch"))
    if place := _place(options):
        # Modal's client does not know which there are, and they change.
        unknown = f"only a call can tell whether Modal has {place}: give rendezvous_uri="
        findings.append(Finding("place", None, unknown))
    unknown = f"only a call can tell whether {options.app} reads payloads of version {PAYLOAD_VERSION}: give rendezvous_uri="
    return [*findings, Finding("version", None, unknown)]


def _place(options: ModalOptions) -> str:
    """Where replicas have to run, in words; empty if anywhere."""
    asked = {"region": options.region, "cloud": options.cloud}
    return " and ".join(f"{name}={value!r}" for name, value in asked.items() if value is not None)


def check_rendezvous(
    executor: BaseExecutor,
    uri: str,
    patience: float,
    options: Mapping[str, Any],
    chosen: ModalOptions,
) -> list[Finding]:
    """Have one call try the rendezvous, and end it.

    Args:
        executor: Launches it.
        uri: The prefix to try.
        patience: Seconds until it is given up.
        options: Of the launch.
        chosen: Of the executor.

    Returns:
        What it says of the rendezvous; if it has run, also of the version of the app and of the place where replicas run. If it
        could not be ended, also what is left (``"cleanup"``).
    """
    shown = redact_text(uri)
    try:
        handles = executor.launch_replicas(
            1, "diloco_core.probe:run", {"uri": uri}, timeout=patience, **options
        )
    except BackendError as error:
        return [_of(False, f"the call that was to try {shown} could not be started: {error}")]
    try:
        found = _tried(executor, handles, uri, patience, chosen)
    except BaseException as error:  # such as Ctrl-C
        if left := _end(executor, handles):
            error.add_note(left)
        raise
    left = _end(executor, handles)
    return [*found, Finding("cleanup", False, left)] if left else found


def _end(executor: BaseExecutor, handles: Sequence[ReplicaHandle]) -> str:
    """End and remove the call that tried; what is left, in words, or nothing."""
    try:
        executor.cancel(handles[0])
        executor.collect(handles, timeout=_CLEANUP_SECONDS)
        executor.purge(handles[0])
    except BackendError as error:
        run = handles[0].run_id
        return f"the run {run!r}, which tried the rendezvous, may cost money: end it with cancel_run({run!r}). {error}"
    return ""


def _tried(
    executor: BaseExecutor,
    handles: Sequence[ReplicaHandle],
    uri: str,
    patience: float,
    chosen: ModalOptions,
) -> list[Finding]:
    shown = redact_text(uri)
    try:
        (result,) = executor.collect(handles, timeout=patience)
    except BackendError as error:
        return [_of(None, f"what became of the call that tried {shown} is not known: {error}")]
    if result["status"] in {"pending", "running"}:
        why = f"the call that was to try {shown} was still {result['status']} after {patience:g} s ({result['reason']})"
        return [_of(None, why)]
    if result["status"] != "succeeded":
        return [_of(False, f"a call cannot use {shown}: {result['error']}")]
    found = [Finding("version", True, f"the app reads payloads of version {PAYLOAD_VERSION}")]
    if place := _place(chosen):
        found.insert(0, Finding("place", True, f"Modal has {place}: a call ran there"))
    told = f"a call wrote and read {shown} in {result['result']['seconds']} s"
    if not result["result"]["exclusive"]:
        told += "; it ignores conditional writes, so only strict runs can meet there"
        return [*found, _of(True, told)]
    return [*found, _of(True, f"{told}, conditional writes included")]


def _of(ok: bool | None, message: str) -> Finding:
    return Finding("rendezvous", ok, message)
