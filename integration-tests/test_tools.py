"""The release check finds what is missing in an sdist or wheel; the site's builder, dead links."""

import importlib
import inspect
import io
import re
import sys
import tarfile
import zipfile
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

TOP = Path(__file__).parents[1]
NAME = "diloco-tiny"
METADATA = """Metadata-Version: 2.4
Name: diloco-tiny
Version: 1.2.0
Summary: Small.
Author: The diloco authors
Keywords: diloco
License-Expression: Apache-2.0
License-File: LICENSE
Requires-Python: >=3.11
"""


def tool(folder, name):
    """A module of a tool."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(TOP / "tools" / folder)
        module = importlib.import_module(name)
    del sys.modules[name]
    return module


class Tiny:
    """A package with all that a release needs; a test may change its sdist and wheel beforehand."""

    def __init__(self, folder):
        self.top = folder
        self.source = folder / "packages" / NAME
        files = {
            "LICENSE": "yours",
            "README.md": "# tiny",
            "CHANGELOG.md": "# Changelog\n\n## 1.2.0 (2027-01-02)\n",
            "DESIGN.md": "# why",
            "pyproject.toml": "",
            "docs/page.md": "# page",
            "examples/one.py": "",
            "tests/test_it.py": "",
            "src/diloco_tiny/__init__.py": '"""Tiny."""',
            "src/diloco_tiny/__about__.py": '__version__ = "1.2.0"\n',
            "src/diloco_tiny/py.typed": "",
        }
        (folder / "packages").mkdir()
        (folder / "LICENSE").write_text("yours")
        for name, text in files.items():
            (self.source / name).parent.mkdir(parents=True, exist_ok=True)
            (self.source / name).write_text(text)
        self.sdist = dict(files)
        self.wheel = {
            **{name[4:]: text for name, text in files.items() if name.startswith("src/")},
            "diloco_tiny-1.2.0.dist-info/METADATA": METADATA,
            "diloco_tiny-1.2.0.dist-info/licenses/LICENSE": "yours",
        }

    def complaints(self, tag=None):
        contents = tool("release", "contents")
        with tarfile.open(self.top / "tiny.tar.gz", "w:gz") as archive:
            for name, text in self.sdist.items():
                member = tarfile.TarInfo(f"diloco_tiny-1.2.0/{name}")
                member.size = len(text)
                archive.addfile(member, io.BytesIO(text.encode()))
        with zipfile.ZipFile(self.top / "tiny.whl", "w") as archive:
            for name, text in self.wheel.items():
                archive.writestr(name, text)
        paths = self.source, self.top / "tiny.tar.gz", self.top / "tiny.whl"
        return contents.complaints(contents.Release(NAME, *paths), tag)


@pytest.fixture
def tiny(tmp_path):
    return Tiny(tmp_path)


def test_a_complete_release_has_no_complaints(tiny):
    assert tiny.complaints() == []
    assert tiny.complaints("diloco-tiny-v1.2.0") == []


@pytest.mark.parametrize(
    "name", ["LICENSE", "README.md", "CHANGELOG.md", "DESIGN.md", "docs/page.md", "examples/one.py"]
)
def test_what_the_sdist_lacks(tiny, name):
    del tiny.sdist[name]
    (first, *_) = tiny.complaints()[-1:]
    assert "sdist" in first
    assert name.split("/")[0] in first


@pytest.mark.parametrize("name", ["diloco_tiny/py.typed", "diloco_tiny/__init__.py"])
def test_what_the_wheel_lacks(tiny, name):
    del tiny.wheel[name]
    assert tiny.complaints() == [f"the wheel lacks {name}"]


def test_what_the_wheel_has_too_much(tiny):
    tiny.wheel["tests/test_it.py"] = ""
    assert tiny.complaints() == ["the wheel has tests/test_it.py, which is not the package's"]


def test_a_licence_of_somebody_else(tiny):
    tiny.wheel["diloco_tiny-1.2.0.dist-info/licenses/LICENSE"] = "theirs"
    assert tiny.complaints() == ["the LICENSE in the wheel is not that of the repository"]


@pytest.mark.parametrize("field", ["Author", "Keywords", "License-Expression", "Summary"])
def test_what_the_metadata_lack(tiny, field):
    lines = [line for line in METADATA.splitlines() if not line.startswith(f"{field}:")]
    tiny.wheel["diloco_tiny-1.2.0.dist-info/METADATA"] = "\n".join(lines)
    assert tiny.complaints() == [f"the metadata lack {field}"]


def test_a_tag_of_another_version_or_package(tiny):
    for tag in ("diloco-tiny-v1.3.0", "diloco-core-v1.2.0"):
        (complaint,) = tiny.complaints(tag)
        assert tag in complaint
        assert "diloco-tiny-v1.2.0" in complaint


def test_a_changelog_without_the_version_or_that_still_calls_it_unreleased(tiny):
    tiny.sdist["CHANGELOG.md"] = "## 1.2.0 (unreleased)\n"
    assert tiny.complaints() == []  # nobody wants to release it yet
    assert "write the date" in tiny.complaints("diloco-tiny-v1.2.0")[0]
    tiny.sdist["CHANGELOG.md"] = "## 1.2.01\n## 1.2.0rc1\n## 11.2.0\n"
    assert tiny.complaints() == ["CHANGELOG.md has no heading for 1.2.0"]


def test_a_package_that_is_not_there(monkeypatch, capsys):
    check = tool("release", "check")
    monkeypatch.setattr(sys, "argv", ["check", "diloco-core", "diloco-cor"])
    monkeypatch.setattr(check, "check", None)  # nothing is begun
    with pytest.raises(SystemExit):
        check.main()
    said = capsys.readouterr().err
    assert "no package diloco-cor;" in said
    packages = {path.parent.name for path in TOP.glob("packages/*/pyproject.toml")}
    assert [name for name in packages if name not in said] == []


# --- the site ---


@pytest.fixture
def pages(tmp_path):
    """Two pages of different packages, and a file that is no page."""
    (tmp_path / "one/docs").mkdir(parents=True)
    (tmp_path / "two").mkdir()
    (tmp_path / "two/README.md").write_text("# Two")
    (tmp_path / "two/notes.txt").write_text("")
    (tmp_path / "one/docs/picture.svg").write_text("<svg/>")
    page = tmp_path / "one/docs/page.md"
    places = {page: "one/page.md", tmp_path / "two/README.md": "two/index.md"}
    links = tool("docs", "links")

    def text(written):
        page.write_text(written)
        made = links.Pages(tmp_path, places)
        return made.text(page), made.pictures

    return text


def test_links_between_pages_are_made_to_fit(pages):
    assert pages("[a](../../two/README.md#part)")[0] == "[a](../two/index.md#part)"
    assert pages("[a](../../two)")[0] == "[a](../two/index.md)"
    assert (
        pages("[a](#here) [b](https://example.org/x)")[0] == "[a](#here) [b](https://example.org/x)"
    )


def test_a_link_to_what_is_no_page_keeps_its_text(pages):
    assert pages("see [the notes](../../two/notes.txt).")[0] == "see the notes."


def test_a_link_to_nothing_ends_the_build(pages):
    with pytest.raises(SystemExit, match=r"links to gone\.md, which is not there"):
        pages("[a](gone.md)")


def test_pictures_come_along(pages, tmp_path):
    text, pictures = pages("![a](picture.svg)")
    assert text == "![a](../pictures/one-docs-picture.svg)"
    assert pictures == {tmp_path / "one/docs/picture.svg": "pictures/one-docs-picture.svg"}


def test_code_is_left_alone(pages):
    code = "```\n[a](gone.md)\n```"
    assert pages(code)[0] == code


def test_what_belongs_to_a_point_of_a_list_stays_there(pages):
    assert (
        pages("1. a\n   b\n\n   ```\n   c\n   ```")[0] == "1. a\n    b\n\n    ```\n    c\n    ```"
    )


def test_broken_links_of_a_site(tmp_path):
    links = tool("docs", "links")
    (tmp_path / "other").mkdir()
    (tmp_path / "other/index.html").write_text('<h1 id="top"><a href="../">home</a></h1>')
    page = tmp_path / "index.html"
    page.write_text('<a href="other/#top">a</a> <a href="https://example.org">b</a><img src="">')
    assert links.broken_links(tmp_path) == []
    page.write_text(
        '<a href="other/#end">a</a><a href="gone/">b</a><script src="https://x.org/y"></script>'
    )
    assert links.broken_links(tmp_path) == [
        "index.html links to gone/, which is not in the site",
        "index.html links to other/#end, and the page has no such place",
        "index.html loads https://x.org/y from elsewhere",
    ]


def test_pages_have_what_the_docstrings_say():
    described = tool("docs", "described")
    texts = [path.read_text(encoding="utf-8") for path in described.PAGES]
    command = "run `hatch env run -- python tools/docs/described.py`"
    assert [described.page(text) for text in texts] == texts, command
    for name in ("connect", "DiLoCo", "SyncReport"):
        assert f"\n<!-- {name} -->\n|  |" in texts[0]
    assert "\n<!-- keys -->\n```\nbeginning.json" in texts[1]


def test_pictures_show_what_the_command_shows(tmp_path):
    pictures = tool("docs", "pictures")
    pictures.main(tmp_path)
    docs = TOP / "packages/diloco-cli/docs"
    for name in ("watch.svg", "report.svg"):
        drawn, kept = (texts(folder / name) for folder in (tmp_path, docs))
        assert drawn == kept, "run `hatch run pictures`"
        assert (docs / name).stat().st_size < 200_000
    assert {"waiting for 2", "demo laptop"} <= {" ".join(text.split()) for text in kept_cells(docs)}


def texts(picture):
    """The texts of a picture."""
    return [text.replace("\xa0", " ") for text in ET.parse(picture).getroot().itertext()]


def kept_cells(docs):
    """The cells of the table of ``watch``."""
    return [cell for text in texts(docs / "watch.svg") for cell in re.split("  +", text)]


@pytest.mark.parametrize(
    ("name", "annotation", "default", "shown"),
    [
        ("kind", 'Literal["a", "b"] | None', "b", '`"b"`; or `"a"`'),
        ("kind", 'Literal["a", "b"] | None', None, '`"a"`, `"b"`'),
        ("alpha", "float", 0.5, "`0.5`"),
        ("grace", "float | None", None, "`60`"),
        ("model", "Any", inspect.Parameter.empty, ""),
    ],
)
def test_what_is_taken_for_an_option_that_is_left_out(name, annotation, default, shown):
    described = tool("docs", "described")

    def made():
        """Make it."""

    made.__doc__ += f"\n\nArgs:\n    {name}: How long it takes (2.5 s, say). More of it.\n"
    parameter = inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )
    made.__signature__ = inspect.Signature([parameter])
    cells = f"| `{name}` | {shown} | How long it takes (2.5 s, say). |"
    assert described.table(made) == f"|  | default |  |\n| --- | --- | --- |\n{cells}"


def test_the_reference_has_every_public_name():
    from diloco_core import __all__ as names

    reference = tool("docs", "reference")
    pages = {
        module: text
        for package in (TOP / "packages").glob("*-*")
        for module, text in reference.pages(package / "src").items()
    }
    assert [name for name in names if f"::: diloco_core.{name}\n" not in pages["diloco_core"]] == []
    wanted = {
        "diloco_core.testing",
        "diloco_core.replica_entrypoint",
        "diloco_protocol.runner",
        "diloco_eks",
    }
    assert wanted <= set(pages)
    assert not [module for module in pages if "._" in module or ".__" in module]


def test_a_name_that_the_site_lacks(tmp_path):
    reference = tool("docs", "reference")
    module = tmp_path / "package/src/tiny"
    module.mkdir(parents=True)
    (module / "__init__.py").write_text('__all__ = ["a", "b"]\n')
    page = tmp_path / "site/reference/tiny"
    page.mkdir(parents=True)
    (page / "index.html").write_text('<h2 id="tiny.a">a</h2>')
    found = reference.missing_names(tmp_path / "site", [tmp_path / "package"])
    assert found == ["reference/tiny lacks b"]


def test_what_replaces_an_inner_state_may_be_gone_before_it_is_read(tmp_path, monkeypatch):
    """The watcher of the chaos runs polls, so it reads some names of a busy replica in vain."""
    history = tool("chaos", "history")
    store = tmp_path / "store"
    told = history.History(tmp_path / "copies", 1)
    watcher = history.FolderWatcher(store, told)
    folder = store / "inner" / "00001"
    folder.mkdir(parents=True)

    def saved(sync):
        return folder / f"0001.{sync:08}.safetensors"

    saved(23).write_bytes(b"a")
    watcher._look()
    saved(23).unlink()
    saved(24).write_bytes(b"b")
    monkeypatch.setattr(history, "read_whole", lambda path: None)
    watcher._look()
    assert told.violations == []
    monkeypatch.undo()
    watcher._look()
    saved(24).unlink()
    watcher._look()
    (violation,) = told.violations
    assert "0001.00000024.safetensors was deleted, but it is the newest inner state" in violation


@pytest.mark.slow
def test_the_table_of_simulated_choices_is_made_and_finds_its_place():
    choices = tool("docs", "choices")
    demo = choices.Settings(replicas=2, steps=2, sync_every=1, seed=0, batch=1)
    rows = choices.table(demo, choices=(1, 2))
    assert [row["syncs"] for row in rows] == [2, 1]
    page = "before\n<!-- simulate -->\nold\n<!-- end -->\nafter\n"
    made = choices.written(page, rows)
    assert made == page.replace("old", str(rows))
    assert choices.written(made, rows) == made


def test_the_page_has_the_choices_and_costs_of_the_tool():
    """The losses are what training has led to; it takes minutes."""
    from diloco_core import plan_exchange

    choices = tool("docs", "choices")
    page = choices.PAGE.read_text(encoding="utf-8")
    lines = page.partition("<!-- simulate -->\n")[2].partition("<!-- end -->")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert [row[0] for row in cells] == [f"sync_every={h}" for h in choices.CHOICES]
    plans, steps, replicas = choices.PLANNED, choices.DEMO.steps, choices.DEMO.replicas
    plan = plan_exchange(plans["params"], replicas, plans["bandwidth"], fixed=True)
    for h, row in zip(choices.CHOICES, cells, strict=True):
        syncs = steps // h
        seconds = steps * plans["step_seconds"] + syncs * plan.seconds
        cost = syncs * plan.cost + replicas * seconds / 3600 * plans["hourly_price"]
        planned = [f"{syncs * plan.bytes_sent / 1e9:.4g}", f"{seconds / 3600:.3g}", f"{cost:.3g}"]
        assert row[2:] == [str(syncs), *planned]
