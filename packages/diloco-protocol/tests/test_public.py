"""What the package shows, and what importing it costs."""

import importlib
import inspect
import pydoc
import re
import subprocess
import sys

import pytest

import diloco_protocol
from diloco_protocol import backend, telemetry
from diloco_protocol._hooks import Hooks


@pytest.mark.parametrize("module", [diloco_protocol, backend, telemetry])
def test_all_is_sorted_and_complete(module):
    names = {name for name, value in vars(module).items() if not name.startswith("_")}
    modules = {name for name in names if type(getattr(module, name)) is type(sys)}
    assert set(module.__all__) == names - modules
    assert module.__all__ == sorted(module.__all__, key=lambda name: (not name.isupper(), name))


@pytest.mark.parametrize("name", diloco_protocol.__all__)
def test_public_names_are_documented(name):
    assert (getattr(diloco_protocol, name).__doc__ or "").strip()


@pytest.mark.parametrize("name", [name for name in backend.__all__ if not name.isupper()])
def test_what_backends_are_made_of_is_documented(name):
    assert (getattr(backend, name).__doc__ or "").strip()


@pytest.mark.parametrize(
    "name", [name for name in telemetry.__all__ if name[1:] != name[1:].upper()]
)
def test_what_telemetry_is_made_of_is_documented(name):
    assert name == "Metric" or (getattr(telemetry, name).__doc__ or "").strip()


def test_help_shows_every_hook_with_its_arguments():
    shown = pydoc.plain(pydoc.render_doc(diloco_protocol.BaseExecutor))
    hooks = {name: hook for name, hook in vars(Hooks).items() if inspect.isfunction(hook)}
    assert set(diloco_protocol.BaseExecutor.__abstractmethods__) < set(hooks)
    for name, hook in hooks.items():
        arguments = ", ".join([*inspect.signature(hook).parameters][1:])
        assert f"* ``{name}({arguments}) -> " in shown


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("ReplicaState", diloco_protocol.ReplicaState.__members__),
        ("Reason", diloco_protocol.Reason.__members__),
        ("ReplicaResult", diloco_protocol.ReplicaResult.__annotations__),
    ],
)
def test_help_shows_every_word_with_its_meaning(name, words):
    shown = pydoc.plain(pydoc.render_doc(getattr(diloco_protocol, name)))
    assert not [word for word in words if not re.search(rf"^ \|  +{word}: \w", shown, re.MULTILINE)]


@pytest.mark.processes
@pytest.mark.parametrize(
    "module", ["diloco_protocol", "diloco_protocol.backend", "diloco_protocol.telemetry"]
)
def test_the_import_is_light(module):
    code = f"import sys, {module}; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout.split()
    heavy = {
        "subprocess",
        "asyncio",
        "importlib.metadata",
        "random",
        "hashlib",
        "ctypes",
        "logging",
        "torch",
        "numpy",
    }
    before = subprocess.run(
        [sys.executable, "-c", "import sys; print(*sys.modules)"],
        check=True,
        capture_output=True,
        text=True,
    )
    assert not heavy & (set(loaded) - set(before.stdout.split()))


def test_there_is_a_version():
    assert (
        diloco_protocol.__version__
        == importlib.import_module("diloco_protocol.__about__").__version__
    )
