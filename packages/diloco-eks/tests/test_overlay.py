"""A pod template merged over ours."""

import copy
import re

import pytest
from eks_lab import PATIENCE
from kubernetes import client, config

from diloco_eks import EKSExecutor
from diloco_eks._request._manifest import job_manifest
from diloco_eks._request._overlay import apply_overlay as merged_into
from diloco_eks._request._overlay import check_overlay
from diloco_localcloud import KubernetesProcesses
from diloco_protocol import Backoff, InvalidRequestError


@pytest.fixture
def template(options_for, request_for):
    return job_manifest(request_for(gpu="L4", env={"A": "1"}), options_for(shm_size="1Gi"))["spec"][
        "template"
    ]


def apply_overlay(template, overlay):
    """As an executor does."""
    return merged_into(template, overlay and check_overlay("pod_overlay", overlay))


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


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("overlay", "what"),
    [
        ({"containers": []}, "may have 'metadata'"),
        ({"metadata": {"name": "x"}}, "(with 'labels' and 'annotations')"),
        *(
            (overlay, f"{place} must be a mapping, not nothing")
            for overlay, place in (
                ({"metadata": None}, "pod_overlay.metadata"),
                ({"spec": None}, "pod_overlay.spec"),
                ({"metadata": {"labels": None}}, "pod_overlay.metadata.labels"),
                ({"metadata": {"annotations": None}}, "pod_overlay.metadata.annotations"),
            )
        ),
        ({"metadata": "hunter2"}, "pod_overlay.metadata must be a mapping, not text"),
        ({"metadata": {"labels": {"a": None}}}, "must be at most 63 letters"),
        ({"metadata": {"annotations": {"a": 1}}}, "annotations.a must be text, not a whole number"),
        (
            {
                "metadata": {
                    "annotations": {"batch.kubernetes.io/job-index-ignored-failure-count": "5"}
                }
            },
            "may not set batch.kubernetes.io/job-index-ignored-failure-count",
        ),
        ({"metadata": {"labels": {"diloco.dev/run-id": "x"}}}, "may not set"),
        ({"spec": {"containers": {"name": "replica"}}}, "must be a list"),
        (
            {"spec": {"containers": [{"image": "x"}]}},
            "containers[0].name must be text, not nothing",
        ),
        ({"spec": {"containers": None}}, "may not set or remove name of the container"),
        ({"spec": {"volumes": ["data"]}}, "volumes[0] must be a mapping, not text"),
        ({"spec": {"terminationGracePeriodSeconds": "30"}}, "must be a whole number, not text"),
        (replica(command=["bash"]), "command= of the executor"),
        (replica(args=["x"]), "may not set or remove args"),
        (replica(terminationMessagePath="/tmp/x"), "terminationMessagePath"),
        (replica(restartPolicy="Always"), "restartPolicy"),
        (replica(restartPolicyRules=[{"action": "Restart"}]), "restartPolicyRules"),
        ({"metadata": {"labels": {"kueue.x-k8s.io/queue-name": "q"}}}, "or queue="),
        (replica(env=[{"name": "A", "value": "2"}]), "use env="),
        (replica(env=[{"name": "DILOCO_SPEC_0", "value": ""}]), "DILOCO_SPEC_0"),
        (replica(env=None), "changes the variable"),
        *(
            (replica(env=[{"name": name, "value": "0"}]), f"{name} may not be set")
            for name in ("JOB_COMPLETION_INDEX", "DILOCO_SPEC_5", "REPLICA_RANK", "DILOCO_ATTEMPT")
        ),
        ({"spec": {"volumes": [{"name": "x", "emptyDir": {1, 2}}]}}, "is a builtins.set"),
        *(
            (part(value), "must be a list, not ")
            for value in ({"name": "s"}, "hunter2", 5)
            for part in (
                lambda value: {"spec": {"initContainers": value}},
                lambda value: {"spec": {"volumes": value}},
                lambda value: replica(env=value),
                lambda value: {"spec": {"initContainers": [{"name": "i", "envFrom": value}]}},
            )
        ),
        ({"spec": {"env": ["A=1"]}}, "pod_overlay.spec.env[0] must be a mapping, not text"),
        (replica(resources=5), "resources must be a mapping, not a whole number"),
        (replica(resources={"limits": "x"}), "resources.limits must be a mapping, not text"),
        (replica(resources={"claims": ["x"]}), "claims[0] must be a mapping, not text"),
        *(
            (replica(env=[{"name": name, "value": "0"}]), "env[0].name must be text, not ")
            for name in (5, ["a"], None)
        ),
        ({"spec": {"containers": [{"name": 5}]}}, "containers[0].name must be text"),
        ({"spec": {5: 1}}, "has the key 5 of type int"),
        (replica(x=float("nan")), "x is nan"),
        (replica(x="\ud800"), "half of a surrogate pair"),
    ],
)
def test_overlays_that_are_refused(template, overlay, what):
    with pytest.raises(InvalidRequestError, match=re.escape(what)):
        apply_overlay(template, overlay)


def nested(levels):
    value = {}
    for _ in range(levels):
        value = {"a": value}
    return value


def endless():
    value = {}
    value["a"] = value
    return value


@pytest.mark.sampled
@pytest.mark.parametrize("value", [nested(300), nested(100_000), endless()])
def test_what_has_no_end_is_not_read_to_it(options_for, value):
    with pytest.raises(InvalidRequestError, match=r"levels|itself"):
        options_for(pod_overlay={"spec": {"affinity": value}})


def test_an_overlay_that_is_changed_later_stays_as_it_was(options_for):
    labels = {"team": "vision"}
    options = options_for(pod_overlay={"metadata": {"labels": labels}})
    labels["diloco.dev/run-id"] = "other"
    assert options.pod_overlay["metadata"]["labels"] == {"team": "vision"}


def test_other_containers_may_have_what_the_replicas_may_not(template):
    side = {"name": "side", "image": "x", "envFrom": [{"prefix": "DILOCO_"}], "resources": None}
    assert apply_overlay(template, {"spec": {"initContainers": [side]}})


def test_the_secrets_of_a_damaged_item_are_not_shown(options_for, request_for):
    for item in ("DB_PASS hunter2Zq", {"called": "DB_PASSWORD", "value": "hunter2Zq"}):
        with pytest.raises(InvalidRequestError, match=r"env\[0\]") as error:
            job_manifest(request_for(), options_for(pod_overlay=replica(env=[item])))
        assert "hunter2" not in str(error.value)


def test_a_secret_in_a_key_is_not_shown(options_for):
    with pytest.raises(InvalidRequestError) as error:
        options_for(pod_overlay={f"postgres://admin:{'hunter2' * 20}@db/x": object()})
    assert "hunter2" not in str(error.value)


@pytest.mark.processes
def test_variables_from_elsewhere_are_no_pieces_of_the_spec(tmp_path):
    """Whatever a ConfigMap of an overlay holds, even one named like a spec's pieces."""
    foreign = {"DILOCO_SPEC_0": "e30=", "DILOCO_SPEC_1": "eA==", "JOB_COMPLETION_INDEX": "0"}
    foreign |= {"DILOCO_SPEC_9": "eA==", "DILOCO_SPEC_x": "eA=="}
    overlay = replica(envFrom=[{"configMapRef": {"name": "foreign"}}])
    with (
        KubernetesProcesses(tls=False) as cluster,
        EKSExecutor(
            "any",
            kubeconfig=cluster.kubeconfig(tmp_path / "kubeconfig"),
            cpu_request="1",
            memory_request="1Gi",
            backoff=Backoff(first=0.1, cap=0.5),
            pod_overlay=overlay,
        ) as executor,
    ):
        body = {"metadata": {"name": "foreign", "namespace": "default"}, "data": foreign}
        with config.new_client_from_config(str(tmp_path / "kubeconfig")) as api:
            client.CoreV1Api(api).create_namespaced_config_map(namespace="default", body=body)
        handles = executor.launch_replicas(2, "json:loads", {"s": "[1]"})
        results = executor.collect(handles, timeout=PATIENCE)
    assert [(result["rank"], result["result"]) for result in results] == [(0, [1]), (1, [1])]
