"""The Job of a run: what is in it, and that a cluster would take it."""

import json

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from diloco_eks._request import _names as names
from diloco_eks._request._manifest import job_manifest
from diloco_protocol import InvalidRequestError, spec_from_environment


def pod_of(manifest):
    return manifest["spec"]["template"]["spec"]


def container_of(manifest):
    (container,) = [c for c in pod_of(manifest)["containers"] if c["name"] == "replica"]
    return container


def test_one_indexed_job(options_for, request_for):
    manifest = job_manifest(request_for(4, timeout=100, max_restarts=2), options_for())
    spec = manifest["spec"]
    assert (spec["completions"], spec["parallelism"], spec["completionMode"]) == (4, 4, "Indexed")
    assert (spec["backoffLimitPerIndex"], spec["maxFailedIndexes"]) == (2, 0)
    assert "backoffLimit" not in spec
    assert spec["podReplacementPolicy"] == "Failed"
    disrupted, replaced = spec["podFailurePolicy"]["rules"]
    assert disrupted == {
        "action": "Ignore",
        "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
    }
    assert replaced == {
        "action": "FailIndex",
        "onExitCodes": {"containerName": "replica", "operator": "In", "values": [79]},
    }
    assert spec["ttlSecondsAfterFinished"] == 3600
    assert spec["activeDeadlineSeconds"] == 3600 + 3 * 100
    assert pod_of(manifest)["restartPolicy"] == "Never"
    assert spec["template"]["metadata"]["annotations"] == {"karpenter.sh/do-not-disrupt": "true"}


def test_elastic_runs_survive_a_loss(options_for, request_for):
    assert (
        "maxFailedIndexes"
        not in job_manifest(request_for(), options_for(on_replica_failure="continue"))["spec"]
    )


def test_it_can_be_found_again(options_for, request_for):
    manifest = job_manifest(
        request_for(2, rank_offset=3, world_size=9, labels={"team": "vision"}),
        options_for(
            owner="ada", labels={"stage": "test"}, annotations={"example.com/note": "any text: ü"}
        ),
    )
    labels, annotations = manifest["metadata"]["labels"], manifest["metadata"]["annotations"]
    assert (labels[names.RUN], labels[names.MANAGED_BY], labels[names.OWNER]) == (
        "run-1",
        "diloco-eks",
        "ada",
    )
    assert (labels["team"], labels["stage"]) == ("vision", "test")
    assert manifest["spec"]["template"]["metadata"]["labels"] == labels
    assert (annotations[names.WORLD_SIZE], annotations[names.FIRST_RANK]) == ("9", "3")
    assert annotations["example.com/note"] == "any text: ü"


def test_the_container(options_for, request_for):
    manifest = job_manifest(
        request_for(kwargs={"a": [None, {"b": 1.5}], "rendezvous_uri": "s3://b/r"}), options_for()
    )
    container = container_of(manifest)
    assert container["command"] == ["python", "-m", "diloco_protocol.runner"]
    assert container["terminationMessagePolicy"] == "FallbackToLogsOnError"
    assert (
        container["resources"]["requests"]
        == container["resources"]["limits"]
        == {"cpu": "4", "memory": "16Gi"}
    )
    spec = spec_from_environment({e["name"]: e["value"] for e in container["env"] if "value" in e})
    assert spec.kwargs == {"a": [None, {"b": 1.5}], "rendezvous_uri": "s3://b/r"}
    assert (spec.rank, spec.world_size, spec.run_id) == (0, 4, "run-1")
    assert pod_of(manifest)["terminationGracePeriodSeconds"] == 15


def test_gpus(options_for, request_for):
    manifest = job_manifest(request_for(gpu="A100:8", cpu=90, memory="1Ti"), options_for(efa=4))
    limits = container_of(manifest)["resources"]["limits"]
    assert limits == {
        "cpu": "90",
        "memory": "1Ti",
        "nvidia.com/gpu": "8",
        "vpc.amazonaws.com/efa": "4",
    }
    assert container_of(manifest)["resources"]["requests"] == limits
    assert {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in pod_of(
        manifest
    )["tolerations"]
    assert (
        len(
            pod_of(manifest)["affinity"]["nodeAffinity"][
                "requiredDuringSchedulingIgnoredDuringExecution"
            ]["nodeSelectorTerms"]
        )
        == 4
    )


@pytest.mark.parametrize(
    ("gpu", "options", "volumes"),
    [
        ("A100:8", {}, [{"name": "shm", "emptyDir": {"medium": "Memory"}}]),
        ("A100", {}, []),
        (None, {}, []),
        (
            "A100:8",
            {"shm_size": "8Gi"},
            [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}}],
        ),
        (
            "A100:8",
            {"mounts": {"/dev/shm": "pvc/own"}},
            [{"name": "mount-0", "persistentVolumeClaim": {"claimName": "own"}}],
        ),
    ],
)
def test_processes_of_several_gpus_have_shared_memory(
    options_for, request_for, gpu, options, volumes
):
    pod = pod_of(job_manifest(request_for(gpu=gpu), options_for(**options)))
    assert pod.get("volumes", []) == volumes


def test_the_gpus_toleration_is_added_to_the_callers(options_for, request_for):
    own = {"key": "team", "operator": "Equal", "value": "vision", "effect": "NoSchedule"}
    tolerations = pod_of(job_manifest(request_for(gpu="L4"), options_for(tolerations=[own])))[
        "tolerations"
    ]
    assert tolerations == [
        own,
        {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"},
    ]
    assert pod_of(job_manifest(request_for(), options_for(tolerations=[own])))["tolerations"] == [
        own
    ]


def test_a_runtime_class_with_gpus_warns(options_for, request_for):
    with pytest.warns(UserWarning, match="gvisor"):
        job_manifest(request_for(gpu="L4"), options_for(runtime_class_name="gvisor"))
    assert (
        pod_of(job_manifest(request_for(), options_for(runtime_class_name="gvisor")))[
            "runtimeClassName"
        ]
        == "gvisor"
    )


def test_queue_storage_and_shared_memory(options_for, request_for):
    manifest = job_manifest(
        request_for(), options_for(queue="gpu-queue", ephemeral_storage="100Gi", shm_size="8Gi")
    )
    assert manifest["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpu-queue"
    assert "suspend" not in manifest["spec"]
    assert container_of(manifest)["resources"]["limits"]["ephemeral-storage"] == "100Gi"
    assert container_of(manifest)["volumeMounts"] == [{"name": "shm", "mountPath": "/dev/shm"}]
    assert pod_of(manifest)["volumes"][0]["emptyDir"] == {"medium": "Memory", "sizeLimit": "8Gi"}


@example(timeout=1e306, restarts=1000, pending=0.0)
@given(st.floats(0.01, 1e9) | st.none(), st.integers(0, 1000), st.floats(0, 1e9) | st.none())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_deadline_is_a_backstop(options_for, request_for, timeout, restarts, pending):
    spec = job_manifest(
        request_for(timeout=timeout, max_restarts=restarts), options_for(pending_timeout=pending)
    )["spec"]
    if timeout is None or pending is None:
        assert "activeDeadlineSeconds" not in spec
        return
    deadline, needed = spec["activeDeadlineSeconds"], pending + timeout * (1 + restarts)
    assert type(deadline) is int
    assert deadline == 2**31 - 1 if needed > 2**31 - 1 else needed <= deadline < needed + 1


def test_equal_launches_have_equal_manifests(options_for, request_for):
    one, two = (job_manifest(request_for(kwargs={"a": 1}), options_for()) for _ in range(2))
    assert json.dumps(one) == json.dumps(two)
    prints = {
        job_manifest(request, setting)["metadata"]["annotations"][names.FINGERPRINT]
        for request, setting in [
            (request_for(), options_for()),
            (request_for(kwargs={"a": 2}), options_for()),
            (request_for(5), options_for()),
            (request_for(env={"A": "1"}), options_for()),
            (request_for(), options_for(image="other:1")),
            (request_for(timeout=7), options_for()),
        ]
    }
    assert len(prints) == 6


def test_arguments_that_no_cluster_keeps(options_for, request_for):
    env = {f"TABLE_{number}": "x" * 100_000 for number in range(9)}
    assert job_manifest(request_for(env=env), options_for())
    with pytest.raises(InvalidRequestError, match="put large arguments into the store"):
        job_manifest(request_for(env={**env, "MORE": "x" * 100_000}), options_for())


MANY = [
    ({}, {}),
    (
        {
            "gpu": "H100:8",
            "spot": True,
            "max_restarts": 3,
            "secrets": {"T": "a/b"},
            "labels": {"a": "b"},
        },
        {"queue": "q", "efa": 1},
    ),
    (
        {"gpu": "2", "spot": False, "timeout": 10.5},
        {"shm_size": "1Gi", "on_replica_failure": "continue"},
    ),
    (
        {"cpu": 0.5, "memory": "1e9"},
        {
            "service_account_name": "trainer",
            "node_selector": {"pool": "blue"},
            "tolerations": [{"key": "x", "operator": "Exists"}],
            "runtime_class_name": "kata",
            "ttl_seconds_after_finished": None,
            "pod_overlay": {
                "spec": {
                    "imagePullSecrets": [{"name": "pull"}],
                    "priorityClassName": "high",
                    "securityContext": {"runAsNonRoot": True, "runAsUser": 1000},
                    "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}],
                    "containers": [
                        {
                            "name": "replica",
                            "volumeMounts": [{"name": "data", "mountPath": "/data"}],
                        }
                    ],
                }
            },
        },
    ),
]


@pytest.mark.sampled
@pytest.mark.parametrize(("launch", "setting"), MANY)
@pytest.mark.parametrize("version", ["1.33", "1.35"])
def test_the_schemas_of_kubernetes_agree(options_for, request_for, launch, setting, version):
    validate = pytest.importorskip(
        "kubernetes_validate", reason="kubernetes-validate is not installed"
    )
    manifest = job_manifest(request_for(**launch), options_for(**setting))
    validate.validate(manifest, version, strict=True)


def test_the_schemas_can_disagree(options_for, request_for):
    validate = pytest.importorskip(
        "kubernetes_validate", reason="kubernetes-validate is not installed"
    )
    manifest = job_manifest(request_for(), options_for())
    manifest["spec"]["backoffLimitPerIndex"] = "0"
    with pytest.raises(validate.ValidationError):
        validate.validate(manifest, "1.33", strict=True)


@pytest.mark.parametrize("options", [{"command": ["a", "\udfff"]}])
def test_what_cannot_be_sent_is_refused_before_it_is(options_for, request_for, options):
    with pytest.raises(InvalidRequestError, match=r"cannot be (written as JSON|sent as text)"):
        job_manifest(request_for(), options_for(**options))
