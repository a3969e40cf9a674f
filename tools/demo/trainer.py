"""A byte-level transformer in plain torch, and the few lines that make it one of many replicas."""

import json
import os

import torch
from torch import nn
from torch.nn import functional

from diloco_core import DiLoCo, SyncReport, connect

CONTEXT = 64
HELD_OUT = 1024  # windows


class Transformer(nn.Module):
    """Predicts the next byte from up to 64 bytes before it."""

    def __init__(self, width: int = 96, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.places = nn.Embedding(CONTEXT, width)
        block = nn.TransformerEncoderLayer(
            width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)
        self.register_buffer(
            "mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT), persistent=False
        )

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Loss in nats per byte; ``text`` is int64 of shape (batch, 65)."""
        inputs, targets = text[:, :-1], text[:, 1:]
        hidden = self.bytes(inputs) + self.places.weight
        logits = self.head(self.blocks(hidden, mask=self.mask, is_causal=True))
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def load(path: str) -> torch.Tensor:
    """A file as a tensor of bytes."""
    with open(path, "rb") as file:
        return torch.frombuffer(bytearray(file.read()), dtype=torch.uint8)


def windows(text: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """The 65 bytes from each of some places on."""
    return text[starts[:, None] + torch.arange(CONTEXT + 1)].long()


def train(
    data: str,
    parts: list[int] | None,
    steps: int,
    sync_every: int,
    batch: int,
    lr: float,
    outer_lr: float,
    seed: int,
    save: str,
) -> float:
    """Train on each replica's part of the text; return the loss on its share of held-out windows.

    With ``parts``, train alone, and take ``batch`` windows from each of them at every step.
    """
    exchange = connect()
    torch.manual_seed(seed)
    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps, pct_start=0.05)
    texts = {part: load(f"{data}/train-{part}.bytes") for part in parts or [exchange.rank]}
    held_out = load(f"{data}/valid.bytes")
    losses: list[float] = []

    def samples(step: int) -> torch.Tensor:
        # Drawn anew for every step, so that a replica that is started again goes on with the
        # batches that come next.
        drawn = []
        for part, text in texts.items():
            generator = torch.Generator().manual_seed(seed + part + 1000 * step)
            starts = torch.randint(len(text) - CONTEXT, (batch,), generator=generator)
            drawn.append(windows(text, starts))
        return torch.cat(drawn)

    def validate() -> float:
        """After a sync all replicas hold the same model, so each looks at its windows only."""
        share = torch.arange(exchange.rank, HELD_OUT, exchange.world_size)
        with torch.no_grad():
            return model(windows(held_out, share * (len(held_out) // HELD_OUT))).item()

    def inner_step(step: int) -> None:
        while schedule.last_epoch < step - 1:  # several times in a replica that is started again
            schedule.step()
        loss = model(samples(step))
        loss.backward()
        losses.append(loss.item())
        optimizer.step()  # DiLoCo counts these calls, and syncs after every sync_every of them
        optimizer.zero_grad()

    def measured(step: int) -> dict[str, float]:
        """What a log line says besides the sync; every fourth looks at the held-out text."""
        own = {"loss": sum(losses) / len(losses)} if losses else {}
        losses.clear()
        looks = step % (4 * sync_every) == 0 or step == steps
        return {**own, **({"valid": validate()} if looks else {})}

    def report(sync: SyncReport) -> None:
        found = measured(sync.total_inner_steps)
        print(sync.to_json(pid=os.getpid(), **found), flush=True)
        # Replicas see other texts: their losses can be compared on the held-out one.
        names = {"loss": "training", "valid": "loss"}
        outer.log(**{names[name]: value for name, value in found.items()})

    if parts:
        for step in range(1, steps + 1):
            inner_step(step)
            if step % sync_every == 0 or step == steps:
                print(json.dumps({"total_inner_steps": step, **measured(step)}), flush=True)
    else:
        options = {"sync_every": sync_every, "outer_lr": outer_lr, "on_sync": report}
        with DiLoCo(model, optimizer, exchange, **options) as outer:
            while outer.inner_steps < steps:
                inner_step(outer.inner_steps + 1)
    if exchange.rank == 0:
        torch.save(model.state_dict(), save)
    return validate()
