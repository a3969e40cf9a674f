"""``exec``: commands beside the process of a pod, with the real client over a WebSocket."""

from __future__ import annotations

import json
import re
import ssl
import time
import urllib.parse

import processes_lab
import pytest
import websocket
from kubernetes.stream import stream
from processes_lab import SLEEP, alive, up
from standin_lab import PATIENCE

pytestmark = pytest.mark.processes


@pytest.fixture
def execute(clients, stand_in):
    """Opens exec in the first pod of the Job ``run``."""
    opened = []

    def start(*command, stdin=False):
        call = clients.core.connect_get_namespaced_pod_exec
        options = {"stdin": stdin, "stdout": True, "stderr": True, "tty": False}
        name = stand_in.pods.newest("run", 0, "ns").name
        opened.append(
            stream(call, name, "ns", command=list(command), _preload_content=False, **options)
        )
        return opened[-1]

    yield start
    for connection in opened:
        close(connection)


def close(connection):
    """The client's own ``close`` leaves the socket open where the server has ended it."""
    connection.close()
    connection.sock.shutdown()


def ended(connection):
    """Wait for the end; (stdout, stderr, status)."""
    connection.run_forever(timeout=PATIENCE)
    assert not connection.is_open()
    stdout, stderr, status = (connection.read_channel(channel) for channel in (1, 2, 3))
    return stdout, stderr, json.loads(status)


def running(clients, stand_in):
    up(clients, stand_in)
    return stand_in.pods.newest("run", 0, "ns")


def open_socket(stand_in, path, subprotocol):
    """A WebSocket without the client of Kubernetes."""
    return websocket.create_connection(
        stand_in.url.replace("http", "ws", 1) + path,
        header=[f"Authorization: Bearer {stand_in.token}"],
        subprotocols=[subprotocol],
        sslopt={"cert_reqs": ssl.CERT_NONE, "check_hostname": False},
        timeout=PATIENCE,
    )


def status_of_handshake(stand_in, path, subprotocol="v5.channel.k8s.io"):
    with pytest.raises(websocket.WebSocketBadStatusException) as refused:
        open_socket(stand_in, path, subprotocol)
    return refused.value.status_code


def test_it_has_the_environment_and_the_folder_of_the_container(clients, stand_in, run, execute):
    main = {
        "env": [{"name": "WHERE", "value": "/data"}],
        "volumeMounts": [{"name": "data", "mountPath": "/data"}],
        "workingDir": "/data",
    }
    template = {"volumes": [{"name": "data", "emptyDir": {}}]}
    run("open('here', 'w').write('by the pod')\n" + SLEEP, main=main, template=template)
    running(clients, stand_in)
    script = "cat here; cat $WHERE/here >&2; test $JOB_COMPLETION_INDEX = 0 && cat /data/here"
    stdout, stderr, status = ended(execute("sh", "-c", script))
    assert (stdout, stderr) == ("by the podby the pod", "by the pod")
    assert status == {"metadata": {}, "status": "Success"}


def test_how_it_ends_is_told(clients, stand_in, run, execute):
    run(SLEEP)
    running(clients, stand_in)
    connection = execute("sh", "-c", "echo no; exit 3")
    assert ended(connection)[2]["reason"] == "NonZeroExitCode"
    assert execute("sh", "-c", "kill -9 $$").subprotocol == "v5.channel.k8s.io"
    connection = execute("sh", "-c", "kill -9 $$")
    connection.run_forever(timeout=PATIENCE)
    assert connection.returncode == 137
    _, _, status = ended(execute("no-such-program"))
    assert status["reason"] == "InternalError"
    assert "No such file or directory: no-such-program" in status["message"]


def test_stdin_of_any_size_comes_back(clients, stand_in, run, execute):
    """More than all pipes and sockets hold, both ways at once."""
    run(SLEEP)
    running(clients, stand_in)
    connection = execute("cat", stdin=True)
    for _ in range(4):
        connection.write_stdin("0123456789" * 100_000)
    connection.close_channel(0)
    stdout, _, status = ended(connection)
    assert stdout == "0123456789" * 400_000
    assert status["status"] == "Success"
    # Who reads nothing is written to for nothing.
    connection = execute("true", stdin=True)
    connection.write_stdin("0123456789" * 100_000)
    assert ended(connection)[2]["status"] == "Success"
    # Without stdin there is an end at once.
    assert ended(execute("cat"))[0] == ""


def test_what_a_command_does_not_read_is_not_taken_in(clients, stand_in, run):
    run(SLEEP)
    name = running(clients, stand_in).name
    asked = [("command", "sleep"), ("command", "600"), ("stdin", "1")]
    path = f"/api/v1/namespaces/ns/pods/{name}/exec?{urllib.parse.urlencode(asked)}"
    connection = open_socket(stand_in, path, "v5.channel.k8s.io")
    connection.settimeout(0.3)

    def send_all():
        for _ in range(64):
            connection.send_binary(b"\0" + b"x" * (1 << 20))

    with pytest.raises((TimeoutError, websocket.WebSocketTimeoutException)):
        send_all()
    connection.shutdown()


def test_the_older_protocol_has_no_end_of_stdin(clients, stand_in, run):
    run(SLEEP)
    name = running(clients, stand_in).name
    asked = [("command", "head"), ("command", "-c5"), ("stdin", "1"), ("stdout", "1")]
    path = f"/api/v1/namespaces/ns/pods/{name}/exec?{urllib.parse.urlencode(asked)}"
    connection = open_socket(stand_in, path, "v4.channel.k8s.io")
    assert connection.getsubprotocol() == "v4.channel.k8s.io"
    connection.send_binary(b"\0ab")
    connection.send_binary(b"\xff\0")  # means nothing here
    connection.send_binary(b"\0cdefg")
    assert connection.recv() == b"\1abcde"
    assert json.loads(connection.recv()[1:]) == {"metadata": {}, "status": "Success"}
    connection.close()


def test_it_ends_with_its_container(clients, stand_in, run, execute):
    run(SLEEP, grace=1, backoffLimitPerIndex=0)  # no pod takes its place
    pod = running(clients, stand_in)
    connection = execute("sh", "-c", "echo $$; exec sleep 600")
    pid = int(connection.readline_channel(1, timeout=PATIENCE))
    assert alive(pid)
    pod.kill()
    _, _, status = ended(connection)
    assert status["details"]["causes"][0]["message"] == "137"
    assert not alive(pid)
    processes_lab.ended(
        stand_in
    )  # the kubelet sees the end of the container after that of its processes
    words = {ended(execute("true"))[2]["message"] for _ in range(3)}
    assert all(each.startswith("Internal error occurred: ") for each in words)
    observed = (
        "container is in CONTAINER_EXITED state",
        "cannot exec in a stopped state",
        r"error writing config to pipe.*broken pipe",
    )
    assert all(any(re.search(form, each) for each in words) for form in observed)


def test_it_ends_with_the_client_and_with_the_stand_in(clients, stand_in, run, execute):
    run(SLEEP)
    running(clients, stand_in)
    connection = execute("sh", "-c", "echo $$; exec sleep 600")
    pid = int(connection.readline_channel(1, timeout=PATIENCE))
    close(connection)
    deadline = time.monotonic() + PATIENCE
    while alive(pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    connection = execute("sh", "-c", "echo $$; exec sleep 600")
    pid = int(connection.readline_channel(1, timeout=PATIENCE))
    stand_in.stop()
    assert not alive(pid)


def test_what_is_refused(clients, stand_in, run, execute):
    run(SLEEP)
    name = running(clients, stand_in).name
    path = f"/api/v1/namespaces/ns/pods/{name}/exec"
    answer, _ = clients.raw("GET", path + "?command=true")
    assert (answer["code"], answer["message"].partition(":")[0]) == (
        400,
        "Upgrade request required",
    )
    for words in ("stdin=1", "command=true&tty=1", "command=true&container=other"):
        assert status_of_handshake(stand_in, f"{path}?{words}") == 400
    assert status_of_handshake(stand_in, path.replace(name, "other") + "?command=true") == 404
    stand_in.access.deny("get", "pods/exec")
    assert status_of_handshake(stand_in, f"{path}?command=true") == 403
    stand_in.access.allow("get", "pods/exec")
    assert status_of_handshake(stand_in, f"{path}?command=true", "v1.channel.k8s.io") == 400
