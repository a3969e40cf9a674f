"""Every code block in packages/*/docs and every unnamed one in the READMEs runs; all names exist.

Python blocks of a page run one after the other in one namespace, in a folder of their own. One that
begins with ``# name.py`` is a file of that name instead. Lines of sh blocks are run if they begin
with ``python``. A text block after either is what it prints, with ``...`` for what differs from run
to run. A block of no language is a drawing.
"""

import contextlib
import doctest
import importlib
import io
import logging
import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
import tomllib
import types
from pathlib import Path

import pytest
from integration_lab import PATIENCE

TOP = Path(__file__).parents[1]
PAGES = sorted(TOP.glob("packages/*/docs/**/*.md"))
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
NOT_RUN = ("hatch run ", "pip install ", "export ", "kubectl ", "aws ", "git ", "torchrun ")
NOT_RUN += ("REPLICA_RANK=", "wait")  # a test of their own runs these together
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
WIDTH = 86  # columns that a code block of the site shows in a window of 1280 pixels
# What the unnamed blocks of a README take for granted, and what in them is replaced by what is
# there.
PRELUDES = {
    "diloco-core": """
import torch, types
torch.manual_seed(0)
class Model(torch.nn.Linear):
    def forward(self, x):
        return types.SimpleNamespace(loss=super().forward(x).square().mean())
model = Model(4, 1)
inner_optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def batches(rank):
    for _ in range(20):
        yield torch.randn(8, 4)
""",
    "diloco-protocol": """
import pathlib, sys
pathlib.Path("my_package").mkdir()
pathlib.Path("my_package/trainer.py").write_text("def train(steps):\\n    return steps\\n")
""",
}
REPLACED = {
    "diloco-core": {
        ", rank=0, world_size=4": ", rank=0, world_size=1",
        "sync_every=500": "sync_every=5",
    },
    "diloco-protocol": {' 4, "my_package': ' 2, "my_package'},
}


class Page:
    """What is written in one page, run in one folder."""

    def __init__(self, folder, replaced=()):
        self.folder = folder
        self.replaced = {"/tmp/": f"{folder}/", "diloco-runs/": f"{folder}/", **dict(replaced)}
        self.names = {"__name__": "page"}
        self.printed = ""

    def run(self, language, code, where):
        """Run one block, or compare it with what the one before has printed."""
        for old, new in self.replaced.items():
            code = code.replace(old, new)
        if language == "python" and (name := re.match(r"# ([\w.-]+)\n", code)):
            (self.folder / name[1]).write_text(code, encoding="utf-8")
        elif language == "python":
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                exec(compile(code, where, "exec"), self.names)
            self.printed = out.getvalue()
        elif language == "sh":
            self.printed = "".join(map(self.line, code.replace("\\\n", "").splitlines()))
        elif language == "text":
            assert doctest.OutputChecker().check_output(code, self.printed, FLAGS), (
                f"{where} says\n{code}and the code before it prints\n{self.printed}"
            )
            self.printed = ""
        elif language == "toml":
            assert tomllib.loads(code)
        else:
            assert not language, f"{where} is {language}: nobody knows how to try that"

    def line(self, line):
        """What a line for a shell prints."""
        if not line.startswith("python "):
            assert line.startswith(NOT_RUN), f"nobody knows whether this runs: {line}"
            return ""
        words = shlex.split(line)[1:]
        if words[:1] == ["-m"] and words[1].startswith("diloco_core."):
            return in_this_process(words[1], words[2:])  # which has imported torch already
        done = subprocess.run(
            [sys.executable, *words],
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(self.folder), *sys.path])},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


def in_this_process(module, arguments):
    """What ``python -m module`` prints."""
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out):
        patch.setattr(sys, "argv", [module, *arguments])
        patch.delitem(sys.modules, module, raising=False)
        with pytest.raises(SystemExit) as end:
            runpy.run_module(module, run_name="__main__", alter_sys=False)
    assert not end.value.code
    return out.getvalue()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where a page's code stands, finds its files, and keeps what it makes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    modules, variables = set(sys.modules), dict(os.environ)
    yield tmp_path
    os.environ.clear()
    os.environ.update(variables)
    for name in set(sys.modules) - modules:  # files of a page
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]
    logging.getLogger("diloco_core").setLevel(logging.NOTSET)


def name_of(path):
    return path.relative_to(TOP / "packages").as_posix()


def blocks(path):
    """Language, text and line of every block of a page."""
    text = path.read_text(encoding="utf-8")
    for fence in FENCE.finditer(text):
        indent, language, code = fence.groups()
        where = f"{name_of(path)}:{text[: fence.start()].count(chr(10)) + 1}"
        yield language, re.sub(rf"^{indent}", "", code, flags=re.MULTILINE), where


@pytest.fixture
def no_lost_errors(monkeypatch):
    """What a replica in a thread raises is raised: pages show only what is printed."""
    testing = importlib.import_module("diloco_core.testing")
    run_replicas = testing.run_replicas

    def run(*arguments, **options):
        ends = run_replicas(*arguments, **options)
        for end in ends:
            if isinstance(end, BaseException):
                raise end
        return ends

    monkeypatch.setattr(testing, "run_replicas", run)


# It trains 20 replicas, for ten seconds; the simulation has tests of its own.
LONG = {TOP / "packages/diloco-core/docs/choose.md"}


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=[pytest.mark.slow] * (path in LONG)) for path in PAGES],
    ids=name_of,
)
def test_the_code_of_a_page(path, folder, request):
    page, found = Page(folder), list(blocks(path))
    if any("run_replicas" in code for _, code, _ in found):
        request.getfixturevalue("no_lost_errors")
    for block in found:
        page.run(*block)
    for file in folder.glob("*.py"):
        uses = [code for _, code, _ in found if not code.startswith(f"# {file.name}\n")]
        assert any(file.stem in code for code in uses), f"nothing runs {file.name}"


@pytest.mark.slow
@pytest.mark.processes
def test_two_replicas_of_two_processes_run_as_the_page_shows_them(folder):
    page = [code for _, code, _ in blocks(TOP / "packages/diloco-core/docs/processes.md")]
    (script,) = (code for code in page if code.startswith("# my_script.py"))
    (commands,) = (code for code in page if "--standalone" in code)
    (folder / "my_script.py").write_text(script, encoding="utf-8")
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    shell = subprocess.Popen(
        ["bash", "-c", commands],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        _, log = shell.communicate(timeout=PATIENCE)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(shell.pid, signal.SIGTERM)
    for rank in (0, 1):
        assert log.count(f"rank {rank}: done, after outer step 5 and inner step 100") == 1, log


@pytest.mark.parametrize("package", PRELUDES)
def test_the_unnamed_code_of_a_readme(package, folder):
    """The named files of READMEs are run by the tests of their packages."""
    page = Page(folder, REPLACED[package])
    exec(PRELUDES[package], page.names)
    count = 0
    for language, code, where in blocks(TOP / "packages" / package / "README.md"):
        if language == "python":
            for old in [text for text in REPLACED[package] if text in code]:
                assert old in code
            code = re.sub(r'"s3://bucket/[\w-]+"', repr(f"{folder}/run-{count}"), code)
            page.run("python", code, where)
            count += 1
    assert count


def test_no_readme_has_unnamed_code_that_nobody_runs():
    for path in TOP.glob("packages/*/README.md"):
        unnamed = [
            where
            for language, code, where in blocks(path)
            if language == "python" and not re.match(r"# [\w.-]+\n", code)
        ]
        # The one of diloco-eks is a piece of a manifest.
        assert not unnamed or path.parent.name in {*PRELUDES, "diloco-eks"}


def test_code_blocks_are_no_wider_than_the_site_shows():
    readmes = [TOP / "README.md", TOP / "CONTRIBUTING.md", *TOP.glob("packages/*/README.md")]
    wide = [
        f"{path.relative_to(TOP)}: {line}"
        for path in [*readmes, *PAGES]
        for _, _, code in FENCE.findall(path.read_text(encoding="utf-8"))
        for line in code.splitlines()
        if len(line) > WIDTH
    ]
    assert wide == []


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_the_files_that_a_page_names_are_there(path):
    text = FENCE.sub("", path.read_text(encoding="utf-8"))
    package = next(folder.parent for folder in path.parents if folder.name == "docs")
    (source,) = (package / "src").iterdir()
    roots = [TOP, package, source, path.parent]
    missing = [
        name
        for name in re.findall(r"`([\w./-]+(?:\.py|\.md|\.toml|/))`", text)
        if not any((root / name).exists() for root in roots)
    ]
    assert missing == []


@pytest.mark.parametrize("path", [*PAGES, *TOP.glob("*.md"), *TOP.glob("packages/*/*.md")], ids=str)
def test_every_link_leads_somewhere(path):
    text = FENCE.sub("", path.read_text(encoding="utf-8"))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("https://"):
            continue
        file, _, anchor = target.partition("#")
        found = path.parent / file if file else path
        assert found.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", found.read_text(encoding="utf-8"), re.MULTILINE)
            slugs = {
                re.sub(r"[^\w -]", "", heading.replace("`", "")).strip().lower().replace(" ", "-")
                for heading in headings
            }
            assert anchor in slugs, target


def test_the_pages_of_the_site_are_all_pages():
    text = (TOP / "tools/docs/site.toml").read_text(encoding="utf-8")
    assert {path.relative_to(TOP).as_posix() for path in PAGES} <= set(
        re.findall(r'"([^"]+\.md)"', text)
    )


def test_a_data_loader_comes_back_as_the_page_shows_it(tmp_path):
    """A replica that was stopped learns each batch once, in the order of one that was not."""
    page = (TOP / "packages/diloco-core/docs/train.md").read_text()
    (code,) = (text for _, _, text in FENCE.findall(page) if "def shuffled_batches" in text)
    core = importlib.import_module("diloco_core")
    torch = importlib.import_module("torch")
    names = {"torch": torch, "DiLoCo": core.DiLoCo, "connect": core.connect}
    exec(code, names)
    x = torch.arange(80.0).reshape(80, 1)
    dataset = torch.utils.data.TensorDataset(x, x)
    learned, given = [], names["shuffled_batches"]

    def noted(*arguments):
        for batch in given(*arguments):
            if len(learned) == stop:
                raise KeyboardInterrupt
            learned.append(batch[0].flatten().tolist())
            yield batch

    names["shuffled_batches"] = noted
    names["torch"] = types.SimpleNamespace(
        **vars(torch) | {"nn": types.SimpleNamespace(Linear=lambda *_: torch.nn.Linear(1, 1))}
    )
    train, stop = names["train_with_loader"], -1
    train(core.connect(tmp_path / "whole", rank=0, world_size=1), dataset, 65)
    whole, learned[:] = list(learned), []
    stop = 53
    with pytest.raises(KeyboardInterrupt):
        train(core.connect(tmp_path / "stopped", rank=0, world_size=1), dataset, 65)
    del learned[40:]  # 13 steps were lost with the process
    stop = -1
    train(core.connect(tmp_path / "stopped", rank=0, world_size=1), dataset, 65)
    assert learned == whole
