"""Links: between the repository's pages, made to fit the site; and those of a built site."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from html.parser import HTMLParser
from pathlib import Path, PurePosixPath
from urllib.parse import unquote, urlsplit

LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\]\([^)]*\))*)\]\(([^)\s]+)\)")
FENCE = re.compile(r"^( *)(```|~~~).*?^\1\2 *$", re.MULTILINE | re.DOTALL)


class Pages:
    """Files of the repository that are pages of the site.

    Attributes:
        pictures: Files that the pages show, and where they stand in the site; filled by
            :meth:`text`.
    """

    def __init__(self, top: Path, places: Mapping[Path, str]) -> None:
        self._top = top
        self._places = {path.resolve(): where for path, where in places.items()}
        self.pictures: dict[Path, str] = {}

    def text(self, path: Path) -> str:
        """A page's text, with links that lead to the same things in the site.

        What a link leads to in the repository and the site does not have keeps its text and loses
        the link. What belongs to a point of a list by three spaces gets the four that Python's
        Markdown wants.
        """
        text = path.read_text(encoding="utf-8")
        pieces, last = [], 0
        for fence in FENCE.finditer(text):  # code stays as it is
            code = (
                fence[0]
                if fence[1] != " " * 3
                else re.sub("^ {3}", " " * 4, fence[0], flags=re.MULTILINE)
            )
            pieces += [self._linked(path, text[last : fence.start()]), code]
            last = fence.end()
        return "".join([*pieces, self._linked(path, text[last:])])

    def _linked(self, path: Path, text: str) -> str:
        text = re.sub(r"^ {3}(?=\S)", " " * 4, text, flags=re.MULTILINE)
        return LINK.sub(lambda link: self._link(path, *link.groups()), text)

    def _link(self, path: Path, mark: str, shown: str, target: str) -> str:
        parts = urlsplit(target)
        if parts.scheme or not parts.path:
            return f"{mark}[{shown}]({target})"
        file = (path.parent / unquote(parts.path)).resolve()
        if not file.exists():
            raise SystemExit(f"{path.relative_to(self._top)} links to {target}, which is not there")
        here = PurePosixPath(self._places[path.resolve()]).parent
        if mark:
            self.pictures[file] = where = f"pictures/{'-'.join(file.relative_to(self._top).parts)}"
        else:
            found = self._places.get(file) or self._places.get(file / "README.md")
            if found is None:
                return shown
            where = found
        anchor = f"#{parts.fragment}" if parts.fragment else ""
        return f"{mark}[{shown}]({os.path.relpath(where, here)}{anchor})"


class _Page(HTMLParser):
    """What a page links to and loads, and which places in it can be linked to."""

    def __init__(self) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.loaded: list[str] = []
        self.ids: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Take down links, and ids."""
        found = {name: value for name, value in attrs if value}
        self.ids |= {found[name] for name in ("id", "name") if name in found}
        if tag == "a" and "href" in found:
            self.targets.append(found["href"])
        elif tag in {"img", "script"} and "src" in found:
            self.loaded.append(found["src"])
        elif tag == "link" and found.get("rel") in {"stylesheet", "icon"} and "href" in found:
            self.loaded.append(found["href"])


def broken_links(site: Path) -> list[str]:
    """A built site's dead links, and what it would load from elsewhere; each in a sentence."""
    pages = {}
    for path in sorted(site.rglob("*.html")):
        page = pages[path] = _Page()
        page.feed(path.read_text(encoding="utf-8"))
    found = []
    for path, page in pages.items():
        name = path.relative_to(site)
        found += [
            f"{name} loads {target} from elsewhere"
            for target in page.loaded
            if urlsplit(target).netloc
        ]
        for target in [*page.targets, *page.loaded]:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc or name.name == "404.html":
                continue
            file = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            file = file / "index.html" if file.is_dir() else file
            if not file.is_file():
                found.append(f"{name} links to {target}, which is not in the site")
            elif (
                parts.fragment and file in pages and unquote(parts.fragment) not in pages[file].ids
            ):
                found.append(f"{name} links to {target}, and the page has no such place")
    return sorted(set(found))
