"""Wrong following: G3."""

import threading
from dataclasses import replace

from toy_cloud import LOG_PAGE
from toy_executor import ToyExecutor, ask
from toy_logs import LineReader, of_stream
from wrong import mutant

from diloco_protocol import BackendError

ENDED = "g3_what_has_ended_is_followed_to_its_end"
LIVES = "g3_what_lives_is_followed"
PREEMPTED = "g3_it_goes_on_through_a_preemption"


@mutant(LIVES, "G3")
class FollowsNothing(ToyExecutor):
    def _logs(self, handle, query):
        return super()._logs(handle, replace(query, follow=False))


@mutant(LIVES, "G3")
class WaitsForTheEnd(ToyExecutor):
    def _logs(self, handle, query):
        return iter(list(super()._logs(handle, query)))


@mutant(LIVES, "G3")
class FollowsOnlyWhatRuns(ToyExecutor):
    def _logs(self, handle, query):
        running = self._job(handle).status == "RUNNING"
        return super()._logs(handle, replace(query, follow=query.follow and running))


@mutant(LIVES, "G3")
class GivesEverythingAgain(ToyExecutor):
    def _lines(self, handle, query):
        while query.follow and self._job(handle).live:
            yield from super()._lines(handle, replace(query, follow=False))
            self._backoff.sleep(1.0)
        yield from super()._lines(handle, replace(query, follow=False))


@mutant(LIVES, "G3")
class FollowsTheWholeRun(ToyExecutor):
    def _lines(self, handle, query):
        if not query.follow:
            yield from super()._lines(handle, query)
            return
        places = {}
        while True:
            jobs = self._jobs(handle.run_id)
            for one in jobs:
                log = self.cloud.log(one.metadata["name"], one.metadata["uid"])
                for chunk in log[places.get(one, 0) :]:
                    yield from ((chunk.time, line) for line in chunk.data.decode().split("\n")[:-1])
                places[one] = len(log)
            if not jobs[handle].live:
                return
            self._backoff.sleep(1.0)


@mutant(ENDED, "G3")
class NeverEnds(ToyExecutor):
    def _lines(self, handle, query):
        yield from super()._lines(handle, query)
        if query.follow:
            threading.Event().wait(60)


@mutant(ENDED, "G3")
class BeginsAtTheEnd(ToyExecutor):
    def _lines(self, handle, query):
        before = len(self._job(handle).log) if query.follow else 0
        for number, line in enumerate(super()._lines(handle, query)):
            if number >= before:
                yield line


@mutant(ENDED, "G3")
class DoesNotReadOnceItIsOver(ToyExecutor):
    def _lines(self, handle, query):
        if not query.follow or self._job(handle).live:
            yield from super()._lines(handle, query)


@mutant(ENDED, "G3")
class FollowsWhateverIsWritten(ToyExecutor):
    def _logs(self, handle, query):
        return super()._logs(handle, replace(query, regex=None) if query.follow else query)


@mutant("g3_it_ends_however_the_replica_ends", "G3")
class EndsWithSuccessAlone(ToyExecutor):
    def _lines(self, handle, query):
        yield from super()._lines(handle, query)
        if query.follow and self._job(handle).status != "SUCCEEDED":
            threading.Event().wait(60)


@mutant("g3_a_last_line_without_a_newline_is_followed", "G3")
class HalfLinesAtOnce(ToyExecutor):
    def _lines(self, handle, query):
        place = 0
        while True:
            over = not query.follow or not self._job(handle).live
            names = (handle.metadata["name"], handle.metadata["uid"])
            chunks = self.cloud.log(*names, place)
            place += len(chunks)
            for chunk in chunks:
                yield from ((chunk.time, line) for line in chunk.data.decode().splitlines())
            if over:
                return
            self._backoff.sleep(1.0)


@mutant(PREEMPTED, "G3")
class EndsAtAPreemption(ToyExecutor):
    def _lines(self, handle, query):
        for line in super()._lines(handle, query):
            if query.follow and self._job(handle).attempt > 1:
                return
            yield line


@mutant(PREEMPTED, "G3")
class FollowsOneAttempt(ToyExecutor):
    def _lines(self, handle, query):
        first = sum(chunk.attempt == 1 for chunk in self._job(handle).log)
        for number, line in enumerate(super()._lines(handle, query)):
            if not query.follow or number <= first:
                yield line


@mutant(PREEMPTED, "G3")
class BeginsAnewWithEveryAttempt(ToyExecutor):
    def _lines(self, handle, query):
        given = []
        for line in super()._lines(handle, query):
            if query.follow and len(given) == 1 and self._job(handle).attempt > 1:
                yield from given
            given.append(line)
            yield line


@mutant("g3_a_disturbance_loses_no_line", "G3")
class EndsQuietlyWhenDisturbed(ToyExecutor):
    def _lines(self, handle, query):
        try:
            yield from super()._lines(handle, query)
        except BackendError:
            if not query.follow:
                raise


@mutant("g3_a_disturbance_loses_no_line", "G3")
class SkipsWhatItCouldNotRead(ToyExecutor):
    def _lines(self, handle, query):
        names = (handle.metadata["name"], handle.metadata["uid"])
        try:
            yield from super()._lines(handle, query)
        except BackendError:
            if not query.follow:
                raise
            place = len(self.cloud.jobs[names[0]].log)
            while self.cloud.jobs[names[0]].live:
                self._backoff.sleep(1.0)
            for chunk in self.cloud.jobs[names[0]].log[place:]:
                yield chunk.time, chunk.data.decode().removesuffix("\n")


@mutant("g3_a_disturbance_loses_no_line", "G3")
class RaisesAtABrokenConnection(ToyExecutor):
    def _again(self, call):
        return call()


@mutant("g3_it_ends_at_a_time_to_come", "G3")
class FollowsBeyondUntil(ToyExecutor):
    def _logs(self, handle, query):
        ahead = query.follow and query.until is not None and query.until > self.cloud.clock()
        return super()._logs(handle, replace(query, until=None) if ahead else query)


@mutant("g3_it_ends_at_a_time_to_come", "G3")
class WaitsBeyondUntil(ToyExecutor):
    def _lines(self, handle, query):
        return super()._lines(handle, replace(query, until=None))


# --- the last lines ---

LAST = "g3_what_is_written_last_is_not_lost"


@mutant(LAST, "G3")
class AsksForTheEndAfterItsLastPage(ToyExecutor):
    def _lines(self, handle, query):
        names = (handle.metadata["name"], handle.metadata["uid"])
        reader, place = LineReader(), 0
        while True:
            chunks = ask(lambda: self.cloud.log(*names, place))  # noqa: B023 - called at once
            place += len(chunks)
            yield from reader.feed(of_stream(chunks, query.streams))
            if len(chunks) == LOG_PAGE:
                continue
            over = query.until is not None and self.cloud.clock() >= query.until
            if over or not query.follow or not self._again(lambda: self._job(handle)).live:
                break
            self._backoff.sleep(self._backoff.first)
        yield from reader.finish()


@mutant(LAST, "G3")
class AsksForTheEndWhileItWaits(ToyExecutor):
    """It has the end from before its wait, and the lines from before that."""

    def _lines(self, handle, query):
        lines = []
        while query.follow:
            new = list(super()._lines(handle, replace(query, follow=False)))
            yield from new[len(lines) :]
            lines = new
            self._backoff.sleep(self._backoff.first)
            over = query.until is not None and self.cloud.clock() >= query.until
            if over or not self._again(lambda: self._job(handle)).live:
                return
        yield from super()._lines(handle, query)
