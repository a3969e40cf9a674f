"""The table of ``docs/choose.md``: four choices of H for the demo's model. ``hatch run simulate``.

With ``--write``, it is written into the page. It takes about two minutes on two cores.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[1] / "demo"))

import text
import trainer
from settings import Settings

from diloco_core import Simulation, simulate

PAGE = Path(__file__).parents[2] / "packages/diloco-core/docs/choose.md"
DEMO = Settings(replicas=4, steps=240, sync_every=20, seed=0)
PLANNED = {"params": 1e9, "bandwidth": 1.25e8, "step_seconds": 2.0, "hourly_price": 4.0}
CHOICES = (5, 20, 60, 240)


def table(demo: Settings = DEMO, choices: tuple[int, ...] = CHOICES) -> Simulation:
    """Train the demo's replicas with each choice of H."""

    def batches(rank: int) -> Iterator[torch.Tensor]:
        data = trainer.load(str(folder / f"train-{rank}.bytes"))
        while True:
            yield trainer.windows(data, torch.randint(len(data) - trainer.CONTEXT, (demo.batch,)))

    def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(model.parameters(), lr=demo.lr, betas=(0.9, 0.99))
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, demo.lr, total_steps=demo.steps + 1, pct_start=0.05
        )
        optimizer.register_step_post_hook(lambda *_: schedule.step())
        return optimizer

    def evaluate(model: torch.nn.Module) -> float:
        held_out = trainer.load(str(folder / "valid.bytes"))
        starts = torch.arange(trainer.HELD_OUT) * (len(held_out) // trainer.HELD_OUT)
        return model(trainer.windows(held_out, starts)).item()

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "data"
        text.prepare(folder, demo.replicas, demo.seed)
        return simulate(
            trainer.Transformer,
            batches,
            steps=demo.steps,
            settings=[{"sync_every": h} for h in choices],
            replicas=demo.replicas,
            optimizer_fn=optimizer_of,
            evaluate=evaluate,
            **PLANNED,
        )


def written(page: str, rows: Simulation) -> str:
    """Return the page with the table in its place."""
    return re.sub(
        r"(<!-- simulate -->\n).*?(?=<!-- end -->)",
        lambda found: f"{found[1]}{rows}\n",
        page,
        flags=re.DOTALL,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="write the table into docs/choose.md")
    rows = table()
    print(rows)
    if parser.parse_args().write:
        PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), rows), encoding="utf-8")
