"""What the demo trains, and how."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Settings:
    """How many replicas train for how many steps, and at which rates."""

    replicas: int
    steps: int
    sync_every: int
    seed: int
    batch: int = 8
    # The best of some tries for each: alone, a replica does better with a higher learning rate.
    lr: float = 6e-3
    lone_lr: float = 1e-2
    averaged_lr: float = 1e-2
    outer_lr: float = 0.7
    kill: int | None = None

    def trainer_kwargs(self, folder: Path, name: str) -> dict[str, Any]:
        """Return the arguments of the trainer's ``train`` in one of the runs."""
        parts = {"diloco": None, "averaged": [*range(self.replicas)], "lone": [0]}
        rates = {"diloco": self.lr, "averaged": self.averaged_lr, "lone": self.lone_lr}
        return {
            "data": str(folder / "data"),
            "save": str(folder / f"{name}.pt"),
            "parts": parts[name],
            "steps": self.steps,
            "sync_every": self.sync_every,
            "batch": self.batch,
            "lr": rates[name],
            "outer_lr": self.outer_lr,
            "seed": self.seed,
        }
