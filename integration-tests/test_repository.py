"""What every package has in common, and that every list of packages names all of them."""

import configparser
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

TOP = Path(__file__).parents[1]
PACKAGES = {
    path.parent.name: tomllib.loads(path.read_text(encoding="utf-8"))
    for path in sorted(TOP.glob("packages/*/pyproject.toml"))
}
MODULES = {name.replace("-", "_") for name in PACKAGES}
BACKENDS = {
    name
    for name, metadata in PACKAGES.items()
    if "diloco.executors" in metadata["project"].get("entry-points", {})
}
PYTHONS = ["3.11", "3.12", "3.13"]


def toml(name):
    return tomllib.loads((TOP / name).read_text(encoding="utf-8"))


def test_there_is_nothing_but_packages_in_the_folder_of_packages():
    assert len(PACKAGES) >= 6
    folders = {path.name for path in TOP.glob("packages/*") if any(path.rglob("*.py"))}
    assert folders == set(PACKAGES)


@pytest.mark.parametrize("package", PACKAGES)
def test_the_metadata_of_a_package(package):
    project = PACKAGES[package]["project"]
    assert project["name"] == package
    assert project["license"] == "Apache-2.0"
    assert project["license-files"] == ["LICENSE"]
    assert project["authors"] == [{"name": "The diloco authors"}]
    assert "diloco" in project["keywords"]
    assert project["keywords"] == sorted(project["keywords"])
    assert project["requires-python"] == f">={PYTHONS[0]}"
    versions = {f"Programming Language :: Python :: {version}" for version in PYTHONS}
    assert versions | {"Typing :: Typed"} <= set(project["classifiers"])
    assert project["classifiers"] == sorted(project["classifiers"])
    siblings = {re.split(r"[^a-z-]", text)[0] for text in project["dependencies"]} & set(PACKAGES)
    assert siblings <= {"diloco-protocol"}


@pytest.mark.parametrize("package", PACKAGES)
def test_the_files_of_a_package(package):
    folder = TOP / "packages" / package
    module = folder / "src" / package.replace("-", "_")
    assert (folder / "LICENSE").read_bytes() == (TOP / "LICENSE").read_bytes()
    for path in (folder / "README.md", folder / "CHANGELOG.md", module / "py.typed"):
        assert path.is_file(), path
    targets = PACKAGES[package]["tool"]["hatch"]["build"]["targets"]
    assert targets["wheel"]["packages"] == [f"src/{module.name}"]
    wanted = {"src", "tests", "examples", "docs", "CHANGELOG.md", "DESIGN.md"}
    assert set(targets["sdist"]["include"]) == {f"/{name}" for name in wanted}


def test_hatch_knows_every_package():
    environments = toml("hatch.toml")["envs"]
    assert environments["default"]["workspace"]["members"] == ["packages/diloco-*"]
    wheels = environments["default"]["scripts"]["wheels"][0]
    assert wheels.endswith(" ./packages/diloco-*/")
    path = environments["lint"]["env-vars"]["PYTHONPATH"].split(":")
    assert sorted(path) == [f"packages/{package}/src" for package in PACKAGES]
    alone = set(environments["unit"]["matrix"][0]["package"])
    assert {f"diloco-{name}" for name in alone} == BACKENDS


def test_the_linters_know_every_package():
    contracts = toml("tools/importlinter.toml")["tool"]["importlinter"]
    assert set(contracts["root_packages"]) == MODULES
    by_name = {contract["name"]: contract for contract in contracts["contracts"]}
    alone = by_name["Packages depend only on the protocol"]
    assert set(alone["modules"]) == MODULES - {"diloco_protocol"}
    below = by_name["The protocol depends on no sibling and no third party"]
    assert MODULES - {"diloco_protocol"} <= set(below["forbidden_modules"])
    without_torch = by_name["Backends need no torch"]
    assert set(without_torch["source_modules"]) == MODULES - {"diloco_protocol", "diloco_core"}
    types = configparser.ConfigParser()
    types.read(TOP / ".mypy.ini", encoding="utf-8")
    assert types["mypy"]["files"] == "packages/*/src"
    style = toml(".ruff.toml")
    assert style["src"] == ["packages/*/src"]
    assert style["lint"]["isort"]["known-first-party"] == ["diloco_*"]


def test_the_readme_names_every_package():
    text = (TOP / "README.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| \[`([a-z-]+)`\]\(packages/\1\)", text, re.MULTILINE)) == set(
        PACKAGES
    )


def test_the_issue_form_names_every_package():
    text = (TOP / ".github/ISSUE_TEMPLATE/bug.yml").read_text(encoding="utf-8")
    named = re.findall(r"- (diloco-[a-z]+)$", text, re.MULTILINE)
    assert sorted(named) == sorted(PACKAGES)


def hatch_commands():
    """What can follow ``hatch run``."""
    return {
        script if name == "default" else f"{name}:{script}"
        for name, environment in toml("hatch.toml")["envs"].items()
        for script in environment.get("scripts", {})
    }


@pytest.mark.parametrize(
    "path",
    [
        "README.md",
        "CONTRIBUTING.md",
        ".pre-commit-config.yaml",
        ".github/pull_request_template.md",
        ".github/workflows/ci.yml",
        ".github/workflows/release.yml",
        *(f"packages/{package}/README.md" for package in PACKAGES),
    ],
)
def test_the_commands_that_are_named_are_there(path):
    text = (TOP / path).read_text(encoding="utf-8")
    named = set(re.findall(r"hatch run ([a-z][a-z0-9:-]*)", text))
    assert named <= hatch_commands()


def test_the_workflows_run_on_the_pythons_that_packages_name():
    text = (TOP / ".github/workflows/ci.yml").read_text(encoding="utf-8")
    tested = re.search(r"python: \[(.*)\]", text)[1]
    assert set(PYTHONS) <= set(re.findall(r'"([\d.]+)"', tested))


def test_actions_are_named_by_commit():
    for path in (TOP / ".github/workflows").glob("*.yml"):
        for name in re.findall(r"uses: (.*)", path.read_text(encoding="utf-8")):
            assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v[\d.]+", name), name


def test_paths_in_the_guide_for_contributors_are_there():
    text = (TOP / "CONTRIBUTING.md").read_text(encoding="utf-8")
    paths = set(re.findall(r"`((?:packages|tools|integration-tests|\.github)/[^`\s]*)`", text))
    assert len(paths) > 8
    assert [path for path in sorted(paths) if not any(TOP.glob(path.rstrip("/")))] == []
    table = re.findall(r"^\| ((?:`_[\w/]+\.py`(?:, )?)+) \|", text, re.MULTILINE)
    files = re.findall(r"`([\w/]+\.py)`", " ".join(table))
    assert len(files) == 8
    source = TOP / "packages/diloco-eks/src/diloco_eks"
    assert [name for name in files if not (source / name).exists()] == []


def test_its_example_of_a_message_is_the_real_one():
    from diloco_core import ConfigurationError, Elastic

    text = (TOP / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (message,) = re.findall(r"```text\n(min_replicas.*?)\n```", text, re.DOTALL)
    with pytest.raises(ConfigurationError) as error:
        Elastic(7).check(4, 1800.0)
    assert str(error.value).split() == message.split()  # the page breaks long lines


def test_its_example_of_running_tests_finds_some():
    text = (TOP / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (arguments,) = re.findall(r"```sh\nhatch run one (.*)\n```", text)
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", *arguments.split()]
    done = subprocess.run(command, cwd=TOP, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout  # 5 if none was found
    assert "::" in done.stdout


def test_its_example_of_a_wrong_executor_has_the_real_signature():
    """The names in it are made up; what they are given to is not."""
    text = (TOP / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (arguments,) = re.findall(r"@mutant\((.*)\)", text)
    test, *promises = (part.strip().strip('"') for part in arguments.split(","))
    assert f"`test_{test}`" in text
    source = (TOP / "packages/diloco-conformance/tests/wrong.py").read_text(encoding="utf-8")
    assert "def mutant(test, *promises" in source
    assert promises
    assert all(re.fullmatch("[A-Z][0-9]+", promise) for promise in promises)
