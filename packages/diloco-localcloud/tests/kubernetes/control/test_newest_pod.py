"""Pods too fast for their times to tell them apart, and pods that fail before they run."""

from __future__ import annotations


def failures(pod):
    return pod.json["metadata"]["annotations"]["batch.kubernetes.io/job-index-failure-count"]


def test_the_newest_pod_of_one_second(clients):
    world, jobs = clients.world, clients.stand_in._jobs
    clients.running(clients.indexed("run", 1, backoffLimitPerIndex=9))
    jobs.backoff_seconds = jobs.batch_seconds = 0.001
    for number in range(1, 6):
        old = world.pod("run", 0, "ns")
        old.fail(1)
        world.advance(1.2)
        assert failures(world.pod("run", 0, "ns")) == str(number)
        clients.core.patch_namespaced_pod(
            name=old.name, namespace="ns", body={"metadata": {"labels": {"touched": "yes"}}}
        )
        assert world.pod("run", 0, "ns").name != old.name


def test_a_pod_that_failed_before_it_ran_is_replaced_too(clients):
    world = clients.world
    clients.create(clients.indexed("run", 1, backoffLimitPerIndex=3))
    world.settle()
    world.pod("run", 0, "ns").delete()
    world.advance(7)
    assert failures(world.pod("run", 0, "ns")) == "0"
    world.advance(5)
    assert failures(world.pod("run", 0, "ns")) == "1"
