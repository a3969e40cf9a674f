"""The API reference: a page for every public module, with all of its public names."""

from __future__ import annotations

import ast
from html.parser import HTMLParser
from pathlib import Path


def public_names(path: Path) -> list[str]:
    """The names in a module's ``__all__``; without one, those of its own without underscore."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    return [
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
    ]


def modules(source: Path) -> dict[str, Path]:
    """The public modules below a ``src`` folder and their files: no underscore begins a name."""
    found = {}
    for path in sorted(source.rglob("*.py")):
        parts = path.relative_to(source).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        inside = path.parent
        while inside != source and (inside / "__init__.py").exists():
            inside = inside.parent
        if inside == source and not any(part.startswith("_") for part in parts):
            found[".".join(parts)] = path
    return found


def pages(source: Path) -> dict[str, str]:
    """The text of the page of every public module that has public names."""
    texts = {}
    for module, path in modules(source).items():
        description = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        names = public_names(path)
        if names:
            entries = "\n\n".join(f"::: {module}.{name}" for name in names)
            texts[module] = (
                f"# `{module}`\n\n{description.partition(chr(10) * 2)[0]}\n\n{entries}\n"
            )
    return texts


class _Ids(HTMLParser):
    """The ids of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:  # noqa: ARG002
        self.found |= {value for name, value in attrs if name == "id" and value}


def missing_names(site: Path, packages: list[Path]) -> list[str]:
    """Public names that the built site does not have, each in a sentence."""
    found = []
    for package in packages:
        for module, path in modules(package / "src").items():
            if not (names := public_names(path)):
                continue
            page = site / "reference" / module / "index.html"
            ids = _Ids()
            ids.feed(page.read_text(encoding="utf-8") if page.exists() else "")
            found += [
                f"reference/{module} lacks {name}"
                for name in names
                if f"{module}.{name}" not in ids.found
            ]
    return found
