"""Sphinx roles in docstrings, which are best in the sources, become Markdown here."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import griffe
import reference

ROLE = re.compile(r":(?:class|func|meth|mod|attr|data|exc):`~?\.?([^`]+)`")
PACKAGES = sorted(
    path.parent for path in Path(__file__).parents[2].glob("packages/*/pyproject.toml")
)
PUBLIC = {
    module: set(reference.public_names(path))
    for package in PACKAGES
    for module, path in reference.modules(package / "src").items()
}


def in_markdown(text: str, module: str) -> str:
    """A docstring from a top-level ``module`` as Markdown: roles are links, or only code."""

    def link(role: re.Match[str]) -> str:
        parts = role[1].split(".")
        for home in (module, *PUBLIC):
            for first, name in enumerate(parts):
                if name in PUBLIC.get(home, ()):
                    shown = ".".join(parts[first:])
                    return f"[`{shown}`][{home}.{name}]"
        public = [part for part in parts if part and not part.startswith("_")]
        return f"`{'.'.join(public) or role[1]}`"

    return ROLE.sub(link, text).replace("::\n", ":\n")


class Roles(griffe.Extension):
    """Changes docstrings as they are loaded."""

    def on_object(self, *, obj: griffe.Object, **_kwargs: Any) -> None:
        """Change one."""
        if obj.docstring is not None:
            obj.docstring.value = in_markdown(obj.docstring.value, obj.path.partition(".")[0])
