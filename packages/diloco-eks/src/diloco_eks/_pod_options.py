"""Options about a replica's pod, as the executor takes them: mounts, code, pull secrets, topology."""

from __future__ import annotations

import re

from diloco_protocol import InvalidRequestError
from diloco_protocol.backend import check_names, check_texts, shown

from . import _names as names

#: Where ``code`` is mounted.
CODE_PATH = "/diloco/code"
MOUNT = re.compile(r"(?P<kind>pvc|configmap|secret)/(?P<name>[^/:]+)(?P<ro>:ro)?")
"""What is mounted, by the kind of object that it is."""
TOPOLOGIES = ("one_zone", "spread_zones", "spread_nodes")
_PATH = re.compile(r"(/(?!\.\.?(/|$))[^/:]+)+")


def check_mounts(what: str, value: object) -> dict[str, str]:
    """Path → ``pvc/NAME``, ``configmap/NAME`` or ``secret/NAME``, with ``:ro`` behind it for read-only.

    Raises:
        InvalidRequestError: It is not such a table.
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


def check_code(what: str, value: object) -> str:
    """The name of a ConfigMap.

    Raises:
        InvalidRequestError: It is not such a name.
    """
    return names.check_object_name(f"{what}, the name of a ConfigMap,", value)


def check_pull_secrets(what: str, value: object) -> tuple[str, ...]:
    """Names of Secrets with the credentials of a registry.

    Raises:
        InvalidRequestError: They are not such names.
    """
    if value is None:
        return ()
    return tuple(names.check_object_name(what, name) for name in check_names(what, value))


def check_topology(what: str, value: object) -> str:
    """One of :data:`TOPOLOGIES`.

    Raises:
        InvalidRequestError: It is not.
    """
    if value not in TOPOLOGIES:
        raise InvalidRequestError(
            f"{what} must be one of {', '.join(TOPOLOGIES)}, not {shown(value)}"
        )
    return str(value)
