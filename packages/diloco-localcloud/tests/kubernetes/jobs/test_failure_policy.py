"""``podFailurePolicy``: which rule meets which end of a pod."""

from __future__ import annotations

import pytest

from diloco_localcloud._kubernetes._jobs._end import match


def pod(code=0, condition=None, container="main"):
    ended = {"name": container, "state": {"terminated": {"exitCode": code}}}
    conditions = [{"type": condition, "status": "True"}] if condition else []
    return {
        "metadata": {"name": "p", "namespace": "ns"},
        "status": {"containerStatuses": [ended], "conditions": conditions},
    }


def codes(operator, *values, **more):
    return {"onExitCodes": {"operator": operator, "values": list(values), **more}}


DISRUPTED = {"onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}


@pytest.mark.parametrize(
    ("rule", "ended", "meets"),
    [
        (codes("In", 3, 4), pod(3), True),
        (codes("In", 3, 4), pod(5), False),
        (codes("NotIn", 3, 4), pod(5), True),
        (codes("NotIn", 3, 4), pod(3), False),
        (codes("NotIn", 3), pod(0), False),  # a success is no failure to decide on
        (codes("In", 3, containerName="main"), pod(3), True),
        (codes("In", 3, containerName="other"), pod(3), False),
        (DISRUPTED, pod(143, "DisruptionTarget"), True),
        (DISRUPTED, pod(143), False),
        (DISRUPTED, pod(143, "PodScheduled"), False),
    ],
)
@pytest.mark.parametrize("action", ["Ignore", "Count", "FailJob", "FailIndex"])
def test_rules(action, rule, ended, meets):
    found = match({"spec": {"podFailurePolicy": {"rules": [{"action": action, **rule}]}}}, ended)
    assert found.action == (action if meets else None)
    assert found.counts == (not (meets and action == "Ignore"))
    assert bool(found.message) == (meets and action == "FailJob")


def test_the_first_rule_that_meets_decides():
    rules = [
        {"action": "Ignore", **codes("In", 1)},
        {"action": "Count", **DISRUPTED},
        {"action": "FailJob", **codes("NotIn", 0)},
    ]
    job = {"spec": {"podFailurePolicy": {"rules": rules}}}
    assert match(job, pod(1, "DisruptionTarget")).action == "Ignore"
    assert match(job, pod(2, "DisruptionTarget")).action == "Count"
    assert (
        match(job, pod(2)).message
        == "Container main for pod ns/p failed with exit code 2 matching FailJob rule at index 2"
    )
    assert match({"spec": {}}, pod(1)).counts
