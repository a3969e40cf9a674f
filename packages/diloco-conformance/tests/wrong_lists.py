"""Wrong handles of launches, and wrong lists: H1, H3, H7, H8."""

from toy_executor import ToyExecutor, ask
from toy_states import result_of
from wrong import mutant

from diloco_protocol import ReplicaHandle

OLDEST = "h7_runs_are_listed_oldest_first"
TEN = "h8_more_than_ten_ranks_are_told_apart"
ALIKE = "h8_names_that_begin_alike_are_different_runs"


class OwnHandle(ReplicaHandle):
    """Equal to its like alone."""


@mutant("h1_handles_survive_json", "H1")
class HandlesOfItsOwn(ToyExecutor):
    def _handle(self, *names):
        plain = super()._handle(*names)
        return OwnHandle(
            plain.rank, "toy", plain.metadata, run_id=plain.run_id, world_size=plain.world_size
        )


class Alone(ReplicaHandle):
    """Equal to nothing else."""

    __hash__ = object.__hash__

    def __eq__(self, other):
        return self is other


@mutant("h1_handles_survive_json", "H1")
class HandlesThatEqualNothing(ToyExecutor):
    def _submit(self, request):
        return [
            Alone(
                handle.rank, "toy", handle.metadata, run_id=handle.run_id,
                world_size=handle.world_size,
            )
            for handle in super()._submit(request)
        ]  # fmt: skip


@mutant("h3_a_run_of_one_is_found_again", "H3")
class OneIsNoRun(ToyExecutor):
    def _list_runs(self):
        return [run_id for run_id in super()._list_runs() if len(self._jobs(run_id)) > 1]


@mutant("h3_runs_are_found_again", "H3")
class OnlyTheLivingAreFound(ToyExecutor):
    def _attach(self, run_id):
        live = [handle for handle, job in self._jobs(run_id).items() if job.live]
        return sorted(live, key=lambda handle: handle.rank)


@mutant(OLDEST, "H7")
class OnlyTheFirstPage(ToyExecutor):
    def _list_runs(self):
        return ask(self.cloud.runs)[0]


@mutant(OLDEST, "H7")
class NewestFirst(ToyExecutor):
    def _list_runs(self):
        return super()._list_runs()[::-1]


@mutant(OLDEST, "H7")
class SortedByName(ToyExecutor):
    def _list_runs(self):
        return sorted(super()._list_runs())


@mutant(OLDEST, "H7")
class PagesOverlap(ToyExecutor):
    def _list_runs(self):
        runs, after = ask(self.cloud.runs)
        while after is not None:
            page, after = self.cloud.runs(after - 1)
            runs += page
        return runs


@mutant(OLDEST, "H7")
class CancelledRunsAreNotListed(ToyExecutor):
    def _list_runs(self):
        runs = {run_id: self.cloud.describe(run_id).values() for run_id in super()._list_runs()}
        return [
            run_id for run_id, jobs in runs.items() if any(job.status != "STOPPED" for job in jobs)
        ]


@mutant(TEN, "H8")
class RanksInTheOrderOfTexts(ToyExecutor):
    def _attach(self, run_id):
        return sorted(super()._attach(run_id), key=lambda handle: str(handle.rank))


@mutant(TEN, "H8")
class RanksByTheLastDigit(ToyExecutor):
    def _observe_run(self, handles):
        jobs = {handle.rank: job for handle, job in self._jobs(handles[0].run_id).items()}
        ranks = {handle: handle.rank % 10 for handle in handles}
        return {handle: self._status(jobs[rank]) for handle, rank in ranks.items() if rank in jobs}


@mutant(TEN, "H8")
class ResultsByTheBeginOfTheName(ToyExecutor):
    def _result(self, handle):
        name = handle.metadata["name"]
        ended = [job for key, job in sorted(self.cloud.jobs.items()) if key.startswith(name)]
        return result_of(ended[-1])


@mutant(ALIKE, "H8")
class CancelsWhateverBeginsSo(ToyExecutor):
    def _stop(self, handle):
        super()._stop(handle)
        for name, job in self.cloud.jobs.items():
            if name.startswith(f"{handle.run_id}-") and name.endswith(f"-{handle.rank}"):
                job.stopping = job.live


@mutant(ALIKE, "H8")
class PurgesWhateverBeginsSo(ToyExecutor):
    def _purge(self, handle):
        super()._purge(handle)
        for name, job in list(self.cloud.jobs.items()):
            if name.startswith(handle.run_id) and not job.live:
                del self.cloud.jobs[name]


@mutant(ALIKE, "H8")
class AttachesWhateverBeginsSo(ToyExecutor):
    def _attach(self, run_id):
        jobs = [job for name, job in self.cloud.jobs.items() if name.startswith(f"{run_id}-")]
        if not jobs:
            return super()._attach(run_id)
        return self._handles(jobs)


@mutant(ALIKE, "H8")
class RunsEndAtTheLastDash(ToyExecutor):
    def _list_runs(self):
        names = {name.rpartition("-")[0].rpartition("-")[0] or name for name in self.cloud.jobs}
        return sorted(names)
