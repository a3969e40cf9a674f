"""Runs with foreign records: any field may hold anything, and every checksum is right."""

import copy
import itertools
import json
import logging
import os
import random
import re
import resource
import shutil
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn

from diloco_core import CoreError, DiLoCo, Elastic, StoreExchange, Timing, export
from diloco_core._inner._file import file_parts
from diloco_core._run._records._keys import MANIFEST
from diloco_core._run._records._records import digest
from diloco_core._store import _reread
from diloco_core._store._open import open_store
from diloco_core._wire._safetensors import header_bytes, header_size, parse_header
from diloco_core._wire._sealed import seal

MEMBERSHIPS = ("fixed", "sharded", "gather", "coded")
MEMORY = 200 * 2**20
SECONDS = 20
SYNCS = 6

HUGE = 2**63 - 1
#: What a field may hold instead of what was written.
VALUES = (
    0, 1, -1, HUGE, 10**30, 10**8, 0.5, True, None, "", "x" * 100_000, "1" * 5000, "torch.float32",
    "torch.nn", [], {}, [0], ["x"], [[HUGE, 1]], {"x": "y"}, [[]], "../../etc", "\ud800", "-1",
    "1e400", "f" * 16, "f" * 32, "float32",
)  # fmt: skip
#: Numbers in the names of keys.
NUMBERS = ("99999999", "00000000", "00000001", "12345678")


class Clock:
    """Time that passes in waits at once, and otherwise as always."""

    def __init__(self):
        self.ahead = 0.0

    def __call__(self):
        return time.monotonic() + self.ahead

    def sleep(self, seconds):
        self.ahead += seconds


def exchange_of(folder, membership, *, resume):
    clock = Clock()
    timing = Timing(
        30.0, 30.0, 1.0, 3.0, clock=clock, sleep=clock.sleep, repeat=lambda *_: lambda: None
    )
    store = open_store(str(folder))
    if membership == "fixed":
        return StoreExchange(store, 0, 1, timing=timing, resume=resume)
    topology = "gather" if membership == "gather" else "sharded"
    every = 1 if topology == "gather" else None
    elastic = Elastic(1, grace=5.0, topology=topology, publish_every=every, resume=resume)
    return StoreExchange(store, 0, 1, elastic, timing=timing)


def train(folder, membership, syncs=SYNCS, *, resume=False):
    """Train one replica of a run up to some number of outer steps or a few more.

    Returns how many were taken.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3), nn.Linear(3, 2).requires_grad_(False))
    model.append(nn.Linear(2, 2))
    inner = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    coding = {"state_codec": "e2m1", "full_state_every": 2} if membership == "coded" else {}
    exchange = exchange_of(folder, membership, resume=resume)
    loop = DiLoCo(model, inner, exchange, sync_every=2, fragments=2, buffers="none", **coding)
    with loop as outer:
        while outer.committed < syncs:
            inner.zero_grad()
            model(torch.ones(4, 5)).pow(2).sum().backward()
            inner.step()
    return outer.committed


def leaves(value, path=()):
    """The paths of everything in a JSON value, containers included."""
    if path:
        yield path
    if isinstance(value, list):  # of a long list the first entry and the last
        inside = [(number, value[number]) for number in sorted({0, len(value) - 1}) if value]
    else:
        inside = value.items() if isinstance(value, dict) else ()
    for name, each in inside:
        yield from leaves(each, (*path, name))


def replaced(value, path, other):
    """The value with another one at a path; ``...`` takes it away."""
    changed = copy.deepcopy(value)
    inside = changed
    for name in path[:-1]:
        inside = inside[name]
    if other is ...:
        del inside[path[-1]]
    else:
        inside[path[-1]] = other
    return changed


class Foreign:
    """A run in a folder, and what may stand there instead.

    Args:
        folder: Where it is; copies of it are made beside it.
        membership: One of :data:`MEMBERSHIPS`.
    """

    def __init__(self, folder, membership):
        self.folder, self.membership = Path(folder), membership
        train(folder, membership, SYNCS)
        self.keys = sorted(
            str(path.relative_to(folder)) for path in self.folder.rglob("*") if path.is_file()
        )

    def cases(self):
        """A name, a key, and a function that returns what stands there instead, for each case."""
        for key in self.keys:
            data = (self.folder / key).read_bytes()
            if key.endswith(".json") or b'"xxh3_128"' in data[-100:]:
                yield from self._records(key, data)
            elif key.startswith("inner/"):
                yield from self._inner(key, data)
            elif key.endswith(".safetensors"):
                yield from self._headers(key, data)
            yield from self._names(key)

    def _records(self, key, data):
        try:
            record = json.loads(data)
        except ValueError:
            return
        kind = record.pop("kind")
        for name in ("format", "xxh3_128"):
            record.pop(name, None)
        for path, value in itertools.product(leaves(record), (..., *VALUES)):

            def changed(path=path, value=value):
                return seal(kind, key, replaced(record, path, value))

            yield f"{key} {path} {value!r:.20}", key, changed

    def _inner(self, key, data):
        header = parse_header(data)
        tree = json.loads(header["__metadata__"]["tree"])
        identity = self._identity(key)
        for path, value in itertools.product(leaves(tree), (..., *VALUES)):

            def changed(path=path, value=value):
                return b"".join(map(bytes, file_parts(replaced(tree, path, value), [], identity)))

            yield f"{key} tree {path} {value!r:.20}", key, changed
        yield f"{key} sparse", key, 3 * 2**30
        yield f"{key} zeros", key, lambda: bytes(8)

    def _headers(self, key, data):
        header = parse_header(data)
        size = header_size(data)
        for path, value in itertools.product(leaves(header), (..., *VALUES)):

            def changed(path=path, value=value):
                fields = replaced(header, path, value)
                metadata = fields.pop("__metadata__", {})
                try:
                    return header_bytes(fields, metadata) + data[size:]
                except (TypeError, ValueError, AttributeError):
                    return header_bytes(fields, {}) + data[size:]

            yield f"{key} header {path} {value!r:.20}", key, changed
        yield f"{key} length", key, lambda: HUGE.to_bytes(8, "little") + data[8:]
        yield f"{key} sparse", key, 3 * 2**30

    def _names(self, key):
        """Keys like this one with other numbers: empty, and with the same content."""
        data = (self.folder / key).read_bytes()
        for match in re.finditer(r"[0-9]{4,8}", key):
            for number in NUMBERS:
                name = key[: match.start()] + number[-len(match[0]) :] + key[match.end() :]
                if name not in self.keys:
                    yield f"{name} empty", name, lambda: b""
                    yield f"{name} copied", name, lambda: data

    def _identity(self, key):
        return f"{digest((self.folder / MANIFEST).read_bytes())}/{key}"

    def met(self, cases, act, *, here=False):
        """The names of the cases in which ``act`` ("export" or "resume") ends badly, and how.

        With ``here``, it is not done in a child with limits, but in this process.
        """
        bad = {}
        for name, key, content in cases:
            copied = self.folder.with_name("copy")
            shutil.rmtree(copied, ignore_errors=True)
            shutil.copytree(self.folder, copied)
            path = copied / key
            path.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, int):
                with path.open("wb") as file:
                    file.truncate(content)
            else:
                try:
                    path.write_bytes(content())
                except (ValueError, UnicodeError):
                    continue  # what JSON cannot express
            if key == MANIFEST:
                (copied / "manifest.copy.json").unlink(missing_ok=True)
            ending = (self._ending if here else self._in_a_child)(copied, act)
            if not ending.startswith(("answered", "named: ")):
                bad[f"{act}: {name}"] = ending
        return bad

    def _in_a_child(self, folder, act):
        """Return how it ended in a process with little memory and time."""
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            os.close(reading)
            try:
                os.write(writing, self._act(folder, act).encode(errors="replace")[:4000])
            finally:
                os._exit(0)
        os.close(writing)
        with os.fdopen(reading, "rb") as pipe:
            told = pipe.read().decode(errors="replace")
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status):
            return f"killed by {signal.Signals(os.WTERMSIG(status)).name}"
        return told or "said nothing"

    def _act(self, folder, act):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(SECONDS)
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, 2)
        held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        # Threads and the arenas of the C library reserve addresses that they never use.
        limit = held + MEMORY + 512 * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        ending = self._ending(folder, act)
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
        return f"{grown / 2**20:.0f} MiB" if grown > MEMORY else ending

    def _ending(self, folder, act):
        try:
            if act == "export":
                export(folder, folder.with_name("exported.safetensors"))
            else:
                train(folder, self.membership, SYNCS + 2, resume=True)
        except CoreError as error:
            return f"named: {type(error).__name__}"
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "answered"


def main(folder, membership, act, count, seed, wanted=""):
    """Write how a sample of cases ends, if badly, as JSON; in a process of its own."""
    torch.set_num_threads(1)
    nn.Linear(1, 1)(torch.ones(1)).sum().backward()
    _reread.REREADS = (0.0, 0.0, 0.0)
    logging.disable(logging.CRITICAL)
    foreign = Foreign(Path(folder) / "run", membership)
    cases = [case for case in foreign.cases() if wanted in case[0]]
    random.Random(int(seed)).shuffle(cases)
    sys.stdout.write(json.dumps({"of": len(cases), "bad": foreign.met(cases[: int(count)], act)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
