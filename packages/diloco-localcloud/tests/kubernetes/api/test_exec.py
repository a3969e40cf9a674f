"""``exec`` where there is nothing to run it."""

import json

from kubernetes.stream import stream


def test_scripted_pods_run_nothing(clients):
    clients.running(clients.indexed("run", 1))
    (pod,) = clients.pods()
    call = clients.core.connect_get_namespaced_pod_exec
    options = {"command": ["true"], "stdout": True, "_preload_content": False}
    connection = stream(call, pod["metadata"]["name"], "ns", **options)
    connection.run_forever()
    status = json.loads(connection.read_channel(3))
    connection.sock.shutdown()
    assert (status["reason"], "scripted" in status["message"]) == ("BadRequest", True)
