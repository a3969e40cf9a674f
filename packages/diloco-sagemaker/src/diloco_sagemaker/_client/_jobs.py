"""Look at many jobs with few calls: one list of all, and the details of those that have changed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

from diloco_protocol.backend import Recent

from .._request import _names as names
from .._state._facts import JobFacts, Summary, same_life
from ._calls import Client
from ._errors import MissingError
from ._parallel import at_once


class Jobs:
    """The known details of jobs, kept until a list shows that they have changed.

    Thread-safe.

    What is kept here only saves calls; nothing else depends on it.
    """

    def __init__(self, client: Client) -> None:
        self.client = client
        self._known: Recent[tuple[str, int], JobFacts] = Recent()
        self._removed: Recent[tuple[str, int], bool] = Recent()

    def of_run(self, run_id: str, since: int | None = None) -> dict[int, Summary]:
        """Return the jobs of a run by rank, as the list shows them.

        Args:
            run_id: The run.
            since: Only jobs created since then, in milliseconds.
        """
        filters = {}
        if since is not None:
            filters["CreationTimeAfter"] = datetime.fromtimestamp(since / 1000 - 2, UTC)
        by_rank = {}
        for summary in self.client.list(names.job_prefix(run_id), **filters):
            parsed = names.parse_job_name(summary.name)
            if parsed is not None and parsed[0] == run_id:
                by_rank[parsed[1]] = summary
        return by_rank

    def details(self, summaries: Sequence[Summary], contains: str) -> dict[str, JobFacts]:
        """Return the details of jobs by name, without jobs that have disappeared meanwhile.

        Args:
            summaries: The jobs, as a list has just shown them.
            contains: A text that the names of all of them contain.
        """
        facts = {row.name: fact for row in summaries if (fact := self._fresh(row)) is not None}
        changed = [row for row in summaries if row.name not in facts]
        if len(changed) > 1:  # one is described; more are searched for, a hundred at a time
            wanted = {row.name: row for row in changed}
            for job in self.client.search(contains):
                listed = wanted.get(job.name)
                # The index may lag behind the list: its details are used only if both show the job
                # at the same moment.
                if listed is not None and job.modified is not None and _same_moment(job, listed):
                    facts[job.name] = self._keep(job)
            changed = [row for row in changed if row.name not in facts]
        facts.update(self.described([row.name for row in changed]))
        return facts

    def described(self, job_names: Iterable[str]) -> dict[str, JobFacts]:
        """Describe jobs one by one; return their details by name, without jobs that are missing."""

        def one(name: str) -> JobFacts | None:
            try:
                return self.describe(name)
            except MissingError:
                return None

        name_list = list(job_names)
        answers = at_once(one, name_list)
        return {name: job for name, job in zip(name_list, answers, strict=True) if job is not None}

    def describe(self, name: str) -> JobFacts:
        """Return the details of a job; MissingError if there is no such job."""
        return self._keep(self.client.describe(name))

    def is_tagged(self, job: JobFacts, key: str) -> bool:
        """Return whether a job has a tag with this key; Describe does not return tags."""
        return self.client.is_tagged(job.arn, key) if job.tags is None else key in job.tags

    def forget(self, job: Summary) -> None:
        """Record that a job was deleted."""
        self._known.forget((job.name, job.created))
        self._removed.keep((job.name, job.created), True)

    def is_removed(self, name: str, created: int) -> bool:
        """Return whether a job was deleted here, so that it is expected to be missing."""
        return (name, created) in self._removed

    def _keep(self, job: JobFacts) -> JobFacts:
        before = self._known.get((job.name, job.created))
        if before is not None and (before.modified or 0) > (job.modified or 0):
            return before
        self._known.keep((job.name, job.created), job)
        return job

    def _fresh(self, listed: Summary) -> JobFacts | None:
        """Return the known details of a job; None if the list has something newer."""
        job = self._known.get((listed.name, listed.created))
        if job is None or listed.modified is None or job.modified is None:
            return None
        if job.modified > listed.modified:
            return job  # the list lags behind these details
        same = (job.status, job.modified) == (listed.status, listed.modified)
        return job if same and listed.secondary in {"", job.secondary} else None


def _same_moment(job: JobFacts, listed: Summary) -> bool:
    return (
        same_life(job.created, listed.created)
        and job.modified == listed.modified
        and job.status == listed.status
    )
