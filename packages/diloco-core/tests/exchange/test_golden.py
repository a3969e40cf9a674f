"""The bytes of a run in its store, against files that were written before: a format that changes is
given another version.

All numbers are sums of powers of two, so that every processor computes the same. A run's name is
drawn at random, and is made the same here. What is told about a process (claims, signs of life) and
what is drawn at random (inner state) is left out; ``test_golden_records`` has that, and what such
short runs do not write. So is telemetry, which changes no other byte.
"""

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import pytest
import torch

from diloco_core import DiLoCo, connect

GOLDEN = Path(__file__).with_name("golden.json")
LEFT_OUT = ("claims/", "beats/", "inner/", "endings/", "live/", "history/")


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Parameter(torch.arange(40.0) / 4)
        self.second = torch.nn.Parameter(torch.arange(24.0).to(torch.bfloat16))
        self.register_buffer("running", torch.zeros(8))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))


def train(exchange):
    model = Model()
    inner = torch.optim.SGD(model.parameters(), lr=0.25)
    options = {"sync_every": 2, "fragments": 2, "outer_lr": 0.5, "outer_momentum": 0.5}
    with DiLoCo(model, inner, exchange, **options, save_inner_every=0):
        for step in range(4):
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, 2.0 ** (exchange.rank + step % 2))
            model.running += 1 + exchange.rank
            model.steps += 1
            inner.step()


def digests(folder):
    files = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    return {
        key: hashlib.sha256(path.read_bytes()).hexdigest()
        for key, path in files.items()
        if not key.startswith((*LEFT_OUT, "."))
    }


@pytest.mark.sampled
@pytest.mark.parametrize("kind", ["fixed", "sharded", "gather"])
def test_the_bytes_of_a_run_are_those_of_before(kind, tmp_path, monkeypatch):
    drawn = (hashlib.sha256(b"%d" % number).hexdigest() for number in count(1))
    monkeypatch.setattr("secrets.token_hex", lambda size=32: next(drawn)[: 2 * size])
    # One incarnation of an elastic run: of several, the quicker one would decide.
    ranks = 2 if kind == "fixed" else 1
    options = {} if kind == "fixed" else {"min_replicas": 1, "topology": kind, "grace": 1.0}
    exchanges = [
        connect(tmp_path / "run", rank=rank, world_size=2, run_id="golden", **options)
        for rank in range(ranks)
    ]
    with ThreadPoolExecutor(ranks) as pool:
        list(pool.map(train, exchanges))
    written = digests(tmp_path / "run")
    assert len(written) >= 10
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_bytes())
    assert golden["format"] == manifest["format"], "write the file anew for a new format"
    # Where a change is meant, give the format another version (FORMAT), so that older versions
    # refuse what they do not understand, and write the file anew.
    assert written == golden[kind]
