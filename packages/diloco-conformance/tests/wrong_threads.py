"""Executors whose threads write where the others read: T1."""

from toy_executor import ToyExecutor
from wrong import mutant

ANSWERS = "t1_what_another_thread_asks_meanwhile_changes_no_answer"
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
