"""Check that a harness finds what was sent in the platform's records: labels, resources, secrets.

An executor that sends none of these is not the harness's fault. So the checks read the platform's
requests, if they can be read, or else the plan: only what is in there must be found.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from typing import Any

from diloco_protocol import BackendError, InvalidRequestError

from ._blame import fault
from ._harness import Ability, Step
from ._self_sample import Sample

LABEL = "conf-self-check"
ASKED: tuple[dict[str, Any], ...] = ({"cpu": 2}, {"memory": "2Gi"}, {"spot": True})
"""Requests for resources that a platform may take, besides its GPUs."""


def labels_are_found(sample: Sample) -> None:
    """Check that the label of a run that was launched with one is found."""
    lab, harness = sample.lab, sample.harness
    if not lab.can(Ability.LABELS):
        return
    planned = _planned(sample, labels={"team": LABEL})
    run = lab.up(1, labels={"team": LABEL})
    sent = json.dumps(harness.sent()[-1], default=str) if lab.can(Ability.SENT) else planned
    if LABEL in sent and LABEL not in (labels := dict(harness.labels(run.handles[0]))).values():
        fault(
            harness,
            f"a run was launched with the label {LABEL!r}, which is in its request, and labels() "
            f"returned {labels}: it must return the labels in the platform's records",
            "labels",
        )


def resources_are_found(sample: Sample) -> None:
    """Check that the resources of runs that asked for some are found."""
    lab, harness = sample.lab, sample.harness
    if not lab.can(Ability.RESOURCES):
        return
    plain, taken = harness.resources(sample.first.handle), []
    for options in [*ASKED, *({"gpu": gpu} for gpu in harness.gpus[:1])]:
        with contextlib.suppress(InvalidRequestError):  # the backend has no such resource
            _planned(sample, **options)
            taken.append(options)
            if harness.resources(lab.launch(1, **options).handles[0]) != plain:
                return
    if taken:
        fault(
            harness,
            f"resources() returned {plain} of every replica, whether it was launched with "
            f"{' or '.join(map(str, taken))} or without: it must return what the platform's "
            "records say was asked for. If the executor sends none of these, it must refuse them "
            "all",
            "resources",
        )


def secrets_are_kept(sample: Sample) -> None:
    """Check that a replica gets what the store has under the reference."""
    lab, harness = sample.lab, sample.harness
    if not lab.can(Ability.SECRETS, Ability.TOLD):
        return
    reference, value = harness.secret("conf-secret"), "conf-secret"
    secrets = {"CONF_SECRET": reference}
    try:
        if reference.rpartition("/")[2] not in _planned(sample, secrets=secrets):
            return
        run = lab.launch(1, secrets=secrets, refusable=True)
        lab.drive(run.replicas[0], Step.START)
        got = harness.told(run.handles[0]).environment.get("CONF_SECRET")
    except (BackendError, LookupError) as error:
        got = f"{type(error).__name__}: {error}"
    if got != value:
        fault(
            harness,
            f"a replica was launched with the reference {reference!r} that secret({value!r}) had "
            f"returned, and it is in the request; what came of it is {got!r}. secret() must put "
            "the value where the platform looks for that reference",
            "secret",
        )


RECORD_CHECKS: list[Callable[[Sample], None]] = [
    labels_are_found,
    resources_are_found,
    secrets_are_kept,
]


def _planned(sample: Sample, **options: Any) -> str:
    """Return what a launch would send, as text."""
    harness = sample.harness
    plan = sample.ask(
        lambda: sample.lab.executor.plan(
            1, harness.entrypoint, harness.entrypoint_args, run_id="conf-self-check", **options
        )
    )
    return json.dumps(plan.requests, sort_keys=True, default=str)
