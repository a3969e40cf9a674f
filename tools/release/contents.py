"""What has to be in an sdist and a wheel, and what must not be."""

from __future__ import annotations

import re
import tarfile
import zipfile
from dataclasses import dataclass
from email import message_from_string
from email.message import Message
from functools import cached_property
from pathlib import Path

VERSION = re.compile(r'^__version__ = "([^"]+)"$', re.MULTILINE)
WANTED = ("Author", "Keywords", "License-Expression", "License-File", "Requires-Python", "Summary")


@dataclass(frozen=True)
class Release:
    """A package as it would be released: its folder in the repository, its sdist and its wheel."""

    package: str
    source: Path
    sdist: Path
    wheel: Path

    @property
    def module(self) -> str:
        """The name to import."""
        return self.package.replace("-", "_")

    @cached_property
    def version(self) -> str:
        """The version that the sources say."""
        about = self.source / "src" / self.module / "__about__.py"
        found = VERSION.search(about.read_text(encoding="utf-8"))
        return found[1] if found else ""

    @cached_property
    def in_sdist(self) -> dict[str, bytes]:
        """The files of the sdist, by their path below its one folder."""
        with tarfile.open(self.sdist) as archive:
            files = {
                member.name: archive.extractfile(member) for member in archive if member.isfile()
            }
            return {name.partition("/")[2]: file.read() for name, file in files.items() if file}

    @cached_property
    def in_wheel(self) -> dict[str, bytes]:
        """The files of the wheel, by their path; its metadata below ``dist-info/``."""
        with zipfile.ZipFile(self.wheel) as archive:
            prefix = f"{self.module}-{self.version}.dist-info/"
            return {
                name.replace(prefix, "dist-info/"): archive.read(name)
                for name in archive.namelist()
            }

    @cached_property
    def metadata(self) -> Message:
        """The metadata of the wheel."""
        return message_from_string(self.in_wheel.get("dist-info/METADATA", b"").decode())


def complaints(release: Release, tag: str | None) -> list[str]:
    """Say what is missing, wrong or too much, each in a sentence; nothing if all is there."""
    return [
        *_of_version(release, tag),
        *_of_metadata(release),
        *_of_files(release),
    ]


def _of_version(release: Release, tag: str | None) -> list[str]:
    found = []
    if release.metadata["Version"] != release.version:
        found.append(
            f"the wheel says version {release.metadata['Version']}, __about__.py {release.version}"
        )
    wanted = f"{release.package}-v{release.version}"
    if tag is not None and tag != wanted:
        found.append(f"the tag is {tag}, and for what the sources say it would be {wanted}")
    changelog = release.in_sdist.get("CHANGELOG.md", b"").decode()
    heading = re.search(rf"^## {re.escape(release.version)}(?![\w.]).*", changelog, re.MULTILINE)
    if not heading:
        found.append(f"CHANGELOG.md has no heading for {release.version}")
    elif tag is not None and "unreleased" in heading[0]:
        found.append(f"CHANGELOG.md still says {heading[0]!r}: write the date of the release there")
    return found


def _of_metadata(release: Release) -> list[str]:
    return [f"the metadata lack {name}" for name in WANTED if not release.metadata.get(name)]


def _of_files(release: Release) -> list[str]:
    in_source = {
        path.relative_to(release.source / "src").as_posix(): path
        for path in (release.source / "src" / release.module).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    expected_in_sdist = {"LICENSE", "README.md", "CHANGELOG.md", "pyproject.toml"}
    expected_in_sdist |= {"DESIGN.md"} if (release.source / "DESIGN.md").exists() else set()
    expected_in_wheel = {*in_source, f"{release.module}/py.typed", "dist-info/licenses/LICENSE"}
    found = [
        *(f"the sdist lacks {name}" for name in sorted(expected_in_sdist - {*release.in_sdist})),
        *(f"the wheel lacks {name}" for name in sorted(expected_in_wheel - {*release.in_wheel})),
    ]
    found += [
        f"the sdist lacks {folder}/"
        for folder in ("docs", "examples", "tests")
        if (release.source / folder).is_dir()
        and not any(name.startswith(f"{folder}/") for name in release.in_sdist)
    ]
    strange = {
        name
        for name in release.in_wheel
        if not name.startswith((f"{release.module}/", "dist-info/"))
    }
    found += [f"the wheel has {name}, which is not the package's" for name in sorted(strange)]
    license_text = (release.source.parents[1] / "LICENSE").read_bytes()
    copies = {
        "sdist": release.in_sdist.get("LICENSE"),
        "wheel": release.in_wheel.get("dist-info/licenses/LICENSE"),
    }
    found += [
        f"the LICENSE in the {where} is not that of the repository"
        for where, text in copies.items()
        if text is not None and text != license_text
    ]
    return found
