"""The leader's copy of a model."""

import pytest
import torch

from diloco_core import ConfigurationError
from diloco_core._processes._inside import Inside
from diloco_core._processes._shared import shared_values
from diloco_core._processes._twin import Twin, tensors_of
from diloco_core._processes._values import held_tensors, spread


def twin_of(model):
    wholes = shared_values(Alone(), tensors_of(model))
    return Twin(model, dict(zip(map(id, tensors_of(model)), wholes, strict=True))), wholes


def model_with_ties():
    model = torch.nn.Sequential(
        torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 3)
    )
    model[2].weight = model[0].weight
    model[2].bias.requires_grad_(False)
    model[1].register_buffer("cache", torch.ones(2), persistent=False)
    return torch.nn.ModuleDict({"body": torch.compile(model, backend="eager")})


def test_a_twin_has_the_same_tensors_without_wrappers():
    model = model_with_ties()
    twin, wholes = twin_of(model)
    plain = {name.replace("_orig_mod.", ""): value for name, value in model.state_dict().items()}
    state = twin.model.state_dict()
    assert list(state) == list(plain)
    for name, value in plain.items():
        assert (state[name].shape, state[name].dtype) == (value.shape, value.dtype)
    assert twin.model.body[2].weight is twin.model.body[0].weight
    assert not twin.model.body[2].bias.requires_grad
    assert type(twin.model.body[1]).__name__ == "BatchNorm1d"
    assert twin.model.body[1].cache is model.body._orig_mod[1].cache, "it is not synced"
    assert list(map(id, tensors_of(twin.model))) == list(map(id, wholes))


def test_modules_and_parameters_in_arguments_become_those_of_the_twin():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    twin, _ = twin_of(model)
    assert twin.translated(("strided", 3)) == ["strided", 3]
    assert twin.translated(4) == 4
    (first, (second,)) = twin.translated([model[0], [model[1]]])
    assert first is twin.model[0]
    assert second is twin.model[1]
    (group,) = twin.translated([{"params": model[0].parameters(), "lr": 0.4}])
    assert group["lr"] == 0.4
    assert group["params"][0] is twin.model[0].weight


def test_each_process_gives_and_takes_its_part_of_a_shared_memory():
    alone = Alone()
    tensors = [torch.arange(5.0), torch.tensor(7), torch.ones(3, 2, dtype=torch.bfloat16)]
    wholes = shared_values(alone, tensors)
    assert all(not whole.any() for whole in wholes)
    held = held_tensors(alone, tensors, wholes)
    spread(alone, lambda: held, [], range(3))
    before = [whole._version for whole in wholes]
    assert all(torch.equal(*pair) for pair in zip(tensors, wholes, strict=True))
    wholes[1].fill_(8)
    assert [whole._version for whole in wholes] == [before[0], before[1] + 1, before[2]]
    spread(alone, lambda: held, [1, 2])
    assert tensors[1] == 8


def test_the_memory_is_on_the_cpu_whatever_the_default_device_is():
    with torch.device("meta"):
        (whole,) = shared_values(Alone(), [torch.ones(2, device="cpu")])
    assert whole.tolist() == [0, 0]


def test_processes_on_several_machines_are_refused():
    with pytest.raises(ConfigurationError, match=r"several machines \(node-1, "):
        shared_values(Alone(hosts=["node-1"]), [])


def test_what_is_not_the_leaders_file_is_not_written_to(tmp_path):
    (tmp_path / "a").write_bytes(bytes(100))
    with pytest.raises(ConfigurationError, match="is not the leader's file"):
        shared_values(Alone(place=str(tmp_path / "a")), [torch.zeros(2)])
    assert (tmp_path / "a").read_bytes() == bytes(100)


class Alone:
    """A replica of one process, in place of :class:`.Inside`."""

    process, processes, leads = 0, 1, True

    def __init__(self, hosts=(), place=None):
        self._hosts, self._place = hosts, place

    def collect(self, message):
        return [*self._hosts, message] if isinstance(message, str) else [message]

    def share(self, message):
        return (self._place, message[1]) if self._place else message

    together, each = Inside.together, Inside.each
