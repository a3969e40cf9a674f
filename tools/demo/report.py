"""What the demo shows: a line per sync while it runs, then a table, a picture and files."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
import torch
from safetensors.torch import save_file

if TYPE_CHECKING:
    from launch import Settings

mpl.use("Agg")

import matplotlib.pyplot as plt

MB = 1e6
INK, LONE, GREEN, ORANGE, GREY = "#1f4e79", "#b03a2e", "#5b9a68", "#d9a441", "#c8c8c8"


def introduction(settings: Settings, sizes: dict[str, int], folder: Path) -> str:
    """What is going to happen."""
    train = sum(size for name, size in sizes.items() if name.startswith("train"))
    return (
        f"{settings.replicas} replicas, each {settings.steps} inner steps on its own part of "
        f"{train / MB:.1f} MB of Python's standard library;\n"
        f"a sync every {settings.sync_every} steps through the folder {folder}/diloco-store\n"
    )


def between(seconds: float) -> str:
    """The first run is over."""
    return f"\ndone in {seconds:.0f} s; now one lone replica: the same steps on the same first part, and no sync\n"


class Progress:
    """Prints a line when all replicas have reported a sync."""

    def __init__(self, settings: Settings, replicas: int) -> None:
        self._replicas = replicas
        self._steps = settings.steps
        self._seen: dict[int, dict[int, dict[str, Any]]] = defaultdict(dict)
        self._sent = 0

    def __call__(self, line: dict[str, Any]) -> None:
        """Take one line of one replica."""
        step = line["total_inner_steps"]
        here = self._seen[step]
        here[line["rank"]] = line
        if len(here) < self._replicas:
            return
        losses = "  ".join(f"{here[rank]['loss']:.3f}" for rank in sorted(here))
        text = f"step {step:>{len(str(self._steps))}}/{self._steps}   loss {losses}"
        if "sync" in line:
            self._sent += sum(each["bytes_sent"] for each in here.values())
            wait = max(each["wait_seconds"] for each in here.values())
            text = f"sync {line['sync']:>3}  {text}   sent {self._sent / MB:6.1f} MB   longest wait {wait:5.2f} s"
        print(text, flush=True)


def write(
    folder: Path,
    settings: Settings,
    diloco: list[dict[str, Any]],
    lone: list[dict[str, Any]],
    losses: list[float],
    lone_loss: float,
    seconds: float,
) -> None:
    """Write model, metrics, summary and picture, and print the table."""
    for name in ("diloco", "lone"):
        pickled = folder / f"{name}.pt"
        save_file(torch.load(pickled, weights_only=True), folder / f"{name}.safetensors")
        pickled.unlink()
    with (folder / "metrics.jsonl").open("w") as file:
        file.writelines(json.dumps(line) + "\n" for line in [*diloco, *lone])
    rows = [_row(rank, diloco) for rank in range(settings.replicas)]
    gain = lone_loss - losses[0]
    summary = {
        "settings": vars(settings),
        "seconds": seconds,
        "validation_loss": {"diloco": losses[0], "lone": lone_loss},
        "gain": {"nats_per_byte": gain, "percent": 100 * gain / lone_loss},
        "replicas": rows,
    }
    (folder / "summary.json").write_text(json.dumps(summary, indent=1))
    _picture(folder / "demo.png", diloco, lone, rows, losses[0], lone_loss)
    print(_table(rows))
    print(_verdict(losses, lone_loss, gain))
    if settings.steps < 500:
        print("  (so few steps decide nothing: outer momentum has only begun to build up)")
    print(f"\nmodel    {folder}/diloco.safetensors\nmetrics  {folder}/metrics.jsonl\npicture  {folder}/demo.png")


def _row(rank: int, lines: list[dict[str, Any]]) -> dict[str, Any]:
    own = [line for line in lines if line["rank"] == rank]
    exchange, wait = (sum(line[key] for line in own) for key in ("exchange_seconds", "wait_seconds"))
    first, last = own[0]["at"], own[-1]["at"]
    # The first report came one period after training began; before that, processes started and imported torch.
    start = first - (last - first) / (len(own) - 1) if len(own) > 1 else 0.0
    return {
        "rank": rank,
        "syncs": len(own),
        "start_seconds": max(0.0, start),
        "compute_seconds": last - max(0.0, start) - exchange - wait,
        "exchange_seconds": exchange,
        "wait_seconds": wait,
        "sent_mb": sum(line["bytes_sent"] for line in own) / MB,
        "received_mb": sum(line["bytes_received"] for line in own) / MB,
    }


def _table(rows: list[dict[str, Any]]) -> str:
    lines = ["", "replica   syncs     start   compute   exchange      wait       sent   received"]
    lines += [
        f"{row['rank']:>7} {row['syncs']:>7} {row['start_seconds']:>7.1f} s {row['compute_seconds']:>7.1f} s "
        f"{row['exchange_seconds']:>8.2f} s {row['wait_seconds']:>7.2f} s {row['sent_mb']:>7.1f} MB {row['received_mb']:>7.1f} MB"
        for row in rows
    ]
    return "\n".join(lines)


def _verdict(losses: list[float], lone_loss: float, gain: float) -> str:
    word = "better" if gain > 0 else "WORSE"
    return (
        f"\nvalidation loss on files that nobody trained on, nats per byte (lower is better)\n"
        f"  {len(losses)} replicas with DiLoCo   {losses[0]:.4f}\n"
        f"  one lone replica        {lone_loss:.4f}\n"
        f"  DiLoCo is {word} by      {abs(gain):.4f} ({abs(100 * gain / lone_loss):.1f} %)"
    )


def _picture(
    path: Path,
    diloco: list[dict[str, Any]],
    lone: list[dict[str, Any]],
    rows: list[dict[str, Any]],
    loss: float,
    lone_loss: float,
) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.4), width_ratios=[3, 2], layout="constrained")
    lone_curve, diloco_curve = _curve(lone, "valid"), _curve([line for line in diloco if line["rank"] == 0], "valid")
    for row in rows:
        own = [line for line in diloco if line["rank"] == row["rank"]]
        label = "replicas of DiLoCo, training" if row["rank"] == 0 else None
        left.plot(*_curve(own, "loss"), color=INK, alpha=0.35, linewidth=1, label=label)
    left.plot(*diloco_curve, color=INK, linewidth=2.2, label="DiLoCo, 64 held-out windows")
    left.plot(*_curve(lone, "loss"), color=LONE, alpha=0.4, linewidth=1, label="lone replica, training")
    left.plot(*lone_curve, color=LONE, linewidth=2.2, label="lone replica, 64 held-out windows")
    for value, color in ((loss, INK), (lone_loss, LONE)):
        left.plot(lone_curve[0][-1:], [value], "o", color=color, clip_on=False)
        left.annotate(
            f" {value:.3f} on 2048 windows",
            (lone_curve[0][-1], value),
            (6, -3),
            textcoords="offset points",
            color=color,
        )
    left.set(
        xlabel="inner steps", ylabel="loss (nats per byte)", title="Same steps per replica, with and without syncs"
    )
    left.set_ylim(top=min(left.get_ylim()[1], 2 * lone_loss))
    left.legend(frameon=False)
    ranks = [f"replica {row['rank']}" for row in rows]
    start = [0.0] * len(rows)
    for key, name, color in (
        ("start", "start-up", GREY),
        ("compute", "compute", GREEN),
        ("exchange", "exchange", INK),
        ("wait", "wait for others", ORANGE),
    ):
        values = [row[f"{key}_seconds"] for row in rows]
        right.barh(ranks, values, left=start, color=color, label=name)
        start = [a + b for a, b in zip(start, values, strict=True)]
    right.invert_yaxis()
    right.set(xlabel="seconds", title="Where the time went")
    right.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _curve(lines: list[dict[str, Any]], key: str) -> tuple[list[int], list[float]]:
    points = sorted((line["total_inner_steps"], line[key]) for line in lines)
    return [step for step, _ in points], [value for _, value in points]
