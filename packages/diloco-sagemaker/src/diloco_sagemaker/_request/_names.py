"""The names that a run has in an account."""

from __future__ import annotations

import re

from diloco_protocol.backend import is_run_id

PREFIX = "diloco-"

#: All of diloco's hyperparameters begin with this, also those of the spec.
STRING_PREFIX = "DILOCO_"

#: Keys of hyperparameters, besides those of the spec. They are the job's own record of the launch.
RUN_ID = "DILOCO_RUN_ID"
RANKS = "DILOCO_RANKS"
WORLD_SIZE = "DILOCO_WORLD_SIZE"
FINGERPRINT = "DILOCO_FINGERPRINT"
RESTARTS = "DILOCO_RESTARTS"
LAUNCH = "DILOCO_LAUNCH"
RECORD = (RUN_ID, RANKS, WORLD_SIZE, FINGERPRINT, RESTARTS, LAUNCH)

#: Keys of tags.
TAG_PREFIX = "diloco:"
TAG_RUN = "diloco:run-id"
TAG_RANK = "diloco:rank"
TAG_COHORT = "diloco:cohort"
TAG_CANCELLED = "diloco:cancelled"

#: Files in the container, at the places where SageMaker writes or reads them.
STRINGS_FILE = "/opt/ml/input/config/hyperparameters.json"
FAILURE_FILE = "/opt/ml/output/failure"
MODEL_FOLDER = "/opt/ml/model"
CHECKPOINT_FOLDER = "/opt/ml/checkpoints"
OUTCOME_NAME = "diloco-outcome.json"
ATTEMPTS_NAME = ".diloco-attempts.json"

LOG_GROUP = "/aws/sagemaker/TrainingJobs"

_JOB = re.compile(rf"{PREFIX}(.+)-(\d{{5}})", re.ASCII)


def job_prefix(run_id: str) -> str:
    """Return the prefix of the names of all jobs of a run; jobs of some other runs have it too."""
    return f"{PREFIX}{run_id}-"


def job_name(run_id: str, rank: int) -> str:
    """Return the name of a replica's job.

    It has at most 61 characters of the 63 allowed, is never cut, and is always the same.
    """
    return f"{job_prefix(run_id)}{rank:05d}"


def parse_job_name(name: str) -> tuple[str, int] | None:
    """Return the run_id and the rank in a job's name; None if diloco does not give such names."""
    match = _JOB.fullmatch(name)
    if match is None or not is_run_id(match[1]):
        return None
    return match[1], int(match[2])


def console_url(region: str, name: str) -> str:
    """Return the address of a job's page in the console."""
    host = (
        "console.amazonaws.cn"
        if region.startswith("cn-")
        else "console.amazonaws-us-gov.com"
        if region.startswith("us-gov-")
        else f"{region}.console.aws.amazon.com"
    )
    return f"https://{host}/sagemaker/home?region={region}#/jobs/{name}"


def log_url(region: str, name: str) -> str:
    """Return the address of the console's page with a job's log streams."""
    host = console_url(region, name).partition("/sagemaker/")[0]
    group = LOG_GROUP.replace("/", "$252F")
    return (
        f"{host}/cloudwatch/home?region={region}#logsV2:log-groups/log-group/{group}"
        f"$3FlogStreamNameFilter$3D{name}"
    )
