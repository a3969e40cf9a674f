"""Find out what would prevent a launch, without creating anything.

A finding claims no more than was proved: IAM's simulation does not know the policies of buckets and
organisations, and a quota does not say how much of it is in use.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from diloco_protocol import BackendError, Finding
from diloco_protocol.backend import Patiently, findings_of

from .._client._calls import Client
from .._client._errors import MissingError
from .._request import _names as names

_ROLE_SESSION = re.compile(r"(arn:[\w-]+):sts:(:\d{12}):assumed-role/([^/]+)/.+")
_ECR = re.compile(
    r"(?P<account>\d{12})\.dkr\.ecr(?:-fips)?\.(?P<region>[a-z0-9-]+)\.amazonaws\.com(?:\.cn)?/"
    r"(?P<repository>[^:@]+)(?::(?P<tag>[^@]+))?(?:@(?P<digest>.+))?"
)


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
        "pass role": lambda: _pass_role(client, who, job["RoleArn"]),
        "quota": lambda: _quota(client, job, len(jobs)),
        "image": lambda: _image(client, job["AlgorithmSpecification"]["TrainingImage"]),
        "bucket": lambda: _bucket(client, job["RoleArn"], job["OutputDataConfig"]["S3OutputPath"]),
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


def _pass_role(client: Client, caller: str, role: str) -> Iterator[Finding]:
    """Find out whether the caller may pass the role to SageMaker."""
    passed = {
        "ContextKeyName": "iam:PassedToService",
        "ContextKeyValues": ["sagemaker.amazonaws.com"],
        "ContextKeyType": "string",
    }
    decision = _simulate(client, _policy_source(caller), "iam:PassRole", role, [passed])
    if decision == "allowed":
        yield Finding("pass role", True, f"iam:PassRole on {role} is allowed, as IAM simulates it")
    else:
        message = (
            f"{caller} may not pass {role} (IAM simulates {decision}): allow it iam:PassRole, "
            "as in launcher_policy.json"
        )
        yield Finding("pass role", False, message)


def _quota(client: Client, job: Mapping[str, Any], count: int) -> Iterator[Finding]:
    """Find out whether the quota of the instance type is large enough for the launch."""
    resources = job["ResourceConfig"]
    if "InstanceType" not in resources:
        yield Finding("quota", None, "there are several instance types, one of which has to do")
        return
    kind = resources["InstanceType"]
    spot = "spot " if job["EnableManagedSpotTraining"] else ""
    name = f"{kind} for {spot}training job usage"
    of_name = (quota for quota in client.quotas() if quota.get("QuotaName") == name)
    most = next((float(quota["Value"]) for quota in of_name if "Value" in quota), None)
    if most is None:
        yield Finding("quota", None, f"Service Quotas names no quota of {name}")
    elif most >= count:
        text = f"the quota of {name} is {most:g}; how much of it is in use is not told"
        yield Finding("quota", True, text)
    else:
        message = (
            f"the quota of {name} is {most:g}, and the launch needs {count}: ask for more in the "
            "console of Service Quotas, or choose another type"
        )
        yield Finding("quota", False, message)


def _image(client: Client, image: str) -> Iterator[Finding]:
    """Find out whether the image is in ECR."""
    match = _ECR.fullmatch(image)
    if match is None or match["region"] != client.region:
        message = f"{image} is not in ECR in {client.region}: whether it is there is not looked at"
        yield Finding("image", None, message)
        return
    wanted = {"imageTag": match["tag"] or "latest"}
    if match["digest"]:
        wanted = {"imageDigest": match["digest"]}
    try:
        client.ask(
            "ecr", "describe_images", f"find the image {image}", registryId=match["account"],
            repositoryName=match["repository"], imageIds=[wanted],
        )  # fmt: skip
    except MissingError as error:
        yield Finding("image", False, f"{error}. Push it, or mend image_uri=")
    else:
        yield Finding("image", True, f"{image} is in ECR")


def _bucket(client: Client, role: str, place: str) -> Iterator[Finding]:
    """Find out whether the bucket of the results exists, and whether the role may write to it."""
    bucket, _, prefix = place.removeprefix("s3://").partition("/")
    try:
        # Not HeadBucket: its errors have no body, so they could also come from a proxy.
        what = f"look into the bucket {bucket}"
        client.ask("s3", "list_objects_v2", what, Bucket=bucket, MaxKeys=1)
    except MissingError:
        yield Finding(
            "bucket", False, f"there is no bucket {bucket!r}: create it, or mend output_s3_path="
        )
        return
    # The call above would already have failed with the errors that this one can have.
    place_of = client.ask("s3", "head_bucket", f"ask where {bucket} is", Bucket=bucket)
    region = place_of.get("BucketRegion")
    if region is not None and region != client.region:
        message = (
            f"{bucket} is in {region}, and the jobs are in {client.region}: whether SageMaker "
            "takes it is not known, and what is sent between regions costs money. A bucket of the "
            "jobs' region is safe"
        )
        yield Finding("bucket", None, message)
    path = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
    written = f"arn:{role.split(':')[1]}:s3:::{bucket}/{path}job/output/model/file"
    decision = _simulate(client, role, "s3:PutObject", written, [])
    if decision == "allowed":
        text = f"it is there, and {role} may write below {place}, as IAM simulates it"
        yield Finding("bucket", True, text)
    elif decision == "explicitDeny":
        yield Finding("bucket", False, f"a policy denies {role} to write below {place}")
    else:
        message = (
            f"no policy of {role} lets it write below {place}; one of the bucket's may, which "
            "IAM does not simulate"
        )
        yield Finding("bucket", None, message)


def _simulate(
    client: Client, source: str, action: str, resource: str, context: list[dict[str, Any]]
) -> str:
    """Return IAM's decision: ``allowed``, ``explicitDeny`` or ``implicitDeny``."""
    answer = client.ask(
        "iam", "simulate_principal_policy", f"ask IAM whether {source} may {action}",
        PolicySourceArn=source, ActionNames=[action], ResourceArns=[resource],
        **({"ContextEntries": context} if context else {}),
    )  # fmt: skip
    for result in answer["EvaluationResults"]:
        return str(result["EvalDecision"])
    raise BackendError(f"IAM does not say whether {source} may {action}")


def _policy_source(caller: str) -> str:
    """Return the ARN whose policies apply to a caller; for a session, that of its role."""
    return _ROLE_SESSION.sub(r"\1:iam:\2:role/\3", caller)
