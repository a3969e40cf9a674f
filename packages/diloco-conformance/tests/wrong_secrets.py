"""Wrong beliefs in what may be shown: E4 and S16, with something planted in each text."""

from toy_executor import ToyExecutor
from wrong import mutant
from wrong_told import Plain

from diloco_protocol import BackendError, InvalidRequestError, Plan
from diloco_protocol.backend import redact

PLANTED = "e4_no_secret_in_any_plan_and_any_refusal"
SAID = "e4_no_secret_in_what_verbs_say_of_a_handle"
ODD = "s16_errors_show_control_characters_as_text"


def bare(text):
    """An error whose message is shown as it is."""
    error = InvalidRequestError("")
    error.args = (text,)
    return error


@mutant(PLANTED, "E4")
class PlansShowLabels(Plain):
    pass


@mutant(PLANTED, "E4")
class PlansKnowSomeNames(ToyExecutor):
    def plan(self, *args, env=None, **options):
        plan = super().plan(*args, env=env, **options)
        for request in plan.requests:
            for name, value in (env or {}).items():
                if not name.endswith(("TOKEN", "PASSWORD")):
                    request["env"][name] = redact("", value)
        return plan


@mutant(PLANTED, "E4")
class RefusalsQuoteWhatWasGiven(ToyExecutor):
    def plan(self, *args, **options):
        try:
            return super().plan(*args, **options)
        except BackendError as error:
            raise bare(f"{error}: {args} {options}") from None


@mutant(PLANTED, "E4")
class ConstructorsAreNotPlanned(ToyExecutor):
    def plan(self, *args, **options):
        plan = super().plan(*args, **options)
        return Plan(plan.run_id, tuple({**each, "own": repr(self._env)} for each in plan.requests))


@mutant(SAID, "E4")
class ErrorsNameTheHandle(ToyExecutor):
    def _check_handle(self, handle):
        try:
            super()._check_handle(handle)
        except InvalidRequestError as error:
            raise bare(f"{error}: {handle}") from None


@mutant(SAID, "E4")
class ExpressionsAreQuoted(ToyExecutor):
    def log_iter(self, handle, **options):
        try:
            return super().log_iter(handle, **options)
        except InvalidRequestError as error:
            raise bare(f"{error}: {options}") from None


@mutant(ODD, "S16")
class ErrorsQuoteHandles(ToyExecutor):
    def _check_handle(self, handle):
        try:
            super()._check_handle(handle)
        except InvalidRequestError as error:
            raise bare(f"{error}: {' '.join(handle.metadata.values())}") from None


@mutant(ODD, "S16")
class ErrorsQuoteNames(ToyExecutor):
    def attach(self, run_id):
        try:
            return super().attach(run_id)
        except BackendError as error:
            error.args = (f"{error}: {run_id}",)
            raise
