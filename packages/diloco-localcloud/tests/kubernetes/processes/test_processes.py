"""Pods that really run."""

from __future__ import annotations

import pytest
from processes_lab import SLEEP, finished, pod
from standin_lab import PATIENCE

from diloco_localcloud import KubernetesProcesses, StandInError
from diloco_localcloud._kubernetes._objects._resources import EVENTS
from diloco_localcloud._kubernetes._pods import _facts

pytestmark = pytest.mark.processes


def test_a_run_from_start_to_end(clients, stand_in, run):
    script = (
        "import os; print('rank', os.environ['JOB_COMPLETION_INDEX'], os.environ['HOSTNAME'], "
        "os.environ['GREETING'])"
    )
    run(
        script,
        2,
        main={
            "env": [
                {"name": "NAME", "value": "you"},
                {"name": "GREETING", "value": "hi $(NAME) $$(NAME)"},
            ]
        },
    )
    status = finished(stand_in)
    assert (status["completedIndexes"], status["succeeded"]) == ("0,1", 2)
    logs = [clients.log(each.name) for each in stand_in.pods.of("run", "ns")]
    assert logs == [b"rank 0 run-0 hi you $(NAME)\n", b"rank 1 run-1 hi you $(NAME)\n"]


def test_logs_while_it_runs(clients, stand_in, run):
    script = (
        "import time\n"
        "for n in range(3):\n"
        " print('line', n, flush=True)\n"
        " time.sleep(0.05)\n"
        "print('no newline', end='')"
    )
    run(script)
    stand_in.pods.wait_for(
        lambda: bool(stand_in.pods.of("run", "ns")) and _facts.phase(pod(stand_in)) != "Pending",
        PATIENCE,
    )
    name = stand_in.pods.newest("run", 0, "ns").name
    answer = clients.core.read_namespaced_pod_log(
        name=name, namespace="ns", follow=True, _preload_content=False
    )
    assert b"".join(answer.stream(decode_content=True)) == b"line 0\nline 1\nline 2\nno newline"
    assert clients.log(name, tail_lines=2) == b"line 2\nno newline"
    assert clients.log(name, since_seconds=600, limit_bytes=4) == b"line"
    stamped = clients.log(name, timestamps=True).splitlines()[0]
    assert stamped.split(b" ", 1)[1] == b"line 0"


def test_a_long_line_is_several_entries(clients, stand_in, run):
    """As observed: ``tailLines`` counts entries of at most 16 KiB.

    containerd drops a ``\\r`` before the newline.
    """
    run("import os\nos.write(1, b'x' * 100_000 + b'\\r\\nlast\\n' + b'y' * 20_000)")
    finished(stand_in)
    name = stand_in.pods.newest("run", 0, "ns").name
    whole = b"x" * 100_000 + b"\nlast\n" + b"y" * 20_000
    assert clients.log(name) == whole
    assert clients.log(name, tail_lines=2) == b"y" * 20_000
    assert clients.log(name, tail_lines=4) == b"x" * (100_000 - 6 * 16384) + whole[100_000:]
    assert clients.log(name, tail_lines=10) == whole
    stamped = clients.log(name, timestamps=True)
    assert [len(line.split(b" ", 1)[1]) for line in stamped.splitlines()] == [100_000, 4, 20_000]


def test_gpus_are_shared_out_as_declared(clients, stand_in, run):
    kind = {"metadata": {"name": "nvidia"}, "handler": "nvidia"}
    clients.raw("POST", "/apis/node.k8s.io/v1/runtimeclasses", kind)
    run(
        SLEEP,
        3,
        main={"resources": {"limits": {"nvidia.com/gpu": "1"}}},
        template={"runtimeClassName": "nvidia"},
    )
    stand_in.pods.wait_for(
        lambda: any(
            _facts.condition(each.json or {}, "PodScheduled").get("status") == "False"
            for each in stand_in.pods.of("run", "ns")
        ),
        PATIENCE,
    )
    waiting = [
        each.json for each in stand_in.pods.of("run", "ns") if "nodeName" not in each.json["spec"]
    ]
    assert len(waiting) == 1
    assert "Insufficient nvidia.com/gpu" in _facts.condition(waiting[0], "PodScheduled")["message"]


def test_a_missing_secret_and_then_not(clients, stand_in, run):
    env = [{"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "keys", "key": "key"}}}]
    run("pass", main={"env": env})

    def waits():
        found = stand_in.pods.of("run", "ns")
        return bool(found) and "waiting" in _facts.container_status(found[0].json, "main").get(
            "state", {}
        )

    stand_in.pods.wait_for(
        lambda: waits() and reason(stand_in) == "CreateContainerConfigError", PATIENCE
    )
    clients.core.create_namespaced_secret(
        namespace="ns", body={"metadata": {"name": "keys"}, "stringData": {"key": "x"}}
    )
    assert finished(stand_in)["completedIndexes"] == "0"


def reason(stand_in):
    return _facts.container_status(pod(stand_in), "main")["state"]["waiting"]["reason"]


def test_code_from_a_config_map(clients, stand_in, run):
    body = {"metadata": {"name": "code"}, "data": {"trainer.py": "print('from the map')"}}
    clients.core.create_namespaced_config_map(namespace="ns", body=body)
    volumes = [{"name": "code", "configMap": {"name": "code"}}]
    mount = [{"name": "code", "mountPath": "/app"}]
    run(
        "",
        main={"command": ["python", "/app/trainer.py"], "volumeMounts": mount},
        template={"volumes": volumes},
    )
    finished(stand_in)
    assert clients.log(stand_in.pods.newest("run", 0, "ns").name) == b"from the map\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"port": 70000}, "port must be from 0 to 65535, not 70000"),
        ({"resources": {"nvidia.com/gpu": "two"}}, "is not a quantity: 'two'"),
        ({"backoff_seconds": 0}, "must be above 0"),
    ],
)
def test_options_that_are_none(options, message):
    with pytest.raises(StandInError, match=message):
        KubernetesProcesses(**options)


@pytest.mark.parametrize("items", [None, [{"key": "absent", "path": "x"}]])
def test_a_missing_map_of_a_volume_is_waited_for(clients, stand_in, run, items):
    """ContainerCreating with FailedMount events, as observed; Running only once it is there."""
    volume = {"name": "files", "configMap": {"name": "map", **({"items": items} if items else {})}}
    if items:
        clients.core.create_namespaced_config_map(
            namespace="ns", body={"metadata": {"name": "map"}}
        )
    run(
        "pass",
        main={"volumeMounts": [{"name": "files", "mountPath": "/files"}]},
        template={"volumes": [volume]},
    )

    def told():
        with stand_in._cluster.changed:
            events = stand_in._cluster.store.list(EVENTS, "ns")
        return any(event["reason"] == "FailedMount" for event in events)

    stand_in.pods.wait_for(told, PATIENCE)
    status = pod(stand_in)["status"]
    assert (status["phase"], status["containerStatuses"][0]["state"]) == (
        "Pending",
        {"waiting": {"reason": "ContainerCreating"}},
    )
    (event,) = [
        each
        for each in clients.core.list_namespaced_event(namespace="ns").items
        if each.reason == "FailedMount"
    ]
    why = "references non-existent config key: absent" if items else 'configmap "map" not found'
    assert event.message == f'MountVolume.SetUp failed for volume "files" : {why}'
