"""Executors that are wrong, each in one way; most of the ways were found in real launchers.

This module has what they share.
"""

from dataclasses import dataclass, replace

from test_toy import ToyHarness
from toy_cloud import ToyCloud
from toy_executor import ToyExecutor

#: Name → :class:`Mutant`.
MUTANTS = {}


@dataclass
class Mutant:
    """A wrong executor.

    Attributes:
        cls: Its class.
        test: The fixed test that catches it, which is the only one that is tried with every change.
        promises: What it breaks; the test says the first of them, any other test any of them.
        gang: Whether the cloud is a gang.
    """

    cls: type
    test: str
    promises: tuple[str, ...]
    gang: bool


def mutant(test, *promises, gang=False):
    """Register a wrong executor with the test that catches it, and the promises that it breaks.

    The foremost promise comes first.
    """

    def register(cls):
        assert cls.__name__ not in MUTANTS, f"there are two {cls.__name__}"
        MUTANTS[cls.__name__] = Mutant(cls, f"test_{test}", promises, gang)
        return cls

    return register


class Restating(ToyExecutor):
    """Base of those that say something else than what they have seen."""

    def _observe_run(self, handles):
        seen = super()._observe_run(handles)
        return {handle: self.restate(handle, status, seen) for handle, status in seen.items()}


class Telling(ToyExecutor):
    """Base of those that send something else than what they were given."""

    def _bodies(self, request):
        bodies = super()._bodies(request)
        for body in bodies:
            self.tell(body)
        return bodies


class Remembering(ToyExecutor):
    """Base of those that keep by rank what they should read from the handle."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.mine = {}

    def _submit(self, request):
        handles = super()._submit(request)
        self.mine.update({handle.rank: handle for handle in handles})
        return handles


class Believing(ToyExecutor):
    """Base of those that do not ask whether what a handle leads to is of its run."""

    def _check_handle(self, handle):
        right = {"account": self.cloud.account, "name": f"{handle.run_id}-{handle.rank}"}
        super()._check_handle(replace(handle, metadata={**handle.metadata, **right}))


def harness_of(cls, *, gang):
    """A class of harnesses that make the mutant."""

    class MutantHarness(ToyHarness):
        patience = 2.0

        def __init__(self):
            super().__init__(gang=gang)

        def make_executor(self, **options):
            return cls(self.cloud, backoff=self.backoff(), **options)

        def elsewhere(self):
            return cls(ToyCloud(self.clock, account="somebody-elses"), backoff=self.backoff())

    return MutantHarness
