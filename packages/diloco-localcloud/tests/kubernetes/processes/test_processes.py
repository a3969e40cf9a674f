"""Pods that really run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
from standin_lab import PATIENCE

from diloco_localcloud import KubernetesProcesses, StandInError
from diloco_localcloud._kubernetes._pods import _facts

pytestmark = pytest.mark.processes

SLEEP = "import time\nprint('up', flush=True)\ntime.sleep(600)"


@pytest.fixture
def stand_in():
    with KubernetesProcesses(
        namespace="ns", backoff_seconds=0.5, resources={"nvidia.com/gpu": "2"}
    ) as running:
        running._jobs.batch_seconds = 0.05  # the lag of the real one is tested on the virtual clock
        yield running


@pytest.fixture
def run(clients, stand_in):
    """Run a Python script as the pods of a Job."""

    def start(script, n=1, *, main=None, template=None, **spec):
        container = {
            "name": "main",
            "image": "any",
            "command": ["python", "-c", script],
            **(main or {}),
        }
        clients.create(
            clients.indexed(
                "run", n, template={"containers": [container], **(template or {})}, **spec
            )
        )

    return start


def pod(stand_in, index=0):
    return stand_in.pods.newest("run", index, "ns").json


def ended(stand_in, index=0):
    """Wait for the end of an index; its terminated state."""

    def over():
        found = [each.json for each in stand_in.pods.of("run", "ns") if each.index == index]
        return bool(found) and found[-1] is not None and _facts.ended(found[-1])

    stand_in.pods.wait_for(over, PATIENCE)
    return pod(stand_in, index)["status"]["containerStatuses"][0]["state"]["terminated"]


def finished(stand_in):
    """Wait for the end of the Job; its status."""

    def over():
        conditions = stand_in.pods.job("run", "ns")["status"].get("conditions", [])
        return any(entry["type"] in ("Complete", "Failed") for entry in conditions)

    stand_in.pods.wait_for(over, PATIENCE)
    return stand_in.pods.job("run", "ns")["status"]


def up(clients, stand_in, n=1):
    """Wait until all pods have printed their first line."""

    def seen():
        found = stand_in.pods.of("run", "ns")
        kubelet = stand_in._kubelet
        return len(found) == n and all(
            each.json and kubelet.log_of(each.json, "main", 0).times() for each in found
        )

    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:  # a log grows without a word to the cluster
        with stand_in._cluster.changed:
            if seen():
                return
            stand_in._cluster.changed.wait(0.05)
    pytest.fail("the pods did not come up")


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_run_from_start_to_end(clients, stand_in, run):
    script = "import os; print('rank', os.environ['JOB_COMPLETION_INDEX'], os.environ['HOSTNAME'], os.environ['GREETING'])"
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


@pytest.mark.parametrize(
    ("script", "code", "reason"),
    [
        ("raise SystemExit(3)", 3, "Error"),
        ("1 / 0", 1, "Error"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", 137, "Error"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", 139, "Error"),
        ("pass", 0, "Completed"),
    ],
)
def test_how_it_ends(stand_in, run, script, code, reason):
    run(script, backoffLimitPerIndex=0)
    state = ended(stand_in)
    assert (state["exitCode"], state["reason"]) == (code, reason)
    status = finished(stand_in)
    assert status.get("failedIndexes") == ("0" if code else "")


@pytest.mark.parametrize(
    "main", [{"command": ["/no/such/program"]}, {"command": []}, {"workingDir": "/no/such/folder"}]
)
def test_what_cannot_be_started(stand_in, run, main):
    run("pass", main=main, backoffLimitPerIndex=0)
    state = ended(stand_in)
    assert (state["exitCode"], state["reason"]) == (128, "StartError")
    assert "OCI runtime create failed" in state["message"]
    assert finished(stand_in)["failedIndexes"] == "0"


def test_termination_message(stand_in, run):
    run(
        "open('/dev/termination-log', 'w').write('the reason'); raise SystemExit(1)",
        backoffLimitPerIndex=0,
    )
    assert ended(stand_in)["message"] == "the reason"


def test_termination_message_from_the_log(stand_in, run):
    run(
        "print('last words'); raise SystemExit(1)",
        main={"terminationMessagePolicy": "FallbackToLogsOnError"},
    )
    assert ended(stand_in)["message"] == "last words\n"


def test_memory_limit(stand_in, run):
    script = "import time\nhold = bytearray(200_000_000)\nfor i in range(0, len(hold), 4096): hold[i] = 1\ntime.sleep(600)"
    run(script, main={"resources": {"limits": {"memory": "100Mi"}}}, backoffLimitPerIndex=0)
    state = ended(stand_in)
    assert (state["exitCode"], state["reason"]) == (137, "OOMKilled")


def test_sigterm_then_grace_then_sigkill(clients, stand_in, run):
    script = (
        "import os, signal, sys, time\n"
        "deaf = os.environ['JOB_COMPLETION_INDEX'] == '0'\n"
        "signal.signal(signal.SIGTERM, lambda *_: None if deaf else sys.exit(7))\n"
        "print('up', flush=True)\n"
        "while True: time.sleep(0.05)\n"
    )
    run(script, 2, grace=1)
    up(clients, stand_in, 2)
    pids = [pid for each in stand_in.pods.of("run", "ns") for pid in each.pids]
    begun = time.monotonic()
    clients.patch("run", {"spec": {"activeDeadlineSeconds": 1}})
    status = finished(stand_in)
    assert time.monotonic() - begun > 1
    assert status["conditions"][-1]["reason"] == "DeadlineExceeded"
    assert len(pids) == 2
    assert not any(alive(pid) for pid in pids)
    assert clients.pods() == []


def test_children_end_with_their_container(clients, stand_in, run):
    # A child in a session of its own that has forgotten its parent: gone when the first process is.
    script = (
        "import subprocess, sys\n"
        "child = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        "print(child.pid, flush=True)\n"
    )
    run(script)
    finished(stand_in)
    child = int(clients.log(stand_in.pods.newest("run", 0, "ns").name))
    assert not alive(child)


def test_a_killed_pod_is_replaced(clients, stand_in, run):
    run(SLEEP, backoffLimitPerIndex=1)
    up(clients, stand_in)
    first = stand_in.pods.newest("run", 0, "ns")
    first.kill()
    stand_in.pods.wait_for(lambda: len(stand_in.pods.of("run", "ns")) == 2, PATIENCE)
    second = stand_in.pods.newest("run", 0, "ns")
    assert first.json["status"]["containerStatuses"][0]["state"]["terminated"]["exitCode"] == 137
    assert (
        second.json["metadata"]["annotations"]["batch.kubernetes.io/job-index-failure-count"] == "1"
    )


def test_an_evicted_pod_is_replaced_and_not_counted(clients, stand_in, run):
    pattern = {"type": "DisruptionTarget", "status": "True"}
    run(
        SLEEP,
        backoffLimitPerIndex=0,
        podFailurePolicy={"rules": [{"action": "Ignore", "onPodConditions": [pattern]}]},
    )
    up(clients, stand_in)
    first = stand_in.pods.newest("run", 0, "ns")
    pid = first.pids[0]
    name = first.name
    eviction = {"metadata": {"name": name, "namespace": "ns"}}
    clients.core.create_namespaced_pod_eviction(name=name, namespace="ns", body=eviction)
    stand_in.pods.wait_for(lambda: stand_in.pods.newest("run", 0, "ns").name != name, PATIENCE)
    assert not alive(pid)
    notes = pod(stand_in)["metadata"]["annotations"]
    assert notes["batch.kubernetes.io/job-index-failure-count"] == "0"
    assert notes["batch.kubernetes.io/job-index-ignored-failure-count"] == "1"


def test_a_pod_on_a_lost_node_runs_on(clients, stand_in, run):
    run(SLEEP, grace=1, podReplacementPolicy="Failed", backoffLimitPerIndex=1)
    up(clients, stand_in)
    lost = stand_in.pods.newest("run", 0, "ns")
    pid = lost.pids[0]
    lost.lose()
    stand_in.pods.wait_for(
        lambda: stand_in.pods.job("run", "ns")["status"].get("terminating") == 1, PATIENCE
    )
    assert alive(pid)
    lost.found()
    stand_in.pods.wait_for(lambda: not lost.pids, PATIENCE)
    assert not alive(pid)


def test_a_forced_delete_ends_the_processes_too(clients, stand_in, run):
    run(SLEEP, grace=600, backoffLimitPerIndex=1)
    up(clients, stand_in)
    forced = stand_in.pods.newest("run", 0, "ns")
    pid = forced.pids[0]
    clients.core.delete_namespaced_pod(name=forced.name, namespace="ns", grace_period_seconds=0)
    stand_in.pods.wait_for(lambda: forced.json is None and not forced.pids, PATIENCE)
    assert not alive(pid)


def test_forced_delete_of_a_lost_pod_leaves_a_zombie_of_the_run(clients, stand_in, run):
    run(SLEEP, grace=1, backoffLimitPerIndex=1)
    up(clients, stand_in)
    lost = stand_in.pods.newest("run", 0, "ns")
    pid = lost.pids[0]
    lost.lose()
    clients.core.delete_namespaced_pod(name=lost.name, namespace="ns", grace_period_seconds=0)
    stand_in.pods.wait_for(lambda: lost.json is None, PATIENCE)
    assert alive(pid)  # two of one rank, as it happens on real clusters
    lost.found()
    stand_in.pods.wait_for(lambda: not lost.pids, PATIENCE)
    assert not alive(pid)


def test_logs_while_it_runs(clients, stand_in, run):
    script = "import time\nfor n in range(3):\n print('line', n, flush=True)\n time.sleep(0.05)\nprint('no newline', end='')"
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


def test_restart_in_place_and_the_log_before(clients, stand_in, run):
    script = (
        "import pathlib, sys, time\n"
        "mark = pathlib.Path('mark')\n"
        "print('second' if mark.exists() else 'first', flush=True)\n"
        "mark.exists() or (mark.touch(), sys.exit(1))\n"
    )
    run(script, template={"restartPolicy": "OnFailure"})
    status = finished(stand_in)
    assert status["completedIndexes"] == "0"
    name = stand_in.pods.newest("run", 0, "ns").name
    assert (clients.log(name, previous=True), clients.log(name)) == (b"first\n", b"second\n")
    assert pod(stand_in)["status"]["containerStatuses"][0]["restartCount"] == 1


def test_gpus_are_shared_out_as_declared(clients, stand_in, run):
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


def test_stop_ends_everything(clients, stand_in, run):
    run(SLEEP, 2)
    up(clients, stand_in, 2)
    pids = [pid for each in stand_in.pods.of("run", "ns") for pid in each.pids]
    folder = stand_in._folder
    stand_in.stop()
    assert len(pids) == 2
    assert not any(alive(pid) for pid in pids)
    assert not folder.exists()
    with pytest.raises(StandInError, match="has been stopped"):
        stand_in.start()


def test_a_killed_stand_in_leaves_nothing(tmp_path):
    script = """
import json, sys, time, urllib.request
from diloco_localcloud import KubernetesProcesses
with KubernetesProcesses(tls=False) as stand_in:
    container = {"name": "main", "image": "any", "command": ["sleep", "600"]}
    pod = {"metadata": {"name": "one"}, "spec": {"containers": [container]}}
    headers = {"Authorization": "Bearer " + stand_in.token, "Content-Type": "application/json"}
    url = stand_in.url + "/api/v1/namespaces/default/pods"
    urllib.request.urlopen(urllib.request.Request(url, json.dumps(pod).encode(), headers)).close()
    with stand_in._cluster.changed:
        pod = lambda: stand_in._kubelet._pods
        started = lambda: any(c.pid for sandbox in pod().values() for c in sandbox.containers.values())
        stand_in._cluster.changed.wait_for(started, 600)
        pids = [c.pid for sandbox in pod().values() for c in sandbox.containers.values()]
    print(json.dumps(pids), flush=True)
    time.sleep(600)
"""
    import json

    env = {
        **os.environ,
        "TMPDIR": str(tmp_path),
    }  # its files stay, as nobody is left to take them away
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=env
    ) as launched:
        pids = json.loads(launched.stdout.readline())
        assert [alive(pid) for pid in pids] == [True]
        launched.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + PATIENCE
    while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(alive(pid) for pid in pids)


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
