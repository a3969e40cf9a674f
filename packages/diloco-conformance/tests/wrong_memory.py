"""Answers from memory, and amounts too large for some: S6, G5, G6, H6, E1, L3, L6; brief: C7."""

import json
import unicodedata

from toy_executor import ToyExecutor
from wrong import Telling, mutant

from diloco_protocol import ThrottledError, UnavailableError

BEFORE = "s6_what_was_true_before_is_no_answer"
OTHERS = "c7_whoever_has_ended_the_others_end"
MANY = "e1_many_and_long_variables"


class Remembers(ToyExecutor):
    """Base of those that answer what they have seen when they cannot see."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.memory = {}

    def remembered(self, name, call, *kinds):
        """What the call gives, or gave."""
        try:
            self.memory[name] = call()
        except kinds:
            if name not in self.memory:
                raise
        return self.memory[name]


@mutant(BEFORE, "S6", "S4")
class SaysTheLastStateWhenThrottled(Remembers):
    def _observe_run(self, handles):
        look = super()._observe_run
        return self.remembered(tuple(handles), lambda: look(handles), ThrottledError)


@mutant(BEFORE, "S6", "S4")
class SaysTheLastStateWhenAway(Remembers):
    def describe(self, handle):
        look = super().describe
        return self.remembered(handle, lambda: look(handle), UnavailableError)


@mutant("g6_a_log_that_cannot_be_read_is_an_exception", "G6")
class GivesTheLogItHasRead(Remembers):
    def stream_logs(self, handle, **options):
        look = super().stream_logs
        return self.remembered(handle, lambda: look(handle, **options), UnavailableError)


@mutant("h6_a_backend_that_cannot_be_asked_is_an_exception", "H6")
class ListsWhatItHasListed(Remembers):
    def _list_runs(self):
        return list(self.remembered("runs", super()._list_runs, UnavailableError))


@mutant("h6_a_backend_that_cannot_be_asked_is_an_exception", "H6")
class FindsWhatItHasFound(Remembers):
    def _find(self, run_id):
        look = super()._find
        return self.remembered(run_id, lambda: look(run_id), UnavailableError, ThrottledError)


@mutant("l3_the_same_run_id_is_the_same_run", "S12", "L3")
class ASecondLaunchStartsTheClockAnew(ToyExecutor):
    def _same(self, request):
        jobs = super()._same(request)
        for name, job in jobs.items():
            if job.status == "RUNNING":
                self.cloud.jobs[name].started_at = self.cloud.clock()
        return jobs


@mutant("g5_hundreds_of_lines", "G5")
class AThousandLinesAtMost(ToyExecutor):
    def _logs(self, handle, query):
        lines = super()._logs(handle, query)
        return lines if query.follow else iter(list(lines)[-1000:])


@mutant(MANY, "E1")
class SixtyVariablesAtMost(Telling):
    def tell(self, body):
        body["env"] = dict(list(body["env"].items())[-60:])


@mutant(MANY, "E1")
class ValuesAreCut(Telling):
    def tell(self, body):
        body["env"] = {name: value[:4096] for name, value in body["env"].items()}


@mutant(MANY, "L6")
class LargeArgumentsAreDropped(Telling):
    def tell(self, body):
        if len(json.dumps(body["spec"]["kwargs"])) > 32_768:
            body["spec"]["kwargs"] = {}


@mutant(OTHERS, "C7", gang=True)
class ARunIsOverWithTheRankItIsAskedFor(ToyExecutor):
    def _stop(self, handle):
        if self._job(handle).live:
            super()._stop(handle)


@mutant(OTHERS, "C7")
class ARunIsOverWithItsLastRank(ToyExecutor):
    def cancel_run(self, run_id):
        if self._job(self.attach(run_id)[-1]).live:
            super().cancel_run(run_id)


@mutant("l6_replicas_are_told_who_they_are", "L6")
class ArgumentsAreNormalised(Telling):
    def tell(self, body):
        text = json.dumps(body["spec"]["kwargs"], ensure_ascii=False)
        body["spec"]["kwargs"] = json.loads(unicodedata.normalize("NFC", text))
