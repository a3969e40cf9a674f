"""What was ever written to a run's store and deleted: copies, and promises that always hold."""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Self

from objects import tensors

if TYPE_CHECKING:
    from collections.abc import Iterator

ONCE = re.compile(r"manifest\.json|(?:claims|commits|state|initial)/.*|deltas/\d+/\d.*", re.ASCII)
"""Keys whose content never changes once they are written."""
KEPT = re.compile(r"manifest\.json|(?:claims|commits)/.*", re.ASCII)
"""Keys that are never deleted."""

_COPIED = re.compile(r"(?:deltas|state|initial|commits)/.*\.(?:safetensors|json)", re.ASCII)
_DELTA = re.compile(r"deltas/(\d{8})/\d.*", re.ASCII)
_STATE = re.compile(r"state/(\d{8})/(\d{3})\..*", re.ASCII)
_DONE = re.compile(r"state/(\d{8})/(\d{3})\.done\.json", re.ASCII)
# Sync first and epoch second, or the other way round.
_INNER = re.compile(
    r"inner/(\d{5})/(?:(?P<s>\d{8})\.(?P<e>\d{4,7})|(?P<E>\d{4,7})\.(?P<S>\d{8}))\.safetensors",
    re.ASCII,
)


class History:
    """Told of every write and every deletion in order, keeps what the reader needs. Thread-safe.

    Args:
        folder: Where the copies go, each under its key.
        fragments: How many fragments the run has.
    """

    def __init__(self, folder: Path, fragments: int) -> None:
        self.folder = folder
        self.violations: list[str] = []
        self.written = 0
        self.deleted = 0
        self.rewritten = 0
        self._fragments = fragments
        self._lock = threading.Lock()
        self._sizes: dict[str, int] = {}
        self._contents: dict[str, int] = {}
        self._excused: dict[str, int | None] = {}
        self._done: dict[int, int] = {}
        self._removed: set[str] = set()
        self._inner: dict[str, set[tuple[int, int]]] = {}
        self._newest_inner: dict[str, tuple[int, int]] = {}
        self._started = time.monotonic()

    def wrote(self, key: str, data: bytes) -> None:
        """An object was written."""
        with self._lock:
            if self._excused.get(key) == hash(data):
                return
            self.written += 1
            before = self._contents.get(key)
            self._contents[key] = hash(data)
            if before is not None:
                self.rewritten += 1
                if before != hash(data) and ONCE.fullmatch(key) and not self._came_back(key, data):
                    self._complain(f"{key} was written again with another content")
                return
            if _COPIED.fullmatch(key):
                self._copy(key, data)
            if done := _DONE.fullmatch(key):
                self._done[int(done[2])] = max(self._done.get(int(done[2]), 0), int(done[1]))
            if inner := _INNER.fullmatch(key):
                own = int(inner["e"] or inner["E"]), int(inner["s"] or inner["S"])
                self._inner.setdefault(inner[1], set()).add(own)
                self._saw_inner(key)

    def saw_inner(self, key: str) -> None:
        """An inner state is there, or was a moment ago: it may be gone before it can be read."""
        with self._lock:
            self._saw_inner(key)

    def _saw_inner(self, key: str) -> None:
        if inner := _INNER.fullmatch(key):
            own = int(inner["e"] or inner["E"]), int(inner["s"] or inner["S"])
            self._newest_inner[inner[1]] = max(own, self._newest_inner.get(inner[1], own))

    def _came_back(self, key: str, data: bytes) -> bool:
        """Say if a shard was written once with a rank's part, once without, and deleted in between.

        In fixed runs an incarnation that was stopped holds its own part, and the one that took its
        place does not. Nobody uses what comes back: who has read it looks ahead in the log first.
        """
        if key not in self._removed or not key.endswith(".safetensors"):
            return False
        first = (self.folder / key).read_bytes()
        return any("without" in tensors(each, key)[1] for each in (first, data))

    def excuse(self, key: str, before: bytes, after: bytes | None) -> None:
        """An object is about to be damaged by us: what is there now is not the run's doing."""
        self.wrote(key, before)
        with self._lock:
            self._excused[key] = None if after is None else hash(after)

    def damaged(self) -> frozenset[str]:
        """Keys of what was damaged by us."""
        with self._lock:
            return frozenset(self._excused)

    def has(self, key: str) -> bool:
        """Whether an object was ever seen."""
        with self._lock:
            return key in self._contents

    def removed(self, key: str, commit: bytes | None = None) -> None:
        """An object was deleted; ``commit`` is the record of its sync, if it is a contribution."""
        with self._lock:
            if key in self._excused and self._excused[key] is None:
                return
            self.deleted += 1
            self._removed.add(key)
            if KEPT.fullmatch(key):
                self._complain(f"{key} was deleted")
            elif delta := _DELTA.fullmatch(key):
                self._check_contribution(key, int(delta[1]), commit)
            elif state := _STATE.fullmatch(key):
                if self._done.get(int(state[2]), 0) <= int(state[1]):
                    self._complain(
                        f"{key} was deleted though no later state of its fragment is complete"
                    )
            elif inner := _INNER.fullmatch(key):
                own = int(inner["e"] or inner["E"]), int(inner["s"] or inner["S"])
                self._inner.get(inner[1], set()).discard(own)
                newest = self._newest_inner.get(inner[1], own)
                if own == newest:
                    self._complain(
                        f"{key} was deleted, but it is the newest inner state of its rank"
                    )

    def _check_contribution(self, key: str, sync: int, commit: bytes | None) -> None:
        if commit is None:
            self._complain(f"{key} was deleted before its sync was decided")
            return
        named = key in {member["key"] for member in json.loads(commit)["members"]}
        if named and self._done.get((sync - 1) % self._fragments, 0) < sync:
            self._complain(
                f"{key} counts, and was deleted before the state after its sync was complete"
            )

    def _copy(self, key: str, data: bytes) -> None:
        path = self.folder / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def _complain(self, text: str) -> None:
        if len(self.violations) < 100:
            self.violations.append(
                f"{text} ({time.monotonic() - self._started:.1f} s after the start)"
            )


class FolderWatcher:
    """Looks at a run's folder again and again, and tells a history what is new and what has gone.

    What comes and goes between two looks is not seen; the reader says how many syncs it could
    recompute.

    Args:
        run: The run's folder.
        history: Who is told.
        pause: Seconds between two looks.
    """

    def __init__(self, run: Path, history: History, pause: float = 0.01) -> None:
        self._run = run
        self._history = history
        self._pause = pause
        self._seen: dict[str, tuple[int, int, int]] = {}
        self._looks = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._error: BaseException | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _watch(self) -> None:
        try:
            while not self._over.wait(self._pause):
                self._look()
            self._looks = 0
            self._look()
        except BaseException as error:  # noqa: BLE001 - raised again where the thread is joined
            self._error = error

    def _look(self) -> None:
        # Claims and commits grow without end and never change: they are looked at less often.
        self._looks += 1
        folders = ["deltas", "state", "inner", "initial"] + (
            ["claims", "commits"] if self._looks % 20 == 1 else []
        )
        present = {
            key: signature
            for folder in folders
            for key, signature in self._files(self._run / folder)
        }
        for key, signature in present.items():
            if self._seen.get(key) != signature:
                data = read_whole(self._run / key)
                if data is not None:
                    self._history.wrote(key, data)
                    self._seen[key] = signature
        gone = [
            key for key in self._seen if key not in present and key.partition("/")[0] in folders
        ]
        if gone:
            self._look_for_done()
            self._look_for_inner()
        for key in gone:
            if not (self._run / key).exists():
                del self._seen[key]
                self._history.removed(key, self._commit_of(key))

    def _look_for_done(self) -> None:
        """Records that allow deletions may be newer than the look that found something gone."""
        for key, signature in self._files(self._run / "state"):
            if key.endswith(".done.json") and not self._history.has(key):
                data = read_whole(self._run / key)
                if data is not None:
                    self._history.wrote(key, data)
                    self._seen[key] = signature

    def _look_for_inner(self) -> None:
        """What has taken the place of an inner state may itself be replaced before it can be read.

        Its name is enough.
        """
        for folder in sorted(self._run.glob("inner/*")):
            # Names only, since a file may vanish at any moment
            for name in os.listdir(folder):  # noqa: PTH208
                self._history.saw_inner(f"inner/{folder.name}/{name}")

    def _files(self, folder: Path) -> Iterator[tuple[str, tuple[int, int, int]]]:
        """Keys below a folder, and what changes when a file is another one."""
        with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                if entry.name.startswith("."):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    yield from self._files(Path(entry.path))
                    continue
                with contextlib.suppress(FileNotFoundError):
                    status = entry.stat()
                    key = Path(entry.path).relative_to(self._run).as_posix()
                    yield key, (status.st_ino, status.st_mtime_ns, status.st_size)

    def _commit_of(self, key: str) -> bytes | None:
        delta = _DELTA.fullmatch(key)
        return read_whole(self._run / f"commits/{delta[1]}.json") if delta else None


def read_whole(path: Path) -> bytes | None:
    """A file as it is under this name, or None if it has gone: a name may be used again."""
    try:
        with path.open("rb") as file:
            before = path.stat()
            data = file.read()
            after = path.stat()
    except FileNotFoundError:
        return None
    same = (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
    return data if same and len(data) == after.st_size else None
