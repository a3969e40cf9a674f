"""Wrong logs and declarations."""

from dataclasses import replace

from toy_executor import ToyExecutor
from wrong import mutant


@mutant("g1_no_log_is_no_text", "G1")
class PlaceholderLogs(ToyExecutor):
    def stream_logs(self, handle, **options):
        return super().stream_logs(handle, **options) or "(no logs yet)"


@mutant("g1_a_log_has_what_the_replica_wrote", "G1")
class TooManyLines(ToyExecutor):
    def stream_logs(self, handle, *, n_lines=200):
        return super().stream_logs(handle, n_lines=200)


@mutant("g1_a_log_has_what_the_replica_wrote", "G1")
class TheSiblingsLog(ToyExecutor):
    def stream_logs(self, handle, **options):
        return super().stream_logs(self._attach(handle.run_id)[0], **options)


@mutant("d1_what_it_cannot_do_is_declared", "D1")
class TakesLongerThanItSays(ToyExecutor):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.capabilities = replace(self.capabilities, max_timeout=100_000.0)

    def _request(self, *arguments, **options):
        declared, self.capabilities = (
            self.capabilities,
            replace(self.capabilities, max_timeout=None),
        )
        try:
            return super()._request(*arguments, **options)
        finally:
            self.capabilities = declared
