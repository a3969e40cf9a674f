"""Find out what would prevent a launch."""

from __future__ import annotations

from collections.abc import Iterator

from diloco_protocol import Finding, RunRequest
from diloco_protocol.backend import Patiently, findings_of

from .._client._client import Client
from .._request._options import ModalOptions
from .._request._payload import PAYLOAD_VERSION
from .._request._resources import bound_options


def check_launch(
    client: Client, options: ModalOptions, request: RunRequest, patiently: Patiently
) -> list[Finding]:
    """Return what can be known without starting a call, up to the first problem.

    Args:
        client: Makes the calls to Modal.
        options: The options of the executor.
        request: The launch.
        patiently: Makes a call of the client, and repeats it if necessary.
    """
    bound = bound_options(request, options)

    def token() -> Iterator[Finding]:
        client.client()
        yield Finding("token", True, "Modal's client has one")

    def app() -> Iterator[Finding]:
        client.function(bound, {})
        text = f"{options.app} is deployed, with a function {options.function!r}"
        yield Finding("app", True, text)

    def secrets() -> Iterator[Finding]:
        if request.secrets:
            client.function(bound, request.secrets)
            yield Finding("secrets", True, "they are there, with the keys of the launch")

    findings: list[Finding] = []
    for look in (token, app, secrets):
        findings += findings_of(look.__name__, look, patiently)
        if findings[-1].ok is False:
            return findings
    unknown = (
        f"only a call can tell whether {options.app} reads payloads of version {PAYLOAD_VERSION}, "
        "and whether Modal has region= and cloud=: give rendezvous_uri="
    )
    return [*findings, Finding("version", None, unknown)]
