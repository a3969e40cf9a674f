"""The README is true."""

import importlib.util
import re
import runpy
import tomllib
from pathlib import Path
from types import SimpleNamespace

import modal
import pytest

from diloco_modal import ModalOptions
from diloco_modal._client._client import Client
from diloco_protocol.backend import options_table

README = Path(__file__).parents[1] / "README.md"


def test_it_says_what_was_not_seen():
    text = README.read_text(encoding="utf-8")
    assert "never been run on Modal" in text
    assert "were never\ncompared with Modal either" in text


def test_the_table_of_options():
    table = README.read_text(encoding="utf-8").partition("<!-- options -->\n")[2]
    table = table.partition("\n<!-- /options -->")[0]
    assert table == options_table(ModalOptions), "print(options_table(ModalOptions)) is it"


@pytest.mark.processes
def test_the_examples(lab, tmp_path, monkeypatch, capsys):
    """The app is deployed, and the launch ends well where something runs the calls."""
    text = README.read_text(encoding="utf-8")
    blocks = dict(re.findall(r"```py\n# (\w+\.py)[^\n]*\n(.*?)```", text, re.DOTALL))
    assert sorted(blocks) == ["launch.py", "my_app.py"]
    for name, block in blocks.items():
        (tmp_path / name).write_text(block)
    (tmp_path / "my_trainer.py").touch()
    if importlib.util.find_spec("diloco_core") is None:
        # The tests of this package alone do not install it; it is only sent.
        (tmp_path / "diloco_core").mkdir()
        (tmp_path / "diloco_core" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    for name, value in lab.stand_in.environment.items():
        monkeypatch.setenv(name, value)
    lab.world.add_secret("bucket", {"AWS_ACCESS_KEY_ID": "key"})
    app = runpy.run_path(str(tmp_path / "my_app.py"))["app"]
    app.deploy(client=lab.client)

    end = Client.end

    async def ended(self, call_id, **options):
        call = lab.world.call(call_id)
        if call.status == "pending":
            ((payload,), _) = call.arguments
            call.start()
            call.log(f"rank {payload['rank']}\n")
            exclusive = {"exclusive": True, "seconds": 0.5}
            call.end(lab.outcome(exclusive if "probe" in payload["spec"] else {"loss": 0.5}))
        return await end(self, call_id, **options)

    monkeypatch.setattr(Client, "end", ended)

    async def from_env():
        return lab.client

    monkeypatch.setattr(modal.Client, "from_env", SimpleNamespace(aio=from_env))
    runpy.run_path(str(tmp_path / "launch.py"))
    out = capsys.readouterr().out
    subjects = ("token", "app", "version", "rendezvous")
    assert [line.split()[:2] for line in out.splitlines()[:4]] == [
        ["True", each] for each in subjects
    ]
    results = [f"{rank} succeeded {{'loss': 0.5}}" for rank in range(4)]
    assert out.splitlines()[4:] == [*results, "rank 0"]


def test_the_image_has_what_the_replicas_import():
    """They are sent as source, without what they need."""
    core = Path(__file__).parents[2] / "diloco-core" / "pyproject.toml"
    if not core.exists():
        pytest.skip("the checkout has no diloco-core")
    needed = tomllib.loads(core.read_text())["project"]["dependencies"]
    names = {re.split("[><=]", each)[0] for each in needed} - {"diloco-protocol"}
    (installed,) = re.findall(r"\.pip_install\(([^)]*)\)", README.read_text(encoding="utf-8"))
    assert names <= set(re.findall('"(.*?)"', installed))
