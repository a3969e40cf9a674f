"""The verbs that the command ``diloco`` takes from this package."""

import tomllib
from dataclasses import asdict, fields
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from diloco_core import (
    ConfigurationError,
    DiLoCo,
    _commands,
    connect,
    plan_exchange,
)
from diloco_protocol import InvalidRequestError
from diloco_protocol.backend import Command

VERBS = ("export", "plan", "probe", "remove")


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_is_named_and_described(verb):
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    named = project["entry-points"]["diloco.commands"]
    assert named == {name: f"diloco_core._commands:{name}" for name in VERBS}
    found = getattr(_commands, verb)
    assert isinstance(found, Command)
    assert found.help
    assert all(option.help and option.type != "Any" for option in found.options())


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """The store of a run that has taken one outer step."""
    folder = str(tmp_path_factory.mktemp("run"))
    model = torch.nn.Linear(2, 1)
    inner = torch.optim.SGD(model.parameters(), 0.1)
    with DiLoCo(model, inner, connect(folder, rank=0, world_size=1), sync_every=1):
        model(torch.ones(1, 2)).sum().backward()
        inner.step()
    return folder


class TestExport:
    def test_the_newest_state(self, store, tmp_path):
        file = str(tmp_path / "model.safetensors")
        answer = _commands.export(uri=store, file=file)
        assert answer.values == {"uri": store, "file": file, "outer_steps": 1}
        assert answer.lines == (f"{file} holds the model after 1 outer steps",)
        assert load_file(file)["weight"].dtype == torch.float32

    def test_options(self, store, tmp_path):
        file = str(tmp_path / "model.safetensors")
        _commands.export(uri=store, file=file, dtype="float16", synced_only=True, at=1)
        with pytest.raises(InvalidRequestError, match="is there already: --force replaces it"):
            _commands.export(uri=store, file=file)
        assert load_file(file)["weight"].dtype == torch.float16
        _commands.export(uri=store, file=file, force=True)
        assert load_file(file)["weight"].dtype == torch.float32
        with pytest.raises(ConfigurationError, match="dtype must be one of"):
            _commands.export(uri=store, file=file, dtype="int8")
        with pytest.raises(InvalidRequestError, match="uri must be non-empty text"):
            _commands.export(uri="", file=file)


class TestPlan:
    def test_it_is_the_plan_of_an_exchange(self):
        answer = _commands.plan(params=7e9, replicas=16, codec="int8", fragments=2, fixed=True)
        planned = plan_exchange(7e9, 16, 1.25e9, codec="int8", fragments=2, fixed=True)
        assert answer.values == asdict(planned)
        assert answer.lines[0] == f"a sync takes {planned.seconds:.3g} s (sharded topology)"
        text = (
            "telemetry takes at most 1.008e+04 PUT requests of each replica and $0.807 in all a day"
        )
        assert answer.lines[-1] == f"{text} (connect(telemetry=False): none)"

    def test_a_period(self):
        answer = _commands.plan(params=1e8, replicas=4, period=600.0)
        planned = plan_exchange(1e8, 4, 1.25e9)
        assert answer.values["blocked"] == planned.blocked(600.0)
        syncs = 86_400 / (600 + planned.seconds)
        assert answer.values["cost_per_day"] == pytest.approx(planned.cost * syncs)
        assert "with 600 s of training between two syncs" in answer.lines[4]

    def test_its_defaults_are_those_of_the_planner(self):
        defaults = plan_exchange.__wrapped__.__kwdefaults__
        for each in fields(_commands.PlanOptions):
            if each.name in defaults:
                assert each.default == defaults[each.name]


class TestProbe:
    def test_a_store_that_can_be_used(self, tmp_path):
        answer = _commands.probe(uri=str(tmp_path))
        assert answer.values["exclusive"] is True
        assert "all runs can use this store" in answer.lines[0]
        assert "MB/s" in answer.lines[1]


class TestRemove:
    @pytest.fixture
    def run(self, tmp_path):
        model = torch.nn.Linear(2, 1)
        inner = torch.optim.SGD(model.parameters(), 0.1)
        with DiLoCo(model, inner, connect(tmp_path / "run", rank=0, world_size=1), sync_every=1):
            for _ in range(3):
                model(torch.ones(1, 2)).sum().backward()
                inner.step()
        (tmp_path / "run" / "journal").mkdir()
        (tmp_path / "run" / "journal" / "launch.json").write_text("{}")
        return tmp_path / "run"

    @staticmethod
    def files(folder):
        return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}

    def test_it_only_counts_at_first(self, run):
        before = self.files(run)
        answer = _commands.remove(uri=str(run))
        assert self.files(run) == before
        assert answer.values["bytes"] > 0
        assert 5 < answer.values["objects"] <= len(before)

    def test_what_a_run_wrote_goes_and_the_rest_stays(self, run):
        (run / "mine").mkdir()
        (run / "mine" / "notes.txt").write_text("mine")
        _commands.remove(uri=str(run), really=True)
        assert self.files(run) == {"mine/notes.txt"}
        with pytest.raises(InvalidRequestError, match="there is no run in"):
            _commands.remove(uri=str(run), really=True)

    def test_a_removal_that_was_interrupted_goes_on(self, run, monkeypatch):
        opened = _commands.open_store

        class Interrupted:
            def __init__(self, store):
                self.list, self.get, self.uri = store.list, store.get, store.uri
                self.store = store

            def delete(self, keys):
                self.store.delete(list(keys)[:3])
                raise KeyboardInterrupt

        monkeypatch.setattr(_commands, "open_store", lambda uri: Interrupted(opened(uri)))
        with pytest.raises(KeyboardInterrupt):
            _commands.remove(uri=str(run), really=True)
        monkeypatch.undo()
        _commands.remove(uri=str(run), really=True)
        assert self.files(run) == set()
