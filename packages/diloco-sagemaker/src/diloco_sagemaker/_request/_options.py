"""The options of an executor: its arguments, checked once."""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any
from urllib.parse import urlsplit

from diloco_protocol import Backoff, InvalidRequestError, RunJournal
from diloco_protocol.backend import (
    RUNNER,
    Options,
    check_backoff,
    check_callable,
    check_command,
    check_flag,
    check_journal,
    check_json,
    check_names,
    check_restarts,
    check_run_prefix,
    check_texts,
    check_variables,
    details,
    option,
    seconds,
    shown,
    text_like,
    whole,
)

from ._names import TAG_PREFIX

GPU_TYPE, VOLUME_GB = "ml.g5.2xlarge", "100"  # what is used if the options do not say
DAY = 86_400
LONGEST_RUN = 28 * DAY  # seconds; the service's limit of MaxRuntimeInSeconds
LONGEST_GRACE = (
    110.0  # SageMaker kills 120 s after SIGTERM, and the runner has to report before that
)

_ENDPOINT = re.compile(r"https?://[^\s/?#@\ud800-\udfff]+(?:/[^\s@\ud800-\udfff]*)?", re.ASCII)


def _shown(value: object, name: str) -> str:
    """Return a value as an error may show it.

    A text with an "@" is not shown at all, since it may have a user and password before a host.
    """
    if isinstance(value, str) and "@" in value:
        return (
            "what was given, which has an '@' and is not shown: it may hold no user and no password"
        )
    return shown(value, name)


_OWN = "one of the executor's own"

_check_role = text_like(
    r"arn:aws[a-z-]*:iam::[0-9]{12}:role/[^\s\ud800-\udfff]+",
    "the ARN of an IAM role, such as 'arn:aws:iam::123456789012:role/trainer'",
)
_check_image = text_like(
    r"[^\s@\ud800-\udfff]+(?:@[a-z0-9]+(?:[+._-][a-z0-9]+)*:[0-9a-fA-F]{32,})?",
    "the name of a container image, such as "
    "'123456789012.dkr.ecr.eu-west-1.amazonaws.com/trainer:1'",
    _shown,
)
_check_place = text_like(
    r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](?:/[^ \t-\r\ud800-\udfff]*)?",
    "a place in S3, such as 's3://bucket/prefix' (a bucket has 3 to 63 lower-case letters, digits, "
    "dots and dashes)",
    _shown,
)
_check_type = text_like(
    r"ml\.[a-z0-9-]+\.[a-z0-9-]+", "an instance type for training, such as 'ml.g5.2xlarge'"
)
check_region_name = text_like("[A-Za-z0-9-]+", "the name of a region, such as 'eu-west-1'")


def _check_s3(name: str, value: object) -> str:
    return _check_place(name, value).rstrip("/")


def check_tags(name: str, values: object) -> dict[str, str]:
    """Refuse tags with keys that the launch or AWS sets."""
    tags = check_texts(name, values)
    for key in tags:
        if key.lower().startswith((TAG_PREFIX, "aws:")):
            raise InvalidRequestError(f"{name} may not set {key!r}: the launch or AWS sets it")
    return tags


def check_endpoint(name: str, value: object) -> str:
    """Refuse an address without a scheme, with a user and password, or with an invalid port."""
    with contextlib.suppress(ValueError):  # of a port that is none
        if isinstance(value, str) and _ENDPOINT.fullmatch(value) and urlsplit(value).port != 0:
            return value
    raise InvalidRequestError(
        f"{name} must be an address with its scheme, such as 'http://127.0.0.1:4566', not "
        f"{_shown(value, name)}"
    )


def _check_session(name: str, value: object) -> Any:
    # All attributes that are used; an isinstance check would import boto3, which is slow.
    if not (hasattr(value, "client") and hasattr(value, "region_name")):
        raise InvalidRequestError(
            f"{name} must be a boto3.Session, not a value of type {type(value).__name__}"
        )
    return value


def _check_client(name: str, value: object) -> Any:
    """Refuse a client that tries again itself: it may lose an answer, and would not say so."""
    config = getattr(getattr(value, "meta", None), "config", None)
    retries = getattr(config, "retries", None) or {}
    if retries.get("total_max_attempts") != 1:
        raise InvalidRequestError(
            f"{name} must be a boto3 client with Config(retries={{'total_max_attempts': 1}}): the "
            f"executor tries again itself. This one is of type {type(value).__name__}, with "
            f"retries={shown(retries)}"
        )
    return value


def _check_overlay(name: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise InvalidRequestError(
            f"{name} must be a mapping with fields of CreateTrainingJob, not a value of type "
            f"{type(value).__name__}"
        )
    try:
        # A copy, since the caller may change the mapping later.
        kept: dict[str, Any] = json.loads(json.dumps(value))
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"{name} must hold JSON values: {error}") from None
    except RecursionError:
        raise InvalidRequestError(f"{name} is nested too deep") from None
    check_json(kept, name)
    return kept


@dataclass(frozen=True, eq=False, repr=False)
class SageMakerOptions(Options):
    """The checked arguments of the constructor of :class:`SageMakerExecutor`. Immutable.

    Attributes:
        role_arn: The execution role of the jobs, with which replicas reach their bucket. The
            launching user needs ``iam:PassRole`` on it.
        image_uri: The replicas' container image, usually in ECR.
        output_s3_path: Where jobs write their results, each below its own name.
        instance_type: The instance type for GPUs of any model (``gpu="2"``), if it has enough of
            them.
        cpu_instance_type: The instance type if no GPU is asked for.
        volume_size_gb: Size of the volume in GB; not for types whose storage is fixed.
        run_id: Prefix of the names of runs that the caller does not name.
        region: The AWS region.
        sagemaker_client: A boto3 client to use, without retries of its own.
        logs_client: A boto3 client of CloudWatch Logs to use, likewise.
        session: A ``boto3.Session`` to make all other clients with.
        endpoint_url: Address to use in place of AWS's for all services, such as that of a stand-in.
        command: The command that starts the runner; the runner's own arguments are added at its
            end. SIGTERM must reach the runner, so the command must not be run by a shell.
        env: Environment variables for every launch; those of the launch itself win.
        tags: Tags of every job, for costs and policies.
        spot: Whether to use managed spot capacity if the launch does not say. Replicas may then be
            interrupted and started again.
        checkpoint_s3_path: Where ``/opt/ml/checkpoints`` is kept from one attempt to the next, each
            job's below its own name: on spot, and with ``platform_retries``.
        max_restarts: Restarts of a failed replica if the launch does not say; in the same job, on
            the same machine.
        platform_retries: How often SageMaker itself starts a job again after an internal error of
            its own, up to 30. Each attempt has the whole timeout.
        pending_timeout: Seconds that a job may wait for capacity before it is given up: without
            spot only on GPU types, from 1800. With spot, from 0, SageMaker counts them together
            with the time that all attempts may take, which is ten times that of one, so a job may
            wait for that long too.
        quota_timeout: Seconds for which a launch waits for quota, since a stopped job frees its own
            only minutes later.
        security_group_ids: Security groups of the jobs, together with ``subnets``.
        subnets: Subnets of the jobs. They must lead to S3 and CloudWatch, by a NAT or endpoints.
        request_overlay: Fields of CreateTrainingJob that are merged over the executor's own: KMS
            keys, input channels, a training plan, a warm pool, credentials of a registry.
        grace: Seconds between SIGTERM and SIGKILL, at most 110.
        request_timeout: Seconds for a connection, and for the next piece of an answer; a whole
            answer has ten times as many.
        retry_timeout: Seconds for which calls are tried again while AWS throttles, fails or is
            away; ``collect`` has its own timeout.
        log_delay: Seconds without a new line after the end until a log that is followed counts as
            complete: CloudWatch has lines some seconds late.
        journal: Where launches and ends are written down, besides SageMaker's own records.
        backoff: Pauses of ``collect`` and between tries, with their clock and sleep.
        clock: Unix seconds, for tests.

    Raises:
        InvalidRequestError: A value is not allowed; says what was given and what is allowed.
    """

    _: KW_ONLY
    role_arn: str = field(metadata=details(check=_check_role))
    image_uri: str = field(metadata=details(check=_check_image))
    output_s3_path: str = field(metadata=details(check=_check_s3))
    instance_type: str | None = option(None, check=_check_type, shown=GPU_TYPE)
    cpu_instance_type: str = option("ml.m5.xlarge", check=_check_type)
    volume_size_gb: int | None = option(None, check=whole(1, 16_384), shown=VOLUME_GB)
    run_id: str | None = option(None, check=check_run_prefix, shown="run")
    region: str | None = option(None, check=check_region_name, shown="the session's")
    sagemaker_client: Any = option(None, check=_check_client, type="client", shown=_OWN)
    logs_client: Any = option(None, check=_check_client, type="client", shown=_OWN)
    session: Any = option(None, check=_check_session, type="boto3.Session", shown=_OWN)
    endpoint_url: str | None = option(None, check=check_endpoint, shown="AWS")
    command: Sequence[str] | None = option(None, check=check_command, shown=" ".join(RUNNER))
    env: Mapping[str, str] | None = option(None, check=check_variables)
    tags: Mapping[str, str] | None = option(None, check=check_tags)
    spot: bool = option(False, check=check_flag)
    checkpoint_s3_path: str | None = option(None, check=_check_s3, shown="below `output_s3_path`")
    max_restarts: int = option(0, check=check_restarts)
    platform_retries: int = option(0, check=whole(0, 30))
    pending_timeout: int | None = option(
        None, check=whole(0, LONGEST_RUN), shown="with spot a day, else SageMaker's own"
    )
    quota_timeout: float = option(0.0, check=seconds(DAY))
    security_group_ids: Sequence[str] | None = option(None, check=check_names)
    subnets: Sequence[str] | None = option(None, check=check_names)
    request_overlay: Mapping[str, Any] | None = option(
        None, check=_check_overlay, type="part of a request"
    )
    grace: float = option(10.0, check=seconds(LONGEST_GRACE))
    request_timeout: float = option(30.0, check=seconds(DAY))
    retry_timeout: float = option(60.0, check=seconds(DAY))
    log_delay: float = option(15.0, check=seconds(3600.0))
    journal: RunJournal | None = option(None, check=check_journal)
    backoff: Backoff | None = option(None, check=check_backoff, shown="1 s to 20 s")
    clock: Callable[[], float] = option(time.time, check=check_callable, hidden=True)
