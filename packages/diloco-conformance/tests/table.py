"""Tables made from the code, in the README and docs/own-backend.md: run this file to renew them."""

import inspect
import re
from pathlib import Path

from diloco_conformance import PROMISES
from diloco_protocol import Reason, ReplicaResult

PACKAGE = Path(__file__).parents[1]
README = PACKAGE / "README.md"
OWN = PACKAGE / "docs" / "own-backend.md"


def attributes(cls):
    """What a docstring says of each attribute."""
    lines = inspect.getdoc(cls).partition("Attributes:\n")[2].splitlines()
    found = {}
    for line in filter(None, map(str.strip, lines)):
        if re.match(r"\w+: ", line):
            name, meaning = line.split(": ", 1)
            found[name] = meaning
        else:  # a meaning that runs on
            found[name] += f" {line}"
    return found


def rows(heads, entries):
    lines = [
        f"| {name} | {meaning.replace(':class:', '').replace('``', '`')} |\n"
        for name, meaning in entries
    ]
    return "".join([f"| {heads[0]} | {heads[1]} |\n|---|---|\n", *lines])


#: Page and name of the block → what is to stand there.
TABLES = {
    (README, "promises"): rows(("", ""), PROMISES.items()).replace("|  |  |", "| | |", 1),
    (OWN, "reasons"): rows(
        ("reason", "state, and when"),
        [(f"`{Reason[name]}`", meaning) for name, meaning in attributes(Reason).items()],
    ),
    (OWN, "keys"): rows(
        ("key", "value"),
        [(f"`{name}`", meaning) for name, meaning in attributes(ReplicaResult).items()],
    ),
}


def block(name):
    return re.compile(rf"(<!-- {name} -->\n)(.*?)(<!-- /{name} -->)", re.DOTALL)


def shown(page, name):
    """What stands there."""
    ((_, table, _),) = block(name).findall(page.read_text(encoding="utf-8"))
    return table


if __name__ == "__main__":
    for (page, name), table in TABLES.items():
        text = page.read_text(encoding="utf-8")
        page.write_text(block(name).sub(rf"\g<1>{table}\g<3>", text), encoding="utf-8")
