"""Secrets and control characters in whatever is given: in no plan and no error, E4 and S16."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from diloco_protocol import BackendError, ReplicaHandle

from ._check_details import check_texts
from ._check_shown import Shown
from ._lab import Lab
from ._suite_names import verbs

SECRET = "t0ken-abcdefghijklmnopqrstuvwxyz"
"""The secret that is planted, in the forms that secrets have."""
FORMS = (
    f"s3://user:{SECRET}@bucket/run",
    f"postgresql://user:{SECRET}\0@host/db",
    f"user:{SECRET}@registry.example/image:1",
    f"--password={SECRET}",
    f"host=db password={SECRET} user=me",
    f"https://host/#access_token={SECRET}",
    f"AccountName=a;AccountKey={SECRET}==;EndpointSuffix=core",
    f"Authorization: Bearer {SECRET}",
    f'{{"db": {{"password": "{SECRET}"}}}}',
    f"- name: DB_PASSWORD\n  value: {SECRET}\n- password: |\n    {SECRET}\n",
    f"{{'Name': 'DB_PASSWORD', 'Type': {{'a': 1}}, 'Value': '{SECRET}'}}",
)
NAMES = (
    *("DB_PASS", "AUTH", "WANDB_KEY", "OPENAI_KEY", "SSH_KEY", "WEBHOOK", "COOKIE", "HF_TOKEN"),
    "A-WRONG-NAME-PASSWORD",
)
"""Names of variables with which any value is secret; no launch takes the last one."""
ARGUMENTS = (
    *("gpu", "cpu", "memory", "run_id", "cohort", "timeout", "spot", "max_restarts", "rank_offset"),
    *("world_size", "env", "secrets", "labels"),
)
ODD = "\x1b[2Jall is well\r\x00\u0085"
"""A text that a terminal obeys."""


class Hiding:
    """Fixed tests of E4 and S16 that plant something in each text."""

    def test_e4_no_secret_in_any_plan_and_any_refusal(self, lab: Lab) -> None:
        """Plant a secret in any argument of a launch, whether that is accepted or not."""
        shown = Shown(lab, [SECRET])
        executor, entrypoint = lab.executor, lab.harness.entrypoint
        for name, options in planted():
            lab.note(f"plan with a secret in {name}", "plan")
            arguments: dict[str, Any] = {
                "n_replicas": 1,
                "entrypoint": entrypoint,
                "run_id": "p",
                **options,
            }
            kwargs = {**lab.harness.entrypoint_args, **arguments.pop("entrypoint_args", {})}
            look(
                lab,
                shown,
                f"plan, with {name},",
                partial(executor.plan, entrypoint_args=kwargs, **arguments),
            )
        for name in NAMES:
            call = partial(self._planned_by, lab, env={name: SECRET})
            look(lab, shown, f"plan of an executor with env={{{name!r}: ...}}", call)
        for form in FORMS:
            call = partial(self._planned_by, lab, run_id=form)
            look(lab, shown, "plan of an executor with a secret as run_id", call)

    def test_e4_no_secret_in_what_verbs_say_of_a_handle(self, lab: Lab) -> None:
        """Plant secrets in handles, in names of runs, and in expressions for choosing lines."""
        shown = Shown(lab, [SECRET])
        executor = lab.executor
        handle = lab.up(1).handles[0]
        for form in FORMS:
            for wrong in with_texts(handle, form):
                look_for = partial(look, lab, shown, errors_only=True)
                is_known = look_for("describe", partial(executor.describe, wrong))
                for verb, call in verbs(executor, wrong).items():
                    # A handle may still name the replica, as one with another address of the same
                    # cluster does.
                    if not (is_known and verb in {"cancel", "purge"}):
                        look_for(verb, call)
            for verb in ("attach", "exists", "cancel_run"):
                look(lab, shown, verb, partial(getattr(executor, verb), form))
            for name, value in (("regex", f"{form}("), ("streams", form), ("since", form)):
                choice: dict[str, Any] = {name: value}
                look(lab, shown, "log_iter", partial(executor.log_iter, handle, **choice))
        lab.observe_all()

    def test_s16_errors_show_control_characters_as_text(self, lab: Lab) -> None:
        """Put control characters into handles and names."""
        run = lab.up(1)
        for wrong in with_texts(run.handles[0], ODD):
            for verb, call in verbs(lab.executor, wrong).items():
                check_error(lab, verb, call)
        for verb in ("attach", "exists", "cancel_run"):
            check_error(lab, verb, partial(getattr(lab.executor, verb), ODD))
        for argument in ("gpu", "memory", "run_id", "cohort"):
            options: dict[str, Any] = {"run_id": "p", argument: ODD}
            call = partial(lab.executor.plan, 1, lab.harness.entrypoint, {}, **options)
            check_error(lab, f"plan({argument}=...)", call)
        lab.observe_all()

    def _planned_by(self, lab: Lab, **options: Any) -> object:
        executor = lab.harness.make_executor(**options)
        with executor:
            plan = partial(executor.plan, 1, lab.harness.entrypoint, lab.harness.entrypoint_args)
            return plan()


def planted() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield arguments of a launch, each with a secret in one place, and the place in words."""
    for name in NAMES:
        yield f"env[{name!r}]", {"env": {name: SECRET}}
        yield f"entrypoint_args.{name}", {"entrypoint_args": {"x": {name: SECRET}}}
        entry = {"name": name, "value": SECRET}
        yield f"entrypoint_args, {name} beside a value", {"entrypoint_args": {"x": [entry]}}
    yield "a command", {"entrypoint_args": {"command": ["run", "--password", SECRET]}}
    for form in FORMS:
        for argument in ARGUMENTS:
            texts = argument in {"env", "secrets", "labels"}
            yield argument, {argument: {"A": form} if texts else form}
        yield "a name in env", {"env": {form: "x"}}
        yield "the name of a label", {"labels": {form: "x"}}
        yield "entrypoint", {"entrypoint": form}
        yield "n_replicas", {"n_replicas": form}
        for kwargs in ({"a": [form]}, {form: 1}, {"a": {form: 1}}, {"rendezvous_uri": form}):
            yield "entrypoint_args", {"entrypoint_args": kwargs}
        yield "rank_env", {"entrypoint_args": {"rank_env": form}}


def with_texts(handle: ReplicaHandle, text: str) -> Iterator[ReplicaHandle]:
    """Yield handles that have this text in place of one of their own."""
    for key in handle.metadata:
        yield replace(handle, metadata={**handle.metadata, key: text})
    yield replace(handle, run_id=text)
    yield replace(handle, backend_name=text)
    yield replace(handle, metadata={text: text})


def look(
    lab: Lab, shown: Shown, what: str, call: Callable[[], Any], *, errors_only: bool = False
) -> bool:
    """Look for a secret in what a call gives or raises; return whether it gave something."""
    try:
        gave = lab.within("E4", call)
    except BackendError as error:
        shown.check(f"the error of {what}", error)
        return False
    if not errors_only:  # an answer may repeat what was given
        shown.check(what, gave)
    return True


def check_error(lab: Lab, verb: str, call: Callable[[], Any]) -> None:
    """Check that an error may be printed as it is; answers of verbs are checked elsewhere."""
    try:
        lab.within("S16", call)
    except BackendError as error:
        check_texts(lab, f"{verb} raised {type(error).__name__}", str(error))
