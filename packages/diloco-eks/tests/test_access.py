"""Credentials, clusters and rights."""

import json
import os
import subprocess
import sys
from importlib.resources import files

import pytest

from diloco_eks import EKSExecutor
from diloco_localcloud import KubernetesStandIn
from diloco_protocol import (
    AuthError,
    BackendError,
    ForbiddenError,
    InvalidRequestError,
    ReplicaHandle,
    UnavailableError,
)


def role():
    import yaml  # comes with the client

    return yaml.safe_load((files("diloco_eks") / "role.yaml").read_text(encoding="utf-8"))["rules"]


def test_the_role_is_enough_for_everything(bench, report):
    bench.stand_in.access.only(role())
    executor = bench.executor()
    run = bench.launch(2, executor=executor)
    run.pod(0).log("done\n")
    run.pod(0).succeed(report(1)[0])
    bench.world.settle()
    assert executor.stream_logs(run.handles[0]) == "done"
    assert executor.attach("run-1") == run.handles
    assert executor.list_runs() == ["run-1"]
    executor.cancel(run.handles[0])
    results = executor.collect(run.handles, timeout=60)
    assert [result["status"] for result in results] == ["succeeded", "cancelled"]
    executor.purge(run.handles[0])
    used = {(call.verb, call.resource) for call in bench.stand_in.calls}
    assert ("get", "jobs/status") not in used
    granted = {
        (verb, resource)
        for rule in role()
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    kueue_and_check = {
        ("create", "pods"),
        ("list", "events"),
        ("list", "workloads"),
        ("patch", "workloads"),
        ("get", "localqueues"),
        ("list", "resourcequotas"),
        ("get", "serviceaccounts"),
    }
    assert used == granted - kueue_and_check


def test_no_right_of_the_role_is_idle(a_bench, tmp_path):
    """Whatever a launcher does is allowed, and what is allowed is done by some verb."""
    with KubernetesStandIn(kueue=True) as stand_in:
        bench = a_bench(stand_in, tmp_path)
        bench.world.add_queue("gpus")
        stand_in.access.only(role())
        queued, plain = bench.executor(queue="gpus"), bench.executor(service_account_name="default")
        assert [each.message for each in queued.check(1) if not each.ok] == []
        run = bench.launch(1, executor=queued, start=False, run_id="queued")
        queued.cancel(run.handles[0])
        run = bench.launch(1, executor=plain, start=False)
        assert bench.launch(1, executor=plain, start=False).handles == run.handles
        bench.world.advance(60)
        plain.describe(run.handles[0])
        run.pod(0).start()
        plain.stream_logs(run.handles[0])
        plain.cancel(run.handles[0])
        bench.world.settle()
        for run_id in plain.list_runs():
            plain.purge(plain.attach(run_id)[0])
        used = {(call.verb, call.resource) for call in stand_in.calls}
        refused = [call for call in stand_in.calls if call.status == 403]
        bench.close()
    granted = {
        (verb, resource)
        for rule in role()
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    assert granted - used == set()
    assert refused == []


REFUSALS = {
    "create jobs": lambda e, h: e.launch_replicas(1, "a:b"),
    "get jobs": lambda e, h: e.poll(h),
    "list pods": lambda e, h: e.collect([h], timeout=5),
    "patch jobs": lambda e, h: e.cancel(h),
    "list jobs": lambda e, h: e.list_runs(),
    "get pods/log": lambda e, h: e.stream_logs(h),
}


@pytest.mark.sampled
@pytest.mark.parametrize("right", REFUSALS)
def test_every_refusal_is_named(bench, right):
    run = bench.launch(1)
    verb, resource = right.split()
    bench.stand_in.access.deny(verb, resource)
    with pytest.raises(ForbiddenError, match=rf"cannot {verb} resource \"{resource}\".*Role"):
        REFUSALS[right](run.executor, run.handles[0])


def test_a_purge_that_is_refused(bench):
    run = bench.launch(1)
    run.executor.cancel(run.handles[0])
    bench.world.settle()
    bench.stand_in.access.deny("delete", "jobs")
    with pytest.raises(ForbiddenError, match="delete"):
        run.executor.purge(run.handles[0])
    assert run.states() == ["cancelled"]


def test_a_token_that_has_run_out_is_renewed(bench):
    run = bench.launch(1)
    bench.stand_in.calls.clear()
    bench.stand_in.faults.add("unauthorized", times=1)
    assert run.states() == ["running"]
    assert [call.status for call in bench.stand_in.calls] == [401, 200, 200]


def test_a_token_that_stays_refused(bench):
    run = bench.launch(1)
    bench.stand_in.faults.add("unauthorized", times=None)
    with pytest.raises(AuthError, match="again after they were loaded anew"):
        run.executor.poll(run.handles[0])


def test_the_token_is_read_anew_from_the_file(bench):
    run = bench.launch(1)
    config = json.loads(bench.kubeconfig.read_text())
    bench.stand_in.access.token = "renewed"
    config["users"][0]["user"]["token"] = "renewed"
    bench.kubeconfig.write_text(json.dumps(config))
    assert run.states() == ["running"]


def test_clients_of_the_callers_are_used_as_they_are(bench):
    from kubernetes import client, config

    api = config.new_client_from_config(str(bench.kubeconfig))
    executor = bench.executor(
        batch_api=client.BatchV1Api(api), core_api=client.CoreV1Api(api), kubeconfig=None
    )
    run = bench.launch(1, executor=executor)
    assert run.states() == ["running"]
    assert run.states(bench.executor(batch_api=client.BatchV1Api(api), kubeconfig=None)) == [
        "running"
    ]
    bench.stand_in.faults.add("unauthorized", times=None)
    with pytest.raises(AuthError):
        executor.poll(run.handles[0])
    executor.close()
    bench.stand_in.faults.clear()
    assert run.states() == ["running"]
    api.rest_client.pool_manager.clear()


def test_half_of_the_callers_clients_is_refused():
    """The other half would be made from the kubeconfig, and might speak to another cluster."""
    from kubernetes import client

    with pytest.raises(InvalidRequestError, match="core_api= is used together with batch_api="):
        EKSExecutor("image", core_api=client.CoreV1Api())


@pytest.mark.parametrize("option", ["context", "kubeconfig"])
def test_a_kubeconfig_beside_the_callers_clients_is_refused(option):
    from kubernetes import client

    with pytest.raises(InvalidRequestError, match=f"{option}= has no effect: "):
        EKSExecutor("image", batch_api=client.BatchV1Api(), **{option: "one"})


@pytest.mark.parametrize("name", ["BatchV1Api", "CoreV1Api"])
def test_another_class_in_the_place_of_the_callers_clients_is_refused(name):
    from kubernetes import client

    given = getattr(client, name)
    option = {"BatchV1Api": "core_api", "CoreV1Api": "batch_api"}[name]
    for wrong in (given(), given):
        with pytest.raises(InvalidRequestError, match=f"{option} must be an API of the package"):
            EKSExecutor("image", **{option: wrong})


@pytest.mark.parametrize(
    ("content", "values", "what"),
    [
        (None, {}, "no cluster can be read from .*none.*update-kubeconfig"),
        ("{", {}, "none cannot be read, line 1"),
        ("[]", {}, "none, its content must be a mapping, not a list"),
        ("{}", {}, "no cluster can be read"),
        ("same", {"context": "staging"}, "context 'staging'"),
    ],
)
def test_no_configuration(bench, tmp_path, content, values, what):
    path = tmp_path / "none"
    if content is not None:
        path.write_text(bench.kubeconfig.read_text() if content == "same" else content)
    executor = bench.executor(kubeconfig=path, **values)
    for verb in (executor.list_runs, lambda: executor.launch_replicas(1, "a:b")):
        with pytest.raises(AuthError, match=what):
            verb()
    executor = bench.executor(kubeconfig=path, namespace="default", **values)
    assert executor.plan(1, "a:b").requests  # a plan needs no cluster


def test_the_context_chooses_the_cluster(bench, tmp_path):
    with KubernetesStandIn() as other:
        one, two = bench.stand_in.kubeconfig_dict(), other.kubeconfig_dict()
        both = {
            **one,
            "clusters": [
                {**one["clusters"][0], "name": "one"},
                {**two["clusters"][0], "name": "two"},
            ],
            "users": [{**one["users"][0], "name": "one"}, {**two["users"][0], "name": "two"}],
            "contexts": [
                {"name": name, "context": {"cluster": name, "user": name}}
                for name in ("one", "two")
            ],
            "current-context": "two",
        }
        path = tmp_path / "both"
        path.write_text(json.dumps(both))
        run = bench.launch(1, executor=bench.executor(kubeconfig=path, context="one"))
        assert bench.stand_in.calls.count("create", "jobs") == 1
        elsewhere = bench.executor(kubeconfig=path)
        assert elsewhere.list_runs() == []
        # No record there says nothing about this run, and a cancel there would end nothing.
        for verb in (
            elsewhere.poll,
            elsewhere.cancel,
            elsewhere.stream_logs,
            lambda h: elsewhere.collect([h], timeout=1),
        ):
            with pytest.raises(InvalidRequestError, match=r"belongs to the cluster at .*context="):
                verb(run.handles[0])
        assert run.states() == ["running"]
        elsewhere.close()


def test_the_same_cluster_by_another_address(bench):
    run = bench.launch(1)
    metadata = {**run.handles[0].metadata, "server": "https://10.100.0.1"}
    handle = ReplicaHandle(0, "eks", metadata, run_id="run-1", world_size=1)
    assert run.executor.poll(handle) == "running"
    run.executor.cancel(handle)
    bench.world.settle()
    assert run.executor.poll(handle) == "cancelled"


def test_a_certificate_that_is_not_trusted(bench, tmp_path):
    config = bench.stand_in.kubeconfig_dict()
    if not config["clusters"][0]["cluster"]["server"].startswith("https"):
        pytest.skip("the stand-in has no TLS here: there is no openssl command")
    del config["clusters"][0]["cluster"][
        "certificate-authority-data"
    ]  # then the public ones are trusted
    path = tmp_path / "untrusted"
    path.write_text(json.dumps(config))
    with pytest.raises(UnavailableError, match="CERTIFICATE_VERIFY") as caught:
        bench.executor(kubeconfig=path).list_runs()
    assert not caught.value.retryable


@pytest.mark.processes
def test_the_import_is_light_and_a_missing_client_is_named(tmp_path):
    (tmp_path / "kubernetes.py").write_text("raise ImportError('not here')")
    code = (
        "import sys, diloco_eks; assert 'kubernetes' not in sys.modules\n"
        "executor = diloco_eks.EKSExecutor('image'); executor.plan(1, 'a:b')\n"
        "assert 'kubernetes' not in sys.modules\n"
        "try: executor.list_runs()\n"
        "except ImportError as error: print(type(error).__name__, error)"
    )
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.stdout.startswith(
        "MissingDependencyError EKSExecutor needs the package kubernetes: pip install"
    ), done


def test_times_that_are_none(bench):
    for name in ("request_timeout", "retry_timeout"):
        with pytest.raises(InvalidRequestError, match=name):
            EKSExecutor("image", **{name: -1})


def test_no_right_to_the_status_subresource_is_needed(bench):
    """Polling and cancelling need no RBAC on jobs/status."""
    for verb in ("get", "patch", "update"):
        bench.stand_in.access.deny(verb, "jobs/status")
    run = bench.launch(1)
    assert run.states() == ["running"]
    run.executor.cancel(run.handles[0])


def test_the_global_configuration_is_left_alone_and_the_pod_can_be_shaped(bench, tmp_path):
    """A context can be chosen; pull secrets, volumes and the like are within reach."""
    from kubernetes import client

    before = client.Configuration.get_default_copy()
    overlay = {
        "spec": {
            "imagePullSecrets": [{"name": "pull"}],
            "priorityClassName": "high",
            "securityContext": {"runAsUser": 1000},
            "automountServiceAccountToken": True,
            "volumes": [{"name": "data", "emptyDir": {}}],
        }
    }
    high = {"metadata": {"name": "high"}, "value": 100}
    bench.create("/apis/scheduling.k8s.io/v1/priorityclasses", high)
    context = bench.stand_in.kubeconfig_dict()["current-context"]
    run = bench.launch(1, executor=bench.executor(context=context, pod_overlay=overlay))
    assert client.Configuration.get_default_copy().host == before.host
    pod = run.pod(0).json["spec"]
    assert pod["imagePullSecrets"] == [{"name": "pull"}]
    assert pod["securityContext"]["runAsUser"] == 1000
    assert pod["automountServiceAccountToken"] is True
    with pytest.raises(BackendError) as caught:
        EKSExecutor("image", kubeconfig=tmp_path / "none").list_runs()
    assert not isinstance(caught.value, UnavailableError)
