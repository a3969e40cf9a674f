"""The surroundings of a replica's process: environment, import path, working directory.

The policy, from weak to strong:

1. the launcher's environment, or the chosen part of it (``inherit_env``), less the variables that
   describe the launcher itself: those of a replica, and those of torchrun unless they are named;
2. ``env`` of the constructor, then ``env`` of the launch;
3. ``CUDA_VISIBLE_DEVICES``, if GPUs were asked for;
4. ``PYTHONPATH``: the import path first, then what 1 and 2 made of that variable;
5. what the spec says (rank, world size, rendezvous, run, attempt), set by the runner.

Nothing else is set: no number of threads, no device, and no locale but the LC_CTYPE that Python
itself sets where there is none.
"""

from __future__ import annotations

import fnmatch
import os
import shutil
import site
import sys
import sysconfig
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import diloco_protocol
from diloco_protocol import InvalidRequestError
from diloco_protocol.backend import is_reserved, shown

from ._processes import MARKER

#: With these options, an interpreter looks for modules on its import path. It does not look in the
#: folder in which it runs, nor in the user's site-packages where the launcher does not.
SAFE_PATH = ("-P", "-s") if sys.flags.no_user_site else ("-P",)

# The variables that torchrun sets for the processes that it starts.
_OF_TORCHRUN = frozenset({
    "GROUP_RANK", "GROUP_WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR",
    "MASTER_PORT", "RANK", "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE", "WORLD_SIZE",
})  # fmt: skip


def inherited(environ: Mapping[str, str], inherit_env: bool | Iterable[str]) -> dict[str, str]:
    """Return the part of ``environ`` that replicas get.

    Args:
        environ: The launcher's environment.
        inherit_env: True for all, False for nothing, or names and patterns such as ``"AWS_*"``.
            Variables of torchrun have to be named, and so have Python's where the launcher itself
            ignores them.
    """
    patterns = ["*"] * inherit_env if isinstance(inherit_env, bool) else list(inherit_env)
    return {
        name: value
        for name, value in environ.items()
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
        and not is_reserved(name)
        and name != MARKER
        and (name in patterns or not _is_of_the_launcher(name))
    }


def _is_of_the_launcher(name: str) -> bool:
    """Say whether a variable is wrong, or ignored, in other processes.

    Those of torchrun tell one process who it is. The launcher's own interpreter ignores those of
    Python if it was started so (``python -I`` and ``-E``).
    """
    ignored = bool(sys.flags.ignore_environment) and name.startswith("PYTHON")
    return ignored or name in _OF_TORCHRUN or name.startswith("TORCHELASTIC_")


def find_program(name: str | os.PathLike[str]) -> str | None:
    """Return the path of a program, or None if it is not found.

    It is found by its path, or below an absolute folder of ``PATH``. An empty entry of that
    variable, or a relative one, leads to the current folder, where any user may have put programs.
    """
    folders = os.environ.get("PATH", os.defpath).split(os.pathsep)
    return shutil.which(name, path=os.pathsep.join(filter(os.path.isabs, folders)))


def _standard_folders() -> set[str]:
    folders = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    folders.update(site.getsitepackages())
    if not sys.flags.no_user_site:
        folders.add(site.getusersitepackages())
    return {os.path.realpath(folder) for folder in folders}


def extra_folders(path: Sequence[str]) -> list[str]:
    """Return the entries of an import path that a fresh interpreter like this one would lack."""
    standard = _standard_folders()
    stdlib = os.path.realpath(sysconfig.get_path("stdlib"))
    result: list[str] = []
    for entry in path:
        try:
            folder = os.path.abspath(entry)  # noqa: PTH100  # links are kept as they are
        except FileNotFoundError:  # in the current folder, which was removed
            continue
        real = os.path.realpath(folder)
        known = real in standard or real.startswith(stdlib + os.sep) or real.endswith(".zip")
        if not known and folder not in result and Path(folder).is_dir():
            result.append(folder)
    return result


def import_path(
    pythonpath: Iterable[str | os.PathLike[str]] | None, python: str, cwd: str | None = None
) -> list[str]:
    """Return the folders in which a replica finds modules, ahead of its own installation.

    The folder in which it happens to run is among them only if the caller chose it, or the launcher
    itself imports from it: another user may have put an ``argparse.py`` there.

    Args:
        pythonpath: The caller's choice; None for the launcher's own import path (if the replica
            runs the launcher's interpreter), so that a module beside the launching script can be
            named.
        python: The replica's interpreter.
        cwd: The replica's working directory, if the caller chose it.

    Raises:
        InvalidRequestError: The name of a folder has a colon, at which ``PYTHONPATH`` would be cut
            in two.
    """
    chosen = [] if cwd is None else [os.path.abspath(cwd)]  # noqa: PTH100
    if pythonpath is not None:
        chosen += [os.path.abspath(folder) for folder in pythonpath]  # noqa: PTH100
    elif python == sys.executable:
        chosen += extra_folders(sys.path)
    elif cwd is None and os.path.realpath("") in map(os.path.realpath, sys.path):
        chosen.append(os.path.abspath(""))  # noqa: PTH100
    chosen = list(dict.fromkeys(chosen))
    # The runner must be found even where the protocol is not installed but taken from a checkout.
    protocol = str(Path(diloco_protocol.__file__).parents[1])
    chosen += [folder for folder in extra_folders([protocol]) if folder not in chosen]
    if odd := [folder for folder in chosen if os.pathsep in folder]:
        raise InvalidRequestError(
            f"modules cannot be looked for in the folder {shown(odd[0])}, since PYTHONPATH would "
            "take it for two: rename it, or name the folders to look in by pythonpath=[...]"
        )
    return chosen


def compose(
    base: Mapping[str, str],
    overlays: Iterable[Mapping[str, str]],
    folders: Sequence[str],
    devices: str | None,
) -> dict[str, str]:
    """Return one replica's environment, by the policy above.

    Raises:
        InvalidRequestError: A value has a character that this machine's encoding lacks.
    """
    result = dict(base)
    # Relative entries refer to the launcher's folder, and what it imports from there is in
    # ``folders``.
    inherited_path = result.pop("PYTHONPATH", "").split(os.pathsep)
    if absolute := [*filter(os.path.isabs, inherited_path)]:
        result["PYTHONPATH"] = os.pathsep.join(absolute)
    for overlay in overlays:
        result.update(overlay)
    if devices is not None:
        result["CUDA_VISIBLE_DEVICES"] = devices
    # Python takes an empty entry for the working directory; mostly it comes from a colon too many.
    parts = [*folders, *filter(None, result.pop("PYTHONPATH", "").split(os.pathsep))]
    if parts:
        result["PYTHONPATH"] = os.pathsep.join(parts)
    for name, value in result.items():
        try:
            os.fsencode(value)
        except UnicodeEncodeError as error:
            raise InvalidRequestError(
                f"{name} in env= has a character that the encoding of this machine's locale "
                f"({error.encoding}) lacks: choose another locale, or set PYTHONUTF8=1"
            ) from None
    return result
