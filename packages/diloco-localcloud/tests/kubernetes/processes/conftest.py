"""Pods that really run."""

from __future__ import annotations

import pytest

from diloco_localcloud import KubernetesProcesses


@pytest.fixture
def stand_in():
    with KubernetesProcesses(
        namespace="ns", backoff_seconds=0.5, resources={"nvidia.com/gpu": "2"}
    ) as running:
        running._jobs.batch_seconds = 0.05  # the lag of the real one is tested on the virtual clock
        yield running


@pytest.fixture
def run(clients, stand_in):
    """Run a Python script as the pods of a Job."""

    def start(script, n=1, *, main=None, template=None, **spec):
        container = {
            "name": "main",
            "image": "any",
            "command": ["python", "-c", script],
            **(main or {}),
        }
        clients.create(
            clients.indexed(
                "run", n, template={"containers": [container], **(template or {})}, **spec
            )
        )

    return start
