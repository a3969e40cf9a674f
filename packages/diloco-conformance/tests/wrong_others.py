"""Wrong declarations."""

from dataclasses import replace

from toy_executor import ToyExecutor
from wrong import mutant


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
