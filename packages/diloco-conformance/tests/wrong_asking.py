"""Wrong requests for resources, and wrong conclusions from answers that were lost: L10, L2."""

from dataclasses import replace

from toy_cloud import CloudError
from toy_executor import ToyExecutor
from wrong import Telling, mutant

from diloco_protocol import BackendError, InvalidRequestError, LaunchError, UnavailableError

ASKED = "l10_what_is_asked_for_is_asked_of_the_platform"
UNANSWERED = "l2_what_was_started_without_an_answer_is_ended_or_named"
BLIND = "l2_who_cannot_look_names_what_may_live"


class NotAsking(Telling):
    """Base of those that never send something."""

    def tell(self, body):
        body["resources"].pop(self.name, None)


for _name in ("Gpu", "Cpu", "Memory", "Spot"):
    mutant(ASKED, "L10")(type(f"NeverAsksFor{_name}", (NotAsking,), {"name": _name.lower()}))


@mutant(ASKED, "L10")
class OneGpuForEverybody(Telling):
    def tell(self, body):
        if "gpu" in body["resources"]:
            body["resources"]["gpu"]["count"] = 1


@mutant(ASKED, "L10")
class AnyModelWillDo(Telling):
    def tell(self, body):
        if "gpu" in body["resources"]:
            body["resources"]["gpu"]["model"] = "any"


@mutant(ASKED, "L10")
class WholeCpus(Telling):
    def tell(self, body):
        if "cpu" in body["resources"]:
            body["resources"]["cpu"] = float(int(body["resources"]["cpu"]))


@mutant(ASKED, "L10")
class ResourcesForRankZero(Telling):
    def tell(self, body):
        if body["spec"]["rank"]:
            body["resources"] = {}


@mutant(ASKED, "L10")
class MegabytesForMebibytes(Telling):
    def tell(self, body):
        if "memory" in body["resources"]:
            body["resources"]["memory"] = body["resources"]["memory"] // 2**20 * 10**6


@mutant(ASKED, "L10")
class SpotWhereverItIsNamed(Telling):
    def tell(self, body):
        body["resources"]["spot"] = "spot" in body["resources"]


@mutant(ASKED, "L10")
class OnlyPlansRefuseSpot(ToyExecutor):
    def plan(self, *args, **options):
        if options.get("spot"):
            raise InvalidRequestError("spot=True: there is none")
        return super().plan(*args, **options)


@mutant("l4_wrong_arguments_are_refused_before_anything_is_called", "L4")
class UnknownGpusAreLeftOut(ToyExecutor):
    def _check_request(self, request):
        try:
            super()._check_request(request)
        except InvalidRequestError:
            super()._check_request(replace(request, gpu=None))

    def _bodies(self, request):
        try:
            return super()._bodies(request)
        except InvalidRequestError:
            return super()._bodies(replace(request, gpu=None))


# --- answers that were lost ---


@mutant(UNANSWERED, "L2")
class WhatHasNotAnsweredIsNotThere(ToyExecutor):
    def _submit(self, request):
        handles = []
        try:
            for body in self._bodies(request):
                uid = body["name"]
                self.cloud.create(body["name"], body, uid)
                handles.append(
                    self._handle(request.run_id, body["spec"]["rank"], request.world_size, uid)
                )
        except CloudError as error:
            for handle in handles:
                self._delete(handle)
            raise LaunchError(f"the cloud says {error}") from error
        return handles


@mutant(UNANSWERED, "L2")
class GivesUpWithoutLooking(ToyExecutor):
    def _create(self, request, body, uid):
        try:
            self.cloud.create(body["name"], body, uid)
        except CloudError as error:
            raise UnavailableError(str(error)) from error

    def _withdraw(self, request, uid):
        made = [body["name"] for body in self.cloud.made if body["run_id"] == request.run_id]
        for handle in self._attach(request.run_id) if made[:-1] else []:
            if handle.metadata["name"] != made[-1]:
                self._delete(handle)
        return []


@mutant(BLIND, "L2")
class WhoCannotLookSeesNothing(ToyExecutor):
    def _withdraw(self, request, uid):
        try:
            self.cloud.describe(request.run_id)
        except CloudError:
            return []
        return super()._withdraw(request, uid)


@mutant(BLIND, "L2")
class NamesOnlyRankZero(ToyExecutor):
    def _withdraw(self, request, uid):
        return super()._withdraw(request, uid)[:1]


@mutant(BLIND, "L2")
class TheErrorOfTheRollbackIsRaised(ToyExecutor):
    def _withdraw(self, request, uid):
        try:
            self._jobs(request.run_id)
        except BackendError as error:
            raise LaunchError(f"it could not be taken back: {error}") from error
        return super()._withdraw(request, uid)
