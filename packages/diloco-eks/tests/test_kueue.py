"""Runs in a queue: Kueue holds a Job by suspending it, and undoes what others do to that."""

import http.client
import json
import re
import ssl
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from diloco_protocol import Reason, ReplicaNotFoundError

WORKLOADS = re.compile(r"/apis/kueue\.x-k8s\.io/v1beta1/namespaces/default/workloads(/[\w-]+)?$")


class Queue:
    """A server in front of the stand-in, which answers for Kueue itself and passes everything else on."""

    def __init__(self, bench):
        self.bench = bench
        self.active = {}
        queue = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self):
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                path, _, query = self.path.partition("?")
                match = WORKLOADS.fullmatch(path)
                status, text = (
                    queue.kueue(self.command, match[1], body, query)
                    if match
                    else queue.forward(self, body)
                )
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            do_GET = do_POST = do_PATCH = do_DELETE = answer

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        self.thread.start()
        config = bench.stand_in.kubeconfig_dict()
        self.authority = config["clusters"][0]["cluster"].pop("certificate-authority-data", None)
        self.target = config["clusters"][0]["cluster"]["server"]
        config["clusters"][0]["cluster"]["server"] = f"http://127.0.0.1:{self.server.server_port}"
        bench.kubeconfig.write_text(json.dumps(config))

    def forward(self, request, body):
        host = self.target.partition("://")[2]
        secure = self.target.startswith("https")
        context = (
            ssl.create_default_context(cadata=self.bench.stand_in.authority) if secure else None
        )
        made = (
            http.client.HTTPSConnection(host, context=context)
            if secure
            else http.client.HTTPConnection(host)
        )
        try:
            made.request(request.command, request.path, body, dict(request.headers))
            answer = made.getresponse()
            return answer.status, answer.read()
        finally:
            made.close()

    def kueue(self, verb, name, body, query):
        if verb == "GET":
            uid = query.partition("job-uid%3D")[2].partition("&")[0]
            jobs = [job for job in self.jobs() if job["metadata"]["uid"] == uid]
            items = [{"metadata": {"name": f"job-{job['metadata']['name']}"}} for job in jobs]
            return 200, json.dumps({"kind": "WorkloadList", "items": items}).encode()
        self.active[name.removeprefix("/job-")] = json.loads(body)["spec"]["active"]
        return 200, b"{}"

    def jobs(self):
        return self.bench.executor()._cluster.list_jobs("default", "kueue.x-k8s.io/queue-name")

    def set(self, *, suspend):
        self.bench.executor()._cluster.patch_job("default", "run-1", {"spec": {"suspend": suspend}})
        self.bench.world.settle()

    def close(self):
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def queue(bench):
    queue = Queue(bench)
    yield queue
    bench.close()
    queue.close()


def queued(bench, queue):
    run = bench.launch(2, start=False, executor=bench.executor(queue="gpus"))
    queue.set(suspend=True)
    return run


def test_a_queued_run_waits_runs_and_is_preempted(bench, queue):
    run = queued(bench, queue)
    assert [(str(s.state), s.reason) for s in (run.describe(0), run.describe(1))] == [
        ("pending", Reason.QUEUED)
    ] * 2
    assert "gpus" in run.describe(0).message
    queue.set(suspend=False)
    for pod in bench.pods(run.handles[0]):
        pod.start()
    assert [run.describe(0).state, run.describe(0).attempt] == ["running", 1]
    queue.set(suspend=True)
    assert [run.describe(0).state, run.describe(0).attempt, run.describe(0).reason] == [
        "pending",
        2,
        Reason.QUEUED,
    ]
    queue.set(suspend=False)
    for pod in bench.pods(run.handles[0]):
        pod.start()
    assert [run.describe(0).state, run.describe(0).attempt] == ["running", 2]


def test_a_queued_run_is_cancelled_in_the_queue(bench, queue):
    run = queued(bench, queue)
    run.executor.cancel(run.handles[0])
    assert queue.active == {"run-1": False}
    assert run.states() == ["cancelled"] * 2
    job = bench.world.job("run-1")
    assert job["spec"]["suspend"] is True  # Kueue would undo anything else
    assert "activeDeadlineSeconds" in job["spec"]
    run.executor.cancel(run.handles[1])
    run.executor.purge(run.handles[0])
    bench.world.settle()
    with pytest.raises(ReplicaNotFoundError):
        run.executor.poll(run.handles[0])


def test_a_run_that_kueue_has_admitted_is_cancelled_as_any_other(bench, queue):
    run = queued(bench, queue)
    queue.set(suspend=False)
    for pod in bench.pods(run.handles[0]):
        pod.start()
    run.executor.cancel(run.handles[0])
    bench.world.settle()
    assert run.states() == ["cancelled"] * 2
    assert queue.active == {}


def test_a_cancel_that_stopped_half_way_is_finished_by_the_next(bench, queue):
    run = queued(bench, queue)
    kueue, queue.kueue = queue.kueue, lambda *_: (500, b"{}")
    with pytest.raises(Exception, match="Kueue's Workloads"):
        run.executor.cancel(run.handles[0])
    assert queue.active == {}
    assert run.states() == ["pending"] * 2  # Kueue may still start it
    queue.kueue = kueue
    run.executor.cancel(run.handles[0])
    assert queue.active == {"run-1": False}
    assert run.states() == ["cancelled"] * 2


def test_a_run_that_is_admitted_while_it_is_cancelled(bench, queue):
    """The Job has changed since it was read, so the next look finds it running."""
    run = queued(bench, queue)
    kueue = queue.kueue

    def admit(verb, *arguments):
        if verb == "PATCH":
            queue.kueue = kueue
            queue.set(suspend=False)
        return kueue(verb, *arguments)

    queue.kueue = admit
    run.executor.cancel(run.handles[0])
    bench.world.settle()
    assert run.states() == ["cancelled"] * 2
    assert bench.world.job("run-1")["status"]["conditions"][-1]["type"] == "Failed"


def test_workloads_that_may_not_be_touched(bench, queue):
    run = queued(bench, queue)
    queue.kueue = lambda *_: (403, b'{"message": "workloads is forbidden"}')
    run.executor.cancel(run.handles[0])
    bench.world.settle()
    assert bench.world.pods() == []
    with pytest.raises(ReplicaNotFoundError):
        run.executor.poll(run.handles[0])
