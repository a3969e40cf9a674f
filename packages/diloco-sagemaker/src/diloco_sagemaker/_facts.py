"""What SageMaker tells of a job, as typed facts; https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_DescribeTrainingJob.html."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from diloco_protocol import InvalidRequestError
from diloco_protocol.backend import MAX_REPLICAS, read_whole

from . import _names as names

#: Words of SageMaker that end a job. Every other word, also one that is new, does not.
ENDED = frozenset({"Completed", "Failed", "Stopped"})
ALIVE = frozenset({"InProgress", "Stopping", "Deleting"})
"""All others that this version knows."""
_FINGERPRINT = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Summary:
    """A job as a list has it.

    Attributes:
        name: Its name.
        created: When it was created, in milliseconds of Unix time: a name may live again, and this
            tells the lives apart.
        status: TrainingJobStatus.
        secondary: SecondaryStatus; empty where the list leaves it out.
        modified: When it last changed, in milliseconds; None if not told.
    """

    name: str
    created: int
    status: str
    secondary: str
    modified: int | None


@dataclass(frozen=True, slots=True)
class Transition:
    """One entry of a job's history: a secondary status, its times in Unix seconds, and what SageMaker said of it."""

    status: str
    start: float | None
    end: float | None
    message: str


@dataclass(frozen=True, slots=True)
class JobFacts(Summary):
    """A job as Describe and Search have it.

    Attributes:
        arn: Its ARN.
        failure: FailureReason, or empty.
        transitions: Its history, oldest first.
        started: TrainingStartTime in Unix seconds.
        ended: TrainingEndTime in Unix seconds.
        strings: Of its hyperparameters, those that are the record of the launch.
        output: OutputDataConfig.S3OutputPath.
        checkpoints: CheckpointConfig.S3Uri, or empty.
        instance: The instance type that it has, or asks for.
        billable: Billable seconds, if told.
        metrics: Final metrics by name.
        tags: Its tags; None where they are not told.
        warm_pool: Status of its warm pool, or empty.
        most_pending: StoppingCondition.MaxPendingTimeInSeconds, if it has one.
    """

    arn: str = ""
    failure: str = ""
    transitions: tuple[Transition, ...] = ()
    started: float | None = None
    ended: float | None = None
    strings: Mapping[str, str] = field(default_factory=dict, repr=False)
    output: str = ""
    checkpoints: str = ""
    instance: str = ""
    billable: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    tags: Mapping[str, str] | None = None
    warm_pool: str = ""
    most_pending: int | None = None

    @property
    def run_id(self) -> str:
        """The run that it belongs to; empty if diloco did not launch it.

        A name says nothing, since anybody may have given it to a job. A job of ours carries the
        run, the ranks and the fingerprint of its launch, and its rank is one of these: a copy of
        such a job under another rank's name is not ours.
        """
        run_id, rank = names.parse_job_name(self.name) or ("", -1)
        if self.strings.get(names.RUN_ID) != run_id or not _FINGERPRINT.fullmatch(self.fingerprint):
            return ""
        return run_id if rank in self.ranks else ""

    @property
    def rank(self) -> int:
        """Its rank, as its name says; -1 if that is no name of ours."""
        return (names.parse_job_name(self.name) or ("", -1))[1]

    @property
    def ranks(self) -> range:
        """The ranks of the launch that created it; none if it does not tell them."""
        first, _, last = self.strings.get(names.RANKS, "").partition("-")
        try:
            least = read_whole("the first rank", first, 0, MAX_REPLICAS)
            most = read_whole("the last rank", last, 0, MAX_REPLICAS)
            return range(least, most + 1) if most < self.world_size else range(0)
        except InvalidRequestError:
            return range(0)

    @property
    def account(self) -> str:
        """The account that it is in, as its ARN says; empty if that says none."""
        parts = self.arn.split(":")
        return parts[4] if len(parts) > 4 else ""

    @property
    def fingerprint(self) -> str:
        """Digest of the launch that created it."""
        return self.strings.get(names.FINGERPRINT, "")

    @property
    def launch(self) -> str:
        """The id of the one launch that created it, of all that have its fingerprint; empty if it tells none."""
        return self.strings.get(names.LAUNCH, "")

    @property
    def world_size(self) -> int:
        """Number of replicas of the whole run; InvalidRequestError if the job does not tell it."""
        return read_whole("world_size", self.strings.get(names.WORLD_SIZE, ""), 1, MAX_REPLICAS)

    @property
    def restarts(self) -> bool:
        """Whether a failed attempt is started again in place."""
        return self.strings.get(names.RESTARTS, "0") != "0"


def read_summary(record: Mapping[str, Any]) -> Summary:
    """An entry of ListTrainingJobs."""
    return Summary(
        record["TrainingJobName"],
        _milliseconds(record["CreationTime"]) or 0,
        record.get("TrainingJobStatus") or "",
        record.get("SecondaryStatus") or "",
        _milliseconds(record.get("LastModifiedTime")),
    )


def read_job(record: Mapping[str, Any]) -> JobFacts:
    """An answer of DescribeTrainingJob, or the TrainingJob of a result of Search."""
    base = read_summary(record)
    resources = record.get("ResourceConfig") or {}
    preferred = [
        each.get("InstanceType", "") for each in resources.get("InstancePreferences") or []
    ]
    tags = record.get("Tags")
    strings = record.get("HyperParameters") or {}
    return JobFacts(
        base.name,
        base.created,
        base.status,
        base.secondary,
        base.modified,
        arn=record.get("TrainingJobArn", ""),
        failure=record.get("FailureReason") or "",
        transitions=tuple(
            Transition(
                each.get("Status", ""),
                _seconds(each.get("StartTime")),
                _seconds(each.get("EndTime")),
                each.get("StatusMessage") or "",
            )
            for each in record.get("SecondaryStatusTransitions") or []
        ),
        started=_seconds(record.get("TrainingStartTime")),
        ended=_seconds(record.get("TrainingEndTime")),
        strings={key: strings[key] for key in names.RECORD if key in strings},
        output=(record.get("OutputDataConfig") or {}).get("S3OutputPath", ""),
        checkpoints=(record.get("CheckpointConfig") or {}).get("S3Uri", ""),
        instance=resources.get("SelectedInstanceType")
        or resources.get("InstanceType")
        or ", ".join(preferred),
        billable=record.get("BillableTimeInSeconds"),
        metrics={
            each["MetricName"]: float(each["Value"])
            for each in record.get("FinalMetricDataList") or []
            if "MetricName" in each and "Value" in each
        },
        tags=None
        if tags is None
        else {each.get("Key", ""): each.get("Value", "") for each in tags},
        warm_pool=(record.get("WarmPoolStatus") or {}).get("Status", ""),
        most_pending=(record.get("StoppingCondition") or {}).get("MaxPendingTimeInSeconds"),
    )


def same_life(one: int, other: int) -> bool:
    """Whether two times of creation are of one job; an answer may have them in whole seconds only."""
    return one == other or (0 in {one % 1000, other % 1000} and one // 1000 == other // 1000)


def _milliseconds(value: datetime | None) -> int | None:
    seconds = _seconds(value)
    return None if seconds is None else round(seconds * 1000)


def _seconds(value: datetime | None) -> float | None:
    """A time; None also for one before 1970, at which nothing of SageMaker's was."""
    return None if value is None or value.timestamp() < 0 else value.timestamp()
