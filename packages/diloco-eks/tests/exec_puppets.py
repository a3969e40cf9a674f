"""Puppets in pods that share no folder with the test: they are reached by ``exec``."""

import base64
import json
import re
import threading
from pathlib import Path

from cluster_truth import index_of
from eks_lab import PATIENCE
from kubernetes.stream import stream

from diloco_conformance import HarnessFault, Puppets, Step

JOB, INDEX = "batch.kubernetes.io/job-name", "batch.kubernetes.io/job-completion-index"
#: What the tests themselves do, beside the executor (role.yaml); the README says it in words.
RIGHTS = [
    {"apiGroups": [""], "resources": ["pods/exec"], "verbs": ["get", "create"]},
    {"apiGroups": [""], "resources": ["pods/eviction"], "verbs": ["create"]},
    {"apiGroups": [""], "resources": ["secrets"], "verbs": ["create", "delete"]},
]
FOLDER = "/puppets"  # an empty volume in every pod, and its working directory
ABSENT = 44  # exit code of a command that looks for a file that is not there
PIECE = 32_768
STDIN, STDOUT, STDERR, ERROR = range(4)
NOT_FOUND = "container not found"
#: What a cluster says when a container ends under an exec, or has ended, in whichever way the
#: runtime noticed.
ENDED = re.compile(
    f"{NOT_FOUND}|Internal error occurred: .*"
    "(CONTAINER_EXITED state|in a stopped state|error writing config to pipe.*broken pipe)",
    re.DOTALL,
)


def has_ended(message):
    """Whether the words of a failed exec mean that the container has ended, or is about to."""
    return ENDED.search(message) is not None


def raw(answer):
    """What the API said, whatever the client makes of it.

    An answer that nobody reads would keep its connection open.
    """
    return json.loads(answer.data)


def newest(api, namespace, name, index):
    """The newest pod of an index; None if there is none."""
    selector = f"{JOB}={name},{INDEX}={index}"
    found = raw(
        api.list_namespaced_pod(namespace, label_selector=selector, _preload_content=False)
    )["items"]
    return max(found, key=lambda pod: pod["metadata"]["creationTimestamp"], default=None)


def executor_options():
    """Options for an image with Python, a shell and diloco-protocol, but no puppet.

    The puppet is written at the start.
    """
    program = 'import os; open("puppet.py", "w", encoding="utf-8").write(os.environ.pop("PUPPET"))'
    command = f"python -c '{program}' && exec python -m diloco_protocol.runner \"$@\""
    container = {
        "name": "replica",
        "workingDir": FOLDER,
        "volumeMounts": [{"name": "puppets", "mountPath": FOLDER}],
    }
    volume = {"name": "puppets", "emptyDir": {}}
    return {
        "command": ["sh", "-c", command, "runner"],
        "env": {"PUPPET": (Puppets.source / "puppet.py").read_text(encoding="utf-8")},
        "pod_overlay": {"spec": {"volumes": [volume], "containers": [container]}},
        "cpu_request": "100m",
        "memory_request": "256Mi",
    }


class ExecPuppets(Puppets):
    """Puppets whose pods were made with ``executor_options()``.

    Files travel as base64, since the client takes all output for text; orders go by stdin, since a
    command line has a limit; and the exit code of every command is looked at. A pod that has not
    come up, or has ended, is no error.

    Args:
        api: A CoreV1Api that nobody else uses: opening a stream puts another function into the
            client for a moment.
        namespace: Of the pods.
    """

    def __init__(self, api, namespace):
        super().__init__(Path(FOLDER), patience=PATIENCE)
        self.api, self.namespace = api, namespace
        self.lock = threading.Lock()
        self.reports = {}

    @property
    def arguments(self):
        return {"puppets": "."}

    def name(self, handle, attempt=1):
        return f"{handle.run_id}-{handle.rank}-{attempt}.0"  # every pod has a folder of its own

    def report(self, handle, attempt=1):
        name, life = self.name(handle, attempt), super().name(handle, attempt)
        if life not in self.reports:
            answer = self.run(handle, f"test -e {name}.told || exit {ABSENT}; base64 {name}.told")
            if not answer:
                return None
            self.reports[life] = json.loads(base64.b64decode(answer))
        return self.reports[life]

    def order(self, handle, step, value, attempt=1):
        name, life = self.name(handle, attempt), super().name(handle, attempt)
        number = self._orders.get(life, 0)
        self._orders[life] = number + 1
        text = json.dumps({str(step): value})
        path = f"{name}.order-{number}"
        # As many bytes as there are: not every version of the protocol can say that stdin ends.
        command = f"head -c {len(text)} > {path}.partial && mv {path}.partial {path}"
        if step in {Step.PRINT, "write"}:
            command += f" && until test -e {name}.done-{number}; do sleep 0.05; done"
        self.wait(
            lambda: self.run(handle, command, text) is not None or self.is_over(handle),
            f"{name} to be told to {step}",
        )

    def is_over(self, handle):
        """Whether nobody is left to obey."""
        pod = self.pod(handle)
        return pod is None or pod["status"]["phase"] in {"Succeeded", "Failed"}

    def pod(self, handle):
        return newest(self.api, self.namespace, handle.metadata["job_name"], index_of(handle))

    def run(self, handle, command, text=""):
        """What a shell command prints; None if the pod does not run or the exit code is ``ABSENT``.

        Raises:
            HarnessFault: The cluster does not allow it, or the command failed.
        """
        pod = self.pod(handle)
        if pod is None or pod["status"]["phase"] != "Running":
            return None
        stdout, stderr, status = self.execute(pod["metadata"]["name"], command, text)
        if status["status"] == "Success":
            return stdout
        causes = (status.get("details") or {}).get("causes") or [{}]
        code = causes[0].get("message", "")
        if code in {str(ABSENT), "137", "143"} or has_ended(status["message"]):
            return None
        raise HarnessFault(f"{command!r} in {handle}: {status['message']} {stderr}")

    def execute(self, pod, command, text):
        """(stdout, stderr, status) of a command of the shell, with ``text`` on its stdin."""
        call = self.api.connect_get_namespaced_pod_exec
        options = {"stdin": bool(text), "stdout": True, "stderr": True, "tty": False}
        words = ["sh", "-c", command]
        try:
            with self.lock:
                connection = stream(
                    call,
                    pod,
                    self.namespace,
                    container="replica",
                    command=words,
                    _preload_content=False,
                    **options,
                )
        except Exception as error:
            # Client 36 stumbles over its own error; what the cluster said is in the one before.
            said = str(error.__context__ or error)
            if any(f"Handshake status {number}" in said for number in (400, 401, 403)):
                raise HarnessFault(f"exec in {pod} is refused: {said}") from None
            return "", "", {"status": "Failure", "message": f"{NOT_FOUND}: {said}"}
        try:
            for start in range(0, len(text), PIECE):
                connection.write_stdin(text[start : start + PIECE])
            connection.run_forever(timeout=self.patience)
            said = connection.read_channel(ERROR)
            status = json.loads(said) if said else {"status": "Failure", "message": "no answer"}
            return connection.read_channel(STDOUT), connection.read_channel(STDERR), status
        finally:
            connection.close()
            # ``close`` leaves it open where the cluster has closed the stream.
            connection.sock.shutdown()
