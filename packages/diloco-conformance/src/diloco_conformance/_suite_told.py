"""Everything that replicas are told: L6, E1 to E5."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from typing import Any
from unittest.mock import patch

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from diloco_protocol import BackendError, Plan, ReplicaHandle, ReplicaState

from ._check_collect import collect
from ._check_shown import Shown, is_in
from ._harness import Ability, Fault, Operation, Step
from ._lab import Lab
from ._scenes import fault_if_possible

NESTED: dict[str, Any] = {
    "nothing": None,
    "flag": True,
    "number": -17,
    "large": 2**60 + 1,
    "tenth": 0.1,
    "tiny": 5e-324,
    "text": "naïve e\u0301 漢字 🙂 $HOME $(HOME) $$ `x` \"quoted\" 'single' \\ \n\t end",
    "empty": [{}, [], ""],
    "deep": {"a": {"b": [{"c": [1, [2, [3.5, None]]]}]}},
    "long": "x" * 3000,
}

#: Values that shells, YAML files and clusters tend to change.
VARIABLES = {
    "CONF_EMPTY": "",
    "CONF_BLANKS": "  two  ",
    "CONF_QUOTES": "a b'c\"d`e\\f",
    "CONF_DOLLARS": "$HOME $(HOME) $$ ${X} $$(X) %(x)s {{x}}",
    "CONF_LINES": "one\ntwo\r\nthree\t",
    "CONF_UNICODE": "naïve 漢字 🙂",
    "CONF_EQUALS": "a=b=c,d;e:f",
    "CONF_NUMBER": "007",
    "CONF_LONG": "x" * 4000,
    "conf_CASE": "small",
    "CONF_CASE": "large",
    "_CONF_9": "score",
}

plain = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**63),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20),
)
json_values = st.recursive(
    plain,
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.text(max_size=5), inner, max_size=3),
)


class Telling:
    """Fixed tests of L6 and E1 to E5."""

    examples: int = 40

    def test_l6_replicas_are_told_who_they_are(self, lab: Lab) -> None:
        """Check their rank, their world size and exactly the arguments, nested as they are."""
        lab.needs(Ability.TOLD)
        run = lab.up(3, kwargs=NESTED)
        for replica in run.replicas:
            check_told(lab, replica.handle, {**lab.harness.entrypoint_args, **run.kwargs})
            rank = str(replica.handle.rank)
            check_environment(
                lab, "L6", replica.handle, {"REPLICA_RANK": rank, "REPLICA_WORLD_SIZE": "3"}
            )

    def test_l6_any_arguments_arrive(self, lab: Lab) -> None:
        """Try any arguments that JSON can express."""
        lab.needs(Ability.TOLD)

        @settings(
            max_examples=self.examples,
            deadline=None,
            database=None,
            derandomize=True,
            phases=[Phase.explicit, Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(
            kwargs=st.dictionaries(st.sampled_from(["a", "b", "ü", "x1"]), json_values, max_size=3)
        )
        def arrive(kwargs: dict[str, Any]) -> None:
            run = lab.up(1, kwargs=kwargs)
            check_told(lab, run.handles[0], {**lab.harness.entrypoint_args, **run.kwargs})
            lab.drive(run.replicas[0], Step.SUCCEED, kwargs)
            collect(lab, run.replicas)
            lab.history.clear()

        arrive()

    # --- the environment ---

    def test_e1_every_variable_arrives_as_it_was_given(self, lab: Lab) -> None:
        """Check that in every replica nothing is expanded, trimmed or mixed up."""
        lab.needs(Ability.TOLD)
        one, two = lab.up(2, env=VARIABLES), lab.up(1, env={"CONF_CASE": "another run's"})
        for handle in one.handles:
            check_environment(lab, "E1", handle, VARIABLES)
        others = dict.fromkeys(VARIABLES.keys() - {"CONF_CASE"})
        check_environment(lab, "E1", two.handles[0], {**others, "CONF_CASE": "another run's"})

    def test_e1_many_and_long_variables(self, lab: Lab) -> None:
        """Pass a hundred of them and one of 8 KiB, beside arguments of 40 KB."""
        lab.needs(Ability.TOLD)
        env = {f"CONF_{number}": f"value {number}" for number in range(100)}
        env["CONF_LONG"] = f"{'x' * 8192}end"
        run = lab.up(2, env=env, kwargs={"long": f"{'y' * 40_000}end", "many": list(range(1000))})
        for handle in run.handles:
            check_environment(lab, "E1", handle, env)
            check_told(lab, handle, {**lab.harness.entrypoint_args, **run.kwargs})

    def test_e2_a_replica_is_told_its_run_and_its_attempt(self, lab: Lab) -> None:
        """Check the protocol's names, and that nothing comes from a run around the launcher."""
        lab.needs(Ability.TOLD)
        outer = {"RENDEZVOUS_URI": "file:///another/run", "DILOCO_RUN_ID": "outer"}
        with patch.dict(os.environ, {**outer, "REPLICA_RANK": "9", "DILOCO_ATTEMPT": "9"}):
            run = lab.up(2)
        for handle in run.handles:
            wanted = {"DILOCO_RUN_ID": run.run_id, "REPLICA_RANK": str(handle.rank)}
            wanted |= {"DILOCO_ATTEMPT": "1", "DILOCO_COHORT": run.run_id}
            check_environment(lab, "E2", handle, {**wanted, "RENDEZVOUS_URI": None})
        part = lab.up(1, cohort="the-cohort", rank_offset=3, world_size=4)
        names = {"DILOCO_RUN_ID": part.run_id, "DILOCO_COHORT": "the-cohort", "REPLICA_RANK": "3"}
        check_environment(lab, "E2", part.handles[0], names)

    def test_e2_a_replica_is_told_its_backend_and_its_place(self, lab: Lab) -> None:
        """Check that the place is one that its handle names; a long one may be cut off."""
        lab.needs(Ability.TOLD)
        for handle in lab.up(2).handles:
            check_environment(lab, "E2", handle, {"DILOCO_BACKEND": handle.backend_name})
            place = lab.harness.told(handle).environment.get("DILOCO_PLACE", "")
            names = filter(None, handle.metadata.values())
            begin = place.removesuffix("…")
            is_cut = begin != place
            if not any(name in place or (is_cut and name.startswith(begin)) for name in names):
                lab.broken(
                    "E2",
                    f"rank {handle.rank} finds DILOCO_PLACE={place!r}",
                    f"it is to name something of {dict(handle.metadata)}",
                )

    def test_e2_the_arguments_may_name_the_variables(self, lab: Lab) -> None:
        """Check that ``rank_env`` and ``world_size_env`` do not reach the program as arguments.

        ``rendezvous_uri`` does.
        """
        lab.needs(Ability.TOLD)
        uri = "s3://bucket/a b/$x?y=1&z=$(z)"
        names = {"rank_env": "MY_RANK", "world_size_env": "MY_WORLD"}
        run = lab.up(2, kwargs={**names, "rendezvous_uri": uri})
        kwargs = {key: value for key, value in run.kwargs.items() if key not in names}
        for handle in run.handles:
            rank = str(handle.rank)
            wanted = {"MY_RANK": rank, "REPLICA_RANK": rank, "MY_WORLD": "2"}
            wanted |= {"REPLICA_WORLD_SIZE": "2", "RENDEZVOUS_URI": uri}
            check_environment(lab, "E2", handle, wanted)
            check_told(lab, handle, {**lab.harness.entrypoint_args, **kwargs})

    def test_e2_the_next_attempt_is_told_its_number(self, lab: Lab) -> None:
        """Check that the next attempt is told everything else once more."""
        lab.needs(Ability.TOLD, Step.PREEMPT)
        run = lab.up(2, env=VARIABLES, kwargs=NESTED)
        replica = run.replicas[1]
        lab.drive(replica, Step.PREEMPT)
        lab.drive(replica, Step.START)
        attempt = str(replica.attempt) if lab.capabilities.counts_attempts else "1"
        check_environment(lab, "E2", replica.handle, {**VARIABLES, "DILOCO_ATTEMPT": attempt})
        check_told(lab, replica.handle, {**lab.harness.entrypoint_args, **run.kwargs})

    # --- secrets and labels ---

    def test_e3_secrets_arrive_by_reference(self, lab: Lab) -> None:
        """Check that their values are in the environment; without a store they are refused."""
        if not lab.can(Ability.SECRETS):
            refused(lab, "E3", secrets={"API_KEY": "anything"})
            lab.needs(Ability.SECRETS)
        lab.needs(Ability.TOLD)
        values = {"API_KEY": "s3cret $(X) $$ 'x'", "OTHER": "another\nline"}
        secrets = {name: lab.harness.secret(value) for name, value in values.items()}
        run = lab.up(2, secrets=secrets, env={"PLAIN": "text"})
        for handle in run.handles:
            check_environment(lab, "E3", handle, {**values, "PLAIN": "text"})

    def test_e3_a_missing_secret_stops_the_launch(self, lab: Lab) -> None:
        """Check that the launch is refused, or otherwise that no replica of it runs.

        A backend that cannot see that the secret is missing need not refuse.
        """
        lab.needs(Ability.SECRETS)
        secrets = {"API_KEY": f"{lab.harness.secret('there')}-missing"}
        living = lab.harness.living()
        try:
            run = lab.launch(2, secrets=secrets, refusable=True, starts=False)
        except BackendError as error:
            if lab.harness.living() != living:
                lab.broken("E3", f"launch_replicas raised {error!r}", "some of it lives")
            if error.retryable:
                lab.broken("E3", f"{error!r} is retryable", "the secret will not come by itself")
            return
        lab.harness.settle()
        replica, status = run.replicas[0], None
        for _ in range(120):
            truth = lab.harness.truth(replica.handle)
            if truth.state is not ReplicaState.PENDING:
                lab.broken(
                    "E3", f"{replica} is {truth.state}", "the secret that it needs is missing"
                )
            status = lab.observe(replica)
            if status is None or "-missing" in status.message:
                break
            lab.advance(lab.unit)
        else:
            lab.broken("E3", str(status), f"it waits for {secrets}, and describe is to say so")
        for one in run.replicas:
            lab.cancel(one)

    def test_e4_what_is_secret_is_shown_nowhere(self, lab: Lab) -> None:
        """Look in every plan, handle, status, result, error and log.

        Neither values of secrets nor of variables that are named like secrets may be there.
        """
        hidden = {"API_TOKEN": "t0ken-abcdef", "DB_PASSWORD": "passw0rd-abcdef"}
        options: dict[str, Any] = {"env": {**hidden, "SHOWN": "plain text"}}
        if lab.can(Ability.SECRETS):
            hidden["OF_THE_STORE"] = "st0red-abcdef"
            options["secrets"] = {"OF_THE_STORE": lab.harness.secret(hidden["OF_THE_STORE"])}
        shown = Shown(lab, list(hidden.values()))
        run = lab.up(1, **options)
        replica, executor, name = run.replicas[0], lab.executor, lab.harness.entrypoint
        plan = lab.verb("E4", lambda: executor.plan(1, name, run.kwargs, run_id="p", **options))
        shown.check("plan", plan)
        if "plain text" not in str(plan):
            lab.broken("E4", str(plan), "what is not named like a secret is shown")
        if lab.can(Step.PRINT):
            lab.drive(replica, Step.PRINT, ["nothing secret"])
        shown.check("launch_replicas", [handle.to_json() for handle in run.handles], run.handles)
        shown.check("describe", lab.observe(replica))
        shown.check("attach", lab.verb("E4", lambda: executor.attach(run.run_id)))
        changed = {**options["env"], "API_TOKEN": "t0ken-abcdef-2"}
        for wrong in (
            {"env": changed},
            {"env": {**changed, "A-B": "1"}},
            {"env": {**changed, "X": 1}},
        ):
            shown.error(lambda wrong=wrong: lab.relaunch(run, **wrong))
        with fault_if_possible(lab, Operation.LAUNCH, Fault.FORBIDDEN):
            shown.error(lambda: lab.launch(2, refusable=True, **options), needed=False)
        lab.drive(replica, Step.FAIL, 3)
        shown.check("collect", collect(lab, [replica]))
        shown.check("stream_logs", lab.verb("E4", lambda: executor.stream_logs(replica.handle)))

    def test_e4_no_secret_in_the_arguments_of_a_plan(self, lab: Lab) -> None:
        """Hide secrets by name or form, in clear text or encoded; other texts stay as they are."""
        secret = "t0ken-abcdefghijklmnopqrstuvwxyz"
        uri = f"s3://user:{secret}@bucket/run"
        kwargs = {"hub": {"api_token": secret}, "data": [f"from {uri}"], "rendezvous_uri": uri}
        shown = Shown(lab, [secret])

        def planned(kwargs: dict[str, Any]) -> Plan:
            executor, name = lab.executor, lab.harness.entrypoint
            return lab.verb("E4", lambda: executor.plan(1, name, kwargs, run_id="p"))

        for wanted in (kwargs, {"rendezvous_uri": uri}, {"a": {"b": [{"password": [secret]}]}}):
            shown.check("plan", planned(wanted))
        executor, name = lab.executor, lab.harness.entrypoint
        for env in ({"STORE": uri}, {"HUB_TOKEN": secret}):
            call = partial(executor.plan, 1, name, {}, run_id="p", env=env)
            shown.check("plan", lab.verb("E4", call))
        plain = {"tokenizer": "gpt2-of-a-long-name", "n_tokens": 4096}
        plan = planned(plain)
        if not is_in("gpt2-of-a-long-name", str(plan)):
            lab.broken("E4", str(plan), "what is not named like a secret is shown")

    def test_e5_labels_are_on_what_was_launched(self, lab: Lab) -> None:
        """Look for them on every replica, or on the run."""
        lab.needs(Ability.LABELS)
        labels = {"team": "blue", "example.com/cost-center": "a.b-c_9"}
        one, two = lab.up(2, labels=labels), lab.up(1, labels={"team": "red"})
        for run, wanted in ((one, labels), (two, {"team": "red"})):
            for handle in run.handles:
                handle_labels = lab.harness.labels(handle)
                if wanted.items() - handle_labels.items():
                    lab.broken(
                        "E5", f"{handle} has the labels {dict(handle_labels)}", f"given: {wanted}"
                    )


def check_told(lab: Lab, handle: ReplicaHandle, kwargs: dict[str, Any]) -> None:
    """Check that a replica is told its rank, the size of the run, and these arguments."""
    told = lab.harness.told(handle)
    if (told.rank, told.world_size) != (handle.rank, handle.world_size):
        lab.broken(
            "L6", f"it is told that it is {told.rank} of {told.world_size}", f"it is {handle}"
        )
    if repr(sorted(told.kwargs.items())) != repr(sorted(kwargs.items())):
        lab.broken("L6", f"it is told {told.kwargs!r}", f"it was given {kwargs!r}")


def check_environment(
    lab: Lab, promise: str, handle: ReplicaHandle, wanted: Mapping[str, str | None]
) -> None:
    """Check that a replica finds these variables, and does not find those that are None."""
    env = lab.harness.told(handle).environment
    wrong = {name: env.get(name) for name in wanted if env.get(name) != wanted[name]}
    if wrong:
        true = {name: wanted[name] for name in wrong}
        lab.broken(promise, f"rank {handle.rank} finds {wrong}", f"it is to find {true}")


def refused(lab: Lab, promise: str, **options: Any) -> None:
    """Check that a launch with these options is refused before anything is started."""
    living = lab.harness.living()
    try:
        run = lab.launch(1, refusable=True, **options)
    except ValueError:
        if lab.harness.living() != living:
            lab.broken(promise, f"a launch with {options} was refused", "something was started")
        return
    lab.broken(promise, f"{run.name} was launched with {options}", "this backend has no such thing")
