"""A release's build tools are fixed by version and digest, and nothing else runs in the build."""

import re
from pathlib import Path

TOP = Path(__file__).parents[1]
LOCKED = "tools/release/requirements.txt"


def commands(job):
    """The shell commands of a job in the workflow of releases."""
    text = (TOP / ".github/workflows/release.yml").read_text(encoding="utf-8")
    (body,) = re.findall(rf"(?ms)^  {job}:\n(.*?)(?=^  \w+:|\Z)", text)
    return re.findall(r"(?m)^ +- run: (.*)$", body)


def test_a_release_is_built_by_fixed_tools_alone():
    install, build = commands("build")
    assert install == f"python -m pip install --no-deps --require-hashes -r {LOCKED}"
    assert build.startswith("python tools/release/check.py ")
    assert "--no-install" in build.split()
    assert commands("publish") == []


def test_nothing_is_installed_unfixed_for_a_release():
    installs = [line for line in commands("check") + commands("build") if "install" in line]
    assert installs
    assert all(f"--require-hashes -r {LOCKED}" in line for line in installs if "pip" in line)
    assert "hatch" not in "".join(commands("check") + commands("build"))


def test_every_tool_is_fixed_by_version_and_digest():
    text = (TOP / LOCKED).read_text(encoding="utf-8").replace("\\\n", " ")
    tools = text.splitlines()
    assert all(re.match(r"[a-z0-9-]+==\S+ .*--hash=sha256:[0-9a-f]{64}", tool) for tool in tools)
    names = {tool.partition("==")[0] for tool in tools}
    assert {"build", "hatchling", "twine", "check-wheel-contents"} <= names
    assert "://" not in text


def test_no_build_backend_is_fetched():
    text = (TOP / "tools/release/check.py").read_text(encoding="utf-8")
    assert '"build", "--no-isolation"' in text
    assert '"--no-build-isolation"' in text
