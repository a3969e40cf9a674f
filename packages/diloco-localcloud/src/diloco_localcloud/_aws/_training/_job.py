"""One training job: what was asked, what has become of it, and what SageMaker tells of it."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]

ENDED = ("Completed", "Failed", "Stopped")
_MESSAGES = {
    "Starting": "Preparing the instances for training",
    "Pending": "Training job waiting for capacity",
    "Downloading": "Downloading the training image",
    "Training": "Training image download completed. Training in progress.",
    "Interrupted": "Training job is interrupted due to spot capacity reclaim",
    "Restarting": "Restarting the training job",
    "Uploading": "Uploading generated training model",
    "Stopping": "Stopping the training job",
    "Stopped": "Training job stopped",
    "Completed": "Training job completed",
    "Failed": "Training job failed",
    "MaxRuntimeExceeded": "Training job runtime exceeded MaxRuntimeInSeconds provided",
    "MaxWaitTimeExceeded": "Training job wait time exceeded MaxWaitTimeInSeconds provided",
}
_POOL_RESOURCES = ("InstanceType", "InstanceCount", "VolumeKmsKeyId", "VolumeSizeInGB")
_POOL_SETTINGS = (
    "RoleArn",
    "VpcConfig",
    "EnableInterContainerTrafficEncryption",
    "EnableNetworkIsolation",
)


@dataclass
class Job:
    """A job of a region; only the region changes it, under its lock.

    Attributes:
        request: as it was sent.
        arn: its ARN.
        created: when, in seconds since the epoch.
        status: TrainingJobStatus.
        secondary: SecondaryStatus.
        seen: every state that it has had, with the moment, as Describe tells it.
        deleted: when, if it was.
        retries: how often it has begun again after an internal error.
        life: counts the moves, so that what was planned for a state finds out that it is over.
    """

    request: Json
    arn: str
    created: float
    tags: dict[str, str]
    status: str = "InProgress"
    secondary: str = ""
    transitions: list[Json] = field(default_factory=list)
    modified: float = 0.0
    started: float | None = None
    ended: float | None = None
    trained: float = 0.0
    failure: str = ""
    warm_pool: Json | None = None
    seen: list[tuple[float, Json]] = field(default_factory=list)
    deleted: float | None = None
    life: int = 0
    term_seconds: float = 1.0
    frees_quota: bool = False
    retries: int = 0

    @property
    def name(self) -> str:
        """TrainingJobName."""
        return str(self.request["TrainingJobName"])

    @property
    def spot(self) -> bool:
        """Whether it may be interrupted."""
        return bool(self.request.get("EnableManagedSpotTraining"))

    @property
    def limits(self) -> Json:
        """StoppingCondition."""
        limits: Json = self.request.get("StoppingCondition") or {}
        return limits

    @property
    def instance(self) -> str:
        """The type that it runs on; the first that is preferred, if there is a choice."""
        resources = self.request["ResourceConfig"]
        choice = resources.get("InstancePreferences") or resources.get("InstanceGroups") or [{}]
        return str(resources.get("InstanceType") or choice[0].get("InstanceType", ""))

    @property
    def instances(self) -> int:
        """How many instances it takes."""
        return int(self.request["ResourceConfig"].get("InstanceCount") or 1)

    @property
    def most_retries(self) -> int:
        """How often it may begin again after an internal error of SageMaker."""
        return int((self.request.get("RetryStrategy") or {}).get("MaximumRetryAttempts") or 0)

    @property
    def keep_alive(self) -> int:
        """For how many seconds after a success its instances are kept warm."""
        return int(self.request["ResourceConfig"].get("KeepAlivePeriodInSeconds") or 0)

    @property
    def kind(self) -> list[Any]:
        """What two jobs must have in common for one to run on the warm instances of the other.

        https://docs.aws.amazon.com/sagemaker/latest/dg/train-warm-pools.html
        """
        asked, resources = self.request, self.request["ResourceConfig"]
        return [
            *(resources.get(key) for key in _POOL_RESOURCES),
            *(asked.get(key) or False for key in _POOL_SETTINGS),
        ]

    def move(self, now: float, secondary: str, *, status: str = "", message: str = "") -> None:
        """Go to a secondary status, and on to a status if one is given."""
        if self.secondary == "Training":
            self.trained += now - self.transitions[-1]["StartTime"]
        if self.transitions:
            self.transitions[-1]["EndTime"] = now
        self.secondary, self.status, self.modified = secondary, status or self.status, now
        entry = {
            "Status": secondary,
            "StartTime": now,
            "StatusMessage": message or _MESSAGES[secondary],
        }
        self.transitions.append(entry)
        if secondary == "Training" and self.started is None:
            self.started = now
        if self.status in ENDED:
            entry["EndTime"] = self.ended = now
        self.life += 1
        self.note(now)

    def note(self, now: float) -> None:
        """Keep what is told of it from now on."""
        self.seen.append((now, self.description()))

    def at(self, moment: float) -> Json | None:
        """What was told of it then; None before its create and after its delete."""
        if self.deleted is not None and self.deleted <= moment:
            return None
        return next((told for since, told in reversed(self.seen) if since <= moment), None)

    def description(self) -> Json:
        """What Describe tells."""
        asked = {key: value for key, value in self.request.items() if key != "Tags"}
        told = {
            **asked,
            "TrainingJobArn": self.arn,
            "TrainingJobStatus": self.status,
            "SecondaryStatus": self.secondary,
            "CreationTime": self.created,
            "LastModifiedTime": self.modified,
            "SecondaryStatusTransitions": copy.deepcopy(self.transitions),
        }
        if self.started is not None:
            told["TrainingStartTime"] = self.started
        if self.ended is not None:
            told["TrainingEndTime"] = self.ended
            told["TrainingTimeInSeconds"] = told["BillableTimeInSeconds"] = int(self.trained)
        if self.failure:
            told["FailureReason"] = self.failure
        if self.warm_pool:
            told["WarmPoolStatus"] = dict(self.warm_pool)
        if self.status in ENDED and self.started is not None:
            told["ModelArtifacts"] = {"S3ModelArtifacts": self._artifacts()}
        return told

    def _artifacts(self) -> str:
        output = self.request["OutputDataConfig"]
        folder = f"{output['S3OutputPath'].rstrip('/')}/{self.name}/output/model"
        return f"{folder}/" if output.get("CompressionType") == "NONE" else f"{folder}.tar.gz"


def summary(told: Json) -> Json:
    """What a list has of what Describe tells."""
    members = (
        "TrainingJobName",
        "TrainingJobArn",
        "CreationTime",
        "TrainingEndTime",
        "LastModifiedTime",
    )
    also = ("TrainingJobStatus", "SecondaryStatus", "WarmPoolStatus")
    return {key: told[key] for key in (*members, *also) if key in told}
