"""How containers end, and what is said of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
from processes_lab import SLEEP, alive, ended, finished, up
from standin_lab import PATIENCE

from diloco_localcloud import StandInError

pytestmark = pytest.mark.processes


@pytest.mark.sampled
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


@pytest.mark.sampled
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


def test_a_folder_in_the_place_of_its_message(stand_in, run):
    run("import os; os.mkdir('/dev/termination-log')")
    state = ended(stand_in)
    assert (state["exitCode"], state.get("message")) == (0, None)


def test_memory_limit(stand_in, run):
    script = (
        "import time\n"
        "hold = bytearray(200_000_000)\n"
        "for i in range(0, len(hold), 4096): hold[i] = 1\n"
        "time.sleep(600)"
    )
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
    spec = {"restartPolicy": "Never", "containers": [container]}
    pod = {"metadata": {"name": "one"}, "spec": spec}
    headers = {"Authorization": "Bearer " + stand_in.token, "Content-Type": "application/json"}
    url = stand_in.url + "/api/v1/namespaces/default/pods"
    urllib.request.urlopen(urllib.request.Request(url, json.dumps(pod).encode(), headers)).close()
    with stand_in._cluster.changed:
        pod = lambda: stand_in._kubelet._pods
        started = lambda: any(
            c.pid for sandbox in pod().values() for c in sandbox.containers.values()
        )
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
