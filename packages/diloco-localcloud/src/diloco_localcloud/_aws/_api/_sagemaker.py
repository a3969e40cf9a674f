"""The operations of SageMaker that launchers of training jobs use."""

from __future__ import annotations

from typing import Any

from .._model._refused import invalid
from .._training._job import Job, summary
from .._training._region import Region
from ._paging import page, page_behind

Json = dict[str, Any]


class SageMaker:
    """Answers requests that keep to the service model; called under the region's lock."""

    def __init__(self, region: Region) -> None:
        self._region = region

    def _serve_create_training_job(self, request: Json) -> Json:
        limits = request.get("StoppingCondition") or {}
        spot, wait = request.get("EnableManagedSpotTraining"), limits.get("MaxWaitTimeInSeconds")
        if wait is not None and not spot:
            raise invalid(
                "MaxWaitTimeInSeconds above 0 is not supported for the given training job type."
            )
        if spot and (wait is None or wait < limits.get("MaxRuntimeInSeconds", 86400)):
            raise invalid(
                "Invalid MaxWaitTimeInSeconds. It must be present and be greater than or equal to "
                "MaxRuntimeInSeconds"
            )
        return {"TrainingJobArn": self._region.create(request).arn}

    def _serve_describe_training_job(self, request: Json) -> Json:
        return self._region.get(request["TrainingJobName"]).description()

    def _serve_stop_training_job(self, request: Json) -> Json:
        self._region.stop(self._region.get(request["TrainingJobName"]))
        return {}

    def _serve_delete_training_job(self, request: Json) -> Json:
        self._region.delete(self._region.get(request["TrainingJobName"]))
        return {}

    def _serve_list_training_jobs(self, request: Json) -> Json:
        moment = self._region.timeline.now() - self._region.habits.list_lag
        listed = [job for job in self._told(moment) if _in_list(job, request)]
        by = {"Name": "TrainingJobName", "Status": "TrainingJobStatus"}.get(
            request.get("SortBy", ""), "CreationTime"
        )
        falling = request.get("SortOrder") != "Ascending"
        listed.sort(key=lambda told: (told[by], told["TrainingJobName"]), reverse=falling)
        keys = [(job[by], job["TrainingJobName"]) for job in listed]
        size = request.get("MaxResults", 10)
        part, token = page_behind(listed, keys, size, request.get("NextToken"), falling=falling)
        # AWS filters by status only the jobs of the page, so that a page may be empty though more
        # follow.
        status = request.get("StatusEquals")
        kept = [job for job in part if status in (None, job["TrainingJobStatus"])]
        return {"TrainingJobSummaries": [summary(job) for job in kept], **_next(token)}

    def _serve_search(self, request: Json) -> Json:
        if request["Resource"] != "TrainingJob":
            raise invalid(
                f"the stand-in searches only for TrainingJob, not for {request['Resource']}"
            )
        moment = self._region.timeline.now() - self._region.habits.search_lag
        jobs = [job for job in self._told(moment, tags=True) if _matches(job, request)]
        by = request.get("SortBy", "LastModifiedTime")
        jobs.sort(key=lambda told: str(told.get(by, "")))  # moments have ten digits before the dot
        if request.get("SortOrder") != "Ascending":
            jobs.reverse()
        part, token = page(jobs, request.get("MaxResults", 100), request.get("NextToken"))
        results = [{"TrainingJob": job} for job in part]
        hits = {"Value": len(jobs), "Relation": "EqualTo"}
        return {"Results": results, "TotalHits": hits, **_next(token)}

    def _told(self, moment: float, *, tags: bool = False) -> list[Json]:
        """Return the description, as of that moment, of every job that existed then."""
        descriptions = []
        for job in self._region.lives:
            description = job.at(moment)
            if description is not None:
                descriptions.append({**description, **({"Tags": _tags(job)} if tags else {})})
        return descriptions

    def _serve_add_tags(self, request: Json) -> Json:
        job = self._of(request["ResourceArn"])
        job.tags.update({tag["Key"]: tag["Value"] for tag in request["Tags"]})
        return {"Tags": _tags(job)}

    def _serve_list_tags(self, request: Json) -> Json:
        tags = _tags(self._of(request["ResourceArn"]))
        part, token = page(tags, request.get("MaxResults", 50), request.get("NextToken"))
        return {"Tags": part, **_next(token)}

    def _of(self, arn: str) -> Job:
        for job in self._region.jobs.values():
            if job.arn == arn:
                return job
        raise invalid("Requested resource not found.")


def _tags(job: Job) -> list[Json]:
    return [{"Key": key, "Value": value} for key, value in job.tags.items()]


def _next(token: str | None) -> Json:
    return {} if token is None else {"NextToken": token}


def _in_list(job: Json, request: Json) -> bool:
    """Return whether a job passes all filters of a list request but the one by status."""
    if request.get("NameContains", "").lower() not in job["TrainingJobName"].lower():
        return False
    for word, member in (("Creation", "CreationTime"), ("LastModified", "LastModifiedTime")):
        after, until = request.get(f"{word}TimeAfter"), request.get(f"{word}TimeBefore")
        if (after is not None and job[member] <= float(after)) or (
            until is not None and job[member] >= float(until)
        ):
            return False
    pool = request.get("WarmPoolStatusEquals")
    return pool is None or job.get("WarmPoolStatus", {}).get("Status") == pool


def _matches(job: Json, request: Json) -> bool:
    """Return whether a job, with its tags, passes all filters of the request's SearchExpression.

    Raises:
        RefusedError: the expression uses a feature that is not served.
    """
    expression = request.get("SearchExpression") or {}
    unserved = sorted(key for key in expression if key != "Filters")
    if unserved:
        raise invalid(f"the stand-in serves Filters alone in a search, not {', '.join(unserved)}")
    passed = [_passes(job, wanted) for wanted in expression.get("Filters") or ()]
    return all(passed)  # every filter is looked at, so that an unserved one is refused


def _passes(job: Json, wanted: Json) -> bool:
    name, operator = str(wanted["Name"]), str(wanted.get("Operator", "Equals"))
    if operator not in ("Contains", "Equals"):
        raise invalid(f"the stand-in serves the operators Contains and Equals, not {operator}")
    if "Value" not in wanted:
        raise invalid(f"the filter of {name} needs a Value")
    text, value = str(wanted["Value"]), _value(job, name)
    if operator == "Equals" or value is None:
        return value is not None and str(value) == text
    return text.lower() in str(value).lower()


def _value(job: Json, name: str) -> Any:
    word, dot, key = name.partition(".")
    if word == "Tags" and dot:
        return next((tag["Value"] for tag in job["Tags"] if tag["Key"] == key), None)
    value: Any = job
    for part in name.split("."):
        if not isinstance(value, dict):
            return None
        value = value.get(part)
    return value
