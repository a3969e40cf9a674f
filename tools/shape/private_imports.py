"""Count test files that import private modules of diloco-core other than the named interfaces.

    python tools/shape/private_imports.py [FOLDER]

Prints the files and what they import, the most used modules, and the count.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parents[2] / "packages" / "diloco-core" / "tests"
INTERFACES = ("_exchange", "_store", "_run._round", "_run._records")


def imported(source: str) -> Iterator[str]:
    """The modules of diloco_core that a file imports, without the name of the package."""
    for node in ast.walk(ast.parse(source)):
        names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            inner = (f"{node.module}.{each.name}" for each in node.names if each.name[0] == "_")
            names = [node.module, *inner]
        for name in names:
            package, _, module = name.partition(".")
            if package == "diloco_core" and module:
                yield module


def is_private(module: str) -> bool:
    """Whether a module is neither public nor one of the interfaces that tests may use."""
    named = any(module == each or module.startswith(f"{each}.") for each in INTERFACES)
    return not named and any(part[0] == "_" and part[:2] != "__" for part in module.split("."))


def private_imports(folder: Path) -> dict[Path, set[str]]:
    """The private modules that each file of a folder imports; files without any are left out."""
    found = {
        path: {*filter(is_private, imported(path.read_text("utf-8")))}
        for path in sorted(folder.rglob("*.py"))
    }
    return {path: modules for path, modules in found.items() if modules}


def main() -> None:
    """Print what was found."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else TESTS
    found = private_imports(folder)
    for path, modules in found.items():
        print(f"{path.relative_to(folder)}: {', '.join(sorted(modules))}")
    uses = Counter(module for modules in found.values() for module in modules)
    print("\nmost used:", ", ".join(f"{module} {times}" for module, times in uses.most_common(12)))
    print(f"{len(found)} of {len([*folder.rglob('*.py')])} files import private modules")


if __name__ == "__main__":
    main()
