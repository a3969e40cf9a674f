"""Wrong cuts of logs: G1, G2, G4."""

import math
from dataclasses import replace

from toy_executor import ToyExecutor
from toy_logs import LineReader
from wrong import mutant

RESULT = "g1_a_large_result_is_no_part_of_the_log"
FOLLOWED = "g1_it_is_not_followed_either"
PAGES = "g2_lines_go_on_over_the_edges_of_pages"
MOMENTS = "g4_since_counts_its_moment_and_until_does_not"


class Showing(ToyExecutor):
    """Base of those whose large results travel through the log."""

    def pieces(self, handle):
        """The lines that carry the result."""
        job = self._job(handle)
        output = job.outputs.get(job.attempt, b"") if job.status == "SUCCEEDED" else b""
        if len(output) > 4096:
            yield from ((job.finished_at, f"result {n}") for n in range(len(output) // 4096))


@mutant(RESULT, "G1")
class ShowsTheResult(Showing):
    def _lines(self, handle, query):
        yield from super()._lines(handle, query)
        yield from self.pieces(handle)


@mutant(RESULT, "G1")
class TheResultTakesTheRoomOfLines(Showing):
    def _logs(self, handle, query):
        if query.n_lines is None:
            return super()._logs(handle, query)
        lines = list(super()._logs(handle, replace(query, n_lines=None)))
        lines += [text for _, text in self.pieces(handle)]
        return (line for line in lines[-query.n_lines :] if not line.startswith("result "))


@mutant(FOLLOWED, "G1")
class ShowsTheResultToWhoFollows(Showing):
    def _lines(self, handle, query):
        yield from super()._lines(handle, query)
        if query.follow:
            yield from self.pieces(handle)


class Paging(ToyExecutor):
    """Base of those that read page by page."""

    def pages(self, handle):
        """The pages of a log."""
        names, place = (handle.metadata["name"], handle.metadata["uid"]), 0
        while page := self.cloud.log(*names, place):
            place += len(page)
            yield page

    def _lines(self, handle, query):
        if query.follow:
            return super()._lines(handle, query)
        return self.by_page(handle)


@mutant(PAGES, "G2")
class WhatIsBegunIsForgottenAtTheEdge(Paging):
    def by_page(self, handle):
        for page in self.pages(handle):
            yield from LineReader().feed(page)


@mutant(PAGES, "G2")
class TheEdgeEndsALine(Paging):
    def by_page(self, handle):
        for page in self.pages(handle):
            reader = LineReader()
            yield from reader.feed(page)
            yield from reader.finish()


@mutant(PAGES, "G2")
class TheFirstPageAlone(Paging):
    def by_page(self, handle):
        reader = LineReader()
        yield from reader.feed(next(self.pages(handle), []))
        yield from reader.finish()


@mutant(PAGES, "G2")
class TheEdgeIsReadTwice(Paging):
    def by_page(self, handle):
        reader, last = LineReader(), []
        for page in self.pages(handle):
            yield from reader.feed([*last, *page])
            last = page[-1:]
        yield from reader.finish()


@mutant(MOMENTS, "G4")
class UntilCountsItsMoment(ToyExecutor):
    def _logs(self, handle, query):
        until = None if query.until is None else math.nextafter(query.until, math.inf)
        return super()._logs(handle, replace(query, until=until))


@mutant(MOMENTS, "G4")
class SinceDoesNotCountItsMoment(ToyExecutor):
    def _logs(self, handle, query):
        since = None if query.since is None else math.nextafter(query.since, math.inf)
        return super()._logs(handle, replace(query, since=since))


@mutant(MOMENTS, "G4")
class DatedASecondEarly(ToyExecutor):
    def _lines(self, handle, query):
        return ((time - 1.0, line) for time, line in super()._lines(handle, query))


@mutant(MOMENTS, "G4")
class WhoFollowsIsGivenTheMomentOfTheEnd(ToyExecutor):
    def _logs(self, handle, query):
        if query.follow and query.until is not None:
            query = replace(query, until=query.until + 0.5)
        return super()._logs(handle, query)


class Cutting(ToyExecutor):
    """Base of those that give other lines where one is long."""

    def _logs(self, handle, query):
        for line in super()._logs(handle, query):
            yield from [line] if len(line) < 1_000_000 else self.cut(line)


@mutant("g2_a_line_that_fills_the_memory_is_cut", "G2")
class NoLineIsTooLong(Cutting):
    def cut(self, line):
        return [line + "y" * 200_000]


@mutant("g2_a_line_that_fills_the_memory_is_cut", "G2")
class WhatIsTooLongIsPassedOver(Cutting):
    def cut(self, line):
        return []


@mutant("g2_a_line_that_fills_the_memory_is_cut", "G2")
class TheRestIsALineOfItsOwn(Cutting):
    def cut(self, line):
        return [line, "y" * 1000]


@mutant("g2_a_line_that_fills_the_memory_is_cut", "G2")
class HalfAMiBIsEnough(Cutting):
    def cut(self, line):
        return [line[: 1 << 19]]
