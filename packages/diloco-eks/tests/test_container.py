"""The container as a kubelet starts it: the real runner, with the Job's command and variables."""

import os
import re
import subprocess
import sys

import pytest

from diloco_protocol import Outcome, Reason, ReplicaState

pytestmark = pytest.mark.processes

TRAINER = """
import os

def train(**kwargs):
    names = ("REPLICA_RANK", "REPLICA_WORLD_SIZE", "RENDEZVOUS_URI", "DILOCO_RUN_ID",
             "DILOCO_COHORT", "DILOCO_ATTEMPT", "PRICE", "MY_RANK")
    print("rank", os.environ["REPLICA_RANK"], "of", os.environ["REPLICA_WORLD_SIZE"])
    return {"kwargs": kwargs, "env": {name: os.environ.get(name) for name in names}}

def large(size):
    return "x" * size

def fail():
    raise ValueError("no such data")

def forge(report):
    print(report, flush=True)
    os.kill(os.getppid(), 9)  # the runner
    os._exit(0)
"""


def expand(text, known):
    return re.sub(
        r"\$\$|\$\(([^)]*)\)", lambda m: "$" if m[0] == "$$" else known.get(m[1], m[0]), text
    )


def read_field(path, pod):
    section, key = re.fullmatch(r"metadata\.(\w+)\['(.*)'\]", path).groups()
    return pod["metadata"].get(section, {}).get(key, "")


@pytest.fixture
def kubelet(tmp_path):
    """Runs a scripted pod's container to its end, and tells the cluster what came of it."""
    (tmp_path / "trainer.py").write_text(TRAINER)

    def run(pod):
        container = pod.json["spec"]["containers"][0]
        known = {}
        for entry in container["env"]:
            if "value" in entry:
                known[entry["name"]] = expand(entry["value"], known)
            else:
                known[entry["name"]] = read_field(
                    entry["valueFrom"]["fieldRef"]["fieldPath"], pod.json
                )
        message = tmp_path / f"{pod.name}.message"
        message.touch()
        words = [expand(word, known) for word in [*container["command"], *container["args"]]]
        words = [word.replace(container["terminationMessagePath"], str(message)) for word in words]
        path = os.pathsep.join([str(tmp_path), *sys.path])
        done = subprocess.run(
            [sys.executable, *words[1:]],
            env={"PATH": os.environ["PATH"], "PYTHONPATH": path, **known},
            capture_output=True,
            text=True,
        )
        assert words[0] == "python"
        pod.log(done.stdout + done.stderr)
        if done.returncode:
            # FallbackToLogsOnError
            text = message.read_text() or (done.stdout + done.stderr)[-2048:]
            pod.fail(done.returncode % 256 if done.returncode > 0 else 128 - done.returncode, text)
        else:
            pod.succeed(message.read_text())

    return run


def test_a_replica_is_told_who_it_is(bench, kubelet):
    kwargs = {
        "deep": {"list": [1, None, {"a": "$(PRICE) $$"}]},
        "rendezvous_uri": "s3://b/$run",
        "rank_env": "MY_RANK",
    }
    executor = bench.executor(env={"PRICE": "$5 $(REPLICA_RANK) $$"})
    run = bench.launch(
        2, executor=executor, kwargs=kwargs, rank_offset=3, world_size=9, cohort="whole"
    )
    for pod in bench.pods(run.handles[0]):
        kubelet(pod)
    results = executor.collect(run.handles, timeout=60)
    told = dict(kwargs)
    del told["rank_env"]
    for rank, result in zip((3, 4), results, strict=True):
        assert result["status"] == "succeeded"
        assert result["result"]["kwargs"] == told
        assert result["result"]["env"] == {
            "REPLICA_RANK": str(rank),
            "REPLICA_WORLD_SIZE": "9",
            "RENDEZVOUS_URI": "s3://b/$run",
            "DILOCO_RUN_ID": "run-1",
            "DILOCO_COHORT": "whole",
            "DILOCO_ATTEMPT": "1",
            "PRICE": "$5 $(REPLICA_RANK) $$",
            "MY_RANK": str(rank),
        }
    assert executor.stream_logs(run.handles[1]) == "rank 4 of 9"


def test_a_large_result_and_a_failure(bench, kubelet):
    executor = bench.executor()
    large = executor.launch_replicas(1, "trainer:large", {"size": 30_000})
    broken = executor.launch_replicas(1, "trainer:fail")
    missing = executor.launch_replicas(1, "nowhere:fail")
    bench.world.settle()
    for pod in bench.world.pods():
        pod.start()
        kubelet(pod)
    results = executor.collect([*large, *broken, *missing], timeout=60)
    assert results[0]["result"] == "x" * 30_000
    assert (results[1]["status"], results[1]["exit_code"], results[1]["reason"]) == (
        "failed",
        1,
        "error",
    )
    assert results[1]["error"] == "ValueError: no such data"
    assert "raise ValueError" in executor.stream_logs(broken[0])
    assert results[2]["reason"] == Reason.START_FAILED
    assert "No module named 'nowhere'" in results[2]["error"]


def test_the_attempt_is_counted_by_the_cluster(bench, kubelet):
    run = bench.launch(1, max_restarts=2)
    run.pod(0).fail(1)
    bench.world.settle(within=30)
    run.pod(0).start()
    bench.world.settle()
    run.pod(0).evict()
    bench.world.settle(within=30)
    run.pod(0).start()
    kubelet(run.pod(0))
    (result,) = run.executor.collect(run.handles, timeout=60)
    assert (result["attempt"], result["result"]["env"]["DILOCO_ATTEMPT"]) == (3, "3")


def test_the_end_of_a_log_is_no_report(bench, kubelet):
    """A kubelet puts it in place of a missing report; a log's author must not write the report."""
    forged = Outcome(7, error="as the replica says", reason=Reason.TIMEOUT, finished_at=1.0)
    executor = bench.executor()
    (handle,) = executor.launch_replicas(1, "trainer:forge", {"report": forged.to_json()})
    bench.world.settle()
    (pod,) = bench.world.pods()
    pod.start()
    kubelet(pod)
    bench.world.settle(within=30)
    status = executor.describe(handle)
    assert status.state is ReplicaState.FAILED
    assert (status.reason, status.exit_code, status.signal) == (Reason.ERROR, 137, "SIGKILL")
    assert status.message == (
        "it was ended by SIGKILL: the runner had started, and was ended before it could report"
    )
