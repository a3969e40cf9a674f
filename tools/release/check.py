"""Would this package hold, released as it is? ``hatch run release:check PACKAGE``.

Builds the sdist, and the wheel out of the sdist; looks at the metadata and at what is in both;
installs the wheel alone in a fresh environment; and runs the package's examples there, from the
sdist. Nothing is uploaded.

What builds and looks is what ``requirements.txt`` beside this file names, by version and digest.
What the examples need is not fixed, so a release is built by a run with ``--no-install``, in which
nothing else is executed.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
from pathlib import Path

from contents import Release, complaints

TOP = Path(__file__).parents[2]
PACKAGES = sorted(path.parent.name for path in TOP.glob("packages/*/pyproject.toml"))
CONSTRAINTS = TOP / "tools" / "constraints.txt"


class CheckFailedError(Exception):
    """The package is not fit to be released; the message says why."""


def run(*command: str, cwd: Path = TOP) -> None:
    """Run a command and show what it prints."""
    say("$ " + " ".join(command))
    if subprocess.run(command, cwd=cwd, check=False).returncode:
        raise CheckFailedError(f"this command failed: {' '.join(command)}")


def say(line: str) -> None:
    """Print a line before anything that a command prints after it."""
    print(line, flush=True)


def build(package: str, folder: Path) -> Release:
    """The sdist of a package and the wheel that is made from it, both in ``folder``."""
    # Without isolation, or the newest build backend would be fetched and executed.
    run(
        sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder),
        f"packages/{package}",
    )  # fmt: skip
    (sdist,) = folder.glob("*.tar.gz")
    (wheel,) = folder.glob("*.whl")
    return Release(package, TOP / "packages" / package, sdist, wheel)


def install(release: Release, siblings: Path, folder: Path) -> str:
    """Install the wheel into a fresh environment in ``folder``; the path of its Python."""
    run(
        sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation",
        "-w", str(siblings), "packages/diloco-protocol",
    )  # fmt: skip
    venv.create(folder, with_pip=True)
    python = str(folder / "bin" / "python")
    run(
        python, "-m", "pip", "install", "-q", "--find-links", str(siblings),
        "-c", str(CONSTRAINTS), str(release.wheel),
    )  # fmt: skip
    run(python, "-m", "pip", "check")
    listed = subprocess.run(
        [python, "-m", "pip", "list", "--format", "freeze"],
        check=True, capture_output=True, text=True,
    ).stdout.split()  # fmt: skip
    ours = {line.partition("==")[0] for line in listed if line.startswith("diloco")}
    if extra := ours - {release.package, "diloco-protocol"}:
        raise CheckFailedError(f"{release.package} alone brought {', '.join(sorted(extra))}")
    return python


def run_examples(release: Release, python: str, folder: Path) -> int:
    """Run the examples as the sdist has them; how many files there were to run.

    A folder with tests is run by pytest. Of the others every file is run that can be run: one with
    a main guard.
    """
    with tarfile.open(release.sdist) as archive:
        archive.extractall(folder, filter="data")
    examples = next(folder.iterdir()) / "examples"
    if sorted(examples.glob("test_*.py")):
        run(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", ".", cwd=examples)
        return len(sorted(examples.glob("test_*.py")))
    programs = [
        path
        for path in sorted(examples.glob("*.py"))
        if '__name__ == "__main__"' in path.read_text()
    ]
    for program in programs:
        run(python, program.name, cwd=examples)
    if not programs:
        raise CheckFailedError(f"{release.package} has no example in examples/ that can be run")
    return len(programs)


def check(package: str, tag: str | None, keep: Path | None, *, install_too: bool = True) -> None:
    """Everything, for one package; what was checked is kept in the folder ``keep``."""
    with tempfile.TemporaryDirectory(prefix="release-") as name:
        folder = Path(name)
        release = build(package, folder / "dist")
        if found := complaints(release, tag):
            raise CheckFailedError("\n  ".join([f"{package} is not complete:", *found]))
        run(
            sys.executable,
            "-m",
            "twine",
            "check",
            "--strict",
            str(release.sdist),
            str(release.wheel),
        )
        run(sys.executable, "-m", "check_wheel_contents", str(release.wheel))
        count = 0
        if install_too:
            python = install(release, folder / "siblings", folder / "venv")
            count = run_examples(release, python, folder / "sdist")
        if keep is not None:
            keep.mkdir(parents=True, exist_ok=True)
            for path in (release.sdist, release.wheel):
                shutil.copy2(path, keep)
    say(f"{package} {release.version} can be released (examples run: {count})")


def main() -> int:
    """Check the packages that were named; the exit status."""
    parser = argparse.ArgumentParser(prog="hatch run release:check", description=__doc__)
    parser.add_argument("packages", nargs="+", metavar="PACKAGE", help=", ".join(PACKAGES))
    parser.add_argument(
        "--tag", help="the tag of the release, which has to name package and version"
    )
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="put sdist and wheel there")
    parser.add_argument(
        "--no-install", action="store_true", help="build and look only; run nothing of the package"
    )
    options = parser.parse_args()
    if unknown := sorted(set(options.packages) - set(PACKAGES)):
        parser.error(f"no package {', '.join(unknown)}; there are {', '.join(PACKAGES)}")
    try:
        for package in options.packages:
            check(package, options.tag, options.keep, install_too=not options.no_install)
    except CheckFailedError as error:
        say(f"\nNot fit for a release: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
