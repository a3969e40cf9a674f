"""Wrong logs and declarations."""

from dataclasses import replace

from toy_executor import ToyExecutor
from wrong import mutant

from diloco_protocol import (
    ReplicaHandle,
)


@mutant("G1")
class PlaceholderLogs(ToyExecutor):
    def stream_logs(self, handle, **options):
        return super().stream_logs(handle, **options) or "(no logs yet)"


@mutant("G1")
class TooManyLines(ToyExecutor):
    def stream_logs(self, handle, *, n_lines=200):
        return super().stream_logs(handle, n_lines=200)


@mutant("G1")
class TheSiblingsLog(ToyExecutor):
    def stream_logs(self, handle, **options):
        first = ReplicaHandle(
            0, self.backend_name, {"name": f"{handle.run_id}-0"}, run_id=handle.run_id
        )
        return super().stream_logs(first, **options)


@mutant("D1")
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
