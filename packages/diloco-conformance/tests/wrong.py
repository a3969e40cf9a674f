"""Executors that are wrong, each in one way; most of the ways were found in real launchers. What they share."""

from test_toy import ToyHarness
from toy_executor import ToyExecutor

#: Name → (executor, the promises of which it breaks one, whether the cloud is a gang).
MUTANTS = {}


def mutant(*promises, gang=False):
    def register(cls):
        MUTANTS[cls.__name__] = (cls, set(promises), gang)
        return cls

    return register


class Restating(ToyExecutor):
    """Base of those that say something else than what they have seen."""

    def _observe_run(self, handles):
        seen = super()._observe_run(handles)
        return {handle: self.restate(handle, status, seen) for handle, status in seen.items()}


class Remembering(ToyExecutor):
    """Base of those that keep by rank what they should read from the handle."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.mine = {}

    def _submit(self, request):
        handles = super()._submit(request)
        self.mine.update({handle.rank: handle for handle in handles})
        return handles


def harness_of(cls, *, gang):
    """A class of harnesses that make the mutant."""

    class MutantHarness(ToyHarness):
        patience = 2.0

        def __init__(self):
            super().__init__(gang=gang)

        def make_executor(self):
            return cls(self.cloud, backoff=self.backoff())

    return MutantHarness
