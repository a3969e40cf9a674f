"""Wrong reading of logs: G5 to G7."""

from toy_executor import ToyExecutor
from wrong import mutant
from wrong_logs import Joining

from diloco_protocol import (
    BackendError,
    ForbiddenError,
    InvalidRequestError,
    ReplicaNotFoundError,
    UnavailableError,
)

DEFAULT = "g5_the_last_200_lines_by_default"
HUNDREDS = "g5_hundreds_of_lines"
GONE = "g6_a_log_that_is_gone_is_an_exception"
UNREADABLE = "g6_a_log_that_cannot_be_read_is_an_exception"
ALIKE = "g7_siblings_are_not_mixed"
ATTEMPTS = "g7_attempts_are_not_mixed"
AGAIN = "g7_a_name_that_is_used_again_has_a_new_log"


# --- how many ---


@mutant(DEFAULT, "G5")
class AHundredLines(ToyExecutor):
    def stream_logs(self, handle, *, n_lines=100):
        return super().stream_logs(handle, n_lines=n_lines)


@mutant(DEFAULT, "G5")
class AllLinesByDefault(ToyExecutor):
    def stream_logs(self, handle, *, n_lines=100_000):
        return super().stream_logs(handle, n_lines=n_lines)


@mutant(DEFAULT, "G5")
class TheFirstLines(ToyExecutor):
    def stream_logs(self, handle, *, n_lines=200):
        return "\n".join(super().stream_logs(handle, n_lines=100_000).split("\n")[:n_lines])


@mutant(DEFAULT, "G5")
class NeverMoreThan200Lines(ToyExecutor):
    def stream_logs(self, handle, *, n_lines=200):
        return super().stream_logs(handle, n_lines=min(n_lines, 200))


@mutant(DEFAULT, "G5")
class OneLineMore(ToyExecutor):
    def stream_logs(self, handle, *, n_lines=200):
        return super().stream_logs(handle, n_lines=n_lines + 1)


@mutant(HUNDREDS, "G5")
class OnePageOfLines(ToyExecutor):
    def log_iter(self, handle, **options):
        return iter(list(super().log_iter(handle, **options))[:500])


# --- what cannot be read ---


@mutant(GONE, "G6")
class GoneIsEmpty(ToyExecutor):
    def _logs(self, handle, query):
        try:
            return super()._logs(handle, query)
        except ReplicaNotFoundError:
            return iter(())


@mutant(GONE, "G6")
class GoneIsEmptyToFollow(ToyExecutor):
    def _logs(self, handle, query):
        try:
            return super()._logs(handle, query)
        except ReplicaNotFoundError:
            if not query.follow:
                raise
            return iter(())


@mutant(GONE, "G6")
class GoneIsAnyError(ToyExecutor):
    def _logs(self, handle, query):
        try:
            return super()._logs(handle, query)
        except ReplicaNotFoundError as error:
            raise InvalidRequestError(str(error)) from error


@mutant(GONE, "G6")
class KeepsLogsForEver(ToyExecutor):
    def stream_logs(self, handle, **options):
        kept = self.cloud.__dict__.setdefault("kept", {})
        try:
            kept[handle] = super().stream_logs(handle, **options)
        except ReplicaNotFoundError:
            if handle not in kept:
                raise
        return kept[handle]


@mutant(UNREADABLE, "G6")
class UnreadableIsEmpty(ToyExecutor):
    def _lines(self, handle, query):
        try:
            yield from super()._lines(handle, query)
        except BackendError:
            return


@mutant(UNREADABLE, "G6")
class UnreadableIsASentence(ToyExecutor):
    def stream_logs(self, handle, **options):
        try:
            return super().stream_logs(handle, **options)
        except UnavailableError as error:
            return f"the log cannot be read: {error}"


@mutant(UNREADABLE, "G6")
class UnreadableIsGone(ToyExecutor):
    def _lines(self, handle, query):
        try:
            yield from super()._lines(handle, query)
        except BackendError as error:
            raise ReplicaNotFoundError("there is no log") from error


@mutant(UNREADABLE, "G6")
class UnreadableForGood(ToyExecutor):
    def _lines(self, handle, query):
        try:
            yield from super()._lines(handle, query)
        except UnavailableError as error:
            raise ForbiddenError(str(error)) from error


@mutant("g6_a_backend_that_cannot_be_asked_has_no_empty_logs", "G6")
class NoAnswerIsNoLog(ToyExecutor):
    def _logs(self, handle, query):
        try:
            return super()._logs(handle, query)
        except UnavailableError:
            return iter(())


# --- whose ---


@mutant(ALIKE, "G7")
class LogsByPrefix(ToyExecutor):
    def _lines(self, handle, query):
        for name, job in sorted(self.cloud.jobs.items()):
            if name.startswith(handle.metadata["name"]):
                for chunk in job.log:
                    yield from ((chunk.time, line) for line in chunk.data.decode().splitlines())


@mutant(ALIKE, "G7")
class LogsByTheLastDigit(ToyExecutor):
    def _logs(self, handle, query):
        handles = self._attach(handle.run_id)
        return super()._logs(handles[handle.rank % 10], query)


@mutant(ATTEMPTS, "G7")
class AttemptsRunTogether(Joining):
    pass


@mutant(ATTEMPTS, "G7")
class TheLatestAttemptFirst(Joining):
    def split(self, chunks):
        return super().split(sorted(chunks, key=lambda chunk: -chunk.attempt))


@mutant(ATTEMPTS, "G7")
class OnlyTheFirstAttempt(Joining):
    def split(self, chunks):
        return super().split([chunk for chunk in chunks if chunk.attempt == 1])


@mutant(AGAIN, "G7", "G6")
class LogsByName(ToyExecutor):
    def _lines(self, handle, query):
        kept = self.cloud.__dict__.setdefault("kept", {}).setdefault(handle.metadata["name"], [])
        lines = [line for line in super()._lines(handle, query) if line not in kept]
        kept += lines
        yield from kept


@mutant(AGAIN, "G6", "G7")
class OldHandlesReadNewLogs(ToyExecutor):
    def _logs(self, handle, query):
        jobs = self._jobs(handle.run_id)
        return super()._logs(next((one for one in jobs if one.rank == handle.rank), handle), query)
