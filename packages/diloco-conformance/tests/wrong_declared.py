"""Wrong declarations: what happens and is not declared, D2."""

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
