"""A loop with Accelerate, as docs/trainers.md has it."""

import pytest
import torch

pytest.importorskip("accelerate")

from accelerate import Accelerator

from diloco_core import DiLoCo, connect

pytestmark = pytest.mark.trainers
STEPS, IN_EPOCH = 15, 5


def train(folder, fails_after=None):
    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    data = torch.randn(40, 4, generator=torch.Generator().manual_seed(1))
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    exchange = connect(folder, rank=0, world_size=1)
    states = {"schedule": schedule}
    options = {"sync_every": 3, "save_inner_every": 1, "stateful": states}
    with DiLoCo(model, optimizer, exchange, **options) as outer:
        while outer.inner_steps < STEPS:
            seen = 2 * (outer.inner_steps % IN_EPOCH)
            for batch in accelerator.skip_first_batches(loader, seen):
                while schedule.last_epoch < outer.inner_steps:
                    schedule.step()
                with accelerator.accumulate(model):
                    accelerator.backward(model(batch).square().mean())
                    optimizer.step()
                    optimizer.zero_grad()
                if outer.inner_steps == fails_after:
                    raise LookupError("killed")
    return torch.nn.utils.parameters_to_vector(model.parameters()).tolist(), schedule.get_last_lr()


@pytest.mark.parametrize("step", [5, 7])  # at the end of an epoch, and in one
def test_a_loop_comes_back(tmp_path, step):
    with pytest.raises(LookupError):
        train(tmp_path / "run", fails_after=step)
    assert train(tmp_path / "run") == train(tmp_path / "never")
