"""Ranks of a gang that were too late, and are said to have been ended because of others: S7."""

from dataclasses import replace

from toy_executor import ToyExecutor
from wrong import mutant

from diloco_protocol import Reason, ReplicaState

LATE = "s7_a_timeout_is_a_failure"


class Counting(ToyExecutor):
    """The platform counts the first of several late ranks; the others are gone with all they said.

    This one tells all that can be told: who has seen a rank run knows that it was too late. Base of
    those that do not.
    """

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.capabilities = replace(self.capabilities, remembers_ended=False)
        self.watched = set()

    def _observe_run(self, handles):
        run = self._jobs(handles[0].run_id)
        every = super()._observe_run(list({**dict.fromkeys(handles), **run}))
        late = sorted(one.rank for one in every if every[one].reason is Reason.TIMEOUT)
        told = {}
        for handle in every.keys() & set(handles):
            status = told[handle] = every[handle]
            if status.state is ReplicaState.RUNNING:
                self.watched.add(handle)
            if status.reason is Reason.TIMEOUT and self.is_lost(handle, late):
                told[handle] = replace(status, reason=Reason.GANG_FAILED)
        return told

    def is_lost(self, handle, late):
        """Whether nobody knows any more that a rank was too late."""
        return handle.rank != late[0] and handle not in self.watched


@mutant(LATE, "S7", gang=True)
class NobodyWasLate(Counting):
    def is_lost(self, handle, late):
        return handle not in self.watched


@mutant(LATE, "S7", gang=True)
class ForgetsWhatItWatched(Counting):
    def is_lost(self, handle, late):
        return handle.rank != late[0]


@mutant(LATE, "S7", gang=True)
class DeclaresThatItRemembers(Counting):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.capabilities = replace(self.capabilities, remembers_ended=True)
