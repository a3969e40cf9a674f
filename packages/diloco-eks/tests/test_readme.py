"""The example in the README is run as it stands."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"


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
    findings = "True cluster\n" + 6 * "True rights\n" + "True manifest\nTrue pods\nTrue quota\n"
    assert output == findings + "0 succeeded {'rank': 0}\n1 succeeded {'rank': 1}\n", errors
    assert process.returncode == 0


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
        "Pod Identity sets `AWS_CONTAINER_CREDENTIALS_FULL_URI` and `AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE`"
        in text
    )
