"""A pod template merged over ours."""

import copy
import re

import pytest

from diloco_eks._manifest import job_manifest
from diloco_eks._overlay import apply_overlay
from diloco_protocol import InvalidRequestError


@pytest.fixture
def template(options_for, request_for):
    return job_manifest(request_for(gpu="L4", env={"A": "1"}), options_for(shm_size="1Gi"))["spec"][
        "template"
    ]


def replica(**fields):
    return {"spec": {"containers": [{"name": "replica", **fields}]}}


def test_things_with_names_are_merged_by_name(template):
    before = copy.deepcopy(template)
    overlay = {
        "metadata": {
            "labels": {"team": "vision"},
            "annotations": {"karpenter.sh/do-not-disrupt": None, "x": "y"},
        },
        "spec": {
            "volumes": [
                {"name": "data", "emptyDir": {}},
                {"name": "shm", "emptyDir": {"sizeLimit": "9Gi"}},
            ],
            "tolerations": [{"key": "team", "operator": "Exists"}],
            "imagePullSecrets": [{"name": "pull"}],
            "enableServiceLinks": None,
            "initContainers": [{"name": "fetch", "image": "fetch:1"}],
            "containers": [
                {
                    "name": "replica",
                    "volumeMounts": [{"name": "data", "mountPath": "/data"}],
                    "env": [{"name": "B", "value": "2"}],
                    "resources": {"limits": {"hugepages-2Mi": "1Gi"}},
                },
                {"name": "logger", "image": "logger:1"},
            ],
        },
    }
    kept = copy.deepcopy(overlay)
    merged = apply_overlay(template, overlay)
    assert (template, overlay) == (before, kept)
    assert merged["metadata"]["labels"]["team"] == "vision"
    assert merged["metadata"]["annotations"] == {"x": "y"}
    pod = merged["spec"]
    assert pod["volumes"] == [
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "9Gi"}},
        {"name": "data", "emptyDir": {}},
    ]
    assert [toleration["key"] for toleration in pod["tolerations"]] == ["nvidia.com/gpu", "team"]
    assert "enableServiceLinks" not in pod
    assert [container["name"] for container in pod["containers"]] == ["replica", "logger"]
    container = pod["containers"][0]
    assert [mount["mountPath"] for mount in container["volumeMounts"]] == ["/dev/shm", "/data"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert container["env"][-1] == {"name": "B", "value": "2"}


def test_nothing_over_something_is_the_same(template):
    assert apply_overlay(template, None) == apply_overlay(template, {}) == template


def test_merging_twice_is_merging_once(template):
    overlay = {
        "spec": {
            "tolerations": [{"key": "a", "operator": "Exists"}],
            "volumes": [{"name": "v", "emptyDir": {}}],
        }
    }
    once = apply_overlay(template, overlay)
    assert apply_overlay(once, overlay) == once


@pytest.mark.parametrize(
    ("overlay", "what"),
    [
        ({"containers": []}, "'metadata' and 'spec'"),
        ({"metadata": {"name": "x"}}, "may have 'labels'"),
        ({"metadata": {"labels": {"diloco.dev/run-id": "x"}}}, "may not set"),
        ({"spec": {"$patch": "replace"}}, "patch directives"),
        ({"spec": {"restartPolicy": "OnFailure"}}, "restartPolicy"),
        ({"spec": {"containers": {"name": "replica"}}}, "must be a list"),
        ({"spec": {"containers": [{"image": "x"}]}}, "must be a mapping with 'name'"),
        ({"spec": {"containers": None}}, "may not remove the container"),
        ({"spec": {"volumes": ["data"]}}, "must be a mapping with 'name'"),
        ({"spec": {"terminationGracePeriodSeconds": "30"}}, "must be a int"),
        (replica(command=["bash"]), "command= of the executor"),
        (replica(args=["x"]), "may not set args"),
        (replica(terminationMessagePath="/tmp/x"), "terminationMessagePath"),
        (replica(env=[{"name": "A", "value": "2"}]), "use env="),
        (replica(env=[{"name": "DILOCO_SPEC_0", "value": ""}]), "DILOCO_SPEC_0"),
        (replica(env=None), "changes the variable"),
        *(
            (replica(env=[{"name": name, "value": "0"}]), f"{name} may not be set")
            for name in ("JOB_COMPLETION_INDEX", "DILOCO_SPEC_5", "REPLICA_RANK", "DILOCO_ATTEMPT")
        ),
        (replica(env=[{"name": "B", "value": 2}]), "must be text"),
        (replica(resources={"limits": {"x.com/y": 1}}), "must be text such as"),
        ({"spec": {"volumes": [{"name": "x", "emptyDir": {1, 2}}]}}, "is a set"),
    ],
)
def test_overlays_that_are_refused(template, overlay, what):
    with pytest.raises(InvalidRequestError, match=re.escape(what)):
        apply_overlay(template, overlay)


@pytest.mark.parametrize("value", [86753091234, ["hunter2Zq"], {"a": "hunter2Zq"}])
@pytest.mark.parametrize("container", ["replica", "side"])
def test_of_a_variable_that_is_no_text_no_value_is_shown(
    options_for, request_for, container, value
):
    entry = {"name": "DB_PASSWORD", "value": value}
    overlay = {"spec": {"containers": [{"name": container, "image": "x", "env": [entry]}]}}
    for env in ({}, {"DB_PASSWORD": "text"}):
        with pytest.raises(InvalidRequestError, match="must be ") as error:
            job_manifest(request_for(env=env), options_for(pod_overlay=overlay))
        assert "8675" not in str(error.value)
        assert "hunter2" not in str(error.value)
