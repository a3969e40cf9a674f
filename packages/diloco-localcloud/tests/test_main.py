"""``python -m diloco_localcloud kubernetes``, and kubectl against it."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from kubernetes import client
from standin_lab import PATIENCE

from diloco_localcloud.__main__ import main

pytestmark = pytest.mark.processes

KUBECTL = shutil.which("kubectl")
needs_kubectl = pytest.mark.skipif(KUBECTL is None, reason="kubectl is not installed")

JOB = """
apiVersion: batch/v1
kind: Job
metadata: {{name: {name}}}
spec:
  completions: 2
  parallelism: 2
  completionMode: Indexed
  backoffLimitPerIndex: 0
  template:
    spec:
      restartPolicy: Never
      containers:
      - name: main
        image: any
        command: {command}
"""


class Launched:
    """The command, running in a process of its own."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder = folder
        command = [
            sys.executable,
            "-m",
            "diloco_localcloud",
            "kubernetes",
            "--backoff-seconds",
            "0.5",
            *options,
        ]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        first = self.process.stdout.readline()
        if not first:
            pytest.fail(self.process.communicate()[1])
        (self.kubeconfig,) = shlex.split(first.removeprefix("export KUBECONFIG="))
        self.said = self.process.stdout.readline()

    @property
    def env(self) -> dict[str, str]:
        return {"PATH": os.environ["PATH"], "HOME": str(self.folder), "KUBECONFIG": self.kubeconfig}

    def kubectl(
        self, *words: str, stdin: str | None = None, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [KUBECTL, *words],
            env=self.env,
            input=stdin,
            stdin=None if stdin else subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        assert not check or done.returncode == 0, done.stderr
        return done

    def apply(self, name: str, *command: str) -> str:
        return self.kubectl(
            "apply", "-f", "-", stdin=JOB.format(name=name, command=json.dumps(command))
        ).stdout

    def stop(self, number: signal.Signals = signal.SIGINT) -> int:
        self.process.send_signal(number)
        with self.process:
            return self.process.wait(PATIENCE)


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    made = Launched(tmp_path_factory.mktemp("kubectl"), "--resource", "nvidia.com/gpu=4")
    yield made
    made.stop()


@needs_kubectl
def test_apply_wait_get_logs_describe(launched):
    script = "import os; print('rank', os.environ['JOB_COMPLETION_INDEX'])"
    assert launched.apply("good", "python", "-c", script) == "job.batch/good created\n"
    assert launched.apply("good", "python", "-c", script) == "job.batch/good unchanged\n"
    launched.kubectl("wait", "--for=condition=complete", "job/good", f"--timeout={PATIENCE:g}s")
    assert sorted(launched.kubectl("logs", "-l", "job-name=good").stdout.splitlines()) == [
        "rank 0",
        "rank 1",
    ]
    shown = launched.kubectl("get", "jobs").stdout.split()
    assert shown[:5] == ["NAME", "STATUS", "COMPLETIONS", "DURATION", "AGE"]
    assert {"good", "Complete", "2/2"} <= set(shown)
    assert launched.kubectl("get", "pods", "-l", "job-name=good").stdout.count("Completed") == 2
    described = launched.kubectl("describe", "job", "good").stdout
    assert "2 Succeeded / 0 Failed" in described
    assert "Job completed" in described
    assert "Exit Code:    0" in launched.kubectl("describe", "pods", "-l", "job-name=good").stdout
    launched.kubectl("delete", "job", "good")


@needs_kubectl
def test_logs_that_are_followed_to_the_end(launched, tmp_path):
    """The pods print the rest only when the first line has been seen."""
    script = f"""
import os, time
print("step 0", flush=True)
while not os.path.exists({str(tmp_path / "go")!r}):
    time.sleep(0.05)
for n in range(1, 4):
    print("step", n, flush=True)
"""
    launched.apply("steps", "python", "-c", script)
    launched.kubectl(
        "wait", "--for=jsonpath={.status.active}=2", "job/steps", f"--timeout={PATIENCE:g}s"
    )
    name = launched.kubectl(
        "get",
        "pods",
        "-l",
        "batch.kubernetes.io/job-completion-index=1,job-name=steps",
        "-o",
        "name",
    ).stdout
    follower = subprocess.Popen(
        [KUBECTL, "logs", "-f", name.strip()], env=launched.env, stdout=subprocess.PIPE, text=True
    )
    with follower:
        assert follower.stdout.readline() == "step 0\n"
        (tmp_path / "go").touch()
        assert follower.stdout.read().splitlines() == [f"step {n}" for n in range(1, 4)]
    assert follower.returncode == 0
    launched.kubectl("delete", "job", "steps")


@needs_kubectl
def test_exec(launched):
    launched.apply("inside", "sleep", "600")
    launched.kubectl(
        "wait", "--for=jsonpath={.status.active}=2", "job/inside", f"--timeout={PATIENCE:g}s"
    )
    launched.kubectl(
        "wait", "--for=condition=ready", "pod", "-l", "job-name=inside", f"--timeout={PATIENCE:g}s"
    )
    command = ["sh", "-c", "cat; echo $JOB_COMPLETION_INDEX; exit 4"]
    arguments = ["exec", "-i", "job/inside", "--", *command]
    shown = launched.kubectl(*arguments, stdin="from here\n", check=False)
    said, index = shown.stdout.splitlines()
    assert (said, index in "01", shown.returncode) == ("from here", True, 4)
    launched.kubectl("delete", "job", "inside")


@needs_kubectl
def test_delete_ends_the_pods(launched):
    launched.apply("long", "sleep", "600")
    launched.kubectl(
        "wait", "--for=jsonpath={.status.active}=2", "job/long", f"--timeout={PATIENCE:g}s"
    )
    launched.kubectl("delete", "job", "long", "--cascade=foreground")
    assert launched.kubectl("get", "pods", "-l", "job-name=long", "-o", "name").stdout == ""
    assert "not found" in launched.kubectl("get", "job", "long", check=False).stderr


@needs_kubectl
def test_a_deleted_pod_and_a_watch(launched):
    launched.apply("watched", "sleep", "600")
    launched.kubectl(
        "wait", "--for=jsonpath={.status.active}=2", "job/watched", f"--timeout={PATIENCE:g}s"
    )
    launched.kubectl(
        "wait", "--for=condition=ready", "pod", "-l", "job-name=watched", f"--timeout={PATIENCE:g}s"
    )
    name = launched.kubectl("get", "pods", "-l", "job-name=watched", "-o", "name").stdout.split()[0]
    env = {
        "PATH": os.environ["PATH"],
        "HOME": str(launched.folder),
        "KUBECONFIG": launched.kubeconfig,
    }
    watching = subprocess.Popen(
        [KUBECTL, "get", name, "-w", "--no-headers"], env=env, stdout=subprocess.PIPE, text=True
    )
    with watching:
        assert "Running" in watching.stdout.readline()
        launched.kubectl("delete", name)
        assert "Terminating" in watching.stdout.readline()
        watching.terminate()
    launched.kubectl("delete", "job", "watched")


@pytest.mark.sampled
@needs_kubectl
@pytest.mark.parametrize(
    ("words", "shown", "value"),
    [
        ("namespace made", "namespace/made", ".status.phase=Active"),
        ("configmap made --from-literal=a=b", "configmap/made", ".data.a=b"),
        ("secret generic made --from-literal=p=q", "secret/made", ".data.p=cQ=="),
    ],
)
def test_what_kubectl_creates(launched, words, shown, value):
    """It sends these as protobuf, whatever the server prefers."""
    assert launched.kubectl("create", *words.split()).stdout == f"{shown} created\n"
    path, _, wanted = value.partition("=")
    found = launched.kubectl("get", shown, "-o", f"jsonpath={{{path}}}").stdout
    assert found == wanted
    launched.kubectl("delete", shown)


@needs_kubectl
def test_what_kubectl_is_refused(launched):
    assert launched.kubectl("auth", "can-i", "create", "jobs").stdout == "yes\n"
    wrong = JOB.format(name="wrong", command='["x"]').replace("image:", "imagee:")
    refused = launched.kubectl("apply", "-f", "-", stdin=wrong, check=False)
    assert 'unknown field "spec.template.spec.containers[0].imagee"' in refused.stderr
    assert "does not serve" in launched.kubectl("auth", "can-i", "--list", check=False).stderr
    dry = launched.kubectl(
        "apply", "--dry-run=server", "-f", "-", stdin=JOB.format(name="dry", command='["x"]')
    )
    assert dry.stdout == "job.batch/dry created (server dry run)\n"
    assert launched.kubectl("get", "jobs", "dry", check=False).returncode == 1
    assert (
        "4"
        in launched.kubectl(
            "get", "node", "local-0", "-o", r"jsonpath={.status.capacity.nvidia\.com/gpu}"
        ).stdout
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_ends_with_all_it_has_started(tmp_path, connect, number):
    file = str(tmp_path / "kube config;$(id)")
    running = Launched(tmp_path, "--kubeconfig", file, "--namespace", "team")
    assert running.kubeconfig == file
    assert "Ctrl-C ends it" in running.said
    api = client.CoreV1Api(connect(running.kubeconfig))
    script = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    container = {"name": "main", "image": "any", "command": ["python", "-c", script]}
    api.create_namespaced_pod(
        namespace="team",
        body={
            "metadata": {"name": "one"},
            "spec": {"restartPolicy": "Never", "containers": [container]},
        },
    )
    said = b""
    while not said.endswith(b"\n"):
        with contextlib.suppress(client.ApiException):  # it waits to start
            said = api.read_namespaced_pod_log(
                name="one", namespace="team", _preload_content=False
            ).data
    pid = int(said)
    assert running.stop(number) == 0
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["kubernetes", "--port", "99999"], "port must be from 0 to 65535"),
        (
            ["kubernetes", "--kubeconfig", "/no/such/folder/file"],
            "the kubeconfig cannot be written",
        ),
        (["kubernetes", "--resource", "gpu=many"], "is not a quantity"),
    ],
)
def test_arguments_that_cannot_be(capsys, monkeypatch, arguments, message):
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # the tests keep their own handlers
    assert main(arguments) == 1
    assert message in capsys.readouterr().err


@pytest.mark.sampled
@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["openshift"],
        ["kubernetes", "--resource", "gpu"],
        ["aws", "--region", "a b\n;id"],
        ["aws", "--region", "../x"],
        *(
            ["kubernetes", f"--backoff-seconds={value}"]
            for value in ("nan", "1e400", "-1", "1e300", "x")
        ),
        ["kubernetes", "--pid-namespaces"],
    ],
)
def test_arguments_that_are_none(capsys, arguments):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage" in capsys.readouterr().err
