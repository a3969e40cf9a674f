"""A page names every key that an entry of `collect` has, on every backend."""

import inspect
import re
from pathlib import Path
from types import SimpleNamespace

from diloco_eks._state import _handles as eks
from diloco_local import _runs as local
from diloco_modal._state import _handles as modal
from diloco_protocol import ReplicaResult
from diloco_sagemaker._state import _handles as sagemaker

PAGE = Path(__file__).parents[1] / "packages" / "diloco-protocol" / "docs" / "executors.md"
_RECORD = SimpleNamespace(host="host", uid="uid", ranks=[0], run_id="run", world_size=1)
_LAUNCH = {"app": "a", "function": "f", "environment": "e", "id": "1", "at": 1.0, "world_size": 1}
_PLACE = ("default", "https://cluster")
_JOB = {"first_rank": 0, "ranks": [0], "run_id": "run", "world_size": 1, "fingerprint": "print"}
HANDLES = {
    "diloco-local": local.handles_of(SimpleNamespace(path="runs"), _RECORD),
    "diloco-eks": [
        *eks.handles_of(SimpleNamespace(uid="uid", **_JOB), *_PLACE),
        *eks.handles_of(SimpleNamespace(uid="", **_JOB), *_PLACE),
    ],
    "diloco-sagemaker": [sagemaker.make_handle("run", 0, 1, 1, "eu-west-1", "123456789012")],
    "diloco-modal": [modal.make_handle(_LAUNCH, 0, "fc-1", "run")],
}
KEYS = {
    backend: {key for handle in handles for key in handle.metadata}
    for backend, handles in HANDLES.items()
}


def test_the_page_names_the_keys_of_every_backend():
    text = PAGE.read_text(encoding="utf-8")
    rows = re.findall(r"^\| (diloco-\w+) \| (.*) \|$", text, re.MULTILINE)
    named = {backend: re.findall("`([a-z_]+)`", keys) for backend, keys in rows}
    assert {backend: set(keys) for backend, keys in named.items()} == KEYS


def test_the_docstring_names_the_same_keys():
    text = inspect.getdoc(ReplicaResult).partition("\n\nAttributes:")[0]
    parts = re.split(r"[Ff]or (diloco-\w+), ", text)[1:]
    named = zip(parts[::2], parts[1::2], strict=True)
    assert {backend: set(re.findall("``([a-z_]+)``", keys)) for backend, keys in named} == KEYS
