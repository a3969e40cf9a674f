"""The leader's copy of a model."""

import pytest
import torch

from diloco_core._processes._twin import Twin, tensors_of
from diloco_core._processes._values import PIECE_BYTES, _batches


def model_with_ties():
    model = torch.nn.Sequential(
        torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 3)
    )
    model[2].weight = model[0].weight
    model[2].bias.requires_grad_(False)
    return torch.nn.ModuleDict({"body": torch.compile(model, backend="eager")})


def test_a_twin_has_the_same_tensors_without_wrappers():
    model = model_with_ties()
    twin = Twin(model)
    plain = {name.replace("_orig_mod.", ""): value for name, value in model.state_dict().items()}
    state = twin.model.state_dict()
    assert list(state) == list(plain)
    for name, value in plain.items():
        assert (state[name].shape, state[name].dtype) == (value.shape, value.dtype)
    assert twin.model.body[2].weight is twin.model.body[0].weight
    assert not twin.model.body[2].bias.requires_grad
    assert type(twin.model.body[1]).__name__ == "BatchNorm1d"
    for tensor in tensors_of(model):
        assert any(twin.of(tensor) is each for each in tensors_of(twin.model))


def test_modules_and_parameters_in_arguments_become_those_of_the_twin():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    twin = Twin(model)
    assert twin.translated(("strided", 3)) == ["strided", 3]
    assert twin.translated(4) == 4
    (first, (second,)) = twin.translated([model[0], [model[1]]])
    assert first is twin.model[0]
    assert second is twin.model[1]
    (group,) = twin.translated([{"params": model[0].parameters(), "lr": 0.4}])
    assert group["lr"] == 0.4
    assert group["params"][0] is twin.model[0].weight


@pytest.mark.parametrize("sizes", [[], [5], [PIECE_BYTES, 1], [1, PIECE_BYTES + 9, 2, 3]])
def test_every_tensor_travels_once_in_pieces_of_bounded_size(sizes):
    pairs = [(torch.empty(size, dtype=torch.uint8, device="meta"), None) for size in sizes]
    batches = list(_batches(pairs))
    assert [pair for batch in batches for pair in batch] == pairs
    for batch in batches:
        assert len(batch) == 1 or sum(tensor.numel() for tensor, _ in batch) <= PIECE_BYTES
