"""Executors whose threads write where the others read: T1."""

from contextlib import contextmanager
from dataclasses import replace

from toy_executor import ToyExecutor
from wrong import mutant

ANSWERS = "t1_what_another_thread_asks_meanwhile_changes_no_answer"
OLDER = "t1_an_older_look_undoes_nothing_that_a_newer_one_has_told"
ENDS = "t1_what_another_thread_ends_meanwhile_is_all_that_it_ends"


@mutant(ANSWERS, "T1")
class LooksAtWhatWasAskedLast(ToyExecutor):
    def _observe_run(self, handles):
        self.asked = handles
        jobs = self._jobs(self.asked[0].run_id)
        return {handle: self._status(jobs[handle]) for handle in handles if handle in jobs}


@mutant(ANSWERS, "T1")
class ReadsTheResultThatWasAskedForLast(ToyExecutor):
    def _result(self, handle):
        self.asked = handle
        return super()._result(self.asked)


@mutant(ANSWERS, "T1")
class ReadsTheLogThatWasAskedForLast(ToyExecutor):
    def _logs(self, handle, query):
        self.asked = handle
        return super()._logs(self.asked, query)


@mutant(ANSWERS, "T1")
class ReadsInOneBuffer(ToyExecutor):
    def _logs(self, handle, query):
        self.lines = []
        for line in super()._logs(handle, query):
            self.lines.append(line)
        return iter(self.lines)


@mutant(ENDS, "T1", "C9")
class PurgesWhatWasNamedLast(ToyExecutor):
    def _purge(self, handle):
        self.named = handle
        super()._purge(self.named)


@mutant(ENDS, "T1", "C5", "C3")
class CancelsWhatWasNamedLast(ToyExecutor):
    def _stop(self, handle):
        self.named = handle
        super()._stop(self.named)


class CountsWhatItSaw(ToyExecutor):
    """Base of those that number attempts by what they told before, in the order of the answers."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.told = {}

    def _observe_run(self, handles):
        seen = super()._observe_run(handles)
        return {handle: self.counted(handle, status) for handle, status in seen.items()}

    def counted(self, handle, status):
        raise NotImplementedError


@mutant(OLDER, "T1")
class PendingAgainIsTheNextAttempt(CountsWhatItSaw):
    def counted(self, handle, status):
        before = self.told.get(handle, status)
        more = before.state == "running" and status.state == "pending"
        least = before.attempt + more
        self.told[handle] = replace(status, attempt=max(status.attempt, least))
        return self.told[handle]


@mutant(OLDER, "T1")
class WhatWasToldLastIsTrueForAWhile(CountsWhatItSaw):
    """A cache that the older of two looks fills last."""

    def counted(self, handle, status):
        kept, left = self.told.get(handle, (None, 0))
        if kept is not None and kept.state == "pending" and left:
            self.told[handle] = kept, left - 1
            return kept
        again = kept is not None and kept.state == "running" and status.state == "pending"
        self.told[handle] = status, int(again)
        return status


class NoOrder:
    """Stands where BaseExecutor puts looks in order, and lets each of them tell what it saw."""

    @contextmanager
    def look(self):
        yield 0

    def newest(self, number, handle, status):
        return status


@mutant(OLDER, "T1")
class EveryLookTellsWhatItSaw(ToyExecutor):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self._looks = NoOrder()
