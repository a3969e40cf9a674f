"""Find out what would prevent a launch, without creating anything."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from diloco_protocol import BackendError, Finding
from diloco_protocol.backend import Patiently, findings_of

from .._client._calls import Client
from .._request import _names as names
from ._check_account import check_bucket, check_image, check_pass_role, check_quota


def check_launch(
    client: Client, run_id: str, jobs: Sequence[Mapping[str, Any]], patiently: Patiently
) -> list[Finding]:
    """Return everything that can be known before a launch; creates nothing.

    If there are no credentials, this is the only finding.

    Args:
        client: Makes the calls to AWS.
        run_id: The run whose jobs are listed.
        jobs: The requests that the launch would send.
        patiently: Makes a call, and repeats it if necessary.
    """
    try:
        who = patiently(client.caller)
        region = client.region
    except BackendError as error:
        return [Finding("credentials", False, str(error))]
    job = jobs[0]
    checks = {
        "training jobs": lambda: _jobs(client, run_id),
        "pass role": lambda: check_pass_role(client, who, job["RoleArn"]),
        "quota": lambda: check_quota(client, job, len(jobs)),
        "image": lambda: check_image(client, job["AlgorithmSpecification"].get("TrainingImage")),
        "bucket": lambda: check_bucket(
            client, job["RoleArn"], job["OutputDataConfig"]["S3OutputPath"]
        ),
    }
    findings = []
    for subject, check in checks.items():
        # Without the permission to list jobs, a run cannot be followed either. The other checks
        # only make messages better.
        ok = False if subject == "training jobs" else None
        findings += findings_of(subject, check, patiently, ok=ok)
    return [Finding("credentials", True, f"{who} in {region}"), *findings]


def _jobs(client: Client, run_id: str) -> Iterator[Finding]:
    for _ in client.list(names.job_prefix(run_id)):
        pass
    yield Finding("training jobs", True, "they may be listed")
