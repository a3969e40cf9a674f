"""The requests of a launch: one CreateTrainingJob per rank. Pure functions."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from itertools import islice
from typing import Any

from diloco_protocol import InvalidRequestError, ReplicaSpec, RunRequest, spec_to_environment
from diloco_protocol.backend import variables_to_strings

from . import _names as names
from ._gpus import choose_instance, has_local_storage
from ._model import check_request
from ._options import DAY, GPU_TYPE, LONGEST_RUN, VOLUME_GB, SageMakerOptions, check_tags
from ._overlay import apply_overlay

MESSAGE_BYTES = 900
"""Bytes of the runner's message: a FailureReason holds 1024, and SageMaker adds its own words."""
MAX_RESULT_BYTES = 1 << 24

_MARGIN = 1800.0
"""Seconds of a job besides its attempts.

SageMaker's clock also runs while it prepares the machine and uploads.
"""
_SPOT_LIVES = 10
"""How many times the time of its attempts a spot job may use.

After an interruption the next attempt has the whole timeout again.
"""
PIECE = 2500
"""Bytes of each hyperparameter that holds a piece of a text."""
_MOST_STRINGS = 99  # one less than the service allows
_VARIABLE = 512  # characters of a name, and of a value
_MOST_VARIABLES = 100
_MOST_TAGS = 49  # one less than the service allows, since a cancel adds one


def longest_timeout(options: SageMakerOptions) -> float:
    """Return the longest timeout of an attempt, in seconds, if nothing is started again."""
    return float(LONGEST_RUN - _MARGIN - math.ceil(options.grace))


def job_requests(request: RunRequest, options: SageMakerOptions) -> list[dict[str, Any]]:
    """Make the requests of a launch, in rank order.

    Raises:
        InvalidRequestError: Something cannot be asked for, does not fit, or would be refused for
            its form.
    """
    specs = request.specs(grace=options.grace)
    shared = apply_overlay(_shared(request, options), options.request_overlay)
    shared["HyperParameters"][names.FINGERPRINT] = _fingerprint(request, options, shared)
    first = _of_rank(shared, specs[0], request, options)
    check_request(first)
    if len(first["Tags"]) > _MOST_TAGS:
        raise InvalidRequestError(
            f"each job would have {len(first['Tags'])} tags with those that the launch sets, and "
            f"may have at most {_MOST_TAGS}, since a cancel adds one: give fewer labels= or tags="
        )
    return [first, *(_of_rank(shared, spec, request, options) for spec in specs[1:])]


def _fingerprint(request: RunRequest, options: SageMakerOptions, shared: Mapping[str, Any]) -> str:
    """Return the digest of everything that two launches of one run_id must agree on.

    This is the request, and what this executor makes of it.
    """
    tags = sorted(shared["Tags"], key=lambda tag: tag["Key"])
    agreed = [
        request.fingerprint(),
        options.grace,
        options.checkpoint_s3_path,
        {**shared, "Tags": tags},
    ]
    return hashlib.sha256(json.dumps(agreed, sort_keys=True).encode()).hexdigest()


def _of_rank(
    shared: dict[str, Any], spec: ReplicaSpec, request: RunRequest, options: SageMakerOptions
) -> dict[str, Any]:
    name = names.job_name(request.run_id, spec.rank)
    job_request = {
        **shared,
        "TrainingJobName": name,
        "HyperParameters": {
            **_pieces(spec, _MOST_STRINGS - len(shared["HyperParameters"])),
            **shared["HyperParameters"],
        },
        "Tags": [{"Key": names.TAG_RANK, "Value": str(spec.rank)}, *shared["Tags"]],
    }
    if "CheckpointConfig" in shared:
        place = options.checkpoint_s3_path or f"{options.output_s3_path}/checkpoints"
        job_request["CheckpointConfig"] = {**shared["CheckpointConfig"], "S3Uri": f"{place}/{name}"}
    return job_request


def _pieces(spec: ReplicaSpec, most: int) -> dict[str, str]:
    pieces = spec_to_environment(spec, piece_bytes=PIECE)
    if len(pieces) > most:
        raise InvalidRequestError(
            f"what each replica is told is {len(spec.to_json())} bytes of JSON, and the "
            f"hyperparameters of a job have room for about {max(0, most) * PIECE * 3 // 4} of it: "
            "put what is large into a file in S3, and pass its URI in entrypoint_args"
        )
    return pieces


def _shared(request: RunRequest, options: SageMakerOptions) -> dict[str, Any]:
    """Return what the requests of all ranks have in common."""
    spot = options.spot if request.spot is None else request.spot
    again = spot or options.platform_retries > 0  # SageMaker itself may start a job again
    instance = choose_instance(
        request.gpu,
        gpu_type=options.instance_type or GPU_TYPE,
        cpu_type=options.cpu_instance_type,
    )
    job: dict[str, Any] = {
        "TrainingJobName": "",
        "AlgorithmSpecification": _algorithm(request, options, counted=again),
        "RoleArn": options.role_arn,
        "OutputDataConfig": {"S3OutputPath": options.output_s3_path, "CompressionType": "NONE"},
        "ResourceConfig": _resources(options, instance),
        "StoppingCondition": _stopping(request, options, spot=spot),
        "EnableNetworkIsolation": False,
        "EnableManagedSpotTraining": spot,
        "HyperParameters": {
            names.RUN_ID: request.run_id,
            names.RANKS: f"{request.ranks[0]}-{request.ranks[-1]}",
            names.WORLD_SIZE: str(request.world_size),
            names.FINGERPRINT: "",  # a digest of all the rest, so it is set last
            names.RESTARTS: str(request.max_restarts),
            names.LAUNCH: "",  # each launch sets a new one
        },
        "Tags": _tags(request, options),
    }
    short = _short(request.env)
    long = {name: value for name, value in request.env.items() if name not in short}
    if short:
        job["Environment"] = short
    job["HyperParameters"].update(variables_to_strings(long, piece_bytes=PIECE))
    if again:
        job["CheckpointConfig"] = {"S3Uri": "", "LocalPath": names.CHECKPOINT_FOLDER}
    if options.platform_retries:
        job["RetryStrategy"] = {"MaximumRetryAttempts": options.platform_retries}
    if options.subnets or options.security_group_ids:  # the model of the service needs both
        job["VpcConfig"] = {
            "SecurityGroupIds": list(options.security_group_ids or ()),
            "Subnets": list(options.subnets or ()),
        }
    return job


def _short(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a job's Environment takes.

    The others travel with the spec, and the runner sets them. See "Environment" in
    https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_CreateTrainingJob.html
    """
    fitting = (item for item in variables.items() if max(map(len, item)) <= _VARIABLE)
    return dict(islice(fitting, _MOST_VARIABLES))


def _algorithm(request: RunRequest, options: SageMakerOptions, *, counted: bool) -> dict[str, Any]:
    arguments = ["--spec-strings", names.STRINGS_FILE]
    arguments += ["--outcome", f"{names.MODEL_FOLDER}/{names.OUTCOME_NAME}"]
    arguments += ["--failure", names.FAILURE_FILE, "--message-bytes", str(MESSAGE_BYTES)]
    arguments += ["--result-bytes", str(MAX_RESULT_BYTES)]
    arguments += ["--restarts", str(request.max_restarts)]
    if counted:
        arguments += ["--attempts", f"{names.CHECKPOINT_FOLDER}/{names.ATTEMPTS_NAME}"]
    return {
        "TrainingImage": options.image_uri,
        "TrainingInputMode": "File",
        "ContainerEntrypoint": list(options.command or ()),
        "ContainerArguments": arguments,
    }


def _resources(options: SageMakerOptions, instance: str) -> dict[str, Any]:
    resources: dict[str, Any] = {"InstanceCount": 1, "InstanceType": instance}
    if not has_local_storage(instance):
        resources["VolumeSizeInGB"] = options.volume_size_gb or int(VOLUME_GB)
    elif options.volume_size_gb is not None:
        raise InvalidRequestError(
            f"volume_size_gb has no effect on {instance}, with storage of a fixed size and no "
            "volume: leave it out"
        )
    return resources


def _stopping(request: RunRequest, options: SageMakerOptions, *, spot: bool) -> dict[str, int]:
    """Return the service's own deadlines: backstops, since the runner ends overdue programs."""
    timeout = request.timeout or 0.0
    runtime = math.ceil((timeout + options.grace) * (1 + request.max_restarts) + _MARGIN)
    if runtime > LONGEST_RUN:
        raise InvalidRequestError(
            f"timeout={request.timeout:g} and max_restarts={request.max_restarts} make {runtime} "
            f"s, and a training job lives for {LONGEST_RUN} s (28 days) at most: give a shorter "
            "timeout or fewer restarts"
        )
    # The service counts the time of all attempts together.
    lives = (_SPOT_LIVES if spot else 1) + options.platform_retries
    runtime = min(LONGEST_RUN, runtime * lives)
    stopping = {"MaxRuntimeInSeconds": runtime}
    if spot:
        wait = DAY if options.pending_timeout is None else options.pending_timeout
        stopping["MaxWaitTimeInSeconds"] = min(LONGEST_RUN, runtime + wait)
    elif options.pending_timeout is not None:
        stopping["MaxPendingTimeInSeconds"] = options.pending_timeout
    return stopping


def _tags(request: RunRequest, options: SageMakerOptions) -> list[dict[str, str]]:
    launch_tags = {names.TAG_RUN: request.run_id, names.TAG_COHORT: request.cohort}
    tags = {**(options.tags or {}), **check_tags("labels", request.labels), **launch_tags}
    return [{"Key": key, "Value": value} for key, value in tags.items()]
