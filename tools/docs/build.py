"""One site from the pages of all packages: ``hatch run docs:build``.

Broken links and missing names are errors.

Pages are copied from beside what they describe, with links between them made to fit; the API
reference is made from the docstrings of all public names. Then zensical builds the site, and what
it has built is looked at once more.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import reference
from links import Pages, broken_links
from roles import in_markdown

TOP = Path(__file__).parents[2]
SOURCE = TOP / "dist" / "docs"
SITE = SOURCE / "site"
FEATURES = [
    "content.code.copy",
    "navigation.indexes",
    "navigation.sections",
    "navigation.top",
    "toc.follow",
]
EXTENSIONS = """
[project.markdown_extensions.attr_list]
[project.markdown_extensions.tables]
[project.markdown_extensions.toc]
permalink = true
[project.markdown_extensions.pymdownx.highlight]
[project.markdown_extensions.pymdownx.superfences]
"""


def packages() -> list[Path]:
    """The folders of all packages."""
    return sorted(path.parent for path in TOP.glob("packages/*/pyproject.toml"))


def navigation() -> dict[str, list[Path]]:
    """The sections of the site, and the repository's files that are their pages."""
    described = tomllib.loads((TOP / "tools/docs/site.toml").read_text(encoding="utf-8"))
    sections = {
        section["title"]: [TOP / page for page in section["pages"]]
        for section in described["sections"]
    }
    sections["Packages"] = [package / "README.md" for package in packages()]
    sections["Changes"] = [package / "CHANGELOG.md" for package in packages()]
    return sections


def place(path: Path) -> str:
    """Where a page stands in the site: ``packages/diloco-core/docs/run.md`` at ``core/run.md``."""
    parts = path.relative_to(TOP).parts
    if parts[0] != "packages":
        return "index.md" if path.name == "README.md" else path.name.lower()
    names = {"README.md": "index.md", "CHANGELOG.md": "changes.md", "DESIGN.md": "contract.md"}
    page = "/".join(parts[3:]) or names[path.name]  # in docs, which may have folders
    return f"{parts[1].removeprefix('diloco-')}/{page}"


def title_of(path: Path) -> str:
    """The first heading of a page; of a package's page, the package's name."""
    if path.name == "CHANGELOG.md":
        return path.parent.name
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("# "):
            return line[2:].replace("`", "")
    raise SystemExit(f"{path.relative_to(TOP)} has no heading that could be its title")


def write_pages(sections: dict[str, list[Path]]) -> dict[str, list[dict[str, str]]]:
    """Copy all pages, with the files that they show; the navigation."""
    places = {path: place(path) for pages in sections.values() for path in pages}
    missing = [str(path.relative_to(TOP)) for path in places if not path.is_file()]
    if missing:
        raise SystemExit(
            f"tools/docs/site.toml names pages that are not there: {', '.join(missing)}"
        )
    pages = Pages(TOP, places)
    for path, where in places.items():
        target = SOURCE / "pages" / where
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(pages.text(path), encoding="utf-8")
    for picture, where in pages.pictures.items():
        target = SOURCE / "pages" / where
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(picture, target)
    return {
        title: [{title_of(path): places[path]} for path in paths]
        for title, paths in sections.items()
    }


def write_reference() -> list[dict[str, str]]:
    """A page for every public module; their part of the navigation."""
    found = []
    for package in packages():
        for module, text in reference.pages(package / "src").items():
            target = SOURCE / "pages" / "reference" / f"{module}.md"
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(in_markdown(text, module), encoding="utf-8")
            found.append({module: f"reference/{module}.md"})
    return found


def write_settings(menu: dict[str, list[dict[str, str]]]) -> Path:
    """The settings of zensical; where they are."""
    described = tomllib.loads((TOP / "tools/docs/site.toml").read_text(encoding="utf-8"))
    entries = ",\n".join(
        f"  {{ {quoted(title)} = [{', '.join(_entry(page) for page in pages)}] }}"
        for title, pages in menu.items()
    )
    sources = ", ".join(quoted(str(package / "src")) for package in packages())
    path = SOURCE / "zensical.toml"
    path.write_text(
        f"""[project]
site_name = {quoted(described["name"])}
site_description = {quoted(described["description"])}
docs_dir = "pages"
site_dir = "site"
nav = [
{entries}
]

[project.theme]
features = [{", ".join(map(quoted, FEATURES))}]
font = false
{EXTENSIONS}
[project.plugins.mkdocstrings.handlers.python]
paths = [{sources}]

[project.plugins.mkdocstrings.handlers.python.options]
docstring_style = "google"
extensions = ["roles"]
heading_level = 2
inherited_members = true
members_order = "source"
separate_signature = true
show_root_heading = true
show_root_full_path = false
show_signature_annotations = true
show_source = false
signature_crossrefs = true
line_length = 80
""",
        encoding="utf-8",
    )
    return path


def _entry(page: dict[str, str]) -> str:
    ((title, where),) = page.items()
    return f"{{ {quoted(title)} = {quoted(where)} }}"


def quoted(text: str) -> str:
    """Text as TOML has it."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def main() -> int:
    """Build the site; the exit status."""
    shutil.rmtree(SOURCE, ignore_errors=True)
    menu = write_pages(navigation())
    menu["Python API"] = write_reference()
    settings = write_settings(menu)
    command = [
        sys.executable,
        "-m",
        "zensical",
        "build",
        "--strict",
        "--clean",
        "-f",
        str(settings),
    ]
    path = os.pathsep.join([str(TOP / "tools/docs"), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path}  # where roles.py is
    if subprocess.run(command, cwd=SOURCE, env=environment, check=False).returncode:
        return 1
    if found := [*broken_links(SITE), *reference.missing_names(SITE, packages())]:
        print("\n".join(found))
        return 1
    print(f"the site is in {SITE.relative_to(TOP)}: open index.html")
    return 0


if __name__ == "__main__":
    sys.exit(main())
