"""Options about a replica's pod: mounts, code, pull secrets."""

from __future__ import annotations

import re

from diloco_protocol import InvalidRequestError
from diloco_protocol.backend import check_names, check_texts, shown

from . import _names as names

#: The path where ``code`` is mounted.
CODE_PATH = "/diloco/code"
MOUNT = re.compile(r"(?P<kind>pvc|configmap|secret)/(?P<name>[^/:]+)(?P<ro>:ro)?")
"""The form of a mounted object: its kind, its name, and whether it is read-only."""
_PATH = re.compile(r"(/(?!\.\.?(/|$))[^/:]+)+")


def check_mounts(what: str, value: object) -> dict[str, str]:
    """Check for a table of mounts.

    It maps a path to ``pvc/NAME``, ``configmap/NAME`` or ``secret/NAME``, with ``:ro`` behind it
    for read-only.

    Raises:
        InvalidRequestError: The value is not such a table.
    """
    mounts = check_texts(what, value)
    for path, source in mounts.items():
        match = MOUNT.fullmatch(source)
        if match is None:
            called = f"{what}[{path!r}]"
            raise InvalidRequestError(
                f"{called} must be 'pvc/NAME', 'configmap/NAME' or 'secret/NAME', with ':ro' "
                f"behind it for read-only, not {shown(source, called)}; FSx and EFS are mounted by "
                "a claim of their driver"
            )
        names.check_object_name(f"{what}[{path!r}]", match["name"])
        if not _PATH.fullmatch(path):
            raise InvalidRequestError(
                f"{what} has the path {path!r}: an absolute path such as '/data' is needed, "
                "without ':', '..' or a '/' at its end"
            )
    return mounts


def check_pull_secrets(what: str, value: object) -> tuple[str, ...]:
    """Check for names of Secrets with the credentials of a registry.

    Raises:
        InvalidRequestError: The values are not such names.
    """
    return tuple(names.check_object_name(what, name) for name in check_names(what, value))
