"""Wrong answers to dead handles, to foreign objects, to journals of others, to changing lists."""

from dataclasses import replace

from toy_cloud import PAGE
from toy_executor import ToyExecutor, ask
from wrong import Believing, mutant

from diloco_protocol import (
    InvalidRequestError,
    ReplicaNotFoundError,
    ReplicaState,
    ReplicaStatus,
    RunConflictError,
)

LACKS = "h9_a_handle_that_lacks_something_is_refused"
NOWHERE = "h9_a_handle_that_leads_nowhere_has_a_named_error"
FOREIGN = "h9_what_is_not_ours_is_no_run"
JOURNAL = "h5_a_journal_speaks_for_its_own_place_alone"
MEANWHILE = "h7_runs_that_go_and_come_meanwhile_hide_no_others"


class Unchecked(ToyExecutor):
    """Base of those that look into a handle without looking whether it is there."""

    def _check_handle(self, handle):
        if handle.metadata.get("account", self.cloud.account) != self.cloud.account:
            raise InvalidRequestError("another account")


@mutant(LACKS, "H9")
class AMissingNameIsAKeyError(Unchecked):
    def _observe_run(self, handles):
        names = {handle.metadata["name"] for handle in handles}
        return {one: x for one, x in super()._observe_run(handles).items() if names}


@mutant(LACKS, "H9")
class WhatIsMissingIsGone(Unchecked):
    def _check_handle(self, handle):
        super()._check_handle(handle)
        if {"account", "name", "uid"} - handle.metadata.keys():
            raise ReplicaNotFoundError("there is no such job")


@mutant(LACKS, "H9")
class TheNameOfTheRunWillDo(Unchecked):
    def _whole(self, handle):
        return next(one for one in self._attach(handle.run_id) if one.rank == handle.rank)

    def _observe_run(self, handles):
        seen = super()._observe_run([self._whole(handle) for handle in handles])
        return dict(zip(handles, seen.values(), strict=True))


@mutant(LACKS, "H9")
class CancelPassesOverWhatItDoesNotUnderstand(ToyExecutor):
    def cancel(self, handle):
        if {"name", "uid"} <= handle.metadata.keys():
            super().cancel(handle)


@mutant(NOWHERE, "H9")
class ARankThatIsNotThereIsAnIndexError(Believing):
    def _observe_run(self, handles):
        run = self._attach(handles[0].run_id)
        for handle in handles:
            run[handle.rank]
        return super()._observe_run(handles)


@mutant(NOWHERE, "H9")
class TheLastRankForAnyOther(Believing):
    def _observe_run(self, handles):
        jobs = {handle.rank: job for handle, job in self._jobs(handles[0].run_id).items()}
        ranks = {one: min(one.rank, max(jobs)) for one in handles if jobs}
        return {one: self._status(jobs[rank]) for one, rank in ranks.items() if rank in jobs}


@mutant(NOWHERE, "H9")
class LogsOfNamesThatAreNone(Believing):
    def _logs(self, handle, query):
        if not handle.metadata["name"].isascii():
            raise ValueError("the name must be ASCII")
        return super()._logs(handle, query)


# --- what is not ours ---


@mutant(FOREIGN, "H9")
class WhateverIsThereIsARun(ToyExecutor):
    def _list_runs(self):
        runs, after = ask(self.cloud.runs)
        while after is not None:
            page, after = self.cloud.runs(after)
            runs += page
        return runs


@mutant(FOREIGN, "H9")
class WhatIsNotOursIsAKeyError(ToyExecutor):
    def _jobs(self, run_id):
        jobs = ask(lambda: self.cloud.describe(run_id))
        return {self._handles([job])[0]: job for job in jobs.values()}


@mutant(FOREIGN, "H9")
class LaunchesOverWhatIsThere(ToyExecutor):
    def _same(self, request):
        for name, job in list(self.cloud.jobs.items()):
            if job.body["run_id"] == request.run_id and "fingerprint" not in job.body:
                del self.cloud.jobs[name]
        return super()._same(request)


@mutant(FOREIGN, "H9")
class ATakenNameIsWrongInput(ToyExecutor):
    def _same(self, request):
        try:
            return super()._same(request)
        except RunConflictError as error:
            if "has not launched" in str(error):
                raise InvalidRequestError(str(error)) from error
            raise


@mutant(FOREIGN, "H9")
class WhatIsNotOursExists(ToyExecutor):
    def exists(self, run_id):
        return bool(ask(lambda: self.cloud.describe(run_id)))


# --- journals ---


@mutant(JOURNAL, "H5")
class TheJournalIsAskedFirst(ToyExecutor):
    def describe(self, handle):
        end = None if self._journal is None else self._journal.end(handle)
        return super().describe(handle) if end is None else end[0]


@mutant(JOURNAL, "H5")
class TheJournalFindsEveryRun(ToyExecutor):
    def attach(self, run_id):
        try:
            return super().attach(run_id)
        except ReplicaNotFoundError:
            if self._journal is None or not self._journal.handles(run_id):
                raise
            return self._journal.handles(run_id)


@mutant(JOURNAL, "H5")
class ResultsOfAnyJournal(ToyExecutor):
    def _check(self, handle):
        if self._journal is None or self._journal.end(handle) is None:
            super()._check(handle)


# --- lists that change ---


class Paging(ToyExecutor):
    """Base of those that count how far they have come."""

    def everything(self):
        """All runs there are now."""
        return super()._list_runs()


@mutant(MEANWHILE, "H7")
class PagesByOffset(Paging):
    def _list_runs(self):
        runs = []
        while page := self.everything()[len(runs) : len(runs) + PAGE]:
            runs += page
        return runs


@mutant(MEANWHILE, "H7")
class PagesFromTheNewest(Paging):
    def everything(self):
        jobs = list(self.cloud.jobs.values())
        return list(dict.fromkeys(job.body["run_id"] for job in jobs))[::-1]

    def _list_runs(self):
        runs = []
        while page := self.everything()[len(runs) : len(runs) + PAGE]:
            ask(self.cloud.runs)
            runs += page
        return runs[::-1]


@mutant(MEANWHILE, "H7")
class StopsWhereSomethingHasGone(Paging):
    def _list_runs(self):
        runs, after = ask(self.cloud.runs)
        while after is not None:
            if any(not self.cloud.describe(run_id) for run_id in runs):
                break
            page, after = self.cloud.runs(after)
            runs += page
        return runs


@mutant("h9_a_handle_that_leads_nowhere_has_a_named_error", "H9", "S6")
class WhoIsNotThereIsPending(Believing):
    def describe(self, handle):
        try:
            return super().describe(handle)
        except ReplicaNotFoundError:
            if handle.rank < handle.world_size and self.exists(handle.run_id):
                return ReplicaStatus(ReplicaState.PENDING)
            raise


@mutant(LACKS, "H9")
class GuessesTheAccount(Unchecked):
    def describe(self, handle):
        mine = {"account": self.cloud.account, **handle.metadata}
        return super().describe(replace(handle, metadata=mine))
