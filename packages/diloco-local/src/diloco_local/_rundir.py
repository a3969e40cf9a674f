"""The layout of a run on disk.

Everything that is known about a run is here; no object keeps anything.

<root>/
  runs/<run_id>/            appears whole, by one rename
    run.json                what was launched, where and when; never changes
    lock                    held by the supervisor (and its guardian) as long as one of them lives
    wake                    a FIFO: a byte in it makes the supervisor look at once
    supervisor.log          messages of the supervisor
    started                 the supervisor has started every replica: from here on the run exists
    replica-<rank>-<uid>/   of this launch alone: what comes late for an earlier run of that name
                            does not find it
      state.json            what the supervisor is doing with the replica (replaced)
      final.json            how it ended (create-once: terminal states are absorbing)
      attempt-<k>/          spec.json, stdout.log, stderr.log, times.jsonl, outcome.json
    replica-<rank>-<uid>.cancel.json
                            a cancel was requested (create-once); it is here, since a replica may
                            spoil its folder
    replica-<rank>-<uid>.final.json
                            how it ended, if that could not be written into its folder
  staging/                  runs being written
  trash/                    runs being purged, under their uids
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diloco_protocol import InvalidRequestError
from diloco_protocol.backend import is_run_id, is_shortage

from ._files import check_own_folder, check_root, open_own

#: The folders below a root.
_FOLDERS = ("runs", "staging", "trash")
_NUMBER = re.compile("[1-9][0-9]{0,8}")


class _File:
    """A file with a fixed name in the folder of its owner."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, owner: Any, kind: object = None) -> Path:
        return Path(owner.path, self._name)


@dataclass(frozen=True, slots=True)
class AttemptDir:
    """The files of one attempt of one replica."""

    path: Path

    #: The file with the spec for the runner.
    spec = _File("spec.json")
    #: The file with the report of the runner; missing if it could not report.
    outcome = _File("outcome.json")
    #: The file that says when the logs had which size.
    #: Its lines are ``[unix seconds, bytes of stdout, bytes of stderr]``.
    times = _File("times.jsonl")

    def log(self, stream: str) -> Path:
        """Return the file that holds ``"stdout"`` or ``"stderr"``."""
        return self.path / f"{stream}.log"


@dataclass(frozen=True, slots=True)
class ReplicaDir:
    """The files of one replica."""

    path: Path

    @property
    def cancel(self) -> Path:
        """Return the file that marks a requested cancel."""
        return self.path.with_name(f"{self.path.name}.cancel.json")

    #: The file of the supervisor's current record.
    state = _File("state.json")
    #: The file of the terminal record.
    final = _File("final.json")

    @property
    def final_outside(self) -> Path:
        """Return the file of the terminal record if the replica's folder cannot be written to."""
        return self.path.with_name(f"{self.path.name}.final.json")

    def cancelled_at(self) -> float | None:
        """Return when a cancel was requested, in Unix seconds; None if it was not.

        It is the time at which its mark was written, once. The content of the mark is for people.
        """
        try:
            return self.cancel.lstat().st_mtime
        except OSError:
            return None

    def attempt(self, number: int) -> AttemptDir:
        """Return the files of attempt ``number`` (from 1)."""
        return AttemptDir(self.path / f"attempt-{number}")

    def attempts(self) -> list[AttemptDir]:
        """Return the attempts that were begun, oldest first.

        Raises:
            OSError: The system is short of file descriptors, so that they cannot be known at the
                moment.
        """
        try:
            with os.scandir(self.path) as entries:
                names = [entry.name for entry in entries if entry.is_dir() or entry.is_symlink()]
        except OSError as error:
            if is_shortage(error):
                raise
            return []
        numbers = [name.removeprefix("attempt-") for name in names if name.startswith("attempt-")]
        # Anything else there was put there from outside.
        known = sorted(int(text) for text in numbers if _NUMBER.fullmatch(text))
        return [self.attempt(number) for number in known]


@dataclass(frozen=True, slots=True)
class RunDir:
    """The files of one run.

    Attributes:
        path: Its folder.
        uid: The uid of its record; "" where only the run as a whole is looked at.
    """

    path: Path
    uid: str = ""

    #: The file that says what was launched.
    record = _File("run.json")
    #: The lock file, which is held while a process supervises the run.
    lock = _File("lock")
    #: The FIFO that wakes the supervisor when it is written to.
    wake = _File("wake")
    #: The file with the supervisor's own standard error.
    log = _File("supervisor.log")
    #: The file that exists once all replicas have been started.
    started = _File("started")

    def mark_started(self) -> None:
        """Mark the run as started: from now on it exists."""
        os.close(open_own(self.started, os.O_WRONLY | os.O_CREAT))

    def replica(self, rank: int) -> ReplicaDir:
        """Return the files of the replica ``rank``."""
        return ReplicaDir(self.path / f"replica-{rank}-{self.uid}")

    def wake_supervisor(self) -> None:
        """Make the supervisor look at once, if it can be told; it looks twice a second anyway."""
        with contextlib.suppress(OSError, InvalidRequestError):
            descriptor = open_own(self.wake, os.O_WRONLY, fifo=True)
            try:
                os.write(descriptor, b"!")
            finally:
                os.close(descriptor)


@dataclass(frozen=True, slots=True)
class Root:
    """The folder that holds the runs of a machine's user."""

    path: Path

    def check(self) -> None:
        """Refuse a root whose runs another user could have made or changed; a missing one is fine.

        Raises:
            InvalidRequestError: Says which folder it is, and why.
        """
        check_root(self.path)
        for name in _FOLDERS:
            check_own_folder(self.path / name)

    def run(self, run_id: str, uid: str = "") -> RunDir:
        """Return the place of the run ``run_id``, whether it exists or not."""
        return RunDir(self.path / "runs" / run_id, uid)

    def run_ids(self) -> list[str]:
        """Return the names of all runs on disk, sorted."""
        self.check()
        try:
            return sorted(entry.name for entry in (self.path / "runs").iterdir())
        except (FileNotFoundError, NotADirectoryError):
            return []

    def stage(self, uid: str = "") -> RunDir:
        """Make a new, empty, private run directory that no other process sees yet."""
        # The folders above it are made like this, too: parents= would leave their mode to the
        # umask, and a user who may write there could replace what is below.
        above = [*reversed(self.path.parents), self.path]
        for folder in (*above, *(self.path / name for name in _FOLDERS)):
            folder.mkdir(mode=0o700, exist_ok=True)
        self.check()
        path = self.path / "staging" / uuid.uuid4().hex
        path.mkdir(mode=0o700)
        return RunDir(path, uid)

    def publish(self, staged: RunDir, run_id: str) -> bool:
        """Make a staged run visible as ``run_id`` in one step, which only one launcher can win.

        Returns:
            False if that name is taken; the staged run is then untouched.
        """
        try:
            # Renaming a folder onto a folder fails unless that one is empty, and a run never is.
            staged.path.rename(self.run(run_id).path)
        except OSError as error:
            if error.errno in {errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR}:
                return False
            raise
        return True

    def discard(self, run: RunDir) -> None:
        """Remove a run: out of sight in one step, then from the disk.

        If it is gone already, nothing happens.
        """
        if not os.path.lexists(run.path):
            return
        self.check()
        trash = self.path / "trash"
        trash.mkdir(mode=0o700, exist_ok=True)  # it may have been tidied away
        hidden = trash / (run.uid or uuid.uuid4().hex)
        try:
            run.path.rename(hidden)
        except FileNotFoundError:
            if os.path.lexists(run.path):
                raise
            return
        _remove(hidden)

    def empty_trash(self, uid: str) -> None:
        """Remove what is left of a run whose removal was interrupted."""
        self.check()
        if is_run_id(uid):
            _remove(self.path / "trash" / uid)


def _remove(folder: Path) -> None:
    while os.path.lexists(folder):
        with contextlib.suppress(FileNotFoundError):  # another process removes it, too
            shutil.rmtree(folder)
