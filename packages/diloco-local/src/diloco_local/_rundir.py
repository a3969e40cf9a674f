"""The layout of a run on disk.

Everything that is known about a run is here; no object keeps anything.

<root>/
  runs/<run_id>/            appears whole, by one rename
    run.json what was launched, where and when; never changes lock held by the supervisor (and its
    guardian) as long as one of them lives wake a FIFO: a byte in it makes the supervisor look at
    once supervisor.log what the supervisor had to say started the supervisor has started every
    replica: from here on the run exists replica-<rank>-<uid>/ of this launch alone: what is late
    for an earlier run of that name does not find it
      state.json            what the supervisor is doing with the replica (replaced)
      final.json            how it ended (create-once: terminal states are absorbing)
      attempt-<k>/          spec.json, stdout.log, stderr.log, times.jsonl, outcome.json
    replica-<rank>-<uid>.cancel.json somebody asked for a cancel (create-once); here, since a
    replica may spoil its folder replica-<rank>-<uid>.final.json that it has ended, if that could
    not be written into its folder
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

from diloco_protocol import InvalidRequestError
from diloco_protocol.backend import is_run_id, is_shortage

from ._own import check_own_folder, check_root, open_own

#: The folders below a root.
_FOLDERS = ("runs", "staging", "trash")
_NUMBER = re.compile("[1-9][0-9]{0,8}")


def default_root() -> Path:
    """``$XDG_STATE_HOME/diloco``, or ``~/.local/state/diloco``.

    Raises:
        InvalidRequestError: Neither is known.
    """
    state = Path(os.environ.get("XDG_STATE_HOME", ""))
    # The XDG specification says that a relative path is to be ignored.
    if state.is_absolute():
        return state / "diloco"
    try:
        return Path.home() / ".local" / "state" / "diloco"
    except RuntimeError as error:
        raise InvalidRequestError(
            "this user has no home folder that is known: give root=, or set XDG_STATE_HOME or HOME"
        ) from error


@dataclass(frozen=True, slots=True)
class AttemptDir:
    """The files of one attempt of one replica."""

    path: Path

    @property
    def spec(self) -> Path:
        """What the runner was told."""
        return self.path / "spec.json"

    @property
    def outcome(self) -> Path:
        """What the runner reports; missing if it could not report."""
        return self.path / "outcome.json"

    @property
    def times(self) -> Path:
        """When the logs had which size: lines ``[unix seconds, bytes of stdout, bytes of stderr]``."""
        return self.path / "times.jsonl"

    def log(self, stream: str) -> Path:
        """The file that holds ``"stdout"`` or ``"stderr"``."""
        return self.path / f"{stream}.log"


@dataclass(frozen=True, slots=True)
class ReplicaDir:
    """The files of one replica."""

    path: Path

    @property
    def cancel(self) -> Path:
        """The mark of a requested cancel."""
        return self.path.with_name(f"{self.path.name}.cancel.json")

    @property
    def state(self) -> Path:
        """The supervisor's current record."""
        return self.path / "state.json"

    @property
    def final(self) -> Path:
        """The terminal record."""
        return self.path / "final.json"

    @property
    def final_outside(self) -> Path:
        """The terminal record of a replica into whose folder nothing can be written."""
        return self.path.with_name(f"{self.path.name}.final.json")

    def cancelled_at(self) -> float | None:
        """When a cancel was requested, in Unix seconds: when its mark was written, once.

        What is in it is for people.
        """
        try:
            return self.cancel.lstat().st_mtime
        except OSError:
            return None

    def attempt(self, number: int) -> AttemptDir:
        """The files of attempt ``number`` (from 1)."""
        return AttemptDir(self.path / f"attempt-{number}")

    def attempts(self) -> list[AttemptDir]:
        """The attempts that were begun, oldest first.

        Raises:
            OSError: The system is short of file descriptors, so that cannot be known at the moment.
        """
        try:
            with os.scandir(self.path) as entries:
                names = [each.name for each in entries if each.is_dir() or each.is_symlink()]
        except OSError as error:
            if is_shortage(error):
                raise
            return []
        numbers = [name.removeprefix("attempt-") for name in names if name.startswith("attempt-")]
        # What else lies there has been put there from outside.
        known = sorted(int(text) for text in numbers if _NUMBER.fullmatch(text))
        return [self.attempt(number) for number in known]


@dataclass(frozen=True, slots=True)
class RunDir:
    """The files of one run.

    Attributes:
        path: Its folder.
        uid: That of its record; "" where only the run as a whole is looked at.
    """

    path: Path
    uid: str = ""

    @property
    def record(self) -> Path:
        """What was launched."""
        return self.path / "run.json"

    @property
    def lock(self) -> Path:
        """Held while somebody supervises."""
        return self.path / "lock"

    @property
    def wake(self) -> Path:
        """A FIFO: writing to it wakes the supervisor."""
        return self.path / "wake"

    @property
    def log(self) -> Path:
        """The supervisor's own standard error."""
        return self.path / "supervisor.log"

    @property
    def started(self) -> Path:
        """Exists once all replicas have been started."""
        return self.path / "started"

    def mark_started(self) -> None:
        """Let the run exist."""
        os.close(open_own(self.started, os.O_WRONLY | os.O_CREAT))

    def replica(self, rank: int) -> ReplicaDir:
        """The files of the replica ``rank``."""
        return ReplicaDir(self.path / f"replica-{rank}-{self.uid}")

    def wake_supervisor(self) -> None:
        """Make the supervisor look at once, if it can be told: it looks twice a second in any case."""
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
        """Refuse a root whose runs somebody else could have made or changed; one that does not exist yet is fine.

        Raises:
            InvalidRequestError: Says which folder it is, and why.
        """
        check_root(self.path)
        for name in _FOLDERS:
            check_own_folder(self.path / name)

    def run(self, run_id: str, uid: str = "") -> RunDir:
        """The place of the run ``run_id``, whether it exists or not."""
        return RunDir(self.path / "runs" / run_id, uid)

    def run_ids(self) -> list[str]:
        """The names of all runs on disk, sorted."""
        self.check()
        try:
            return sorted(entry.name for entry in (self.path / "runs").iterdir())
        except (FileNotFoundError, NotADirectoryError):
            return []

    def stage(self, uid: str = "") -> RunDir:
        """A new, empty, private run directory that nobody sees yet."""
        # Those above it as well: parents= would leave them to the umask, and whoever may write
        # there could replace what is below.
        above = [*reversed(self.path.parents), self.path]
        for folder in (*above, *(self.path / name for name in _FOLDERS)):
            folder.mkdir(mode=0o700, exist_ok=True)
        self.check()
        path = self.path / "staging" / uuid.uuid4().hex
        path.mkdir(mode=0o700)
        return RunDir(path, uid)

    def publish(self, staged: RunDir, run_id: str) -> bool:
        """Make a staged run visible as ``run_id``, in one step that only one of several launchers can win.

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

        Removing what is gone is a no-op.
        """
        if not os.path.lexists(run.path):
            return
        self.check()
        trash = self.path / "trash"
        trash.mkdir(mode=0o700, exist_ok=True)  # somebody may have tidied it away
        hidden = trash / (run.uid or uuid.uuid4().hex)
        try:
            run.path.rename(hidden)
        except FileNotFoundError:
            if os.path.lexists(run.path):
                raise
            return
        _remove(hidden)

    def empty_trash(self, uid: str) -> None:
        """Remove what is left of a run that was removed, if that was interrupted."""
        self.check()
        if is_run_id(uid):
            _remove(self.path / "trash" / uid)


def _remove(folder: Path) -> None:
    while os.path.lexists(folder):
        with contextlib.suppress(FileNotFoundError):  # somebody else removes it, too
            shutil.rmtree(folder)
