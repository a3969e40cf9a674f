"""Servers that drip bytes, each in time: no call waits for the whole, which would take hours."""

import contextlib
import os
import socketserver
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from diloco_protocol import UnavailableError

# What a server of HTTP/2 begins with, and the first header of HTTP/1.
ANSWERS = {
    "a frame": b"\0\0\0\4\0\0\0\0\0\0\xff\xff\1",
    "headers": b"HTTP/1.1 200 OK\r\nX-Name: ",
    "a body": b"HTTP/1.1 200 OK\r\n\r\n",
}
ASK = """
import time
from diloco_modal import ModalSpawnExecutor
from diloco_protocol import UnavailableError
executor = ModalSpawnExecutor(request_timeout=1, retry_timeout=0)
begin = time.monotonic()
try:
    executor.list_runs()
except UnavailableError as error:
    print(f"{error} after {time.monotonic() - begin:.0f} s")
"""


@contextlib.contextmanager
def dripping(begin):
    class Handler(socketserver.BaseRequestHandler):
        def handle(self):
            with contextlib.suppress(OSError):
                self.request.sendall(begin)
                while True:
                    self.request.sendall(b"a")
                    time.sleep(0.05)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()


@pytest.mark.parametrize("begin", ["headers", "a body"])
def test_a_result_that_drips(lab, monkeypatch, begin):
    """It is in a bucket, from which it is fetched by HTTP."""
    executor = lab.executor(retry_timeout=0, request_timeout=3)
    (handle,) = lab.launch(1, executor)
    lab.begin(handle)
    lab.finish(handle, "a" * 3_000_000)
    with dripping(ANSWERS[begin]) as port:
        monkeypatch.setattr(lab.stand_in._serving._blobs, "_server", SimpleNamespace(port=port))
        with pytest.raises(UnavailableError, match="did not answer within 3 s"):
            executor.describe(handle)


@pytest.mark.processes
@pytest.mark.parametrize("begin", ["a frame", "headers"])
def test_a_server_that_drips(tmp_path, begin):
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MODAL_")}
    with dripping(ANSWERS[begin]) as port:
        url = f"http://127.0.0.1:{port}"
        settings = {"MODAL_SERVER_URL": url, "MODAL_TOKEN_ID": "ak-x", "MODAL_TOKEN_SECRET": "as-x"}
        env = {**kept, "MODAL_CONFIG_PATH": str(tmp_path / "none"), **settings}
        command = [sys.executable, "-c", ASK]
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=120, check=True
        )
    assert "cannot" in done.stdout or "did not answer within 1 s" in done.stdout, done
