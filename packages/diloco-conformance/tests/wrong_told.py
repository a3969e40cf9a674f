"""Wrong things told to replicas, and secrets that are shown: L6, E1 to E5."""

import os
from dataclasses import replace

from toy_executor import ToyExecutor
from wrong import Restating, Telling, mutant

from diloco_protocol import Plan, ReplicaHandle, RunConflictError, spec_to_arguments

EVERY = "e1_every_variable_arrives_as_it_was_given"
WHO = "e2_a_replica_is_told_its_run_and_its_attempt"
WHERE = "e2_a_replica_is_told_its_backend_and_its_place"
NAMES = "e2_the_arguments_may_name_the_variables"
ARRIVE = "e3_secrets_arrive_by_reference"
MISSING = "e3_a_missing_secret_stops_the_launch"
NOWHERE = "e4_what_is_secret_is_shown_nowhere"
IN_ARGUMENTS = "e4_no_secret_in_the_arguments_of_a_plan"
LABELS = "e5_labels_are_on_what_was_launched"
OWN = "l6_replicas_are_told_who_they_are"


# --- rank, size and arguments ---


@mutant("l6_any_arguments_arrive", "L6")
class NestedArgumentsAreDropped(Telling):
    def tell(self, body):
        kwargs = body["spec"]["kwargs"].items()
        body["spec"]["kwargs"] = {
            key: value for key, value in kwargs if not isinstance(value, (dict, list))
        }


@mutant(OWN, "L6")
class NumbersBecomeText(Telling):
    def tell(self, body):
        kwargs = body["spec"]["kwargs"].items()
        body["spec"]["kwargs"] = {
            key: str(value) if isinstance(value, float) else value for key, value in kwargs
        }


@mutant(OWN, "L6")
class WorldSizeIsNotTold(Telling):
    def tell(self, body):
        del body["env"]["REPLICA_WORLD_SIZE"]


@mutant(OWN, "L6")
class EverybodyIsRankZero(Telling):
    def tell(self, body):
        body["env"]["REPLICA_RANK"] = "0"


# --- where ---


@mutant(WHERE, "E2")
class TheBackendIsNotTold(Telling):
    def tell(self, body):
        del body["env"]["DILOCO_BACKEND"]


@mutant(WHERE, "E2")
class NoPlaceIsTold(ToyExecutor):
    def _where(self):
        return ""


@mutant(WHERE, "E2")
class ThePlaceIsAnother(ToyExecutor):
    def _where(self):
        return "elsewhere"


# --- the environment ---


class Variables(Telling):
    """Base of those that change the environment."""

    def tell(self, body):
        body["env"] = self.change(body["env"])


@mutant(EVERY, "E1")
class EmptyVariablesAreDropped(Variables):
    def change(self, env):
        return {name: value for name, value in env.items() if value}


@mutant(EVERY, "E1")
class ValuesAreStripped(Variables):
    def change(self, env):
        return {name: value.strip() for name, value in env.items()}


@mutant(EVERY, "E1")
class DollarsAreExpanded(Variables):
    def change(self, env):
        return {name: value.replace("$$", "$") for name, value in env.items()}


@mutant(EVERY, "E1")
class VariablesOfAShell(Variables):
    def change(self, env):
        return {name: os.path.expandvars(value) for name, value in env.items()}


@mutant(EVERY, "E1")
class NamesAreMadeLarge(Variables):
    def change(self, env):
        return {name.upper(): value for name, value in env.items()}


@mutant(EVERY, "E1")
class OneLineEach(Variables):
    def change(self, env):
        return {name: value.replace("\n", " ") for name, value in env.items()}


@mutant(EVERY, "E1")
class ShortValues(Variables):
    def change(self, env):
        return {name: value[:1024] for name, value in env.items()}


@mutant(EVERY, "E1")
class OnlyTheFirstReplicaHasThem(Telling):
    def tell(self, body):
        if body["spec"]["rank"]:
            body["env"] = {key: text for key, text in body["env"].items() if "CONF" not in key}


@mutant(EVERY, "E1")
class VariablesOfEarlierRuns(Variables):
    def change(self, env):
        known = self.cloud.__dict__.setdefault("known", {})
        known.update(env)
        return dict(known)


@mutant(WHO, "E2")
class RunIdIsNotTold(Telling):
    def tell(self, body):
        del body["env"]["DILOCO_RUN_ID"]


@mutant(WHO, "E2")
class CohortIsTheRun(Telling):
    def tell(self, body):
        body["env"]["DILOCO_COHORT"] = body["run_id"]


@mutant(WHO, "E2")
class RendezvousOfTheLauncher(Telling):
    def tell(self, body):
        if "RENDEZVOUS_URI" in os.environ:
            body["env"].setdefault("RENDEZVOUS_URI", os.environ["RENDEZVOUS_URI"])


@mutant(WHO, "E2")
class InheritsEverything(Telling):
    def tell(self, body):
        body["env"] = {**body["env"], **os.environ}


@mutant(NAMES, "E2")
class RankVariableIsIgnored(Telling):
    def tell(self, body):
        body["env"].pop("MY_RANK", None)


@mutant(NAMES, "E2")
class OnlyTheNamedVariables(Telling):
    def tell(self, body):
        if body["spec"]["rank_env"] != "REPLICA_RANK":
            del body["env"]["REPLICA_RANK"]


@mutant(NAMES, "E2")
class RendezvousIsNotExported(Telling):
    def tell(self, body):
        body["env"].pop("RENDEZVOUS_URI", None)


@mutant(NAMES, "L6")
class RendezvousIsNoArgument(Telling):
    def tell(self, body):
        kwargs = body["spec"]["kwargs"].items()
        body["spec"]["kwargs"] = {key: value for key, value in kwargs if key != "rendezvous_uri"}


# --- secrets ---


@mutant(ARRIVE, "E3")
class SecretsAreForgotten(Telling):
    def tell(self, body):
        body["secrets"] = {}


@mutant(ARRIVE, "E3")
class OneSecretAtMost(Telling):
    def tell(self, body):
        body["secrets"] = dict(list(body["secrets"].items())[:1])


@mutant(ARRIVE, "E3")
class ReferencesForValues(Telling):
    def tell(self, body):
        body["env"] = {**body["env"], **body["secrets"]}
        body["secrets"] = {}


@mutant(ARRIVE, "E3")
class SecretsReplaceVariables(Telling):
    def tell(self, body):
        if body["secrets"]:
            body["env"].pop("PLAIN", None)


@mutant(MISSING, "E3")
class MissingSecretsAreLeftOut(Telling):
    def tell(self, body):
        known = body["secrets"].items()
        body["secrets"] = {name: where for name, where in known if where in self.cloud.secrets}

    def _submit(self, request):
        handles = super()._submit(request)
        if request.secrets.keys() - self.cloud.jobs[f"{request.run_id}-0"].body["secrets"].keys():
            for handle in handles:  # they are started at once
                self.cloud.start(handle.metadata["name"])
        return handles


@mutant(MISSING, "E3")
class MissingSecretsMayComeLater(ToyExecutor):
    def _submit(self, request):
        try:
            return super()._submit(request)
        except Exception as error:
            error.retryable = True
            raise


class Plain(ToyExecutor):
    """Base of those whose plans are not redacted by what all backends share."""

    def plan(self, *args, **options):
        request = self._request(*args, **options)
        return Plan(request.run_id, tuple(self._plan(request)))


@mutant(NOWHERE, "E4")
class PlansShowEverything(Plain):
    def _plan(self, request):
        return self._bodies(request)


@mutant(IN_ARGUMENTS, "E4")
class PlansShowArguments(Plain):
    def _plan(self, request):
        shown = super()._plan(request)
        return [
            {**body, "spec": whole["spec"]}
            for body, whole in zip(shown, self._bodies(request), strict=True)
        ]


@mutant(IN_ARGUMENTS, "E4")
class PlansShowEncodedArguments(ToyExecutor):
    def _plan(self, request):
        pieces = spec_to_arguments(request.specs()[0])
        return [{**body, "arguments": pieces} for body in super()._plan(request)]


@mutant(IN_ARGUMENTS, "E4")
class PlansShowTheRendezvous(Plain):
    def _plan(self, request):
        return [
            {**body, "meet": request.specs()[0].rendezvous_uri} for body in super()._plan(request)
        ]


@mutant(IN_ARGUMENTS, "E4")
class PlansHideArguments(ToyExecutor):
    def _plan(self, request):
        return [{**body, "spec": {}} for body in super()._plan(request)]


@mutant(NOWHERE, "E4")
class PlansShowNothing(ToyExecutor):
    def _plan(self, request):
        return [{**body, "env": dict.fromkeys(body["env"], "?")} for body in self._bodies(request)]


@mutant(NOWHERE, "E4")
class PlansResolveSecrets(ToyExecutor):
    def plan(self, *args, **options):
        plan = super().plan(*args, **options)
        bodies = [dict(body) for body in plan.requests]
        for body in bodies:
            body["secrets"] = {
                name: self.cloud.secrets[where] for name, where in body["secrets"].items()
            }
        return Plan(plan.run_id, tuple(bodies))


@mutant(NOWHERE, "E4")
class ConflictsShowTheDifference(ToyExecutor):
    def _same(self, request):
        try:
            return super()._same(request)
        except RunConflictError as error:
            shown = RunConflictError("")
            shown.args = (f"{error}: env={request.env}",)  # the error itself would leave it out
            raise shown from error


@mutant(NOWHERE, "E4")
class HandlesCarryTheEnvironment(ToyExecutor):
    def _handles(self, jobs):
        return [
            ReplicaHandle(
                handle.rank, "toy", {**handle.metadata, "env": str(job.body["env"])},
                run_id=handle.run_id, world_size=handle.world_size,
            )
            for job in jobs for handle in super(HandlesCarryTheEnvironment, self)._handles([job])
        ]  # fmt: skip


@mutant(NOWHERE, "E4")
class FailuresShowTheEnvironment(Restating):
    def restate(self, handle, status, seen):
        env = self.cloud.find(handle.metadata).body["env"]
        return replace(status, message=f"{status.message} {env}") if status.message else status


@mutant(NOWHERE, "E4")
class StatesShowTheRequest(Restating):
    def restate(self, handle, status, seen):
        return replace(status, native=str(self.cloud.find(handle.metadata).body))


# --- labels ---


@mutant(LABELS, "E5")
class LabelsAreForgotten(Telling):
    def tell(self, body):
        body["labels"] = {}


@mutant(LABELS, "E5")
class LabelsOfTheFirstReplica(Telling):
    def tell(self, body):
        body["labels"] = body["labels"] if body["spec"]["rank"] == 0 else {}


@mutant(LABELS, "E5")
class SimpleLabels(Telling):
    def tell(self, body):
        labels = body["labels"].items()
        body["labels"] = {key.replace("/", "-").replace(".", "-"): value for key, value in labels}


@mutant(LABELS, "E5")
class LabelsOfTheLastRun(Telling):
    def tell(self, body):
        self.cloud.__dict__.setdefault("labels", {}).update(body["labels"])
        for job in self.cloud.jobs.values():
            job.body["labels"] = self.cloud.labels
