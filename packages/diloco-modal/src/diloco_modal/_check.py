"""What stands in the way of a launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from diloco_protocol import BackendError, Finding, RunRequest

from ._client import Client
from ._launch import bound_options
from ._options import ModalOptions
from ._payload import PAYLOAD_VERSION

T = TypeVar("T")


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


def seen_by_a_call(options: ModalOptions) -> list[Finding]:
    """What a call that has run has shown: where replicas run, and the version of the app."""
    found = [Finding("version", True, f"the app reads payloads of version {PAYLOAD_VERSION}")]
    if place := _place(options):
        found.insert(0, Finding("place", True, f"Modal has {place}: a call ran there"))
    return found
