"""Wrong names: handles of purged runs and other places, journals, several threads and launchers."""

import contextlib
import threading
import time
from dataclasses import replace

from toy_executor import ToyExecutor, ask
from wrong import mutant

from diloco_protocol import (
    BackendError,
    LaunchError,
    ReplicaNotFoundError,
    RunConflictError,
)


class ByName(ToyExecutor):
    """Base of those that take what has the name of a replica for that replica."""

    def namesake(self, handle):
        """The handle of what has the name now."""
        with contextlib.suppress(ReplicaNotFoundError):
            for one in self._attach(handle.run_id):
                if one.rank == handle.rank:
                    return one
        return handle


@mutant("h4_an_old_handle_is_not_the_new_run", "S6", "H4", "R7", "S4")
class OldHandlesSeeTheNewRun(ByName):
    def _observe_run(self, handles):
        now = {handle: self.namesake(handle) for handle in handles}
        seen = super()._observe_run(list(now.values()))
        return {handle: seen[one] for handle, one in now.items() if one in seen}


@mutant("h4_an_old_handle_is_not_the_new_run", "H4", "G1", "G2", "G3", "G4", "G5", "G6")
class OldHandlesReadTheNewLog(ByName):
    def _logs(self, handle, query):
        return super()._logs(self.namesake(handle), query)


@mutant("h4_an_old_handle_ends_nothing_and_removes_nothing", "H4")
class OldHandlesCancelTheNewRun(ByName):
    def _stop(self, handle):
        super()._stop(self.namesake(handle))


@mutant("h4_an_old_handle_ends_nothing_and_removes_nothing", "H4")
class OldHandlesPurgeTheNewRun(ByName):
    def _purge(self, handle):
        super()._purge(self.namesake(handle))


@mutant("h4_a_journal_tells_them_apart", "H4", "S4", "S12")
class JournalByName(ToyExecutor):
    def _observe(self, handles):
        if self._journal is not None:
            first = {}
            for handle in handles:
                path = self._first(handle)
                if not path.exists():
                    continue
                first[handle] = super()._observe([handle]).get(handle) or self._status_of(path)
                first[handle] = replace(first[handle], state=self._status_of(path).state)
            if first:
                return first
        seen = super()._observe(handles)
        for handle, status in seen.items():
            if self._journal is not None and status.state.terminal:
                path = self._first(handle)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(str(status.state))
        return seen

    def _first(self, handle):
        return self._journal.folder / handle.run_id / f"{handle.rank}.first.ended"

    def _status_of(self, path):
        from diloco_protocol import ReplicaState, ReplicaStatus

        return ReplicaStatus(ReplicaState(path.read_text()))


@mutant("h5_handles_of_another_backend_are_refused", "H5")
class AnyBackendWillDo(ToyExecutor):
    def _check(self, handle):
        pass


@mutant("h5_handles_of_another_backend_are_refused", "H5")
class OthersAreGone(ToyExecutor):
    def _check(self, handle):
        if handle.backend_name != self.backend_name:
            raise ReplicaNotFoundError("there is no such replica")
        super()._check(handle)


@mutant("h5_handles_of_another_place_are_refused", "H5")
class AnyAccountWillDo(ToyExecutor):
    def _check_handle(self, handle):
        pass


@mutant("h5_handles_of_another_place_are_refused", "H5")
class CancelTakesAnyAccount(ToyExecutor):
    def cancel(self, handle):
        self._stop(handle)


@mutant("h5_handles_of_another_place_are_refused", "H5")
class CollectTakesAnyAccount(ToyExecutor):
    def collect(self, handles, **options):
        mine = [one for one in handles if one.metadata["account"] == self.cloud.account]
        return super().collect(mine, **options)


# --- L2: survivors ---


@mutant("l2_what_survives_is_named", "L2")
class SurvivorsAreCounted(ToyExecutor):
    """In words: the error has no handles."""

    def _submit(self, request):
        try:
            return super()._submit(request)
        except LaunchError as error:
            raise LaunchError(f"{error}; {len(error.survivors)} replicas survive") from error


@mutant("l2_what_survives_is_named", "L2")
class EverythingSurvives(ToyExecutor):
    """Those that were never started are named too."""

    def _submit(self, request):
        try:
            return super()._submit(request)
        except LaunchError as error:
            if not error.survivors:
                raise
            uid = error.survivors[0].metadata["uid"]
            handles = [
                self._handle(request.run_id, rank, request.world_size, uid)
                for rank in request.ranks
            ]
            raise LaunchError(str(error), handles) from error


@mutant("l2_what_survives_is_named", "L2", "H5")
class SurvivorsCannotBeUsed(ToyExecutor):
    def _submit(self, request):
        try:
            return super()._submit(request)
        except LaunchError as error:
            left = [replace(one, metadata={**one.metadata, "uid": ""}) for one in error.survivors]
            raise LaunchError(str(error), left) from error


@mutant("l3_a_refused_launch_of_what_is_there_changes_nothing", "L3", "C3")
class ARefusedLaunchEndsTheRun(ToyExecutor):
    def _submit(self, request):
        try:
            for body in self._bodies(request):
                ask(lambda body=body: self.cloud.create(body["name"], body, "again"))
        except BackendError as error:
            if error.retryable:
                raise
            if "AlreadyExists" not in str(error):
                for handle in self._jobs(request.run_id):
                    self._stop(handle)
                raise
        return super()._submit(request)


# --- T1: threads ---


@mutant("t1_threads_get_the_answers_of_their_own", "T1")
class OneHandleAtATime(ToyExecutor):
    """What is asked for is kept in the executor."""

    handle = None

    def describe(self, handle):
        self.handle = handle
        time.sleep(0.001)  # long enough for another thread
        return super().describe(self.handle)


@mutant("t1_threads_get_the_answers_of_their_own", "T1")
class ThreadsAreRefused(ToyExecutor):
    """As by a client that belongs to the thread that made it, or to whoever is in it."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.busy = threading.Lock()

    def _observe_run(self, handles):
        if not self.busy.acquire(blocking=False):
            raise BackendError("it is in use")
        try:
            time.sleep(0.001)
            return super()._observe_run(handles)
        finally:
            self.busy.release()


@mutant("t1_threads_launch_and_cancel_runs_of_their_own", "T1")
class OneLaunchAtATime(ToyExecutor):
    request = None

    def _submit(self, request):
        self.request = request
        time.sleep(0.01)
        return super()._submit(self.request)


@mutant("t1_threads_launch_and_cancel_runs_of_their_own", "T1", "C5")
class OneCancelAtATime(ToyExecutor):
    stopping = None

    def _stop(self, handle):
        self.stopping = handle
        time.sleep(0.01)
        super()._stop(self.stopping)


# --- T2: several launchers ---


@mutant("t2_who_launches_the_same_gets_the_same", "T2")
class LooksThenLaunches(ToyExecutor):
    """Names that another launcher could not have taken."""

    def _submit(self, request):
        jobs = self._same(request)
        time.sleep(0.02)
        if jobs:
            return self._handles(jobs.values())
        uid = f"{id(self)}"
        for body in self._bodies(request):
            name = f"{body['name']}-{uid}"
            ask(lambda name=name, body=body: self.cloud.create(name, body, uid))
        return self._handles(
            [job for job in self.cloud.describe(request.run_id).values() if job.uid == uid]
        )


@mutant("t2_who_launches_the_same_gets_the_same", "T2")
class TheSecondLauncherIsRefused(ToyExecutor):
    def _create(self, request, body, uid):
        time.sleep(0.005)
        there = self.cloud.jobs.get(body["name"])
        if there is not None and there.uid != uid:
            raise RunConflictError("somebody else launches it")
        super()._create(request, body, uid)


@mutant("t2_who_launches_something_else_is_refused", "T2")
class TheLastLauncherWins(ToyExecutor):
    """Whatever it asks for, it gets what is there."""

    def _submit(self, request):
        time.sleep(0.005)
        try:
            return super()._submit(request)
        except (RunConflictError, LaunchError):
            return self._attach(request.run_id)
