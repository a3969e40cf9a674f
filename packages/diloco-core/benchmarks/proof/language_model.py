"""A small language model over bytes: a transformer that reads from left to right."""

from __future__ import annotations

import torch
from torch.nn import functional


class LanguageModel(torch.nn.Module):
    """Foresees the next byte from those before it.

    Args:
        width: Of every layer; a multiple of 32, the width of a head.
        layers: How many there are.
        context: The most bytes that are read at once.
    """

    def __init__(self, width: int = 128, layers: int = 2, context: int = 64) -> None:
        super().__init__()
        self.bytes = torch.nn.Embedding(256, width)
        self.places = torch.nn.Embedding(context, width)
        self.layers = torch.nn.ModuleList(_Layer(width) for _ in range(layers))
        self.norm = torch.nn.LayerNorm(width)
        self.head = torch.nn.Linear(width, 256)
        for module in self.modules():
            if isinstance(module, (torch.nn.Linear, torch.nn.Embedding)):
                torch.nn.init.normal_(module.weight, std=0.02)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        """Return the scores of the next byte at every place.

        ``given`` is int64 (windows, length), and the scores are (windows, length, 256).
        """
        values = self.bytes(given) + self.places.weight[: given.shape[1]]
        for layer in self.layers:
            values = layer(values)
        return self.head(self.norm(values))

    def loss(self, windows: torch.Tensor) -> torch.Tensor:
        """Mean loss in nats per byte of windows with the shape (count, length + 1)."""
        scores = self(windows[:, :-1])
        return functional.cross_entropy(scores.flatten(0, 1), windows[:, 1:].flatten())


class _Layer(torch.nn.Module):
    """Attention and two linear layers, each after a norm and beside a way around it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // 32
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(width) for _ in range(2))
        self.attention = torch.nn.Linear(width, 3 * width)
        self.joined = torch.nn.Linear(width, width)
        self.wide = torch.nn.Linear(width, 4 * width)
        self.narrow = torch.nn.Linear(4 * width, width)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        split = self.attention(self.norms[0](values)).unflatten(-1, (3, self.heads, 32))
        asked, keys, held = split.movedim(-3, 0).transpose(-3, -2)
        seen = functional.scaled_dot_product_attention(asked, keys, held, is_causal=True)
        values = values + self.joined(seen.transpose(-3, -2).flatten(-2))
        return values + self.narrow(functional.gelu(self.wide(self.norms[1](values))))
