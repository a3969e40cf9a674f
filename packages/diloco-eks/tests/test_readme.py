"""The example in the README is run as it stands, and its numbers are those of the code."""

import os
import re
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
from real_cluster import MOST_PODS

from diloco_eks._client import _client, _cluster
from diloco_eks._request import _environment
from diloco_eks._request._manifest import job_manifest
from diloco_eks._state import _events, _verdict
from diloco_eks._verbs import _logs
from diloco_protocol import InvalidRequestError, OutcomeMessage
from diloco_protocol.backend import LINE_BYTES, MAX_REPLICAS

README = Path(__file__).parents[1] / "README.md"
TWELVE = {12: "twelve"}


@pytest.mark.processes
def test_the_example(bench, report, tmp_path):
    ((name, text),) = re.findall(
        r"```python\n# (\S+)\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL
    )
    (tmp_path / name).write_text(text)
    process = subprocess.Popen(
        [sys.executable, "-W", "error", name],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            "KUBECONFIG": str(bench.kubeconfig),
            "PYTHONPATH": os.pathsep.join(os.path.abspath(entry) for entry in sys.path if entry),  # noqa: PTH100
        },
    )
    try:
        while process.poll() is None:
            bench.world.advance(1)
            for pod in bench.world.pods():
                if pod.alive:
                    pod.succeed(report({"rank": pod.index})[0])
                elif pod.json["status"]["phase"] == "Pending":
                    pod.start()
            time.sleep(0.05)
    finally:
        process.kill()
        output, errors = process.communicate()
    findings = "True cluster\n" + 5 * "True rights\n" + "True manifest\nTrue pods\nTrue quota\n"
    assert output == findings + "0 succeeded {'rank': 0}\n1 succeeded {'rank': 1}\n", errors
    assert process.returncode == 0


@pytest.mark.parametrize(
    "words",
    [
        f"of at most {_environment._MOST_BYTES >> 10} KiB",
        f"one list of its pods ({_cluster.PAGE} per page)",
        f"waits for {_events.STUCK_SECONDS:g} s, the message has the cluster's events",
        (
            f"A report of up to {_verdict._MESSAGE_BYTES >> 10} KiB is in the pod's termination "
            "message"
        ),
        f"A larger result (up to {OutcomeMessage.max_result_bytes >> 20} MiB of JSON)",
        f"a runtime's pieces have less than {_logs._LEAST_PIECE >> 10} KiB",
        f"a list of more than {_cluster._OBJECTS:,} objects or {_cluster._PAGES} pages",
        f"has more than {MAX_REPLICAS:,} completions",
        f"a line of a log is cut at {LINE_BYTES >> 20} MiB",
        (
            f"is read up to {_client._ANSWER_BYTES >> 20} MiB, a refusal up to "
            f"{_client._REFUSAL_BYTES >> 20} MiB"
        ),
        f"There are {TWELVE[MOST_PODS]} small pods at a time at most",
    ],
)
def test_its_numbers_are_those_of_the_code(words):
    assert words in " ".join(README.read_text(encoding="utf-8").split())


def test_as_many_arguments_fit_as_it_says(options_for, request_for):
    (kib,) = re.findall(r"which is about (\d+) KiB of JSON", README.read_text(encoding="utf-8"))
    for size, fits in ((int(kib), True), (int(kib) + 10, False)):
        request = request_for(1, kwargs={"text": "x" * size * 1024})
        with (
            nullcontext() if fits else pytest.raises(InvalidRequestError, match="may carry 262144")
        ):
            assert job_manifest(request, options_for())


def test_it_does_not_call_scheduling_atomic(bench):
    """A Job is not gang-scheduled; Kueue's queue is the way to have that."""
    assert re.search(r"not\s+gang-scheduled", README.read_text(encoding="utf-8"))
    (job,) = bench.executor(queue="gpus").plan(2, "trainer:train").requests
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpus"


def test_it_tells_irsa_from_pod_identity():
    """They inject different variables."""
    text = " ".join(README.read_text(encoding="utf-8").split())
    assert "IRSA sets `AWS_ROLE_ARN` and `AWS_WEB_IDENTITY_TOKEN_FILE`" in text
    assert (
        "Pod Identity sets `AWS_CONTAINER_CREDENTIALS_FULL_URI` and "
        "`AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE`" in text
    )
