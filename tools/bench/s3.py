"""The S3 drivers against a bare parallel client, as ratios in one run: ``hatch run bench-s3``.

The server is moto, in a process of its own on a loopback port. The bare client is the standard
library's http.client: parts of 8 MiB, four at once up, as many down (the drivers have more under
way, which gains nothing on loopback), not really signed, from and into buffers that exist; it does
what must be done and nothing else. Our side is what an exchange does: chunks of 1 MiB into ``put``,
and out of an open object. Every round runs every contender once, in turn; what is printed is the
median of the ratios round by round.

Then, in processes of their own (``s3_memory.py``): by how much the resident memory of a replica
grows at its peak in whole runs of two replicas, local and global copy included, for both drivers
and every kind of run.
"""

from __future__ import annotations

import argparse
import http.client
import os
import re
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from diloco_core._store._open import open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from diloco_core._store._api import Store

MIB = 2**20
PART = 8 * MIB
AT_ONCE = 4
SMALL = 1024
SMALL_TIMES = 50
# moto looks for a signature, and not at it.
SIGNED = {
    "Authorization": (
        "AWS4-HMAC-SHA256 Credential=bench/20260101/us-east-1/s3/aws4_request, Signature=0"
    )
}

SERVER = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
server.stop()
"""


@contextmanager
def s3_server() -> Iterator[int]:
    """Start a server with ``s3://bucket``, to which the environment leads; gives its port."""
    command = [sys.executable, "-c", SERVER]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as server:
        try:
            port = int(server.stdout.readline()) if server.stdout else 0
            address = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"}
            os.environ.update(address, AWS_DEFAULT_REGION="us-east-1")
            os.environ.update(AWS_ACCESS_KEY_ID="bench", AWS_SECRET_ACCESS_KEY="bench")
            bare = Bare(port)
            bare.done(bare.request("PUT", "/bucket")).read()
            yield port
        finally:
            server.kill()


class Bare:
    """Requests with http.client and nothing around them, over one connection per thread."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.pool = ThreadPoolExecutor(AT_ONCE)
        self.connections: list[http.client.HTTPConnection] = []

    def request(
        self, method: str, path: str, body: bytes | memoryview | None = None, **headers: str
    ) -> http.client.HTTPResponse:
        """Send a request over an idle connection; read its answer, and call :meth:`done`."""
        connection = (
            self.connections.pop()
            if self.connections
            else http.client.HTTPConnection("127.0.0.1", self.port)
        )
        connection.request(method, path, body, {**SIGNED, **headers})
        response = connection.getresponse()
        if response.status >= 300:
            raise SystemExit(f"{method} {path}: {response.status} {response.read()!r}")
        response.connection = connection  # type: ignore[attr-defined]
        return response

    def done(self, response: http.client.HTTPResponse) -> http.client.HTTPResponse:
        """Take the connection back."""
        self.connections.append(response.connection)  # type: ignore[attr-defined]
        return response

    def put(self, key: str, data: memoryview) -> None:
        """Write an object in parts."""
        path = f"/bucket/{key}"
        response = self.request("POST", f"{path}?uploads")
        found = re.search(rb"<UploadId>([^<]+)<", response.read())
        self.done(response)
        upload = found[1].decode() if found else ""

        def send(number: int) -> str:
            body = data[(number - 1) * PART : number * PART]
            response = self.request("PUT", f"{path}?partNumber={number}&uploadId={upload}", body)
            response.read()
            return self.done(response).headers["ETag"]

        tags = self.pool.map(send, range(1, -(-len(data) // PART) + 1))
        parts = "".join(
            f"<Part><PartNumber>{number}</PartNumber><ETag>{tag}</ETag></Part>"
            for number, tag in enumerate(tags, 1)
        )
        whole = f"<CompleteMultipartUpload>{parts}</CompleteMultipartUpload>".encode()
        response = self.request("POST", f"{path}?uploadId={upload}", whole)
        response.read()
        self.done(response)

    def get(self, key: str, data: memoryview) -> None:
        """Read an object in ranges."""

        def fetch(start: int) -> None:
            stop = min(start + PART, len(data))
            response = self.request("GET", f"/bucket/{key}", Range=f"bytes={start}-{stop - 1}")
            while start < stop:
                start += response.readinto(data[start:stop])
            self.done(response)

        list(self.pool.map(fetch, range(0, len(data), PART)))

    def put_small(self, key: str) -> None:
        """Write a small object."""
        response = self.request("PUT", f"/bucket/{key}", bytes(SMALL))
        response.read()
        self.done(response)

    def get_small(self, key: str) -> None:
        """Read a small object."""
        response = self.request("GET", f"/bucket/{key}")
        response.read()
        self.done(response)


class Ours:
    """The same through a store, as the exchange uses it."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def put(self, key: str, data: memoryview) -> None:
        """Write an object chunk by chunk."""

        def chunks() -> Iterator[memoryview]:
            for start in range(0, len(data), MIB):
                yield data[start : start + MIB]

        self.store.put(key, chunks())

    def get(self, key: str, data: memoryview) -> None:
        """Read an object chunk by chunk."""
        with self.store.open(key) as reader:
            if hasattr(reader, "expect"):
                reader.expect(0, len(data))
            for start in range(0, len(data), MIB):
                reader.read_into(start, data[start : start + MIB])

    def put_small(self, key: str) -> None:
        """Write a small object."""
        self.store.put(key, [bytes(SMALL)])

    def get_small(self, key: str) -> None:
        """Read a small object."""
        self.store.get(key)


def main() -> int:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--megabytes", type=int, default=128, help="size of the large object in MiB (default: 128)"
    )
    parser.add_argument(
        "--rounds", type=int, default=7, help="counted rounds, after one to warm up (default: 7)"
    )
    parser.add_argument(
        "--parameters",
        type=int,
        default=23_750_000,
        help="for the memory: fp32 (default: 23,750,000)",
    )
    parser.add_argument(
        "--no-memory", action="store_true", help="leave out the measurement of peak memory"
    )
    arguments = parser.parse_args()
    with s3_server() as port:
        _print_times(_measure(port, arguments.megabytes * MIB, arguments.rounds), arguments)
        if not arguments.no_memory:
            _print_memory(arguments.parameters)
    return 0


def _print_times(
    seconds: dict[tuple[str, str], list[float]], arguments: argparse.Namespace
) -> None:
    print(
        f"{arguments.megabytes} MiB in parts of 8 MiB, {AT_ONCE} at once; {os.cpu_count()} cores, "
        "moto on loopback"
    )
    print(f"medians of {arguments.rounds} rounds, against the bare client\n")
    print(f"{'':<30} {'obstore':>8} {'s3fs':>8}   {'goal':>7}   bare client")
    for what, label in (
        ("put", "put"),
        ("get", "get"),
        ("put_small", "put 1 KiB"),
        ("get_small", "get 1 KiB"),
    ):
        ratios = [
            statistics.median(
                a / b for a, b in zip(seconds[driver, what], seconds["bare", what], strict=True)
            )
            for driver in ("obstore", "s3fs")
        ]
        times = SMALL_TIMES if what.endswith("small") else 1
        bare = 1000 * statistics.median(seconds["bare", what]) / times
        goal = "" if what.endswith("small") else "<= 1.3"
        print(f"{label:<30} {ratios[0]:>8.2f} {ratios[1]:>8.2f}   {goal:>7}   {bare:.1f} ms")


def _print_memory(parameters: int) -> None:
    size, replicas = 4 * parameters, 2
    sharded = (2.1 * size + size / replicas + 128 * MIB, "2.1 B + B/N + 128 MiB")
    goals = {
        "fixed": sharded,
        "sharded": sharded,
        "gather": (3.1 * size + 64 * MIB, "3.1 B + 64 MiB"),
    }
    print(
        f"\npeak memory of a replica in MiB, N = {replicas}, B = {size / MIB:.0f} MiB of "
        "parameters\n"
    )
    print(f"{'':<30} {'obstore':>8} {'s3fs':>8}   {'goal':>7}")
    for kind, (limit, formula) in goals.items():
        peaks = [
            _peak(scheme, kind, parameters, replicas) / MIB
            for scheme in ("obstore+s3", "fsspec+s3")
        ]
        label = kind if kind == "fixed" else f"elastic, {kind}"
        print(f"{label:<30} {peaks[0]:>8.0f} {peaks[1]:>8.0f}   {limit / MIB:>4.0f} = {formula}")


def _peak(scheme: str, kind: str, parameters: int, replicas: int) -> int:
    child = Path(__file__).with_name("s3_memory.py")
    command = [sys.executable, str(child), f"{scheme}://bucket/memory-{scheme[0]}-{kind}", kind]
    numbers = ([str(rank), str(replicas), str(parameters)] for rank in range(replicas))
    children = [
        subprocess.Popen([*command, *each], stdout=subprocess.PIPE, text=True) for each in numbers
    ]
    try:
        peaks = [int(child.communicate()[0] or 0) for child in children]
    finally:
        for child in children:
            child.kill()
    if any(child.returncode for child in children):
        raise SystemExit(f"a replica of the {kind} run over {scheme} failed; see above")
    return max(peaks)


def _measure(port: int, size: int, rounds: int) -> dict[tuple[str, str], list[float]]:
    bare = Bare(port)
    contenders: dict[str, Bare | Ours] = {
        "bare": bare,
        "obstore": Ours(open_store("obstore+s3://bucket/obstore")),
        "s3fs": Ours(open_store("fsspec+s3://bucket/s3fs")),
    }
    seconds: dict[tuple[str, str], list[float]] = {}
    data, back = memoryview(bytearray(os.urandom(size))), memoryview(bytearray(size))
    for number in range(rounds + 1):
        acts: dict[str, Callable[[Bare | Ours], None]] = {
            "put": lambda contender: contender.put("large", data),
            "get": lambda contender: contender.get("large", back),
            "put_small": lambda contender: [
                contender.put_small(f"small-{i}") for i in range(SMALL_TIMES)
            ]
            and None,
            "get_small": lambda contender: [
                contender.get_small(f"small-{i}") for i in range(SMALL_TIMES)
            ]
            and None,
        }
        for what, act in acts.items():
            for name, contender in contenders.items():
                back[:] = bytes(size) if what == "get" else back
                start = time.perf_counter()
                act(contender)
                if number:
                    seconds.setdefault((name, what), []).append(time.perf_counter() - start)
                if what == "get" and back != data:
                    raise SystemExit(f"{name} did not read what was written")
    return seconds


if __name__ == "__main__":
    sys.exit(main())
