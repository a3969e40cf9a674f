"""The place of a fixed run in a store that cannot decide which process creates an object first.

Each time that all ranks meet there, they begin a *generation*: a folder of its own, in which every
key has one writer, or only writers of the same bytes. Its name holds what only the processes that
have met know, so no other process writes there. A rank that dies ends its generation. When all
ranks are resumed, they carry the newest whole state into the next one.

    meetings/{rank}.json                       what a process says while it meets the others; see
                                               :mod:`._gathering`
    generations/{number}-{name}/…              a run, as it lies elsewhere at the top; it counts
                                               once it has a manifest
    generations/{number}-{name}/carried.json   from which state it goes on, which rank 0 has chosen
    generations/{number}-{name}/carried/{rank} this rank has carried its part of the state there
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from ..._errors import CorruptedObjectError
from ..._store._api import Below, Store
from ..._store._reread import copy_key
from ..._wire._sections import fingerprint
from .._records._keys import MANIFEST

FOLDER = "generations/"
_KEY = re.compile(rf"({FOLDER}(\d{{6}})-[0-9a-f]{{16}}/)(.+)", re.ASCII)


def folder(number: int, nonces: Sequence[str]) -> str:
    """The folder of the generation that the processes with these nonces begin."""
    return f"{FOLDER}{number:06}-{fingerprint('generation', list(nonces))[:16]}/"


def begun(keys: Iterable[str]) -> list[str]:
    """Return the folders of the generations that have a manifest, the newest first.

    ``keys`` are those below ``generations/``.
    """
    manifests = {MANIFEST, copy_key(MANIFEST)}
    found = {match[1] for match in filter(None, map(_KEY.fullmatch, keys)) if match[3] in manifests}
    return sorted(found, reverse=True)


def headless(keys: Iterable[str]) -> list[str]:
    """Return the folders of generations that have begun and lost their manifest, the newest first.

    Signs of life show that they had begun.
    """
    listed = list(keys)
    matches = filter(None, map(_KEY.fullmatch, listed))
    lived = {match[1] for match in matches if match[3].startswith("beats/")}
    newest = next(iter(begun(listed)), "")
    return sorted((folder for folder in lived if folder > newest), reverse=True)


def without_manifest(store: Store, lost: str) -> str:
    """Return what errors say of a generation that has lost its manifest."""
    return (
        f"{store.uri}/{lost}{MANIFEST} and its copy are gone, although the run went on there: "
        "something else has deleted them. If you have a copy, put it back."
    )


def place_of_run(store: Store) -> Store:
    """Return where the run lies that a prefix holds: in its newest generation, or at the top.

    Raises:
        CorruptedObjectError: The newest generation has lost its manifest.
    """
    keys = store.list(FOLDER)
    for lost in headless(keys):
        raise CorruptedObjectError(
            f"{without_manifest(store, lost)} Otherwise, start all ranks of the run again with "
            'resume="newest-whole": they give up what it had learned there, and what is left can '
            "be exported then."
        )
    newest = next(iter(begun(keys)), None)
    return store if newest is None else Below(store, newest)


def next_number(keys: Iterable[str]) -> int:
    """Return the number of the next generation, which is higher than that of any, begun or not.

    So what is begun late never counts.
    """
    return 1 + max((int(match[2]) for match in filter(None, map(_KEY.fullmatch, keys))), default=0)


def before(keys: Iterable[str], newest: str) -> list[str]:
    """The keys of all generations before the one in the folder ``newest``."""
    return [key for key in keys if _KEY.fullmatch(key) and key < newest]
