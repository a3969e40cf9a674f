"""What stands in the way of a launch, found out without creating anything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from diloco_protocol import BackendError, Finding

from . import _names as names
from ._client import Client

T = TypeVar("T")


class Patiently(Protocol):
    """Calls, and tries again for a while as long as AWS throttles or fails."""

    def __call__(self, call: Callable[[], T], /) -> T:
        """Return what ``call`` returns."""


def check_account(client: Client, run_id: str, patiently: Patiently) -> list[Finding]:
    """Whether there are credentials, and training jobs may be listed. Ends at the first look if there are none.

    Args:
        client: To ask.
        run_id: The run whose jobs are listed.
        patiently: Makes a call.
    """
    try:
        who = patiently(client.caller)
        region = client.region
    except BackendError as error:
        return [Finding("credentials", False, str(error))]
    findings = [Finding("credentials", True, f"{who} in {region}")]
    try:
        patiently(lambda: list(client.list(names.job_prefix(run_id))))
    except BackendError as error:
        findings.append(Finding("training jobs", False, str(error)))
    else:
        findings.append(Finding("training jobs", True, "they may be listed"))
    return findings
