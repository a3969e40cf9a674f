"""Functions that really run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import modal
import modal_functions
import pytest
from standin_lab import PATIENCE

from diloco_localcloud import ModalProcesses
from diloco_localcloud._server._container import image_environment


class Lab:
    """The real client, the functions of ``modal_functions``, and their calls."""

    def __init__(self, stand_in: ModalProcesses) -> None:
        self.stand_in, self.world = stand_in, stand_in.world
        self.client = stand_in.client()
        self.world.add_secret("bucket", {"KEY": "value"})

    def deploy(self, function: Any, name: str = "", **options: Any) -> Any:
        app = modal.App(f"app-{name or function.__name__}", include_source=False)
        app.function(name=name or function.__name__, **options)(function)
        app.deploy(client=self.client)
        return modal.Function.from_name(app.name, name or function.__name__, client=self.client)

    def spawn(self, name: str, *args: Any, **options: Any) -> tuple[Any, Any]:
        """A call: the client's hand on it, and the test's."""
        function = self.deploy(getattr(modal_functions, name), **options)
        call = function.spawn(*args)
        return call, self.world.call(call.object_id)

    def until(self, predicate: Any) -> None:
        self.world.wait_for(predicate, PATIENCE)

    def gone(self, held: Any) -> None:
        """Wait until the call has ended and its container is gone."""
        open_states = ("pending", "running")
        self.until(lambda: held.status not in open_states and not held.has_container)

    def written(self, call: Any, text: str) -> str:
        """Wait until a line with a text is in the log; the line."""
        entries = self.stand_in._workspace.logs

        def lines() -> list[str]:
            kept = entries.read({"function_call_id": call.object_id})
            return [each.data for each in kept if text in each.data]

        self.until(lines)
        return lines()[-1]


@pytest.fixture
def stand_in():
    here = str(Path(modal_functions.__file__).parent)
    env = image_environment()
    env["PYTHONPATH"] = os.pathsep.join([here, env.get("PYTHONPATH", "")])
    with ModalProcesses(env=env) as running:
        yield running


@pytest.fixture
def lab(stand_in):
    made = Lab(stand_in)
    yield made
    made.client.__exit__(None, None, None)  # older clients have no close
