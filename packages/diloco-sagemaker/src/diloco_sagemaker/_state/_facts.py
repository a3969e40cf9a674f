"""SageMaker's description of a job as typed facts.

https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_DescribeTrainingJob.html
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from diloco_protocol import InvalidRequestError
from diloco_protocol.backend import MAX_REPLICAS, read_whole

from .._request import _names as names

#: Statuses of SageMaker that end a job. No other status does, not even a new one.
ENDED = frozenset({"Completed", "Failed", "Stopped"})
ALIVE = frozenset({"InProgress", "Stopping", "Deleting"})
"""All other statuses that this version knows."""
_FINGERPRINT = re.compile("[0-9a-f]{64}")
_LONGEST = 2500  # characters of a hyperparameter, as the service allows them


@dataclass(frozen=True, slots=True)
class Summary:
    """A job as a list shows it.

    Attributes:
        name: Its name.
        created: When it was created, in milliseconds of Unix time. A name may be used again, and
            this time distinguishes the jobs that have had it.
        status: TrainingJobStatus.
        secondary: SecondaryStatus; empty if the list leaves it out.
        modified: When it last changed, in milliseconds; None if the list does not say.
    """

    name: str
    created: int
    status: str
    secondary: str
    modified: int | None


@dataclass(frozen=True, slots=True)
class Transition:
    """An entry of a job's history: secondary status, times in Unix seconds, SageMaker's message."""

    status: str
    start: float | None
    end: float | None
    message: str


@dataclass(frozen=True, slots=True)
class JobFacts(Summary):
    """A job as Describe and Search show it.

    Attributes:
        arn: Its ARN.
        failure: FailureReason, or empty.
        transitions: Its history, oldest first.
        started: TrainingStartTime in Unix seconds.
        ended: TrainingEndTime in Unix seconds.
        strings: Those of its hyperparameters that are the record of the launch.
        output: OutputDataConfig.S3OutputPath.
        checkpoints: CheckpointConfig.S3Uri, or empty.
        instance: Its instance type.
        billable: Billable seconds; None if unknown.
        tags: Its tags; None if the answer leaves them out.
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
    tags: Mapping[str, str] | None = None
    most_pending: int | None = None

    @property
    def run_id(self) -> str:
        """Return the run that it belongs to; empty if diloco did not launch it.

        The name proves nothing, since any program may have given it to a job. A job of diloco
        carries the run, the ranks and the fingerprint of its launch, and its own rank is one of
        these ranks: a copy of such a job under another rank's name does not count.
        """
        run_id, rank = names.parse_job_name(self.name) or ("", -1)
        if self.strings.get(names.RUN_ID) != run_id or not _FINGERPRINT.fullmatch(self.fingerprint):
            return ""
        return run_id if rank in self.ranks else ""

    @property
    def rank(self) -> int:
        """Return its rank, taken from its name; -1 if the name is not one that diloco gives."""
        return (names.parse_job_name(self.name) or ("", -1))[1]

    @property
    def ranks(self) -> range:
        """Return the ranks of the launch that created it; an empty range if the job lacks them."""
        first, _, last = self.strings.get(names.RANKS, "").partition("-")
        try:
            least = read_whole("the first rank", first, 0, MAX_REPLICAS)
            most = read_whole("the last rank", last, 0, MAX_REPLICAS)
            return range(least, most + 1) if most < self.world_size else range(0)
        except InvalidRequestError:
            return range(0)

    @property
    def account(self) -> str:
        """Return the account that it is in, taken from its ARN; empty if the ARN has none."""
        parts = self.arn.split(":")
        return parts[4] if len(parts) > 4 else ""

    @property
    def fingerprint(self) -> str:
        """Return the digest of the launch that created it."""
        return self.strings.get(names.FINGERPRINT, "")

    @property
    def launch(self) -> str:
        """Return the id of the launch that created it; empty if the job has none.

        Several launches may have the same fingerprint, but each has an id of its own.
        """
        return self.strings.get(names.LAUNCH, "")

    @property
    def world_size(self) -> int:
        """Return the number of replicas of the whole run; InvalidRequestError if it is missing."""
        return read_whole("world_size", self.strings.get(names.WORLD_SIZE, ""), 1, MAX_REPLICAS)

    @property
    def restarts(self) -> bool:
        """Return whether a failed attempt is started again in place."""
        return self.strings.get(names.RESTARTS, "0") != "0"


def read_summary(record: Mapping[str, Any]) -> Summary:
    """Read an entry of ListTrainingJobs."""
    return Summary(
        record["TrainingJobName"],
        _milliseconds(record["CreationTime"]) or 0,
        record.get("TrainingJobStatus") or "",
        record.get("SecondaryStatus") or "",
        _milliseconds(record.get("LastModifiedTime")),
    )


def read_job(record: Mapping[str, Any]) -> JobFacts:
    """Read an answer of DescribeTrainingJob, or the TrainingJob in a result of Search."""
    base = read_summary(record)
    resources = record.get("ResourceConfig") or {}
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
                transition.get("Status", ""),
                _seconds(transition.get("StartTime")),
                _seconds(transition.get("EndTime")),
                transition.get("StatusMessage") or "",
            )
            for transition in record.get("SecondaryStatusTransitions") or []
        ),
        started=_seconds(record.get("TrainingStartTime")),
        ended=_seconds(record.get("TrainingEndTime")),
        strings={key: strings[key][:_LONGEST] for key in names.RECORD if key in strings},
        output=(record.get("OutputDataConfig") or {}).get("S3OutputPath", ""),
        checkpoints=(record.get("CheckpointConfig") or {}).get("S3Uri", ""),
        instance=resources.get("InstanceType") or resources.get("SelectedInstanceType") or "",
        billable=record.get("BillableTimeInSeconds"),
        tags=None if tags is None else {tag.get("Key", ""): tag.get("Value", "") for tag in tags},
        most_pending=(record.get("StoppingCondition") or {}).get("MaxPendingTimeInSeconds"),
    )


def same_life(one: int, other: int) -> bool:
    """Return whether two creation times may be those of one job.

    An answer may have them in whole seconds only.
    """
    return one == other or (0 in {one % 1000, other % 1000} and one // 1000 == other // 1000)


def _milliseconds(value: datetime | None) -> int | None:
    seconds = _seconds(value)
    return None if seconds is None else round(seconds * 1000)


def _seconds(value: datetime | None) -> float | None:
    """Return a time in Unix seconds; None for no time, and for one before 1970, which is wrong."""
    return None if value is None or value.timestamp() < 0 else value.timestamp()
