"""One look of the Job controller at a Job and its pods: what to write, make, delete and release.

Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from ..._server import _timeline
from .._pods import _facts
from .._pods._facts import FAILURES, IGNORED
from . import _backoff, _end
from ._status import (
    finished,
    index_text,
    parse_indexes,
    set_condition,
    start_status,
    true_condition,
    write_counts,
)

Json = dict[str, Any]


@dataclass
class Plan:
    """The result of one look.

    Attributes:
        status: the status to write; None for none.
        backoff: the back-off from now on.
        delete: pods to end, still to be counted.
        drop: pods to end, not to be counted (suspended, or too many).
        release: pods that are counted now and lose their finalizer.
        create: the indexes and annotations of pods to make.
        ending: the terminal condition, set when all is counted and gone.
        again: look again after so many seconds.
    """

    status: Json | None = None
    backoff: _backoff.Backoff = field(default_factory=_backoff.Backoff)
    delete: list[Json] = field(default_factory=list)
    drop: list[Json] = field(default_factory=list)
    release: list[Json] = field(default_factory=list)
    create: list[tuple[int | None, dict[str, str]]] = field(default_factory=list)
    ending: Json | None = None
    again: float | None = None


def plan(
    job: Json,
    pods: list[Json],
    record: _backoff.Backoff,
    now: float,
    first: float = _backoff.FIRST_SECONDS,
) -> Plan:
    """Decide what to do next for a Job.

    Args:
        job: the Job as stored.
        pods: all pods that this Job owns, ended and deleting ones too.
        record: the back-off so far.
        now: seconds since the epoch.
        first: the first back-off, in seconds.

    Returns:
        A plan; its ``status`` is None if nothing is to be written.
    """
    if finished(job):
        return Plan(backoff=record)
    return _Look(job, pods, record, now, first).decide()


class _Look:
    """The state of one call of ``plan``."""

    def __init__(
        self, job: Json, pods: list[Json], record: _backoff.Backoff, now: float, first: float
    ) -> None:
        self.job, self.now, self.record, self.first = job, now, record, first
        self.spec = job["spec"]
        self.indexed = self.spec.get("completionMode") == "Indexed"
        self.per_index = self.spec.get("backoffLimitPerIndex") is not None
        self.deleted = "deletionTimestamp" in job["metadata"]
        self.pods = sorted(pods, key=lambda pod: (_index(pod), pod["metadata"]["name"]))
        living = [pod for pod in self.pods if not _facts.ended(pod)]
        self.active = [pod for pod in living if not _facts.deleting(pod)]
        self.terminating = len(living) - len(self.active)
        self.ready = sum(map(_facts.is_ready, self.active))
        self.status = start_status(job, now)
        self.plan = Plan(backoff=record)

    def decide(self) -> Plan:
        counted = set(self.status["uncountedTerminatedPods"].get("failed", []))
        self.uncounted = [pod for pod in self.pods if _facts.tracked(pod)]
        new = [pod for pod in self.uncounted if _uid(pod) not in counted]
        self.new_failed = [pod for pod in new if self._is_failed(pod)]
        new_succeeded = [pod for pod in new if _facts.phase(pod) == "Succeeded"]
        self.plan.backoff = self.record.after(new_succeeded, self.new_failed, self.now)
        done = self._indexes(new_succeeded)
        failed = self._failed_indexes()
        end = self._end(done, failed)
        waiting: set[str] = set()
        active = len(self.active)
        if end is not None:
            self.plan.delete = self._ending(self.active)
            active = 0
        elif not self.deleted:
            active, waiting = self._manage(done, failed)
            if len(done) >= self.spec["completions"] and active == 0:
                end = _end.complete()
        self._suspended(end)
        self._track(end, done, failed, waiting)
        write_counts(self.status, active=active, ready=self.ready, terminating=self.terminating)
        self.plan.status = self.status
        self._announce(end)
        return self.plan

    def _is_failed(self, pod: Json) -> bool:
        if _facts.phase(pod) == "Failed":
            return True
        if self.spec.get("podReplacementPolicy") == "Failed":
            return False
        return _facts.deleting(pod) and _facts.phase(pod) != "Succeeded"

    def _indexes(self, new_succeeded: list[Json]) -> set[int]:
        if not self.indexed:
            return set(range(self.status.get("succeeded", 0) + len(new_succeeded)))
        fresh = {index for pod in new_succeeded if (index := _facts.index_of(pod)) is not None}
        return parse_indexes(self.status.get("completedIndexes", "")) | fresh

    def _failed_indexes(self) -> set[int]:
        if not self.per_index:
            return set()
        failed = parse_indexes(self.status.get("failedIndexes", ""))
        for pod in self.new_failed:
            index, verdict = _facts.index_of(pod), _end.match(self.job, pod)
            failures = _facts.count_of(pod, FAILURES)
            spent = verdict.counts and failures >= self.spec["backoffLimitPerIndex"]
            if index is not None and (verdict.action == "FailIndex" or spent):
                failed.add(index)
        return failed

    def _end(self, done: set[int], failed: set[int]) -> Json | None:
        for kind in ("SuccessCriteriaMet", "FailureTarget"):
            if decided := true_condition(self.status, kind):
                return decided
        counting = [pod for pod in self.new_failed if _end.match(self.job, pod).counts]
        uncounted = self.status["uncountedTerminatedPods"].get("failed", [])
        count = self.status.get("failed", 0) + len(uncounted) + len(counting)
        started = self.status.get("startTime")
        end = _end.failure(self.job, self.new_failed, count, started, self.now)
        if end is None and self.per_index:
            end = _end.failure_by_index(self.spec, done, failed)
        deadline = self.spec.get("activeDeadlineSeconds")
        if end is None and not self.spec.get("suspend") and None not in (deadline, started):
            self._again(_timeline.seconds(started or "") + deadline - self.now)
        return end

    def _manage(self, done: set[int], failed: set[int]) -> tuple[int, set[str]]:
        """Make or end pods.

        Returns:
            How many are active now, and the uids of failed ones whose replacement must wait.
        """
        if self.spec.get("suspend"):
            self.plan.drop = self._ending(self.active)
            return 0, set()
        want = max(0, min(self.spec["parallelism"], self.spec["completions"] - len(done)))
        surplus = self._surplus(len(self.active) - want)
        if surplus:
            self.plan.drop = self._ending(surplus)
            return len(self.active) - len(surplus), set()
        room = want - len(self.active)
        if self.spec.get("podReplacementPolicy") == "Failed":
            room -= self.terminating
        if room <= 0:
            return len(self.active), self._unreplaced(done, failed)
        if self.per_index:
            return self._create_per_index(room, done, failed)
        wait = self.plan.backoff.remaining(self.now, self.first)
        if wait > 0:
            self._again(wait)
            waiting_uids = {_uid(pod) for pod in self.new_failed}
            self.plan.backoff = self.record
            return len(self.active) + min(len(waiting_uids), room), waiting_uids
        pending = self._pending(done, failed, room) if self.indexed else [None] * room
        self.plan.create = [(index, {}) for index in pending]
        return len(self.active) + len(pending), set()

    def _create_per_index(
        self, room: int, done: set[int], failed: set[int]
    ) -> tuple[int, set[str]]:
        last = self._last_failures(done, failed)
        waits: dict[str, float] = {}
        for index in self._pending(done, failed, room):
            notes, wait, old = {FAILURES: "0"}, 0.0, last.get(index)
            if old is not None:
                counts = {key: _facts.count_of(old, key) for key in (FAILURES, IGNORED)}
                counts[FAILURES if _end.match(self.job, old).counts else IGNORED] += 1
                notes |= {key: str(count) for key, count in counts.items() if count}
                ended = _backoff.finished(old, self.now)
                wait = _backoff.wait(sum(counts.values()), ended, self.now, self.first)
            if wait > 0 and old is not None:
                waits[_uid(old)] = wait
            else:
                self.plan.create.append((index, notes))
        if waits:
            self._again(min(waits.values()))
        return len(self.active) + len(self.plan.create) + len(waits), set(waits)

    def _unreplaced(self, done: set[int], failed: set[int]) -> set[str]:
        """Return the failed pods of indexes that will be tried again.

        They keep their finalizer until they are replaced.
        """
        if not self.per_index:
            return set()
        return {_uid(pod) for pod in self._last_failures(done, failed).values()}

    def _last_failures(self, done: set[int], failed: set[int]) -> dict[int, Json]:
        running = {_facts.index_of(pod) for pod in self.active}
        last: dict[int, Json] = {}
        for pod in sorted(self.new_failed, key=lambda pod: _backoff.finished(pod, self.now)):
            index = _facts.index_of(pod)
            if index is not None and index not in running | done | failed:
                last[index] = pod
        return last

    def _pending(self, done: set[int], failed: set[int], most: int) -> list[int]:
        """Return the first indexes that need a pod.

        A Job may have two thousand million indexes, so the search ends after ``most``.
        """
        waits = self.spec.get("podReplacementPolicy") == "Failed"
        busy = [pod for pod in self.pods if waits and not _facts.ended(pod)] or self.active
        taken = {_facts.index_of(pod) for pod in busy} | done | failed
        free = (index for index in range(self.spec["completions"]) if index not in taken)
        return list(islice(free, most))

    def _surplus(self, too_many: int) -> list[Json]:
        """Return the active pods to end.

        Those whose index is out of range come first, then unready ones and those of the last
        indexes.
        """
        most = self.spec["completions"]
        outside = [pod for pod in self.active if self.indexed and _index(pod) >= most]
        ordered = sorted(
            self.active, key=lambda pod: (pod not in outside, _facts.is_ready(pod), -_index(pod))
        )
        return ordered[: max(0, too_many, len(outside))]

    def _ending(self, pods: list[Json]) -> list[Json]:
        """Return active pods that are deleted now, and count them as such."""
        self.terminating += len(pods)
        self.ready -= sum(map(_facts.is_ready, pods))
        return pods

    def _suspended(self, end: Json | None) -> None:
        if end is not None or self.deleted:
            return
        if self.spec.get("suspend"):
            words = ("True", "JobSuspended", "Job suspended")
            set_condition(self.status, "Suspended", *words, self.now)
        elif true_condition(self.status, "Suspended"):
            set_condition(self.status, "Suspended", "False", "JobResumed", "Job resumed", self.now)
            self.status["startTime"] = _timeline.stamp(self.now)
            if self.spec.get("activeDeadlineSeconds") is not None:
                self._again(self.spec["activeDeadlineSeconds"])

    def _track(self, end: Json | None, done: set[int], failed: set[int], waiting: set[str]) -> None:
        uncounted = list(self.status["uncountedTerminatedPods"].get("failed", []))
        for pod in self.uncounted:
            lost = self._is_failed(pod)
            free = self.deleted or end is not None or _facts.phase(pod) == "Succeeded" or lost
            if not free or _uid(pod) in waiting:
                continue
            self.plan.release.append(pod)
            if _facts.phase(pod) == "Succeeded":
                continue
            ended_by_end = end is not None and end["type"] != "SuccessCriteriaMet"
            counts = (lost or ended_by_end) and _end.match(self.job, pod).counts
            if counts and _uid(pod) not in uncounted:
                uncounted.append(_uid(pod))
        if uncounted:
            self.status["uncountedTerminatedPods"] = {"failed": uncounted}
        if done:
            self.status["succeeded"] = len(done)
        if self.indexed and done:
            self.status["completedIndexes"] = index_text(done)
        if self.per_index:
            self.status["failedIndexes"] = index_text(failed)

    def _announce(self, end: Json | None) -> None:
        """Set the interim condition now; the terminal one follows when all is counted and gone."""
        if end is None:
            return
        if not true_condition(self.status, end["type"]):
            set_condition(self.status, end["type"], "True", end["reason"], end["message"], self.now)
        kind = "Complete" if end["type"] == "SuccessCriteriaMet" else "Failed"
        self.plan.ending = {**end, "type": kind}

    def _again(self, seconds: float) -> None:
        wait = max(seconds, 0.0)
        self.plan.again = wait if self.plan.again is None else min(self.plan.again, wait)


def _uid(pod: Json) -> str:
    return str(pod["metadata"]["uid"])


def _index(pod: Json) -> int:
    return _facts.index_of(pod) or 0
