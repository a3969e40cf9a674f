"""One training job: its request, its state, and its description by SageMaker."""

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
_POOL_RESOURCES = "InstanceType InstanceCount VolumeKmsKeyId VolumeSizeInGB"
_POOL_SETTINGS = "RoleArn VpcConfig EnableInterContainerTrafficEncryption EnableNetworkIsolation"


@dataclass
class Job:
    """A job of a region; only the region changes it, under its lock.

    Attributes:
        request: the request as it was sent.
        arn: its ARN.
        created: when it was created, in seconds since the epoch.
        status: TrainingJobStatus.
        secondary: SecondaryStatus.
        seen: every description that Describe has given of it, with the moment since when.
        deleted: when it was deleted, if it was.
        retries: how many times it has begun again after an internal error.
        life: counts the moves, so that an action planned for one state is dropped after it.
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
        """Return its TrainingJobName."""
        return str(self.request["TrainingJobName"])

    @property
    def spot(self) -> bool:
        """Return whether it runs on spot instances, so that it may be interrupted."""
        return bool(self.request.get("EnableManagedSpotTraining"))

    @property
    def limits(self) -> Json:
        """Return its StoppingCondition."""
        limits: Json = self.request.get("StoppingCondition") or {}
        return limits

    @property
    def instance(self) -> str:
        """Return its instance type; the first preferred one if there is a choice."""
        resources = self.request["ResourceConfig"]
        choice = resources.get("InstancePreferences") or resources.get("InstanceGroups") or [{}]
        return str(resources.get("InstanceType") or choice[0].get("InstanceType", ""))

    @property
    def instances(self) -> int:
        """Return how many instances it takes."""
        return int(self.request["ResourceConfig"].get("InstanceCount") or 1)

    @property
    def most_retries(self) -> int:
        """Return how many times it may begin again after an internal error of SageMaker."""
        return int((self.request.get("RetryStrategy") or {}).get("MaximumRetryAttempts") or 0)

    @property
    def keep_alive(self) -> int:
        """Return for how many seconds after a success its instances are kept warm."""
        return int(self.request["ResourceConfig"].get("KeepAlivePeriodInSeconds") or 0)

    @property
    def kind(self) -> list[Any]:
        """Return the values that two jobs must share for one to run on the other's warm instances.

        https://docs.aws.amazon.com/sagemaker/latest/dg/train-warm-pools.html
        """
        request, resources = self.request, self.request["ResourceConfig"]
        return [
            *(resources.get(key) for key in _POOL_RESOURCES.split()),
            *(request.get(key) or False for key in _POOL_SETTINGS.split()),
        ]

    def move(self, now: float, secondary: str, *, status: str = "", message: str = "") -> None:
        """Go to a secondary status, and also to a status if one is given."""
        if self.secondary == "Training":
            self.trained += now - self.transitions[-1]["StartTime"]
        if self.transitions:
            self.transitions[-1]["EndTime"] = now
        self.secondary, self.status, self.modified = secondary, status or self.status, now
        text = message or _MESSAGES[secondary]
        entry = {"Status": secondary, "StartTime": now, "StatusMessage": text}
        self.transitions.append(entry)
        if secondary == "Training" and self.started is None:
            self.started = now
        if self.status in ENDED:
            entry["EndTime"] = self.ended = now
        self.life += 1
        self.note(now)

    def note(self, now: float) -> None:
        """Record its description, which holds from now on."""
        self.seen.append((now, self.description()))

    def at(self, moment: float) -> Json | None:
        """Return its description at that moment; None before its create and after its delete."""
        if self.deleted is not None and self.deleted <= moment:
            return None
        return next((view for since, view in reversed(self.seen) if since <= moment), None)

    def description(self) -> Json:
        """Return its description, as Describe answers it."""
        answer = {
            **{key: value for key, value in self.request.items() if key != "Tags"},
            "TrainingJobArn": self.arn,
            "TrainingJobStatus": self.status,
            "SecondaryStatus": self.secondary,
            "CreationTime": self.created,
            "LastModifiedTime": self.modified,
            "SecondaryStatusTransitions": copy.deepcopy(self.transitions),
            "TrainingStartTime": self.started,
            "TrainingEndTime": self.ended,
            "FailureReason": self.failure or None,
            "WarmPoolStatus": dict(self.warm_pool) if self.warm_pool else None,
        }
        if self.ended is not None:
            answer["TrainingTimeInSeconds"] = answer["BillableTimeInSeconds"] = int(self.trained)
        if self.status in ENDED and self.started is not None:
            answer["ModelArtifacts"] = {"S3ModelArtifacts": self._artifacts()}
        return {key: value for key, value in answer.items() if value is not None}

    def _artifacts(self) -> str:
        output = self.request["OutputDataConfig"]
        folder = f"{output['S3OutputPath'].rstrip('/')}/{self.name}/output/model"
        return f"{folder}/" if output.get("CompressionType") == "NONE" else f"{folder}.tar.gz"


def summary(description: Json) -> Json:
    """Return the part of a description that a list shows."""
    times = ("CreationTime", "TrainingEndTime", "LastModifiedTime")
    states = ("TrainingJobStatus", "SecondaryStatus", "WarmPoolStatus")
    members = ("TrainingJobName", "TrainingJobArn", *times, *states)
    return {key: description[key] for key in members if key in description}
