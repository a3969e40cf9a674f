"""What a real cluster (Kubernetes 1.36.2, containerd 1.6) does, which a better one would not."""

from __future__ import annotations

import json

import pytest
from kubernetes import watch

from diloco_localcloud import KubernetesStandIn
from diloco_localcloud._server import _timeline

DISRUPTED = {
    "rules": [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    ]
}


def seconds(text):
    return _timeline.seconds(text)


class TestTheLogOfAPodWhoseContainerIsGone:
    def evicted(self, clients):
        clients.running(clients.indexed("run", 1, podFailurePolicy=DISRUPTED, backoffLimit=0))
        pod = clients.world.pod("run", 0, "ns")
        pod.log("what it wrote\n")
        pod.on_term(143, after=0.2)
        pod.evict()
        clients.world.advance(3.0)
        return pod

    def test_it_is_the_kubelets_words(self, clients):
        """Evicted, ended, held by the finalizer until replaced: 200, but without times."""
        pod = self.evicted(clients)
        status = pod.json["status"]["containerStatuses"][0]
        words = f"unable to retrieve container logs for {status['containerID']}".encode()
        assert clients.log(pod.name, timestamps=True) == words
        assert clients.log(pod.name) == clients.log(pod.name, follow=True, tail_lines=5) == words

    def test_a_pod_that_ended_by_itself_keeps_its_log(self, clients):
        clients.running(clients.indexed("run", 1, backoffLimitPerIndex=0))
        pod = clients.world.pod("run", 0, "ns")
        pod.log("the end\n")
        pod.fail(3)
        clients.world.settle()
        assert clients.log(pod.name) == b"the end\n"


class TestTheLastDelete:
    def test_it_writes_the_time_anew(self, clients):
        """deletionTimestamp 1 s or more after finishedAt, grace 0, no finalizers, in a watch."""
        clients.running(clients.indexed("run", 2, backoffLimitPerIndex=0, maxFailedIndexes=0))
        version = clients.core.list_namespaced_pod(namespace="ns").metadata.resource_version
        victim = clients.world.pod("run", 1, "ns")
        clients.world.pod("run", 0, "ns").fail(3)
        clients.world.settle()
        assert not victim.exists
        watching, seen = watch.Watch(), []
        pods = clients.core.list_namespaced_pod
        for event in watching.stream(pods, namespace="ns", resource_version=version):
            if event["raw_object"]["metadata"]["uid"] == victim.uid:
                seen.append(event["raw_object"])
                if event["type"] == "DELETED":
                    watching.stop()
        told = next(each for each in seen if "deletionTimestamp" in each["metadata"])["metadata"]
        last, state = seen[-1]["metadata"], seen[-1]["status"]["containerStatuses"][0]["state"]
        assert "finalizers" not in last
        assert (told["deletionGracePeriodSeconds"], last["deletionGracePeriodSeconds"]) == (30, 0)
        finished = state["terminated"]["finishedAt"]
        assert state["terminated"]["exitCode"] == 143
        assert seconds(last["deletionTimestamp"]) >= seconds(finished) + 1
        assert seconds(told["deletionTimestamp"]) - 30 <= seconds(finished)

    def test_strict_timing_lets_it_be_seen(self, clients_of):
        with KubernetesStandIn(namespace="ns", tls=False, strict_timing=5) as stand_in:
            clients = clients_of(stand_in)
            clients.running(clients.indexed("run", 4))
            clients.delete("run", propagation_policy="Background")
            graces = set()
            while pods := clients.pods():
                graces |= {pod["metadata"].get("deletionGracePeriodSeconds") for pod in pods}
                stand_in.world.advance(0.05)
        assert graces == {None, 30, 0}


def test_of_two_that_fail_at_once_one_may_be_counted(clients_of):
    """3 of 5 trials; in one of these a rank that had returned was not counted either."""
    failed, completed = [], []
    for seed in range(1, 16):
        with KubernetesStandIn(namespace="ns", tls=False, strict_timing=seed) as stand_in:
            clients = clients_of(stand_in)
            clients.running(clients.indexed("run", 3, backoffLimitPerIndex=0, maxFailedIndexes=0))
            for index, code in enumerate((1, 1, 0)):
                pod = stand_in.world.pod("run", index, "ns")
                pod.fail(code) if code else pod.succeed()
            stand_in.world.settle()
            status = clients.job("run")["status"]
            failed.append(status["failedIndexes"])
            completed.append(status.get("completedIndexes"))
    assert set(failed) == {"0", "1", "0,1"}
    assert set(completed) == {"2", None}


def test_a_missing_claim_is_unschedulable(clients):
    volume = {"name": "data", "persistentVolumeClaim": {"claimName": "nope"}}
    clients.create(clients.indexed("run", 1, template={"volumes": [volume]}))
    clients.world.settle()
    (pod,) = clients.pods()
    (scheduled,) = pod["status"]["conditions"]
    assert (scheduled["type"], scheduled["status"]) == ("PodScheduled", "False")
    assert scheduled["reason"] == "Unschedulable"
    assert 'persistentvolumeclaim "nope" not found' in scheduled["message"]
    events = clients.core.list_namespaced_event(namespace="ns").items
    assert "FailedScheduling" in [event.reason for event in events]
    claim = {"metadata": {"name": "nope"}, "spec": {"accessModes": ["ReadWriteOnce"]}}
    clients.core.create_namespaced_persistent_volume_claim(namespace="ns", body=claim)
    clients.world.settle()
    assert clients.pods()[0]["spec"]["nodeName"]


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ({"configMap": {"name": "nope"}}, 'configmap "nope" not found'),
        ({"secret": {"secretName": "nope"}}, 'secret "nope" not found'),
        (
            {"configMap": {"name": "kept", "items": [{"key": "nope", "path": "x"}]}},
            "references non-existent config key: nope",
        ),
    ],
)
class TestAVolumeOfWhichSomethingIsMissing:
    @pytest.fixture
    def pod(self, clients, source):
        self.create(clients, "config_map", "kept")
        template = {"volumes": [{"name": "data", **source}]}
        clients.create(clients.indexed("run", 1, template=template))
        clients.world.settle()
        return clients.world.pod("run", 0, "ns")

    def make(self, clients):
        data = {"data": {"nope": ""}}
        clients.core.patch_namespaced_config_map(name="kept", namespace="ns", body=data)
        self.create(clients, "config_map", "nope")
        self.create(clients, "secret", "nope")

    def create(self, clients, kind, name):
        make = getattr(clients.core, f"create_namespaced_{kind}")
        make(namespace="ns", body={"metadata": {"name": name}})

    def test_it_is_waited_for_and_said(self, clients, pod, why):
        """ContainerCreating, with ever rarer FailedMount events; the Job says the pod is active."""
        clients.world.advance(600)
        state = pod.json["status"]["containerStatuses"][0]["state"]
        assert state == {"waiting": {"reason": "ContainerCreating"}}
        (event,) = [
            each
            for each in clients.core.list_namespaced_event(namespace="ns").items
            if each.reason == "FailedMount"
        ]
        assert event.message == f'MountVolume.SetUp failed for volume "data" : {why}'
        assert 10 < event.count < 16
        assert clients.job("run")["status"]["active"] == 1

    @pytest.mark.sampled
    @pytest.mark.parametrize("act", ["start", "succeed", "oom", "start_error"])
    def test_a_pod_does_nothing_before(self, clients, pod, why, act):
        with pytest.raises(ValueError, match=f"pod {pod.name} cannot start: .*{why}"):
            getattr(pod, act)()
        assert pod.json["status"]["phase"] == "Pending"
        self.make(clients)
        pod.start()
        assert pod.json["status"]["phase"] == "Running"

    def test_a_pod_that_starts_by_itself_does_so_once_it_is_there(self, clients, pod, why):
        clients.world.auto_start = 5.0
        clients.world.advance(60)
        assert pod.json["status"]["phase"] == "Pending"
        self.make(clients)
        clients.world.advance(125)  # the kubelet's longest wait
        assert pod.json["status"]["phase"] == "Running"


class TestADeletedNamespace:
    def test_it_is_terminating_first(self, clients):
        clients.running(clients.indexed("run", 2))
        for pod in clients.world.pods("run", "ns"):
            pod.on_term(0, after=5)
        clients.core.create_namespaced_config_map(
            namespace="ns", body={"metadata": {"name": "map"}}
        )
        clients.core.delete_namespace(name="ns")
        assert clients.core.read_namespace(name="ns").status.phase == "Terminating"
        with clients.refused(
            403,
            "Forbidden",
            'jobs.batch "late" is forbidden: unable to create new content in namespace ns '
            "because it is being terminated",
        ) as caught:
            clients.create(clients.indexed("late", 1))
        (cause,) = json.loads(caught.value.body)["details"]["causes"]
        assert cause["reason"] == "NamespaceTerminating"
        clients.world.advance(3)
        assert all("deletionTimestamp" in pod["metadata"] for pod in clients.pods())
        assert len(clients.pods()) == 2
        # The pods go first, and nothing else does before they have gone.
        assert "deletionTimestamp" not in clients.job("run")["metadata"]
        clients.core.read_namespaced_config_map(name="map", namespace="ns")
        clients.world.settle(within=20)
        with clients.refused(404, "NotFound", "jobs"):
            clients.job("run")
        with clients.refused(404, "NotFound", "configmaps"):
            clients.core.read_namespaced_config_map(name="map", namespace="ns")
        with clients.refused(404, "NotFound", "namespaces"):
            clients.core.read_namespace(name="ns")

    def test_its_pods_are_not_replaced(self, clients):
        """Neither they nor events can be made there; the Job hears of their ends, and goes last."""
        clients.running(clients.indexed("run", 2))
        first = {pod["metadata"]["uid"] for pod in clients.pods()}
        clients.core.delete_namespace(name="ns")
        pods = set()
        while listed := clients.pods():
            pods |= {pod["metadata"]["uid"] for pod in listed}
            assert clients.world.step()
        assert pods == first
        events = clients.core.list_namespaced_event(namespace="ns").items
        assert "FailedCreate" not in [event.reason for event in events]
        assert clients.job("run")["status"]["failed"] == 2
        clients.world.settle(within=20)
        with clients.refused(404, "NotFound", "jobs"):
            clients.job("run")

    def test_an_empty_one_goes_soon_and_can_be_made_again(self, clients):
        clients.core.create_namespace(body={"metadata": {"name": "other"}})
        clients.core.delete_namespace(name="other")
        clients.core.delete_namespace(name="other")
        with clients.refused(409, "AlreadyExists", "object is being deleted"):
            clients.core.create_namespace(body={"metadata": {"name": "other"}})
        clients.world.settle()
        clients.core.create_namespace(body={"metadata": {"name": "other"}})
        clients.world.settle()
        assert clients.core.read_namespace(name="other").status.phase == "Active"


def test_an_enforced_standard_alone_warns_of_a_job(clients):
    label = {"pod-security.kubernetes.io/enforce": "restricted"}
    clients.core.patch_namespace(name="ns", body={"metadata": {"labels": label}})
    path = "/apis/batch/v1/namespaces/ns/jobs"
    _, headers = clients.raw("POST", path, clients.indexed("run", 1))
    assert headers["Warning"].startswith('299 - "would violate PodSecurity \\"restricted:latest\\"')
