"""Write the parts of diloco-core's docs/reference that come from docstrings, options and keys.

Run this file for it.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import diloco_core
from diloco_core import Elastic, Timing
from diloco_core._run._records import _keys

FOLDER = Path(__file__).parents[2] / "packages/diloco-core/docs/reference"
PAGES = (FOLDER / "options.md", FOLDER / "kept.md")
_PLACE = re.compile(r"(<!-- (\w+) -->\n).*?\n(<!-- /\2 -->)", re.DOTALL)
_ENTRY = re.compile(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", re.MULTILINE)
_SENTENCE = re.compile(r"(.*?\.)(?= [A-Z0-9`(]|$)")


def table(described: Callable[..., Any] | type) -> str:
    """Return a Markdown table: each argument, its default, and its first sentence of the docstring.

    A class without arguments for users, such as a report, has its attributes there instead, without
    defaults.
    """
    text = inspect.getdoc(described) or ""
    is_passed = "\nArgs:\n" in text
    section = re.split(r"\n(?:Args|Attributes):\n", text)[1].partition("\n\n")[0]
    parameters = inspect.signature(described).parameters
    rows = [
        [f"`{name}`", *([_taken(parameters[name])] if is_passed else []), _first(name, entry)]
        for name, entry in _ENTRY.findall(section)
    ]
    head = ["", "default", ""] if is_passed else ["", ""]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [head, ["---"] * len(head), *rows])


def _taken(parameter: inspect.Parameter) -> str:
    """Return the default, and the other values of an argument that takes certain texts."""
    value = parameter.default
    if value is None:  # what connect() is not given, these settings have
        defaults = {each.name: each.default for kind in (Elastic, Timing) for each in fields(kind)}
        value = defaults.get(parameter.name)
    default = _shown(value) if isinstance(value, str | float | int) else ""
    choices = [_shown(text) for text in re.findall(r"[\"'](.*?)[\"']", str(parameter.annotation))]
    others = ", ".join(dict.fromkeys(choice for choice in choices if choice != default))
    return "; or ".join(filter(None, [default, others]))


def _shown(value: str | float) -> str:
    return f"`{value:g}`" if type(value) is float else f"`{value!r}`".replace("'", '"')


def _first(name: str, entry: str) -> str:
    sentence = _SENTENCE.match(" ".join(entry.split()))
    if sentence is None:
        raise SystemExit(f"what is said of {name} has no first sentence: {entry}")
    return re.sub(r":\w+:`\.?([^`]+)`", r"`\1`", sentence[1]).replace("``", "`")


def page(text: str) -> str:
    """Return the page with everything that it has from docstrings as these are now."""
    return _PLACE.sub(lambda found: f"{found[1]}{_written(found[2])}\n{found[3]}", text)


def _written(name: str) -> str:
    if name != "keys":
        return table(getattr(diloco_core, name))
    block = re.search(r"::\n\n((?: {4}.*\n)+)", _keys.__doc__ or "")
    assert block is not None
    return f"```\n{textwrap.dedent(block[1])}```"


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(page(path.read_text(encoding="utf-8")), encoding="utf-8")
