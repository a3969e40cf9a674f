"""Wrong choosing from logs: G4."""

import re
from dataclasses import replace

from toy_executor import ToyExecutor
from wrong import mutant

TIMES = "g4_since_and_until"
ANYWHERE = "g4_an_expression_is_found_anywhere_in_a_line"
APART = "g4_the_streams_are_kept_apart"


class Asking(ToyExecutor):
    """Base of those that change the question."""

    def _logs(self, handle, query):
        return super()._logs(handle, self.ask(query))


@mutant(TIMES, "G4")
class SinceIsIgnored(Asking):
    def ask(self, query):
        return replace(query, since=None)


@mutant(TIMES, "G4")
class UntilIsIgnored(Asking):
    def ask(self, query):
        return replace(query, until=None)


@mutant(TIMES, "G4")
class SinceIsUntil(Asking):
    def ask(self, query):
        return replace(query, since=query.until, until=query.since)


@mutant(TIMES, "G4")
class SinceCountsFromTheStart(ToyExecutor):
    def _logs(self, handle, query):
        began = self._job(handle).started_at or 0.0
        since = None if query.since is None else query.since + began
        return super()._logs(handle, replace(query, since=since))


@mutant(TIMES, "G4")
class OneBoundOnly(Asking):
    def ask(self, query):
        return query if query.since is None else replace(query, until=None)


@mutant(ANYWHERE, "G4")
class OnlyAtTheBegin(Asking):
    def ask(self, query):
        return query if query.regex is None else replace(query, regex=f"^(?:{query.regex})")


@mutant(ANYWHERE, "G4")
class OnlyWholeLines(ToyExecutor):
    def log_iter(self, handle, *, regex=None, **options):
        lines = super().log_iter(handle, **options)
        return (line for line in lines if regex is None or re.fullmatch(regex, line))


@mutant(ANYWHERE, "G4")
class TextsAndNotExpressions(ToyExecutor):
    def log_iter(self, handle, *, regex=None, **options):
        return (line for line in super().log_iter(handle, **options) if (regex or "") in line)


@mutant(ANYWHERE, "G4")
class AnyCase(ToyExecutor):
    def log_iter(self, handle, *, regex=None, **options):
        found = re.compile(regex or "", re.IGNORECASE).search
        return (line for line in super().log_iter(handle, **options) if found(line))


@mutant(ANYWHERE, "G4")
class OnlyPlainLettersAreFound(Asking):
    def ask(self, query):
        return query if query.regex is None or query.regex.isascii() else replace(query, regex=None)


@mutant(ANYWHERE, "G4")
class OnlyPlainLettersAreLetters(ToyExecutor):
    def log_iter(self, handle, *, regex=None, **options):
        found = re.compile(regex or "", re.ASCII).search
        return (line for line in super().log_iter(handle, **options) if found(line))


@mutant(ANYWHERE, "G4")
class ExpressionsAreIgnored(Asking):
    def ask(self, query):
        return replace(query, regex=None)


@mutant(APART, "G4")
class OneStreamForAll(Asking):
    def ask(self, query):
        return replace(query, streams="combined")


@mutant(APART, "G4")
class StreamsAreSwapped(Asking):
    def ask(self, query):
        other = {"stdout": "stderr", "stderr": "stdout"}
        return replace(query, streams=other.get(query.streams, query.streams))


@mutant(APART, "G4")
class ErrorsAreNotInTheLog(Asking):
    def ask(self, query):
        return replace(query, streams="stdout" if query.streams == "combined" else query.streams)


@mutant(APART, "G4")
class DeclaresMoreStreams(ToyExecutor):
    def _logs(self, handle, query):
        streams = query.streams if query.streams != "stderr" else "stdout"
        return super()._logs(handle, replace(query, streams=streams))
