"""Wrong launches and handles."""

from dataclasses import replace

from toy_executor import ToyExecutor
from wrong import Remembering, mutant

from diloco_protocol import (
    Plan,
    ReplicaState,
    ReplicaStatus,
    RunConflictError,
)


@mutant("s4_every_run_for_itself", "S4", "S2", "S6", "H2", "S3", "C3", "S8", "R5", "C5")
class RankKeyedHandles(Remembering):
    def _observe_run(self, handles):
        seen = {}
        for handle in handles:
            mine = self.mine.get(handle.rank, handle)
            status = super()._observe_run([mine]).get(mine)
            if status is not None:
                seen[handle] = status
        return seen


@mutant("c3_cancel_has_the_declared_scope", "C5", "C3", "C1")
class CancelOfRunOneActsOnRunTwo(Remembering):
    def _stop(self, handle):
        super()._stop(self.mine.get(handle.rank, handle))


@mutant("l1_handles_are_distinct", "L1", "L3", "S4", "S2", "L2")
class SameSecondNames(ToyExecutor):
    def launch_replicas(self, *args, run_id=None, **options):
        return super().launch_replicas(
            *args, run_id=run_id or f"job-{int(self.cloud.clock())}", **options
        )


@mutant("l1_handles_are_distinct", "L1", "H1")
class HandlesWithoutTheRun(ToyExecutor):
    def _handle(self, *names):
        return replace(super()._handle(*names), run_id="")


@mutant("r7_a_lost_replica_has_failed", "R7", "S4", "H2", "S6", "S5", "S2")
class ForeignProcessSaysCancelled(Remembering):
    def _observe_run(self, handles):
        known = [handle for handle in handles if handle in self.mine.values()]
        seen = dict(super()._observe_run(known)) if known else {}
        others = {
            handle: ReplicaStatus(ReplicaState.CANCELLED)
            for handle in handles
            if handle not in known
        }
        return {**others, **seen}


@mutant("h2_another_process_knows_as_much", "H2", "C5")
class ForeignProcessCannotCancel(Remembering):
    def _stop(self, handle):
        if handle in self.mine.values():
            super()._stop(handle)


@mutant("h2_another_process_knows_as_much", "H2", "R5", "R3")
class ForeignProcessHasNoResults(Remembering):
    def _result(self, handle):
        return super()._result(handle) if handle in self.mine.values() else None


@mutant("h3_runs_are_found_again", "H3")
class AttachLosesARank(ToyExecutor):
    def _attach(self, run_id):
        return super()._attach(run_id)[:2]


@mutant("h3_runs_are_found_again", "H3")
class ListsOnlyItsOwnRuns(Remembering):
    def _list_runs(self):
        return sorted({handle.run_id for handle in self.mine.values()})


@mutant("l2_a_refused_launch_leaves_nothing", "L2")
class LeakyLaunch(ToyExecutor):
    def _withdraw(self, request, uid):
        return []


@mutant("l3_another_launch_under_the_same_run_id_is_refused", "L3")
class AnyLaunchUnderOneName(ToyExecutor):
    def _submit(self, request):
        try:
            return super()._submit(request)
        except RunConflictError:
            return self._attach(request.run_id)


@mutant("l4_wrong_arguments_are_refused_before_anything_is_called", "L4")
class UnknownGpuIsIgnored(ToyExecutor):
    def _check_request(self, request):
        super()._check_request(replace(request, gpu=None))


@mutant("l5_a_plan_calls_nothing", "L5")
class PlanAsks(ToyExecutor):
    def _plan(self, request):
        self.cloud.runs()
        return super()._plan(request)


@mutant("l5_a_plan_is_what_is_sent", "L5")
class PlanIsSomethingElse(ToyExecutor):
    def plan(self, *args, **options):
        plan = super().plan(*args, **options)
        return Plan(plan.run_id, tuple({**body, "restarts": 7} for body in plan.requests))


@mutant("l1_handles_are_distinct", "L1")
class OneReplicaTooFew(ToyExecutor):
    def _submit(self, request):
        handles = super()._submit(request)
        return handles[: max(1, len(handles) - 1)]
