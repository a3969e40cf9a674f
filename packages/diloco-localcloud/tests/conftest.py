"""A stand-in and real clients of it."""

from __future__ import annotations

import contextlib
import json
import re
import ssl
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client, config

from diloco_localcloud import KubernetesStandIn

NAMESPACE = "ns"

sys.path.insert(0, str(Path(__file__).parent))  # for the module that several tests share


class Clients:
    """The real Python client, one ApiClient, plain dicts in and out."""

    def __init__(self, stand_in: Any, api: client.ApiClient) -> None:
        self.stand_in, self.world = stand_in, getattr(stand_in, "world", None)
        self.api = api
        self.batch, self.core = client.BatchV1Api(self.api), client.CoreV1Api(self.api)

    def create(self, job: dict[str, Any], **more: Any) -> dict[str, Any]:
        return self.plain(self.batch.create_namespaced_job(namespace=NAMESPACE, body=job, **more))

    def job(self, name: str) -> dict[str, Any]:
        return self.plain(self.batch.read_namespaced_job(name=name, namespace=NAMESPACE))

    def pods(self, **query: Any) -> list[dict[str, Any]]:
        return [
            self.plain(pod)
            for pod in self.core.list_namespaced_pod(namespace=NAMESPACE, **query).items
        ]

    def patch(self, name: str, body: Any) -> dict[str, Any]:
        return self.plain(
            self.batch.patch_namespaced_job(name=name, namespace=NAMESPACE, body=body)
        )

    def delete(self, name: str, **options: Any) -> None:
        self.batch.delete_namespaced_job(name=name, namespace=NAMESPACE, **options)

    def log(self, pod: str, **query: Any) -> bytes:
        answer = self.core.read_namespaced_pod_log(
            name=pod, namespace=NAMESPACE, _preload_content=False, **query
        )
        return bytes(answer.data)

    def raw(
        self,
        method: str,
        path: str,
        body: Any = None,
        kind: str = "application/json",
        token: str | None = None,
    ) -> tuple[Any, Any]:
        """(answer, headers) to a request that the client would not send."""
        stand_in = self.stand_in
        context = (
            ssl.create_default_context(cadata=stand_in.authority) if stand_in.authority else None
        )
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {token or stand_in.token}", "Content-Type": kind}
        request = urllib.request.Request(stand_in.url + path, data, headers, method=method)
        try:
            with urllib.request.urlopen(request, context=context) as answer:
                return json.loads(answer.read()), answer.headers
        except urllib.error.HTTPError as refusal:
            with refusal:
                return json.loads(refusal.read()), refusal.headers

    def plain(self, thing: Any) -> Any:
        return self.api.sanitize_for_serialization(thing)

    def conditions(self, name: str) -> list[tuple[str, str]]:
        """(type, reason) of the Job's conditions that are true, in their order."""
        listed = self.job(name)["status"].get("conditions", [])
        return [(entry["type"], entry["reason"]) for entry in listed if entry["status"] == "True"]

    def running(self, body: dict[str, Any]) -> None:
        """Create a Job, and have all its pods run."""
        self.create(body)
        self.world.settle()
        for pod in self.world.pods(body["metadata"]["name"], NAMESPACE):
            pod.start()
        self.world.settle()

    @staticmethod
    def indexed(
        name: str = "run", n: int = 4, /, grace: int = 30, template: dict | None = None, **spec: Any
    ) -> dict[str, Any]:
        """An Indexed Job as a plain dict."""
        container = {"name": "main", "image": "any:1", "command": ["train"]}
        pod = {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": grace,
            "containers": [container],
            **(template or {}),
        }
        base = {
            "completions": n,
            "parallelism": n,
            "completionMode": "Indexed",
            "template": {"spec": pod},
        }
        spec = {key: value for key, value in {**base, **spec}.items() if value is not None}
        return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "spec": spec}

    @contextlib.contextmanager
    def refused(self, status: int, reason: str, message: str):
        """The call is refused with this status, reason and part of the message."""
        with pytest.raises(client.ApiException) as caught:
            yield caught
        body = json.loads(caught.value.body)
        assert (caught.value.status, body["code"], body["reason"]) == (status, status, reason)
        assert re.search(message, body["message"]), body["message"]


@pytest.fixture
def stand_in():
    with KubernetesStandIn(namespace=NAMESPACE) as running:
        yield running


@pytest.fixture
def connect():
    """Makes ApiClients from kubeconfigs (object or path); closes their connections at the end."""
    opened = []

    def make(kubeconfig: Any, **more: Any) -> client.ApiClient:
        load = (
            config.new_client_from_config_dict
            if isinstance(kubeconfig, dict)
            else config.new_client_from_config
        )
        opened.append(load(kubeconfig, **more))
        return opened[-1]

    yield make
    for api in opened:
        api.close()
        pools = api.rest_client.pool_manager.pools
        for key in list(pools.keys()):
            pools[key].close()


@pytest.fixture
def clients_of(connect):
    """A function from a stand-in to its clients."""

    def make(stand_in: KubernetesStandIn) -> Clients:
        settings = client.Configuration()
        settings.retries = False  # urllib3 would answer a 429 by itself
        api = connect(stand_in.kubeconfig_dict(), client_configuration=settings)
        return Clients(stand_in, api)

    return make


@pytest.fixture
def clients(stand_in, clients_of):
    return clients_of(stand_in)
