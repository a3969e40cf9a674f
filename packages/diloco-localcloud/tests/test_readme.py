"""The README's example and fixtures are run as they stand; it names every folder of the source."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from standin_lab import PATIENCE

README = Path(__file__).parents[1] / "README.md"
SOURCE = README.parent / "src" / "diloco_localcloud"
FIXTURES = """
pytest_plugins = ["diloco_localcloud.testing"]

def test_scripted(kubernetes_stand_in):
    assert kubernetes_stand_in.url.endswith(kubernetes_stand_in.url.rpartition(":")[2])
    assert kubernetes_stand_in.world.pods() == []

def test_sagemaker(sagemaker_stand_in, sagemaker_processes):
    assert sagemaker_stand_in.world.jobs() == sagemaker_processes.world.jobs() == []

def test_processes(kubernetes_processes):
    assert kubernetes_processes.pods.of("none") == []

def test_modal(modal_stand_in, modal_processes):
    assert modal_stand_in.world.calls() == modal_processes.world.calls() == []
"""


def run(folder, *command):
    path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path if entry)  # noqa: PTH100
    env = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        capture_output=True,
        text=True,
        env=env,
        timeout=PATIENCE,
    )


@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "printed"),
    [
        ("scripted.py", "0 1 ['FailureTarget', 'Failed']\n"),
        ("one_job.py", "AlgorithmError: no more data, exit code: 3\n"),
    ],
)
def test_the_example(tmp_path, name, printed):
    text = README.read_text(encoding="utf-8")
    examples = dict(re.findall(r"```python\n# (\S+)\n(.*?)```", text, re.DOTALL))
    assert set(examples) == {"scripted.py", "one_job.py"}
    (tmp_path / name).write_text(examples[name])
    done = run(tmp_path, name)
    assert done.stderr == ""
    assert done.stdout == printed
    assert f"prints `{done.stdout.strip()}`" in text


@pytest.mark.processes
def test_the_fixtures(tmp_path):
    (tmp_path / "test_fixtures.py").write_text(FIXTURES)
    done = run(tmp_path, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_fixtures.py")
    assert done.returncode == 0, done.stdout
    assert "4 passed" in done.stdout


def test_it_names_every_folder_and_no_other():
    text = README.read_text(encoding="utf-8").partition("## Inside")[2]
    below = SOURCE / "_kubernetes"
    folders = {path.parent for path in SOURCE.rglob("__init__.py")} - {SOURCE}
    named = {
        str(folder.relative_to(below if below in folder.parents else SOURCE)) + "/"
        for folder in folders
    }
    assert named == set(re.findall(r"`(_[\w/]+/)`", text))
    files = re.findall(r"`(_\w+\.py)`", text)
    assert files
    assert all(list(SOURCE.rglob(name)) for name in files)
