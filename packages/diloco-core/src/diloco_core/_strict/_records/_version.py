"""The version of the records of strict runs: records of another one are refused by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..._errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Mapping

VERSION = 6
"""Version of the records of strict runs. In version 1, commit records did not name the run, and it could not be resumed.

Version 2 did not name what was given up when the run was resumed. In version 3, claims did not say how often a process gives a
sign of life. In version 4, the keys of inner state did not name the life that had saved it. In version 5,
contributions did not say with which learning rate the outer step is to be taken.
"""


def check_version(record: Mapping[str, Any], kind: str, origin: str) -> None:
    """Refuse a record that another version of diloco-core has written.

    Args:
        record: The fields of the record.
        kind: The kind of the record.
        origin: What it is called in errors.

    Raises:
        FormatError: The record has another version, or none.
    """
    version = record.get("version")
    if version != VERSION:
        named = "an earlier version" if version is None else f"version {version!r}"
        raise FormatError(
            f"{origin} is the {kind} of a strict run of {named}, and this version of diloco-core reads version {VERSION} only. "
            "Use the version that the run was begun with, or begin a new run on another prefix."
        )
