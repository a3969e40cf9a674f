"""Volumes as folders.

A process has no mounts of its own, so the paths in its command and environment are rewritten.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..._server._files import replace
from .._control import _content
from .._objects._store import Store

Json = dict[str, Any]


def make(store: Store, pod: Json, folder: Path) -> dict[str, Path]:
    """Return the folder of each volume by its name, with ConfigMaps and Secrets as files in it.

    Raises:
        MountError: a ConfigMap, a Secret or a key of one is missing, or a file cannot be where it
            should be.
    """
    folders: dict[str, Path] = {}
    for name, files in _content.files(store, pod).items():
        folders[name] = folder / "volumes" / name
        folders[name].mkdir(parents=True, exist_ok=True)
        for path, data in files.items():
            target = folders[name] / path
            try:
                target.parent.mkdir(parents=True, exist_ok=True)
                replace(target, data)
            except (OSError, ValueError) as wrong:
                why = f'MountVolume.SetUp failed for volume "{name}" : {path}: {wrong}'
                raise _content.MountError(why) from None
    return folders


def paths(
    pod: Json, container: Json, folders: Mapping[str, Path], termination: Path
) -> dict[str, str]:
    """Return the real path of each path of the container.

    These are the paths of its mounts and of the file of its termination message.
    """
    local = {container.get("terminationMessagePath", "/dev/termination-log"): str(termination)}
    volumes = {volume["name"]: volume for volume in pod["spec"].get("volumes") or []}
    for mount in container.get("volumeMounts") or []:
        host = (volumes[mount["name"]].get("hostPath") or {}).get("path")
        target = host or str(folders[mount["name"]])
        if mount.get("subPath"):
            target += "/" + mount["subPath"]
        if mount["mountPath"] != "/dev/shm":
            local[mount["mountPath"].rstrip("/")] = target
    return local


def rewrite(text: str, known: Mapping[str, str]) -> str:
    """Return the text with every whole path of ``known`` replaced, the longest first."""
    if not known:
        return text
    ordered = sorted(known, key=len, reverse=True)
    either = "|".join(re.escape(path) for path in ordered)
    return re.sub(rf"(?<![\w.\-/])({either})(?![\w.\-])", lambda match: known[match[1]], text)
