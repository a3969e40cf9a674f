"""The test of a rendezvous by one replica, for ``check(rendezvous_uri=)`` of the backends.

The replica reaches the rendezvous from where replicas would run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._cancel import LaunchError
from ._checks import check_seconds, is_number
from ._errors import BackendError
from ._hooks import Finding
from ._redact import redact_text
from ._request import check_rendezvous

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ._handle import ReplicaHandle

_PROBE = "diloco_core.probe:run"
_CLEANUP_SECONDS = 300.0


def try_rendezvous(
    executor: Any, uri: str, patience: float, options: Mapping[str, Any], replica: str
) -> list[Finding]:
    """Launch one replica that writes and reads below a prefix, wait for it, and remove it.

    Args:
        executor: Launches the replica, whose image needs ``diloco-core``.
        uri: The prefix to try. A password in it is not shown.
        patience: Seconds after which the test is given up.
        options: Further options of the launch.
        replica: What the platform calls a replica, such as ``"pod"``.

    Returns:
        A finding ``"rendezvous"``; its ``ok`` is True only if the replica has run and could use the
        prefix. If the replica could not be removed, also after a launch that failed, a finding
        ``"cleanup"`` says what is left. If the caller interrupts the wait, the replica is removed
        all the same; if that fails or is interrupted too, a note on the exception says so.

    Raises:
        InvalidRequestError: ``uri`` or ``patience`` is not allowed; nothing was started.
    """
    shown = redact_text(check_rendezvous(uri))
    check_seconds("patience", patience, positive=True)
    try:
        # No restarts: a rendezvous that has refused once refuses again.
        handles = executor.launch_replicas(
            1, _PROBE, {"uri": uri}, timeout=patience, max_restarts=0, **options
        )
    except BackendError as error:
        message = f"the {replica} that was to try {shown} could not be launched: {error}"
        left = _cleaned(executor, error.survivors if isinstance(error, LaunchError) else ())
        return [Finding("rendezvous", False, message), *left]
    try:
        tried = _tried(executor, handles, shown, patience, replica)
    except BaseException as error:  # such as Ctrl-C
        if words := _removed(executor, handles):
            error.add_note(words)
        raise
    return [tried, *_cleaned(executor, handles)]


def _cleaned(executor: Any, handles: Sequence[ReplicaHandle]) -> list[Finding]:
    left = _removed(executor, handles) if handles else ""
    return [Finding("cleanup", False, left)] if left else []


def _tried(
    executor: Any, handles: Sequence[ReplicaHandle], shown: str, patience: float, replica: str
) -> Finding:
    ok: bool | None = None
    try:
        (result,) = executor.collect(handles, timeout=patience)
        waits = result["status"] in {"pending", "running"}
        why = executor.describe(handles[0]).message if waits else result["error"]
    except BackendError as error:
        message = f"what became of the {replica} that tried {shown} is not known: {error}"
        return Finding("rendezvous", None, message)
    report = result["result"]
    if waits:
        state = f"{result['status']} after {patience:g} s ({result['reason']})"
        message = f"the {replica} that was to try {shown} was still {state}: {why}".rstrip(": ")
    elif result["status"] != "succeeded":
        ok, message = False, f"a {replica} cannot use {shown}: {why}"
    elif not (
        isinstance(report, dict)
        and is_number(report.get("seconds"))
        and isinstance(report.get("exclusive"), bool)
    ):
        # The replica has used the prefix, or it would have failed.
        lost = why or "its result is not that of the probe"
        message = f"a {replica} could use {shown}, but what it found out is not known: {lost}"
    else:
        ok, message = True, f"a {replica} wrote and read {shown} in {report['seconds']:g} s"
        message += (
            ", conditional writes included"
            if report["exclusive"]
            else "; it ignores conditional writes, so only runs with fixed membership can meet "
            "there"
        )
    return Finding("rendezvous", ok, message)


def _removed(executor: Any, handles: Sequence[ReplicaHandle]) -> str:
    """End and remove the replica that tried; return what is left, in words, or an empty text."""
    run = handles[0].run_id
    left = (
        f"the run {run!r}, which tried the rendezvous, may cost money: end it with "
        f"cancel_run({run!r})"
    )
    try:
        executor.cancel(handles[0])
        executor.collect(handles, timeout=_CLEANUP_SECONDS)
        executor.purge(handles[0])
    except BackendError as error:
        return f"{left}. {error}"
    except BaseException as error:  # such as Ctrl-C
        error.add_note(left)
        raise
    return ""
