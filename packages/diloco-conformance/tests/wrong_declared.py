"""Wrong declarations, and wrong checks: D1 to D3."""

from dataclasses import replace

from toy_executor import ToyExecutor
from wrong import mutant


class Declares(ToyExecutor):
    """Base of those that declare something else."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.capabilities = replace(self.capabilities, **self.wrong)


@mutant("d2_who_tells_pending_from_running_declares_it", "D2")
class SaysThatNobodyKnows(Declares):
    wrong = {"distinguishes_pending": False}


@mutant("d2_who_looks_at_a_run_at_once_declares_it", "D2")
class SaysThatEveryRankIsAsked(Declares):
    wrong = {"calls_per_look": "rank"}


@mutant("d2_what_is_kept_for_longer_is_declared", "D2")
class SaysHalfOfItsRetention(Declares):
    wrong = {"retention": 43_200.0}


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


@mutant("d1_what_it_cannot_do_is_declared", "D1")
class ScopeInItsOwnWords(ToyExecutor):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.capabilities = replace(self.capabilities, cancel_scope="job")


@mutant("d1_what_it_cannot_do_is_declared", "D1")
class DeclaresAStreamOfItsOwn(ToyExecutor):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.capabilities = replace(self.capabilities, log_streams=("combined", "syslog"))


@mutant("d3_check_starts_nothing", "D3")
class CheckTriesALaunch(ToyExecutor):
    def _findings(self, request):
        self._submit(request)
        return super()._findings(request)


@mutant("d3_check_starts_nothing", "D3")
class CheckSaysOk(ToyExecutor):
    def check(self, *arguments, **options):
        super().check(*arguments, **options)
        return ["ok"]


@mutant("d3_check_starts_nothing", "D3")
class CheckTakesAnything(ToyExecutor):
    def check(self, n_replicas=1, **options):
        return []


@mutant("d2_nobody_is_preempted_who_cannot_be", "D2")
class PreemptsUndeclared(ToyExecutor):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.capabilities = replace(self.capabilities, preemptible=False)


@mutant("d2_attempts_are_counted_only_where_declared", "D2")
class CountsUndeclared(ToyExecutor):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.capabilities = replace(self.capabilities, counts_attempts=False)
