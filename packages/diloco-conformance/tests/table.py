"""The table of promises in the README: run this file to write it anew."""

import re
from pathlib import Path

from diloco_conformance import PROMISES

README = Path(__file__).parents[1] / "README.md"
BLOCK = re.compile(r"(<!-- promises -->\n).*?(<!-- /promises -->)", re.DOTALL)


def table():
    rows = [f"| {name} | {sentence} |\n" for name, sentence in PROMISES.items()]
    return "".join(["| | |\n|---|---|\n", *rows])


if __name__ == "__main__":
    text = README.read_text(encoding="utf-8")
    README.write_text(
        BLOCK.sub(lambda found: found[1] + table() + found[2], text), encoding="utf-8"
    )
