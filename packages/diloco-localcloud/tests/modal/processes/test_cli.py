"""Modal's own command line against the stand-in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import modal
import pytest
from standin_lab import PATIENCE

pytestmark = [pytest.mark.processes, pytest.mark.slow]

APP = """
import modal

app = modal.App("shipped", include_source=False)


@app.function(serialized=True)
def train():
    import time

    print("up")
    time.sleep(600)
"""


@pytest.fixture
def cli(lab, tmp_path):
    (tmp_path / "shipped.py").write_text(APP)
    env = {**os.environ, **lab.stand_in.environment, "COLUMNS": "200"}

    def run(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "modal", *words],
            cwd=tmp_path,
            env=env,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


def test_the_life_of_an_app(cli, lab):
    assert "App deployed" in cli("deploy", "shipped.py")
    call = modal.Function.from_name("shipped", "train", client=lab.client).spawn()
    held = lab.world.call(call.object_id)
    lab.written(call, "up")

    (app,) = json.loads(cli("app", "list", "--json"))
    assert (app["description"], app["state"], app["tasks"]) == ("shipped", "deployed", "1")
    assert cli("app", "logs", "shipped") == "up\n"
    (container,) = json.loads(cli("container", "list", "--json"))
    assert (container["app_id"], container["app_name"]) == (app["app_id"], "shipped")

    # A container that is stopped is like one that is preempted: another one gets its input.
    cli("container", "stop", container["container_id"], "--yes")
    lab.until(lambda: held.attempt == 2)
    (other,) = json.loads(cli("container", "list", "--json"))
    assert other["container_id"] != container["container_id"]

    cli("app", "stop", "shipped", "--yes")
    lab.gone(held)
    assert held.status == "terminated"
    assert json.loads(cli("container", "list", "--json")) == []
    (app,) = json.loads(cli("app", "list", "--json"))
    assert (app["state"], app["tasks"]) == ("stopped", "0")
    assert app["stopped_at"] is not None


def test_dicts(cli, lab):
    cli("dict", "create", "run-a")
    held = modal.Dict.from_name("run-a", client=lab.client)
    held["launch"] = {"world_size": 4}
    (told,) = json.loads(cli("dict", "list", "--json"))
    assert told["name"] == "run-a"
    (item,) = json.loads(cli("dict", "items", "run-a", "--json"))
    assert list(item.values()) == ["launch", {"world_size": 4}]
    assert "world_size" in cli("dict", "get", "run-a", "launch")
    cli("dict", "delete", "run-a", "--yes")
    assert json.loads(cli("dict", "list", "--json")) == []


def test_other_lists(cli, lab):
    assert json.loads(cli("secret", "list", "--json"))[0]["name"] == "bucket"
    assert Path(lab.stand_in.environment["MODAL_CONFIG_PATH"]).exists()
