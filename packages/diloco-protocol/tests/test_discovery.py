"""Installed backends are found by entry points; those that cannot be loaded are shown, too."""

import sys

import pytest

from diloco_protocol import (
    InvalidRequestError,
    executor_names,
    executors,
    get_executor,
    load_errors,
)
from diloco_protocol.backend import get_command

GOOD = """
from dataclasses import dataclass
from diloco_protocol.backend import Answer, Options, command, option


class Executor:
    backend_name = "good"


@dataclass(frozen=True)
class Greeting(Options):
    name: str = option("world")


@command(Greeting)
def greet(options):
    \"\"\"Greet somebody.\"\"\"
    return Answer({"greeting": options.name}, (f"hello {options.name}",))
"""


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Two more backends, as an installer leaves them: one works, one lacks a package."""
    folder = tmp_path / "diloco_extra-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: diloco-extra\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text(
        "[diloco.executors]\n"
        "good = extra_good_backend:Executor\n"
        "broken = extra_broken_backend:Executor\n"
        "[diloco.commands]\n"
        "greet = extra_good_backend:greet\n"
        "wrong = extra_good_backend:Executor\n"
        "broken = extra_broken_backend:greet\n"
    )
    (tmp_path / "extra_good_backend.py").write_text(GOOD)
    (tmp_path / "extra_broken_backend.py").write_text(
        "import some_cloud_sdk_that_is_not_installed\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in ("extra_good_backend", "extra_broken_backend"):
        sys.modules.pop(name, None)


@pytest.mark.usefixtures("installed")
class TestDiscovery:
    def test_what_works(self):
        assert executors()["good"].backend_name == "good"
        assert "broken" not in executors()
        assert get_executor("good") is executors()["good"]

    def test_what_does_not(self):
        assert "good" not in load_errors()
        assert "some_cloud_sdk_that_is_not_installed" in str(load_errors()["broken"])
        with pytest.raises(InvalidRequestError, match="'broken' is installed but cannot be loaded"):
            get_executor("broken")

    def test_names_are_known_without_an_import(self):
        assert {"good", "broken"} <= set(executor_names())
        assert "extra_good_backend" not in sys.modules
        get_executor("good")
        with pytest.raises(InvalidRequestError):
            get_executor("nowhere")
        assert "extra_broken_backend" not in sys.modules

    def test_a_command(self):
        greet = get_command("greet")
        assert greet.help == "Greet somebody."
        assert [option.name for option in greet.options()] == ["name"]
        assert greet(name="you").values == {"greeting": "you"}
        assert greet().lines == ("hello world",)
        assert get_command("no-such-command") is None

    def test_a_command_that_is_none(self):
        with pytest.raises(InvalidRequestError, match="'wrong' is installed but is not a Command"):
            get_command("wrong")
        with pytest.raises(InvalidRequestError, match="'broken' is installed but cannot be loaded"):
            get_command("broken")

    def test_two_packages_that_offer_the_same_name(self, tmp_path):
        (tmp_path / "diloco_rival-1.0.dist-info").mkdir()
        (tmp_path / "diloco_rival-1.0.dist-info" / "METADATA").write_text(
            "Name: diloco-rival\nVersion: 1.0\n"
        )
        (tmp_path / "diloco_rival-1.0.dist-info" / "entry_points.txt").write_text(
            "[diloco.executors]\ngood = rival:E\n"
        )
        assert "good" not in executors(), "neither is chosen in silence"
        with pytest.raises(InvalidRequestError, match="several installed packages provide 'good'"):
            get_executor("good")

    def test_what_is_not_there(self):
        with pytest.raises(
            InvalidRequestError, match=r"no backend 'nowhere' is installed; installed are: .*good"
        ):
            get_executor("nowhere")
