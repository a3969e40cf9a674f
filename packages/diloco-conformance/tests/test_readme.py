"""The README is true: its example runs, its table is complete, its message is the real one."""

import os
import pydoc
import re
import subprocess
import sys
from pathlib import Path

import pytest
from table import TABLES, shown
from wrong_all import MUTANTS

from diloco_conformance import Ability, Fault, Harness, Operation, Step
from diloco_protocol import BaseExecutor

PACKAGE = Path(__file__).parents[1]
README = (PACKAGE / "README.md").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.processes
def test_the_example_passes_and_says_what_it_skips(tmp_path):
    (block,) = re.findall(r"```python\n# test_my_backend.py\n(.*?)```", README, re.DOTALL)
    (tmp_path / "test_my_backend.py").write_text(block)
    path = [str(PACKAGE / "examples"), *(os.path.abspath(entry) for entry in sys.path if entry)]  # noqa: PTH100
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-rs",
            "-p",
            "no:cacheprovider",
            "-p",
            "diloco_conformance.plugin",
            "--diloco-seed",
            "7",
            "test_my_backend.py",
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    passed, skipped = map(int, re.search(r"(\d+) passed, (\d+) skipped", done.stdout).groups())
    assert passed > 60
    assert skipped > 0
    assert "the harness leaves out '" in done.stdout
    assert "not written yet" in done.stdout


def test_its_code_has_the_lines_that_it_says():
    (block,) = re.findall(r"class MyHarness.*?```", README, re.DOTALL)
    code = [line for line in block.splitlines() if line.strip() and not line.startswith("```")]
    assert len(code) <= 30


@pytest.mark.parametrize(("page", "name"), TABLES, ids=[name for _, name in TABLES])
def test_the_tables_are_those_of_the_code(page, name):
    assert shown(page, name) == TABLES[page, name], "run packages/diloco-conformance/tests/table.py"


def test_the_harness_is_described():
    for word in [*Operation, *Fault]:
        assert word in README
    for word in [*Step, *Ability]:
        assert word.upper() in README or word in README


def test_there_are_as_many_wrong_executors_as_it_says():
    said = int(re.search(r"has more than (\d+) executors", README)[1])
    assert said < len(MUTANTS) < said + 40


def test_the_page_of_the_harness_has_every_method_and_every_attribute():
    page = (PACKAGE / "docs" / "harness.md").read_text(encoding="utf-8")
    rows = "\n".join(line for line in page.splitlines() if line.startswith("|"))
    names = {name for name in vars(Harness) if not name.startswith("_")} | {"entrypoint"}
    assert not {name for name in names - {"time", "backoff"} if f"`{name}" not in rows}


def test_help_shows_every_word_with_its_meaning():
    for words in (Step, Operation, Fault, Ability):
        shown = pydoc.plain(pydoc.render_doc(words))
        for word in words:
            assert f"{word.name}: " in shown


def test_the_page_of_backends_has_every_hook():
    page = (PACKAGE / "docs" / "own-backend.md").read_text(encoding="utf-8")
    hooks = {line.split("|")[1].strip() for line in page.splitlines() if line.startswith("| `_")}
    assert BaseExecutor.__abstractmethods__ <= set(re.findall(r"`(\w+)`", " ".join(hooks)))
