"""What the demo shows: a line per sync while it runs, then a table, a picture and files."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from settings import Settings

# torch and matplotlib take seconds to import, and are needed at the end only.
if TYPE_CHECKING:
    from matplotlib.axes import Axes

Line = dict[str, Any]

MB = 1e6
BLUE, RED, GREEN, ORANGE, GREY, BLACK = (
    "#1f4e79",
    "#b03a2e",
    "#5b9a68",
    "#d9a441",
    "#c8c8c8",
    "#333333",
)
# With fewer steps the outer momentum has hardly built up.
ENOUGH_STEPS = 500


@dataclass(frozen=True)
class Outcome:
    """What came of it.

    Attributes:
        run: What ``diloco report --json`` says of the run with DiLoCo.
        lines: What the two others have logged, by their names. They are no runs: they sync nothing.
        losses: The validation losses of all three.
        seconds: How long the run took.
    """

    run: dict[str, Any]
    lines: dict[str, list[Line]]
    losses: dict[str, float]
    seconds: float

    @property
    def gain(self) -> float:
        """How much better DiLoCo is than a replica alone, in nats per byte."""
        return self.losses["lone"] - self.losses["diloco"]


def introduction(settings: Settings, sizes: dict[str, int], folder: Path) -> str:
    """What is going to happen."""
    train = sum(size for name, size in sizes.items() if name.startswith("train"))
    return (
        f"{settings.replicas} replicas, each {settings.steps} inner steps on its own part of "
        f"{train / MB:.1f} MB of Python's standard library;\n"
        f"a sync every {settings.sync_every} steps through the folder {folder}/diloco-store\n"
    )


def between(settings: Settings, name: str) -> str:
    """The next run, of one process, begins."""
    if name == "lone":
        return (
            "\n"
            f"now one replica alone: {settings.steps} steps on the part of replica 0, and no sync\n"
        )
    return (
        f"\nnow one process with the batches of all {settings.replicas}: the same as averaging "
        "gradients at every step\n"
    )


class Progress:
    """Prints a line when all replicas report a sync; for a lone replica, every fourth report."""

    def __init__(self, settings: Settings, replicas: int) -> None:
        self._replicas = replicas
        self._settings = settings
        self._seen: dict[int, dict[int, Line]] = defaultdict(dict)
        self._sent = 0

    def __call__(self, line: Line) -> None:
        """Take one line of one replica."""
        step = line["total_inner_steps"]
        here = self._seen[step]
        here[line["rank"]] = line
        if len(here) < self._replicas:
            return
        steps, period = self._settings.steps, self._settings.sync_every
        losses = [here[rank]["loss"] for rank in sorted(here) if "loss" in here[rank]]
        shown = "  ".join(f"{loss:.3f}" for loss in losses)
        if len(losses) > 4:
            shown = f"{min(losses):.3f} to {max(losses):.3f}"
        text = f"step {step:>{len(str(steps))}}/{steps}   loss {shown}"
        if "sync" in line:
            self._sent += sum(each["bytes_sent"] for each in here.values())
            wait = max(each["wait_seconds"] for each in here.values())
            text = (
                f"sync {line['sync']:>3}  {text}   sent {self._sent / MB:6.1f} MB   longest wait "
                f"{wait:5.2f} s"
            )
        elif step % (4 * period) and step + period <= steps:
            return
        elif step < steps:
            text += f"   about {line['at'] / step * (steps - step):.0f} s to go"
        print(text, flush=True)


def write(folder: Path, settings: Settings, outcome: Outcome) -> None:
    """Write models, metrics, summary and picture, and print the table."""
    import torch
    from safetensors.torch import save_file

    sizes = {}
    for name in outcome.losses:
        pickled = folder / f"{name}.pt"
        model = torch.load(pickled, weights_only=True)
        sizes[name] = sum(tensor.nbytes for tensor in model.values())
        save_file(model, folder / f"{name}.safetensors")
        pickled.unlink()
    with (folder / "alone.jsonl").open("w") as file:
        for lines in outcome.lines.values():
            file.writelines(json.dumps(line) + "\n" for line in lines)
    rows = list(_rows(outcome.run))
    summary = {
        "settings": vars(settings),
        "seconds": outcome.seconds,
        "validation_loss": outcome.losses,
        "gain": {
            "nats_per_byte": outcome.gain,
            "percent": 100 * outcome.gain / outcome.losses["lone"],
        },
        "sent_mb": {
            "diloco": statistics.fmean(row["sent_mb"] for row in rows),
            "averaged": all_reduced(settings, sizes["diloco"]),
        },
        "replicas": rows,
    }
    (folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    picture(folder / "demo.png", settings, outcome, rows)
    print(_table(rows))
    print(_verdict(settings, outcome, summary["sent_mb"]))
    print(
        f"\nmodel    {folder}/diloco.safetensors\nmetrics  {folder}/report.json\npicture  "
        f"{folder}/demo.png"
    )


def _rows(run: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield what each replica has told of its time and bytes, from its launch to its end."""
    launched = min(replica["started_at"] for replica in run["backend"]["replicas"])
    for rank, of_rank in groupby(run["incarnations"], lambda life: life["rank"]):
        lives = list(of_rank)
        start, untold = lives[0]["first"] - launched, 0.0
        if lives[0]["epoch"] > 1:  # it was killed before it had told anything
            start, untold = 0.0, start
        # The last minute of a killed process, and the start of the next one.
        untold += sum(life["first"] - before["last"] for before, life in pairwise(lives))
        spent = {key: sum(life["seconds"][key] for life in lives) for key in lives[0]["seconds"]}
        amounts = {way: sum(life["bytes"][way] for life in lives) for way in lives[0]["bytes"]}
        yield {
            "rank": rank,
            "syncs": sum(life["syncs"] for life in lives),
            "start_seconds": start,
            "untold_seconds": untold,
            **{f"{key}_seconds": seconds for key, seconds in spent.items()},
            **{f"{way}_mb": count / MB for way, count in amounts.items()},
        }


def _table(rows: list[dict[str, Any]]) -> str:
    times = {"start": "start-up", "compute": "compute", "exchange": "exchange", "wait": "wait"}
    if any(row["untold_seconds"] for row in rows):
        times["untold"] = "not told"
    head = "".join(f"{name:>11}" for name in times.values())
    lines = ["", f"replica   syncs {head}        sent    received"]
    for row in rows:
        seconds = "".join(f"{row[f'{key}_seconds']:>9.2f} s" for key in times)
        lines.append(
            f"{row['rank']:>7} {row['syncs']:>7} {seconds}"
            f" {row['sent_mb']:>8.1f} MB {row['received_mb']:>8.1f} MB"
        )
    return "\n".join(lines)


def all_reduced(settings: Settings, model_bytes: int) -> float:
    """MB that a replica sends to average gradients at each step, with least traffic (a ring)."""
    n = settings.replicas
    return settings.steps * 2 * (n - 1) / n * model_bytes / MB


def names_of(settings: Settings) -> dict[str, str]:
    """What the runs are called where a person reads of them."""
    return {
        "lone": "one replica alone",
        "diloco": f"{settings.replicas} replica{'s' * (settings.replicas > 1)} with DiLoCo",
        "averaged": "averaging at every step",
    }


def _verdict(settings: Settings, outcome: Outcome, sent: dict[str, float]) -> str:
    text = (
        "\nvalidation loss on files that nobody trained on, nats per byte (lower is better)\n"
        f"{'':28}{'loss':>8}   sent by each replica\n"
    )
    for name, shown in names_of(settings).items():
        amount = f"{sent[name]:8.0f} MB" if name in sent else " nothing"
        text += f"  {shown:<26}{outcome.losses[name]:>8.4f}   {amount}\n"
    word = "better" if outcome.gain > 0 else "WORSE"
    percent = abs(100 * outcome.gain / outcome.losses["lone"])
    text += f"DiLoCo is {word} than a replica alone by {abs(outcome.gain):.4f} ({percent:.1f} %)"
    if settings.steps < ENOUGH_STEPS:
        text += "\n  (so few steps decide nothing: the outer momentum has only begun to build up)"
    return text


def picture(path: Path, settings: Settings, outcome: Outcome, rows: list[dict[str, Any]]) -> None:
    """Loss curves on the left, the time of every replica on the right."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(
        1, 2, figsize=(11, 4.4), width_ratios=[3, 2], layout="constrained"
    )
    _draw_losses(left, settings, outcome)
    _draw_times(right, rows)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _draw_losses(axes: Axes, settings: Settings, outcome: Outcome) -> None:
    colors = {"lone": RED, "diloco": BLUE, "averaged": BLACK}
    for key, name in names_of(settings).items():
        color, final = colors[key], outcome.losses[key]
        # The replicas see other parts of the text than a lone one: their training losses are no
        # comparison.
        if key == "diloco":
            lives = outcome.run["incarnations"]
            points = [(step, value) for life in lives for step, _, value in life["losses"]]
        else:
            lines = [line for line in outcome.lines[key] if "valid" in line]
            points = [(line["total_inner_steps"], line["valid"]) for line in lines]
        steps, values = _curve(points)
        axes.plot(steps, values, color=color, linewidth=2.2, label=name)
        axes.plot(steps[-1:], [final], "o", color=color, clip_on=False)
        axes.annotate(
            f"{final:.3f}",
            (steps[-1], final),
            (8, -4),
            textcoords="offset points",
            color=color,
            weight="bold",
        )
    axes.set(xlabel="inner steps of each replica", ylabel="loss on held-out text (nats per byte)")
    axes.set_title("The same number of steps in each", loc="left")
    axes.set_ylim(top=min(axes.get_ylim()[1], 2 * outcome.losses["lone"]))
    axes.legend(frameon=False)


def _draw_times(axes: Axes, rows: list[dict[str, Any]]) -> None:
    names = [f"replica {row['rank']}" for row in rows]
    left = [0.0] * len(rows)
    for key, name, color in (
        ("start", "start-up", GREY),
        ("compute", "compute", GREEN),
        ("exchange", "exchange", BLUE),
        ("wait", "wait for others", ORANGE),
        ("untold", "killed: not told", RED),
    ):
        values = [row[f"{key}_seconds"] for row in rows]
        if not any(values):
            continue
        axes.barh(names, values, left=left, color=color, label=name)
        left = [a + b for a, b in zip(left, values, strict=True)]
    axes.invert_yaxis()
    axes.set(xlabel="seconds")
    axes.set_title("Where the time went", loc="left")
    axes.legend(
        frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=4, fontsize="small"
    )


def _curve(points: Iterable[tuple[int, float]]) -> tuple[list[int], list[float]]:
    """Return steps, and at each the mean of the replicas that have a value there."""
    at = defaultdict(list)
    for step, value in points:
        at[step].append(value)
    return sorted(at), [statistics.fmean(at[step]) for step in sorted(at)]
