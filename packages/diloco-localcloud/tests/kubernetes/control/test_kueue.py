"""Queued Jobs, as a launcher sees them under Kueue."""

from __future__ import annotations

import pytest
from kubernetes import client

from diloco_localcloud import KubernetesStandIn

WHERE = {"group": "kueue.x-k8s.io", "version": "v1beta1", "namespace": "ns", "plural": "workloads"}


@pytest.fixture
def stand_in():
    with KubernetesStandIn(namespace="ns", kueue=True) as running:
        yield running


@pytest.fixture
def queued(clients):
    body = clients.indexed("run", 2)
    body["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "team"}
    made = clients.create(body)
    clients.world.settle()
    return made


def workload(clients):
    uid = clients.job("run")["metadata"]["uid"]
    label = f"kueue.x-k8s.io/job-uid={uid}"
    found = client.CustomObjectsApi(clients.api).list_namespaced_custom_object(
        **WHERE, label_selector=label
    )
    (one,) = clients.plain(found)["items"]
    return one


def true(thing):
    return {
        (entry["type"], entry["reason"])
        for entry in thing["status"]["conditions"]
        if entry["status"] == "True"
    }


def test_queued_then_admitted(clients, queued):
    assert queued["spec"]["suspend"] is True
    assert clients.conditions("run") == [("Suspended", "JobSuspended")]
    assert clients.pods() == []
    assert (workload(clients)["spec"]["queueName"], true(workload(clients))) == ("team", set())
    clients.patch("run", {"spec": {"suspend": False}})  # undone
    clients.world.settle()
    assert clients.pods() == []
    clients.world.admit("run", "ns")
    clients.world.settle()
    assert len(clients.pods()) == 2
    assert ("Admitted", "Admitted") in true(workload(clients))


def test_suspend_is_undone_while_admitted(clients, queued):
    clients.world.admit("run", "ns")
    clients.world.settle()
    clients.patch("run", {"spec": {"suspend": True}})
    clients.world.settle()
    assert clients.job("run")["spec"]["suspend"] is False
    assert clients.job("run")["status"]["active"] == 2


def test_preempted_and_admitted_again(clients, queued):
    clients.world.admit("run", "ns")
    clients.world.settle()
    first = {pod["metadata"]["name"] for pod in clients.pods()}
    clients.world.preempt("run", "ns")
    clients.world.settle()
    assert clients.conditions("run") == [("Suspended", "JobSuspended")]
    assert true(workload(clients)) == {("Evicted", "Preempted")}
    clients.world.admit("run", "ns")
    clients.world.settle()
    second = {pod["metadata"]["name"] for pod in clients.pods()}
    assert len(second) == 2
    assert not first & second
    assert ("Evicted", "Preempted") not in true(workload(clients))


@pytest.mark.parametrize("admitted", [True, False])
def test_deactivated_is_stopped_for_good(clients, queued, admitted):
    if admitted:
        clients.world.admit("run", "ns")
        clients.world.settle()
    name = workload(clients)["metadata"]["name"]
    custom = client.CustomObjectsApi(clients.api)
    custom.patch_namespaced_custom_object(**WHERE, name=name, body={"spec": {"active": False}})
    clients.world.settle()
    assert clients.pods() == []
    assert true(workload(clients)) == {("Evicted", "Deactivated")}
    assert clients.conditions("run") == [("Suspended", "JobSuspended")]
    with pytest.raises(LookupError, match="no active Workload"):
        clients.world.admit("run", "ns")


def test_finished_and_deleted(clients, queued):
    clients.world.admit("run", "ns")
    clients.world.settle()
    for pod in clients.world.pods("run", "ns"):
        pod.succeed()
    clients.world.settle()
    assert ("Finished", "JobFinished") in true(workload(clients))
    clients.delete("run", propagation_policy="Background")
    clients.world.settle()
    everything = clients.plain(
        client.CustomObjectsApi(clients.api).list_namespaced_custom_object(**WHERE)
    )
    assert everything["items"] == []


def test_jobs_without_a_queue_are_left_alone(clients):
    clients.running(clients.indexed("run", 2))
    assert clients.job("run")["status"]["ready"] == 2
    with pytest.raises(LookupError, match="is not admitted"):
        clients.world.preempt("run", "ns")


def test_without_kueue_there_is_none(connect):
    with KubernetesStandIn(namespace="ns") as stand_in:
        custom = client.CustomObjectsApi(connect(stand_in.kubeconfig_dict()))
        with pytest.raises(client.ApiException) as caught:
            custom.list_namespaced_custom_object(**WHERE)
        assert caught.value.status == 404
        with pytest.raises(LookupError, match="there is no Job"):
            stand_in.world.job("run")
        with pytest.raises(LookupError, match="there is no Kueue"):
            stand_in.world.admit("run")
