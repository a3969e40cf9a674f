"""Wrong details: states, reasons, signals and times."""

from dataclasses import replace
from signal import Signals

from toy_executor import ToyExecutor
from wrong import Restating, mutant

from diloco_protocol import Reason, ReplicaState

# --- S1, S2, S3, S5, S9: the states themselves ---


@mutant("s1_states_are_the_five_and_poll_agrees_with_describe", "S1")
class PollGivesText(ToyExecutor):
    def poll(self, handle):
        return str(super().poll(handle))


class Changing(ToyExecutor):
    """Base of those that say something else the next time they are asked."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.asked = {}

    def again(self, handle, state):
        """How often it was asked for in this state before."""
        self.asked[handle, state] = self.asked.get((handle, state), -1) + 1
        return self.asked[handle, state]


@mutant("s2_terminal_states_are_never_left", "S2", "S4")
class FailuresAreRetriedInWords(Changing):
    """A failure that was collected is said to be pending again."""

    def describe(self, handle):
        status = super().describe(handle)
        if status.state == "failed" and self.again(handle, "failed") > 1:
            return replace(status, state=ReplicaState.PENDING, reason=None, exit_code=None)
        return status


@mutant("s2_terminal_states_are_never_left", "S2", "S4", "C2")
class SuccessIsCancelledLater(Changing):
    """After enough questions, says cancelled of a replica that had succeeded before its cancel."""

    def cancel(self, handle):
        super().cancel(handle)
        self.asked[handle] = True

    def describe(self, handle):
        status = super().describe(handle)
        if status.state == "succeeded" and handle in self.asked:
            return replace(status, state=ReplicaState.CANCELLED, exit_code=None)
        return status


@mutant("s3_a_preempted_replica_is_pending_with_the_next_attempt", "S3", "S8", "S4")
class AttemptsGoBack(Restating):
    """Who runs again is said to be in its first life."""

    def restate(self, handle, status, seen):
        return replace(status, attempt=1) if status.state == "running" else status


@mutant("s5_what_never_started_can_be_cancelled", "S5", "S4")
class PendingIsCancelledAtOnce(Restating):
    def restate(self, handle, status, seen):
        if status.stopping and status.state == "pending":
            return replace(status, state=ReplicaState.CANCELLED, stopping=False)
        return status


@mutant("s9_a_failure_has_the_declared_scope", "S9", "S4", "C3", "C5")
class FailureEndsTheSiblings(ToyExecutor):
    def _observe_run(self, handles):
        seen = super()._observe_run(handles)
        if any(status.state == "failed" for status in seen.values()):
            for handle in self._attach(handles[0].run_id):
                job = self.cloud.find(handle.metadata)
                if job.live:
                    self.cloud.end(handle.metadata["name"], "FAILED", 143, reason="GangFailed")
        return seen


# --- S4: poll by itself ---


@mutant("s4_poll_is_true_by_itself", "S4")
class PollIsCached(ToyExecutor):
    """Until somebody asks for more, poll says what it said first."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.cache = {}

    def describe(self, handle):
        status = super().describe(handle)
        self.cache[handle] = status.state
        return status

    def poll(self, handle):
        return self.cache[handle] if handle in self.cache else super().poll(handle)


@mutant("s4_poll_is_true_by_itself", "S4")
class PollIsOneStepBehind(ToyExecutor):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.before = {}

    def poll(self, handle):
        state = super().poll(handle)
        before, self.before[handle] = self.before.get(handle, state), state
        return before


@mutant("s4_poll_is_true_by_itself", "S4")
class PollFlips(Changing):
    def poll(self, handle):
        state = super().poll(handle)
        flips = state == "running" and self.again(handle, "running") % 2
        return ReplicaState.PENDING if flips else state


@mutant("s4_poll_is_true_by_itself", "S4")
class PollForgetsEnds(ToyExecutor):
    """Only a running replica is looked for again; the others are what they were."""

    def poll(self, handle):
        state = super().poll(handle)
        return ReplicaState.RUNNING if state == "cancelled" else state


# --- S8, S10: reasons, before the end too ---


@mutant("s10_reasons_belong_to_states", "S10", "S8")
class LostIsSaidByDescribe(Restating):
    def restate(self, handle, status, seen):
        return replace(status, reason=Reason.LOST) if status.state == "failed" else status


@mutant("s10_reasons_belong_to_states", "S10")
class StillStarting(Restating):
    def restate(self, handle, status, seen):
        running = status.state == "running" and not status.stopping
        return replace(status, reason=Reason.STARTING) if running else status


@mutant("s10_reasons_belong_to_states", "S10", "R4", "S8")
class ExitCodeBeforeTheEnd(Restating):
    def restate(self, handle, status, seen):
        return replace(status, exit_code=0) if status.state == "running" else status


@mutant("s10_reasons_belong_to_states", "S10")
class AnErrorThatIsPending(Restating):
    def restate(self, handle, status, seen):
        return replace(status, reason=Reason.ERROR) if status.state == "pending" else status


@mutant("s10_reasons_belong_to_states", "S10", "S8")
class PreemptedForGood(Restating):
    """What has run again after a preemption and failed is said to have failed for it."""

    def restate(self, handle, status, seen):
        failed = status.state == "failed" and status.reason is Reason.ERROR
        return replace(status, reason=Reason.PREEMPTED) if failed else status


@mutant("s10_reasons_belong_to_states", "S8")
class EverythingIsStopping(Restating):
    def restate(self, handle, status, seen):
        return replace(status, stopping=not status.state.terminal)


@mutant("s2_terminal_states_are_never_left", "S8")
class TheCancelledAreStopping(Restating):
    def restate(self, handle, status, seen):
        return replace(status, stopping=status.state == "cancelled" or status.stopping)


@mutant("s8_exit_codes_and_reasons_are_the_true_ones", "S8", "S9")
class EveryFailureIsOutOfMemory(Restating):
    def restate(self, handle, status, seen):
        return replace(status, reason=Reason.OOM) if status.exit_code == 3 else status


# --- S11: signals ---


@mutant("s11_signals_have_their_names_and_numbers", "S11", "S8")
class SignalsAreNegative(Restating):
    def restate(self, handle, status, seen):
        ended = status.state == "failed" and status.signal is not None
        return replace(status, exit_code=-Signals[status.signal]) if ended else status


@mutant("s11_signals_have_their_names_and_numbers", "S11")
class SignalsHaveNoNames(Restating):
    def restate(self, handle, status, seen):
        return replace(status, signal=None)


@mutant("s11_signals_have_their_names_and_numbers", "S11")
class SignalsAreNumbers(Restating):
    def restate(self, handle, status, seen):
        name = status.signal and str(int(Signals[status.signal]))
        return replace(status, signal=name)


@mutant("s11_out_of_memory_is_a_signal", "S11")
class OutOfMemoryExitsWithOne(Restating):
    def restate(self, handle, status, seen):
        return replace(status, exit_code=1) if status.reason is Reason.OOM else status


# --- S12: times ---


@mutant("s12_times_are_those_of_the_attempt", "S12")
class TimesInMilliseconds(Restating):
    def restate(self, handle, status, seen):
        times = {name: getattr(status, name) for name in ("started_at", "finished_at")}
        return replace(status, **{name: at and at * 1000 for name, at in times.items()})


@mutant("s12_times_are_those_of_the_attempt", "S12")
class NobodyHasStarted(Restating):
    def restate(self, handle, status, seen):
        return replace(status, started_at=None)


@mutant("s12_times_are_those_of_the_attempt", "S12")
class EndsThatAreNow(Restating):
    """The end is when somebody looks."""

    def restate(self, handle, status, seen):
        return replace(status, finished_at=self.cloud.clock())


@mutant("s12_times_are_those_of_the_attempt", "S12")
class ThereIsNoEnd(Restating):
    def restate(self, handle, status, seen):
        return replace(status, finished_at=None)


@mutant("s12_times_are_those_of_the_attempt", "S12")
class PendingHasStarted(Restating):
    def restate(self, handle, status, seen):
        pending = status.state == "pending"
        return replace(status, started_at=self.cloud.clock()) if pending else status


@mutant("s12_the_next_attempt_has_its_own_start", "S12")
class StartOfTheFirstAttempt(ToyExecutor):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.starts = {}

    def _status(self, job):
        status = super()._status(job)
        if status.started_at is not None:
            started = self.starts.setdefault(job.uid, status.started_at)
            return replace(status, started_at=started)
        return status
