"""A loop of one's own with Muon and AdamW, and the outer values of MuLoCo (arXiv:2505.23725).

Muon trains the matrices between the layers, AdamW the embeddings, biases and norms.
"""

import tiny
import torch
from torch.utils.data import DataLoader

from diloco_core import DiLoCo, connect


def train(steps):
    """Train one replica; returns its steps, and the last loss."""
    exchange = connect()
    model = tiny.make_model()
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and ".h." in name]
    others = [p for p in model.parameters() if not any(p is matrix for matrix in matrices)]
    inner = [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=3e-3)]
    groups = [{"params": matrices, "lr": 0.7, "momentum": 0.6}, {"params": others}]
    text = tiny.Text(exchange.rank, exchange.world_size)
    with DiLoCo(model, inner, exchange, sync_every=10, outer_groups=groups) as outer:
        while outer.inner_steps < steps:
            # The run's count chooses the rows, so that they are the right ones after a kill too.
            order = torch.Generator().manual_seed(outer.inner_steps)
            rows = torch.randint(len(text), (8,), generator=order).tolist()
            (batch,) = DataLoader(text, batch_size=8, sampler=rows)
            loss = model(**batch).loss
            loss.backward()
            outer.log(loss=loss.item())
            for optimizer in inner:
                optimizer.step()
                optimizer.zero_grad()
    return [outer.inner_steps, round(loss.item(), 3)]


if __name__ == "__main__":
    tiny.main(__file__)
