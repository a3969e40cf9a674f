"""How long one look at a run of 1000 replicas takes, beside the floor and the client's own work.

    python packages/diloco-eks/benchmarks/observe.py [replicas]

Prints, for one Job and its pods as JSON: reading the JSON (the floor), our facts and states, and
the client's own models of the same pods (the peer).
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable

from diloco_eks._state._reading import read_job, read_pod
from diloco_eks._state._states import map_states
from diloco_protocol import Outcome, Reason, outcome_to_message

ROUNDS = 7


def pod(index: int) -> dict[str, object]:
    """A pod as a cluster tells it: a third succeeded, a third runs, a third waits."""
    end = {
        "exitCode": 0,
        "reason": "Completed",
        "startedAt": "2026-11-21T04:30:48Z",
        "finishedAt": "2026-11-21T04:40:00Z",
    }
    message, _ = outcome_to_message(
        Outcome(0, result={"loss": 0.5, "rank": index}, reason=Reason.COMPLETED)
    )
    kinds = [
        ("Succeeded", {"terminated": {**end, "message": message}}),
        ("Running", {"running": {"startedAt": "2026-11-21T04:30:48Z"}}),
        ("Pending", {"waiting": {"reason": "ContainerCreating"}}),
    ]
    phase, state = kinds[index % 3]
    env = [
        {"name": "DILOCO_SPEC_0", "value": "x" * 800},
        *({"name": f"V{n}", "value": "x"} for n in range(10)),
    ]
    label = "batch.kubernetes.io/job-completion-index"
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": f"run-1-{index}-abcde",
            "labels": {label: str(index), "batch.kubernetes.io/controller-uid": "u"},
            "annotations": {label: str(index), "batch.kubernetes.io/job-index-failure-count": "0"},
            "creationTimestamp": "2026-11-21T04:30:47Z",
        },
        "spec": {"containers": [{"name": "replica", "image": "x", "env": env}]},
        "status": {
            "phase": phase,
            "conditions": [
                {"type": "PodScheduled", "status": "True"},
                {"type": "Ready", "status": "True"},
            ],
            "containerStatuses": [
                {
                    "name": "replica",
                    "image": "x",
                    "imageID": "x",
                    "ready": True,
                    "restartCount": 0,
                    "state": state,
                }
            ],
        },
    }


def seconds(call: Callable[[], object]) -> float:
    """Median of a few rounds."""
    times = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def main() -> None:
    """Measure and print."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    done = ",".join(str(index) for index in range(0, count, 3))
    job = {
        "metadata": {"name": "run-1", "uid": "u"},
        "spec": {"completions": count},
        "status": {"completedIndexes": done},
    }
    text = json.dumps(
        {"kind": "PodList", "apiVersion": "v1", "items": [pod(index) for index in range(count)]}
    )
    items = json.loads(text)["items"]

    def ours() -> object:
        return map_states(read_job(job), [read_pod(item) for item in items], range(count))

    floor, mapping = seconds(lambda: json.loads(text)), seconds(ours)
    print(f"{count} replicas, {len(text) / 1e6:.1f} MB of JSON, median of {ROUNDS} rounds")
    print(f"  reading the JSON (floor)   {floor * 1e3:8.1f} ms")
    print(f"  facts and states           {mapping * 1e3:8.1f} ms   {mapping / floor:5.2f} x floor")
    try:
        import kubernetes
    except ImportError:
        return

    class Answer:
        data = text

    api = kubernetes.client.ApiClient(kubernetes.client.Configuration())
    try:
        peer = seconds(lambda: api.deserialize(Answer(), "V1PodList"))
    except TypeError:  # the generation of 37 takes the text
        peer = seconds(lambda: api.deserialize(text, "V1PodList", "application/json"))
    print(
        f"  client {kubernetes.__version__}'s own models {peer * 1e3:8.1f} ms   "
        f"{mapping / peer:5.2f} of it are ours"
    )


if __name__ == "__main__":
    main()
