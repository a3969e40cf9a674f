"""The steps of a pod's state, each a pure function."""

from __future__ import annotations

import copy

import pytest

from diloco_localcloud._kubernetes._pods import _facts, _states

NOW, LATER = "2026-01-01T00:00:00Z", "2026-01-01T00:00:09Z"
NEW = {
    "metadata": {"name": "p", "uid": "u"},
    "spec": {"containers": [{"name": "main", "image": "any"}, {"name": "side", "image": "any"}]},
    "status": {"phase": "Pending"},
}


def ended(*codes):
    pod = _states.running(
        _states.waiting(_states.bound(NEW, "n", NOW), "ContainerCreating", "", NOW), NOW
    )
    for container, code in zip(("main", "side"), codes, strict=True):
        pod = _states.terminated(pod, container, code, LATER)
    return _states.ended(pod, LATER)


@pytest.mark.parametrize(
    ("codes", "phase"), [((0, 0), "Succeeded"), ((0, 3), "Failed"), ((137, 0), "Failed")]
)
def test_a_pod_succeeds_if_all_its_containers_do(codes, phase):
    pod = ended(*codes)
    assert _facts.phase(pod) == phase
    assert [end["exitCode"] for end in _facts.terminations(pod)] == list(codes)
    assert not _facts.is_ready(pod)


def test_a_step_makes_a_new_pod():
    before = copy.deepcopy(NEW)
    ended(0, 0)
    assert before == NEW


def test_a_condition_that_stays_keeps_its_time():
    pod = _states.disrupted(NEW, "EvictionByEvictionAPI", "", NOW)
    again = _states.disrupted(pod, "EvictionByEvictionAPI", "", LATER)
    assert _facts.condition(again, "DisruptionTarget")["lastTransitionTime"] == NOW
    over = _states.with_condition(again, "DisruptionTarget", true=False, now=LATER)
    assert _facts.condition(over, "DisruptionTarget")["lastTransitionTime"] == LATER
