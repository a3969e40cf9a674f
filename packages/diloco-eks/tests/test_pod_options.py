"""What a pod gets besides its container, and that a cluster takes it."""

import os
import sys

import pytest
from eks_lab import PATIENCE

from diloco_eks import EKSExecutor
from diloco_eks._request import _gpus as gpus
from diloco_localcloud import KubernetesProcesses
from diloco_protocol import Backoff, InvalidRequestError

RUN = {"matchLabels": {"diloco.dev/run-id": "run-1"}}


def planned(bench, gpu=None, spot=None, **options):
    (job,) = bench.executor(**options).plan(2, "a:b", run_id="run-1", gpu=gpu, spot=spot).requests
    pod = job["spec"]["template"]["spec"]
    return pod, pod["containers"][0]


def test_nothing_is_added_unasked(bench):
    pod, container = planned(bench)
    assert not pod.keys() & {
        "securityContext",
        "imagePullSecrets",
        "volumes",
        "nodeSelector",
        "affinity",
    }
    assert container["resources"]["limits"] == container["resources"]["requests"]


def test_restricted_pods_run_where_others_are_refused(bench):
    bench.label_namespace(enforce="restricted")
    bad = {each.subject for each in bench.executor().check(1) if each.ok is False}
    assert bad == {"pods"}
    executor = bench.executor(restricted=True, shm_size="1Gi", mounts={"/data": "pvc/data"})
    assert all(each.ok for each in executor.check(1))
    assert bench.launch(1, executor=executor).states() == ["running"]


def test_the_limit_of_the_cpu(bench):
    assert "cpu" not in planned(bench, cpu_limit=None)[1]["resources"]["limits"]
    assert planned(bench, cpu_limit="8")[1]["resources"]["limits"]["cpu"] == "8"
    with pytest.raises(InvalidRequestError, match="limit"):
        bench.launch(1, executor=bench.executor(cpu_limit="2"))
    assert bench.executor().list_runs() == []


def test_mounts_and_code(bench):
    mounts = {"/data": "pvc/fsx-claim:ro", "/conf": "configmap/conf", "/key": "secret/key"}
    pod, container = planned(bench, mounts=mounts, code="trainer", env={"PYTHONPATH": "/x"})
    assert pod["volumes"] == [
        {"name": "mount-0", "configMap": {"name": "conf"}},
        {"name": "mount-1", "persistentVolumeClaim": {"claimName": "fsx-claim"}},
        {"name": "mount-2", "configMap": {"name": "trainer"}},
        {"name": "mount-3", "secret": {"secretName": "key"}},
    ]
    assert container["volumeMounts"] == [
        {"name": "mount-0", "mountPath": "/conf"},
        {"name": "mount-1", "mountPath": "/data", "readOnly": True},
        {"name": "mount-2", "mountPath": "/diloco/code", "readOnly": True},
        {"name": "mount-3", "mountPath": "/key"},
    ]
    assert {"name": "PYTHONPATH", "value": "/diloco/code:/x"} in container["env"]


def test_a_secret_does_not_hide_the_code(bench):
    executor = bench.executor(code="trainer")
    with pytest.raises(InvalidRequestError, match="replicas would not find code='trainer'"):
        executor.plan(1, "a:b", secrets={"PYTHONPATH": "name/key"})


@pytest.mark.parametrize(
    ("path", "options"),
    [
        ("/dev/shm", {"shm_size": "1Gi"}),
        ("/diloco/code", {"code": "trainer"}),
        ("/tmp", {"restricted": True}),
    ],
)
def test_two_volumes_at_one_path_are_left_to_the_cluster_which_refuses_them(bench, path, options):
    _, container = planned(bench, mounts={path: "pvc/x"}, **options)
    assert [mount["mountPath"] for mount in container["volumeMounts"]].count(path) == 2
    planned(bench, mounts={path: "pvc/x"})


@pytest.mark.processes
def test_code_from_a_config_map_runs(tmp_path, a_bench):
    with KubernetesProcesses(tls=False) as cluster:
        bench = a_bench.__new__(a_bench)
        bench.stand_in = cluster
        data = {"my_trainer.py": "def train(n):\n    return n + 1\n"}
        path = "/api/v1/namespaces/default/configmaps"
        bench.create(path, {"metadata": {"name": "trainer"}, "data": data})
        with EKSExecutor(
            "any",
            kubeconfig=cluster.kubeconfig(tmp_path / "kubeconfig"),
            cpu_request="1",
            memory_request="1Gi",
            code="trainer",
            env={"PYTHONPATH": os.pathsep.join(sys.path)},
            backoff=Backoff(first=0.1, cap=0.5),
        ) as executor:
            handles = executor.launch_replicas(1, "my_trainer:train", {"n": 41})
            (result,) = executor.collect(handles, timeout=PATIENCE)
    assert result["result"] == 42, result["error"]


def test_topology(bench):
    pod, _ = planned(bench, topology="one_zone")
    (term,) = pod["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert term == {"topologyKey": "topology.kubernetes.io/zone", "labelSelector": RUN}
    for topology, key in (
        ("zones", "topology.kubernetes.io/zone"),
        ("nodes", "kubernetes.io/hostname"),
    ):
        pod, _ = planned(bench, topology=f"spread_{topology}")
        (constraint,) = pod["topologySpreadConstraints"]
        assert (constraint["topologyKey"], constraint["labelSelector"]) == (key, RUN)
    assert bench.launch(2, executor=bench.executor(topology="one_zone")).states() == ["running"] * 2


def test_reservations(bench):
    def terms(**options):
        pod, _ = planned(bench, **options)
        node = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        return [
            {each["key"]: each["values"] for each in term["matchExpressions"]}
            for term in node["nodeSelectorTerms"]
        ]

    assert terms(capacity_reservation="cr-0abc") == [{gpus.RESERVATION: ["cr-0abc"]}]
    assert terms(capacity_reservation="block") == [
        {gpus.RESERVATION_TYPE: ["capacity-block"]},
        {gpus.NODE_GROUP_CAPACITY: ["CAPACITY_BLOCK"]},
    ]
    with_gpu = terms(capacity_reservation="cr-0abc", gpu="H100:8")
    assert all(term[gpus.RESERVATION] == ["cr-0abc"] for term in with_gpu)
    assert len(with_gpu) == 4
    assert terms(capacity_reservation="cr-0abc", spot=False) == terms(
        capacity_reservation="cr-0abc"
    )
    with pytest.raises(InvalidRequestError, match="reserved capacity is never spot"):
        terms(capacity_reservation="cr-0abc", spot=True)


def test_names_of_things(bench):
    pod, _ = planned(bench, image_pull_secrets=["one", "two"], priority_class_name="high")
    assert pod["imagePullSecrets"] == [{"name": "one"}, {"name": "two"}]
    assert pod["priorityClassName"] == "high"


def test_trainium_has_a_resource_of_its_own(bench):
    pod, container = planned(bench, gpu="Trainium2:16")
    assert container["resources"]["limits"]["aws.amazon.com/neuron"] == "16"
    assert "nvidia.com/gpu" not in container["resources"]["limits"]
    assert {"key": "aws.amazon.com/neuron", "operator": "Exists", "effect": "NoSchedule"} in pod[
        "tolerations"
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mounts": {"data": "pvc/x"}}, "absolute path"),
        ({"mounts": {"/": "pvc/x"}}, "absolute path"),
        ({"mounts": {"/a/../b": "pvc/x"}}, "absolute path"),
        ({"mounts": {"/data/": "pvc/x"}}, "absolute path"),
        ({"mounts": {"/a:b": "pvc/x"}}, "absolute path"),
        ({"mounts": {"/data": "x"}}, r"must be 'pvc/NAME'"),
        ({"mounts": {"/data": "pvc/X"}}, "lower-case"),
        ({"mounts": {"/data": "hostpath/x"}}, r"must be 'pvc/NAME'"),
        ({"topology": "ring"}, "one_zone, spread_zones, spread_nodes"),
        ({"capacity_reservation": "mine"}, "id of a capacity reservation"),
        ({"restricted": 1}, "True or False"),
        ({"cpu_limit": "none"}, "cpu_limit must be a quantity of CPUs"),
        ({"image_pull_secrets": "one"}, "image_pull_secrets"),
        ({"image_pull_secrets": ["A"]}, "lower-case"),
        ({"code": "trainer.py/x"}, "code must be lower-case letters"),
        ({"priority_class_name": ""}, "priority_class_name must be"),
    ],
)
def test_what_is_refused(options, message):
    with pytest.raises(InvalidRequestError, match=message):
        EKSExecutor("image", **options)
