"""The training jobs of an account in a region, and what happens to them over time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..._server._timeline import Timeline
from .._model._refused import RefusedError, invalid
from ._job import ENDED, Job

Json = dict[str, Any]

# The seconds that SageMaker gives a program between SIGTERM and SIGKILL.
KILL_SECONDS = 120.0
_DAY = 86400
# The log group of all training jobs.
GROUP = "/aws/sagemaker/TrainingJobs"
# The only failure after which a RetryStrategy lets a job begin again.
_INTERNAL = "InternalServerError"
_REASON_BYTES = 1024
NO_CAPACITY = (
    "CapacityError: Unable to provision requested ML compute capacity. "
    "Please retry using a different ML instance type."
)
_TAKEN = (
    "Training job names must be unique within an AWS account and region, "
    "and a training job with this name already exists ({})"
)


class TrainingHabits:
    """The behaviour of the region; everything may be changed at any time.

    Attributes:
        auto_start: the seconds after which jobs begin to train by themselves; None leaves it to
            ``start``.
        upload_seconds: from the end of a program to the end of its job.
        quota_release_seconds: how long an ended job keeps its part of the quota.
        delete_seconds: how long a deleted job still exists, with status Deleting.
        quotas: how many instances of a type there may be; a type that is not named has no quota.
        no_capacity: types without instances: jobs on demand fail, jobs on spot wait.
        list_lag: how far ListTrainingJobs is behind, in seconds.
        search_lag: how far Search is behind, in seconds.
        rates: calls per second that are let through, by operation; those beyond are throttled.
        refused_roles: ARNs that the caller may not pass.
        missing_images: images that ECR does not have, as ``repository:tag``.
        roles_without_rights: ARNs of roles that no policy allows anything.
    """

    def __init__(self) -> None:
        self.auto_start: float | None = None
        self.upload_seconds = 1.0
        self.quota_release_seconds = 120.0
        self.delete_seconds = 0.0
        self.quotas: dict[str, int] = {}
        self.no_capacity: set[str] = set()
        self.list_lag = 0.0
        self.search_lag = 0.0
        self.rates: dict[str, float] = {}
        self.refused_roles: set[str] = set()
        self.missing_images: set[str] = set()
        self.roles_without_rights: set[str] = set()


@dataclass
class Stream:
    """One log stream.

    Attributes:
        created: when it was created, in milliseconds since the epoch.
        events: (moment in milliseconds, message), oldest first.
    """

    created: int
    events: list[tuple[int, str]] = field(default_factory=list)


class Logs:
    """The streams of the group by name; guarded by the region's lock."""

    def __init__(self) -> None:
        self.streams: dict[str, Stream] = {}
        self.group_exists = False

    def write(self, name: str, now: float, text: str) -> None:
        """Add the lines of a text to a stream, which is made if need be: one event per line."""
        self.group_exists = True
        moment = int(now * 1000)
        stream = self.streams.setdefault(name, Stream(moment))
        stream.events += [(moment, line) for line in text.removesuffix("\n").split("\n")]


class Machines(Protocol):
    """The machines that really run jobs; they and the region call each other under its lock."""

    def start(self, job: Job) -> None:
        """Run a job's program; report its end to ``Region.finish``, unless ``end`` was called."""

    def end(self, job: Job, gone: Callable[[], None]) -> None:
        """Send a job's processes SIGTERM, and SIGKILL after a while.

        Call ``gone`` when none of them is left; at once if none runs.
        """


class Region:
    """Training jobs and their clock.

    Attributes:
        lock: guards everything; notified when something is planned.
        timeline: the clock.
        habits: how the region behaves.
        jobs: the jobs that exist, by name.
        lives: all jobs that ever existed, oldest first.
        logs: the output of the jobs.
        machines: the machines that run the jobs; None if no programs are run.
    """

    def __init__(self, timeline: Timeline, name: str, account: str) -> None:
        self.lock = threading.Condition()
        self.timeline = timeline
        self.name = name
        self.account = account
        self.habits = TrainingHabits()
        self.jobs: dict[str, Job] = {}
        self.lives: list[Job] = []
        self.logs = Logs()
        self.machines: Machines | None = None

    @property
    def caller(self) -> str:
        """Return the ARN of the caller."""
        return f"arn:aws:iam::{self.account}:user/stand-in"

    def get(self, name: str) -> Job:
        """Return a job that exists.

        Raises:
            RefusedError: there is no such job; like AWS, not with the documented
                ResourceNotFound.
        """
        job = self.jobs.get(name)
        if job is None:
            raise invalid("Requested resource not found.")
        return job

    def create(self, request: Json) -> Job:
        """Return a new job, which waits for instances.

        Raises:
            RefusedError: the name is taken, the quota is used up, or the role may not be passed.
        """
        role = request["RoleArn"]
        if role in self.habits.refused_roles:
            raise RefusedError(
                "AccessDeniedException",
                f"User: {self.caller} is not authorized to perform: iam:PassRole on resource: "
                f"{role} because no identity-based policy allows the iam:PassRole action",
            )
        name = request["TrainingJobName"]
        arn = f"arn:aws:sagemaker:{self.name}:{self.account}:training-job/{name}"
        if name in self.jobs:
            raise RefusedError("ResourceInUse", _TAKEN.format(self.jobs[name].arn))
        tags = {tag["Key"]: tag["Value"] for tag in request.get("Tags") or ()}
        job = Job(request, arn, self.timeline.now(), tags)
        self._take_quota(job)
        self._take_pool(job)
        self.jobs[name] = job
        self.lives.append(job)
        job.move(job.created, "Starting", message="Starting the training job")
        self._await_instances(job)
        self._watch_waiting(job)
        return job

    def start(self, job: Job) -> None:
        """Give the job its instances: it downloads its image, and trains from now on."""
        if job.status != "InProgress" or job.secondary in {"Training", "Uploading"}:
            return
        now = self.timeline.now()
        if job.secondary in {"Interrupted", "Restarting"}:
            job.move(now, "Starting")
        if job.secondary != "Downloading":
            job.move(now, "Downloading")
        job.move(now, "Training")
        if self.machines is not None:
            self.machines.start(job)
        left = job.limits.get("MaxRuntimeInSeconds", _DAY) - job.trained
        self._unless_moved(left, job, lambda: self._overdue(job, "MaxRuntimeExceeded"))

    def finish(self, job: Job, failure: str = "") -> None:
        """End the job because its program ended or SageMaker failed it; a failure has a reason."""
        if job.status != "InProgress":
            return
        if failure.startswith(_INTERNAL) and job.retries < job.most_retries:
            job.retries += 1
            self.restart(job)
            return
        if job.secondary == "Training":
            job.move(self.timeline.now(), "Uploading")
            seconds = self.habits.upload_seconds
            self._unless_moved(seconds, job, lambda: self._end(job, failure))
        else:
            self._end(job, failure)

    def interrupt(self, job: Job) -> None:
        """Take the job's spot instances away; it starts again when there are others."""
        if not job.spot:
            raise ValueError(
                f"{job.name} does not run on spot: it was made without EnableManagedSpotTraining"
            )
        if job.status == "InProgress" and job.secondary not in {"Interrupted", "Uploading"}:
            job.move(self.timeline.now(), "Interrupted")
            self._leave_machine(job, lambda: self._await_instances(job))

    def restart(self, job: Job) -> None:
        """Begin the job again, as after an internal error of SageMaker."""
        if job.status == "InProgress":
            job.move(self.timeline.now(), "Restarting")
            self._leave_machine(job, lambda: self._await_instances(job))

    def stop(self, job: Job) -> None:
        """Stop the job, as StopTrainingJob does.

        Raises:
            RefusedError: it has ended, or is being stopped.
        """
        if job.status != "InProgress":
            raise invalid(
                f"The request was rejected because the training job is in status {job.status}."
            )
        self._end_by(0.1, job, "Stopped")

    def delete(self, job: Job) -> None:
        """Delete the job, as DeleteTrainingJob does.

        Raises:
            RefusedError: it has not ended, or has a warm pool.
        """
        if job.status not in ENDED:
            words = f"while it is in status {job.status}."
            raise RefusedError("ResourceInUse", f"Training job {job.arn} cannot be deleted {words}")
        if job.warm_pool and job.warm_pool["Status"] == "Available":
            words = "because it has a warm pool in status Available."
            raise RefusedError("ResourceInUse", f"Training job {job.arn} cannot be deleted {words}")
        if not self.habits.delete_seconds:
            self._gone(job)
            return
        job.status, job.modified = "Deleting", self.timeline.now()
        job.note(job.modified)
        self._after(self.habits.delete_seconds, lambda: self._gone(job))

    def _gone(self, job: Job) -> None:
        job.deleted = self.timeline.now()
        del self.jobs[job.name]

    # -- events that come without a call
    # ------------------------------------------------------------------------------------------

    def _await_instances(self, job: Job) -> None:
        habits = self.habits
        if job.instance in habits.no_capacity:
            if not job.spot:
                self._unless_moved(1.0, job, lambda: self.finish(job, NO_CAPACITY))
        elif habits.auto_start is not None:
            self._unless_moved(habits.auto_start, job, lambda: self.start(job))

    def _watch_waiting(self, job: Job) -> None:
        """Plan the end of a job that waits for too long; spot jobs end even while they run."""
        pending = job.limits.get("MaxPendingTimeInSeconds")
        if pending is not None:
            self._after(pending, lambda: None if job.started else self._overdue(job, "Stopped"))
        wait = job.limits.get("MaxWaitTimeInSeconds") if job.spot else None
        if wait is not None:
            self._after(wait, lambda: self._overdue(job, "MaxWaitTimeExceeded"))

    def _overdue(self, job: Job, secondary: str) -> None:
        if job.status == "InProgress":
            self._end_by(0.0, job, secondary)

    def _end_by(self, seconds: float, job: Job, secondary: str) -> None:
        """End the job: if it trains as soon as its program, or its machine, says so."""
        if job.secondary == "Training":
            seconds = min(job.term_seconds, KILL_SECONDS)
        job.move(self.timeline.now(), "Stopping", status="Stopping")
        if self.machines is None:
            self._unless_moved(seconds, job, lambda: self._stopped(job, secondary))
        else:
            self.machines.end(job, lambda: self._stopped(job, secondary))

    def _leave_machine(self, job: Job, then: Callable[[], None]) -> None:
        """Do ``then`` when no process of the job is left, unless it has been stopped by then."""
        if self.machines is None:
            then()
            return
        life = job.life
        self.machines.end(job, lambda: then() if job.life == life else None)

    def _stopped(self, job: Job, secondary: str) -> None:
        job.move(self.timeline.now(), secondary, status="Stopped")
        self._free_quota(job)

    def _end(self, job: Job, failure: str) -> None:
        job.failure = failure[:_REASON_BYTES]
        if job.keep_alive and not failure:
            job.warm_pool = {"Status": "Available", "ResourceRetainedBillableTimeInSeconds": 0}
            self._after(job.keep_alive, lambda: self._leave_pool(job, "Terminated"))
        elif job.warm_pool:
            job.warm_pool = {"Status": "Terminated", "ResourceRetainedBillableTimeInSeconds": 0}
        end = "Failed" if failure else "Completed"
        job.move(self.timeline.now(), end, status=end)
        self._free_quota(job)

    def _take_pool(self, job: Job) -> None:
        """Use the instances of a similar job that has ended, if their pool is still warm."""
        if job.keep_alive:
            job.warm_pool = {"Status": "InUse"}
        for other in self.jobs.values():
            if (other.warm_pool or {}).get("Status") == "Available" and other.kind == job.kind:
                self._leave_pool(other, "Reused", ReusedByJob=job.name)
                job.warm_pool = {"Status": "InUse"}
                return

    def _leave_pool(self, job: Job, status: str, **more: str) -> None:
        if job.warm_pool is None or job.warm_pool["Status"] != "Available":
            return
        now = self.timeline.now()
        seconds = round(now - (job.ended or now))
        job.warm_pool = {"Status": status, "ResourceRetainedBillableTimeInSeconds": seconds, **more}
        job.modified = now
        job.note(now)

    def _take_quota(self, job: Job) -> None:
        quota = self.habits.quotas.get(job.instance)
        if quota is None:
            return
        rivals = [other for other in self.lives if other.instance == job.instance]
        used = sum(other.instances for other in rivals if not other.frees_quota)
        if used + job.instances > quota:
            use = "spot training job usage" if job.spot else "training job usage"
            raise RefusedError(
                "ResourceLimitExceeded",
                f"The account-level service limit '{job.instance} for {use}' is {quota} "
                f"Instances, with current utilization of {used} Instances and a request delta of "
                f"{job.instances} Instances. Please use AWS Service Quotas to request an increase "
                "for this quota. If AWS Service Quotas is not available, contact AWS support to "
                "request an increase for this quota.",
            )

    def _free_quota(self, job: Job) -> None:
        def free() -> None:
            job.frees_quota = True

        self._after(self.habits.quota_release_seconds, free)

    def _after(self, seconds: float, action: Callable[[], None]) -> None:
        self.timeline.after(seconds, action)
        self.lock.notify_all()

    def _unless_moved(self, seconds: float, job: Job, action: Callable[[], None]) -> None:
        """Act after so long, unless the job has gone on to another state by then."""
        life = job.life
        self._after(seconds, lambda: action() if job.life == life else None)
