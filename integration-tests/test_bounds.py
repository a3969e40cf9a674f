"""A launcher reads what replicas print, return or report in bounded memory, and names errors."""

import contextlib
import json
import os
import subprocess
import sys
import uuid

import boto3
import pytest
from integration_lab import PATIENCE
from rehearsal_lab import processes_of, python_path, wait_for

from diloco_localcloud import (
    KubernetesProcesses,
    ModalProcesses,
    SageMakerProcesses,
)
from diloco_protocol import get_executor
from diloco_protocol.backend import LINE_BYTES, OUTCOME_BYTES

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(sys.platform != "linux", reason="memory and processes are read in /proc"),
]

MARK = "DILOCO_BOUNDS"
MIB = 1 << 20
LINES = 768
"""How many lines of 64 KiB are printed after one of 2 MiB.

A launcher that held them all would grow by more than it may.
"""
GROWTH = 40 * MIB
HOSTILE = f"""
import os
import sys


def prints():
    print("x" * (2 * {MIB}))
    for _ in range({LINES}):
        print("x" * 65536)
    print("the end", flush=True)
    return "printed"


def returns():
    return "x" * (20 * {MIB})


def reports():
    with open(sys.orig_argv[-1], "wb") as file:
        file.truncate(512 * {MIB})
    os._exit(0)
"""
LAUNCHER = """
import json
import sys
from pathlib import Path

from diloco_protocol import get_executor

name, options, patience = sys.argv[1], json.loads(sys.argv[2]), float(sys.argv[3])


def held():
    # getrusage would count what the program that started this one has held, too.
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


with get_executor(name)(**options) as executor:
    handles = [executor.attach(run)[0] for run in ("prints", "returns", "reports")]
    executor.describe(handles[0])
    before = held()
    results = executor.collect(handles, timeout=patience)
    lines = [len(line) for line in executor.log_iter(handles[0])]
    last = executor.stream_logs(handles[0], n_lines=1)
    print(json.dumps([results, lines, last, held() - before]))
"""
APP = """
import modal
from diloco_modal import build_app

app = build_app("trainer")
"""


@contextlib.contextmanager
def local(folder, variables):
    yield "local_process", {"root": str(folder / "runs"), "env": variables}, {}


@contextlib.contextmanager
def eks(folder, variables):
    with KubernetesProcesses(backoff_seconds=0.5) as stand_in:
        kubeconfig = str(stand_in.kubeconfig(folder / "kubeconfig"))
        options = {"image": "any/image:1", "kubeconfig": kubeconfig, "env": variables}
        yield "eks", options, {}


@contextlib.contextmanager
def sagemaker(folder, variables):
    with SageMakerProcesses(kill_seconds=10.0) as stand_in, pytest.MonkeyPatch.context() as patch:
        for name, value in stand_in.environment.items():
            patch.setenv(name, value)
        client = boto3.Session().client("s3")
        client.create_bucket(Bucket="runs")
        client.close()
        options = {
            "role_arn": "arn:aws:iam::123456789012:role/trainer",
            "image_uri": "123456789012.dkr.ecr.us-east-1.amazonaws.com/trainer:1",
            "output_s3_path": "s3://runs/output",
            "command": [sys.executable, "-m", "diloco_protocol.runner"],
            "env": variables,
        }
        yield "sagemaker", options, stand_in.environment


@contextlib.contextmanager
def modal(folder, variables):
    image = {"PATH": os.environ["PATH"], **variables}
    with ModalProcesses(env=image) as stand_in, pytest.MonkeyPatch.context() as patch:
        environment = {**stand_in.environment, "PYTHONPATH": python_path(folder)}
        for name, value in environment.items():
            patch.setenv(name, value)
        (folder / "app.py").write_text(APP)
        subprocess.run([sys.executable, "-m", "modal", "deploy", "app.py"], cwd=folder, check=True)
        yield "modal", {"app": "trainer", "env": variables}, environment


@pytest.mark.parametrize(
    ("backend", "most"),
    [
        pytest.param(local, GROWTH, id="local"),
        pytest.param(eks, GROWTH, id="eks", marks=pytest.mark.slow),
        pytest.param(sagemaker, GROWTH, id="sagemaker", marks=pytest.mark.slow),
        # Modal's client holds each answer twice, and all of this log is in one.
        pytest.param(
            modal, GROWTH + 2 * (LINES * 65536 + 2 * MIB), id="modal", marks=pytest.mark.slow
        ),
    ],
)
def test_what_is_too_large_is_named_and_not_held(tmp_path, backend, most):
    (tmp_path / "hostile.py").write_text(HOSTILE)
    mark = uuid.uuid4().hex
    variables = {"PYTHONPATH": python_path(tmp_path), MARK: mark}
    with backend(tmp_path, variables) as (name, options, environment):
        with get_executor(name)(**options) as executor:
            handles = [
                executor.launch_replicas(1, f"hostile:{run}", timeout=PATIENCE, run_id=run)[0]
                for run in ("prints", "returns", "reports")
            ]
            executor.collect(handles, timeout=PATIENCE)
        done = subprocess.run(
            [sys.executable, "-c", LAUNCHER, name, json.dumps(options), str(PATIENCE)],
            cwd=tmp_path,
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            check=True,
        )
        (printed, returned, reported), lines, last, growth = json.loads(done.stdout)
    assert (printed["status"], printed["result"]) == ("succeeded", "printed")
    assert (returned["status"], returned["result"]) == ("failed", None)
    assert "bytes of JSON" in returned["error"]
    assert (reported["status"], reported["result"]) == ("failed", None)
    assert f"larger than {OUTCOME_BYTES} bytes" in reported["error"]
    assert LINE_BYTES <= max(lines) < LINE_BYTES + 100
    assert lines.count(65536) == LINES
    assert last == "the end"
    assert growth < most, f"{growth / MIB:.0f} MiB"
    wait_for(lambda: not processes_of(MARK, mark), "every process to be gone")
