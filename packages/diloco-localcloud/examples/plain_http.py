"""A Kubernetes API on this machine, asked with the standard library alone.

Create a Job, move its pods, look again.
"""

import json
import sys
import urllib.request

from diloco_localcloud import KubernetesStandIn

JOB = {
    "apiVersion": "batch/v1",
    "kind": "Job",
    "metadata": {"name": "run"},
    "spec": {
        "completions": 2,
        "parallelism": 2,
        "completionMode": "Indexed",
        "backoffLimitPerIndex": 0,
        "template": {
            "spec": {
                "restartPolicy": "Never",
                "containers": [{"name": "main", "image": "any", "command": ["train"]}],
            }
        },
    },
}


def ask(stand_in, method, path, body=None):
    """One request; the answer as JSON. Any client of Kubernetes does the same."""
    request = urllib.request.Request(
        stand_in.url + path,
        method=method,
        data=None if body is None else json.dumps(body).encode(),
        headers={"Authorization": f"Bearer {stand_in.token}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


def main():
    """One index succeeds, the other fails."""
    with KubernetesStandIn(tls=False) as stand_in:
        jobs = "/apis/batch/v1/namespaces/default/jobs"
        ask(stand_in, "POST", jobs, JOB)
        world = stand_in.world
        world.settle()  # the controller makes the pods
        for pod in world.pods("run"):
            pod.start()
        world.pod("run", 0).succeed()
        world.pod("run", 1).fail(3, "no more data")
        world.settle()
        status = ask(stand_in, "GET", f"{jobs}/run")["status"]
    sys.stdout.write(
        f"completed: {status['completedIndexes']}, failed: {status['failedIndexes']}\n"
    )
    for condition in status["conditions"]:
        sys.stdout.write(f"{condition['type']}: {condition['reason']}\n")


if __name__ == "__main__":
    main()
