"""The pictures of ``diloco watch`` and ``diloco report`` in the docs: ``hatch run pictures``.

They are made from what the four replicas of a demo have told (``recorded/``): replica 2 was killed
and came back. ``recorded/watched.jsonl`` is what they told while two of them waited for it.
"""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Iterator
from html import escape
from pathlib import Path
from xml.etree import ElementTree as ET

from rich.console import CONSOLE_SVG_FORMAT, Console
from rich.text import Text

from diloco_cli._report import _page, _pictures, _summary
from diloco_cli._told import Store, run_facts
from diloco_cli._view import View, Word, rank_facts, screenful, see
from diloco_protocol import ReplicaState, ReplicaStatus
from diloco_protocol.telemetry import Live, RunReader, Told

TOP = Path(__file__).parents[2]
RECORDED = Path(__file__).with_name("recorded")
URI = "s3://bucket/run-1"
COLUMNS = 100
WIDTH, LEFT, RIGHT = 960, 60, 20
LETTER = 6.6
"""About the width of a letter, by which the entries of a legend are placed."""


def told() -> Told:
    """Return all that the replicas have told."""
    store = Store(str(RECORDED))
    return RunReader(store.list_keys, store.read).look()


def watch(everything: Told) -> str:
    """Return the picture of ``watch``, at the moment when two replicas wait for one that is back.

    Args:
        everything: What the replicas have told in the end.
    """
    lines = (RECORDED / "watched.jsonl").read_bytes().splitlines()
    lives = {live.rank: live for live in map(Live.from_bytes, lines)}
    now = max(live.time for live in lives.values()) + 2
    replicas = run_facts(URI, Told(lives, {}, 0, 0, 0))["replicas"]
    before = [{**each, "bytes_sent": 0, "bytes_received": 0, "sync": 0} for each in replicas]
    seen = see(see({}, before, now - 60, now - 65), replicas, now - 4, now - 9)
    rows = [
        rank_facts(
            rank, seen[rank], Word(ReplicaStatus(ReplicaState.RUNNING, attempt=live.attempt or 1)),
            now, 60.0,
        )
        for rank, live in lives.items()
    ]  # fmt: skip
    syncs = [
        (key.epoch, line)
        for key, each in everything.history.items()
        for line in each.lines
        if key.rank == 0 and line.sync <= lives[0].sync
    ]
    view = View(URI, rows, syncs, 0, (), now)
    console = Console(
        record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, highlight=False
    )
    for line in screenful(view, COLUMNS, 24):
        console.print(Text.assemble(*line), soft_wrap=True)
    # The fonts of the system do; those that rich names would come over the network.
    without_fonts = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    return console.export_svg(
        title=f"diloco watch {URI}", code_format=without_fonts, unique_id="watch"
    )


def report(everything: Told) -> str:
    """Return the picture of ``report``: the charts of its page below each other."""
    prices = _summary.read_prices(_summary.DEFAULT.read_bytes())
    summary = _summary.summarise(everything, prices, uri=URI)
    ranks = _pictures.ranks_with_a_row(summary["incarnations"])
    charts = {
        "loss against time": _pictures.loss_chart(summary, by_time=True),
        "Where the time went": _pictures.split_chart(ranks),
        "Incarnations": _pictures.lives_chart(summary, ranks),
        "Who was in which sync": _pictures.members_chart(summary, ranks),
    }
    shapes, top = [_text(20, 40, f"Run {summary['run_id']}", "title")], 60
    for title, chart in charts.items():
        shapes += [_text(20, top + 20, title, "head")]
        drawn, top = _chart(chart, top + 46)
        shapes += drawn
    style = Path(_page.__file__).with_name("style.css").read_text(encoding="utf-8")
    own = (
        "text{font:11px system-ui,sans-serif;fill:var(--soft)}.title{font-size:24px;"
        "font-weight:700;fill:var(--text)}.head{font-size:14px;font-weight:600;fill:var(--text)}"
        ".back{fill:var(--back)}"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top}" role="img" '
        f'aria-label="A report of a run"><style>{style}{own}</style>'
        f'<path class="back" d="M0 0h{WIDTH}v{top}H0z"/>{"".join(shapes)}</svg>\n'
    )


def _text(x: float, y: float, text: str, name: str = "", anchor: str = "start") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" class="{name}" text-anchor="{anchor}">{escape(text)}</text>'
    )


def _chart(html: str, top: int) -> tuple[list[str], int]:
    """Return the shapes of a chart of the page, and where the next one begins."""
    legend, frame = ET.fromstring(f"<div>{html}</div>")
    return [*_legend(legend, top), *_frame(frame, top + 14)], top + 64 + _height(frame)


def _height(frame: ET.Element) -> int:
    return int(frame.attrib["style"].removeprefix("height:").removesuffix("px"))


def _legend(entries: ET.Element, top: int) -> Iterator[str]:
    x = float(LEFT)
    for entry in entries:
        text, (path,) = "".join(entry.itertext()), entry[0]
        yield f'<path class="{path.attrib["class"]}" d="M{x:.1f} {top - 9}h9v9h-9z"/>'
        yield _text(x + 14, top, text)
        x += 34 + LETTER * len(text)


def _frame(frame: ET.Element, top: int) -> Iterator[str]:
    """Yield a drawing at its place, with the texts at its left side and below."""
    width, height = WIDTH - LEFT - RIGHT, _height(frame)
    drawing, *texts = frame
    drawing.attrib |= {"x": f"{LEFT}", "y": f"{top}", "width": f"{width}", "height": f"{height}"}
    yield ET.tostring(drawing, encoding="unicode")
    for each in texts:
        side, _, share = each.attrib["style"].partition(":")
        at = float(share.removesuffix("%")) / 100
        if side == "top":
            yield _text(LEFT - 8, top + at * height + 4, each.text or "", anchor="end")
        else:
            yield _text(LEFT + at * width, top + height + 18, each.text or "", anchor="middle")


def main(folder: Path) -> None:
    """Write the pictures into a folder."""
    everything = told()
    for name, picture in (("watch.svg", watch(everything)), ("report.svg", report(everything))):
        (folder / name).write_text(picture, encoding="utf-8")
        print(folder / name)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else TOP / "packages/diloco-cli/docs")
