"""A byte-level transformer in plain torch, and the few lines that make it one of many replicas."""

import torch
from torch import nn
from torch.nn import functional

from diloco_core import DiLoCo, SyncReport, connect

CONTEXT = 64


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
    steps: int,
    sync_every: int,
    batch: int,
    lr: float,
    outer_lr: float,
    seed: int,
    save: str,
    alone: bool,
) -> float:
    """Train on this replica's part of the text; returns the loss on its share of the held-out windows."""
    exchange = connect()
    torch.manual_seed(seed)
    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps, pct_start=0.05)
    text = load(f"{data}/train-{exchange.rank}.bytes")
    held_out = load(f"{data}/valid.bytes")
    generator = torch.Generator().manual_seed(
        seed + exchange.rank
    )  # every replica draws its own samples
    losses: list[float] = []

    def validate(count: int) -> float:
        """After a sync all replicas hold the same model, so each looks at its share of the windows only."""
        share = torch.arange(exchange.rank, count, exchange.world_size)
        with torch.no_grad():
            return model(windows(held_out, share * (len(held_out) // count))).item()

    def report(sync: SyncReport) -> None:
        print(sync.to_json(loss=sum(losses) / len(losses), valid=validate(256)), flush=True)
        losses.clear()

    def inner_steps() -> None:
        for step in range(1, steps + 1):
            loss = model(
                windows(text, torch.randint(len(text) - CONTEXT, (batch,), generator=generator))
            )
            loss.backward()
            losses.append(loss.item())
            optimizer.step()  # DiLoCo counts these calls, and syncs after every sync_every of them
            optimizer.zero_grad()
            schedule.step()
            if alone and step % sync_every == 0:
                mean = sum(losses[-sync_every:]) / sync_every
                print(
                    f'{{"total_inner_steps": {step}, "loss": {mean}, "valid": {validate(256)}}}',
                    flush=True,
                )

    if alone:
        inner_steps()
    else:
        with DiLoCo(
            model, optimizer, exchange, sync_every=sync_every, outer_lr=outer_lr, on_sync=report
        ):
            inner_steps()
    if exchange.rank == 0:
        torch.save(model.state_dict(), save)
    return validate(2048)
