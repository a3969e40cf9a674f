"""A journal in a folder of this user's own, which is believed."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from typing import TYPE_CHECKING, BinaryIO, ClassVar

from ._checks import check_home
from ._errors import InvalidRequestError
from ._journal import StoreJournal
from ._journal_records import DamagedRecordError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


class FolderJournal(StoreJournal):
    """A journal in a folder.

    There is one folder per run, and one file per launch, per end and per log, each written in one
    step. The folder belongs to this user alone (mode 0700, its files 0600), since everyone
    who can write there can decide how replicas have ended.

    Safe to use from several threads and processes.

    Args:
        folder: The folder; ``~`` and ``~user`` at the beginning are home folders. By default
            ``$XDG_STATE_HOME/diloco/journal`` (``~/.local/state`` where that is not set).

    Raises:
        InvalidRequestError: The folder is not a path, or belongs to another user, or others can
            write to it. Every method raises this, too.
    """

    believed: ClassVar[bool] = True

    def __init__(self, folder: str | Path | None = None) -> None:
        from pathlib import Path  # slow to import, and replicas do not need it

        self.folder = (
            state_folder() / "journal" if folder is None else Path(check_home("folder", folder))
        )
        check_private_folder(self.folder)
        super().__init__(
            str(self.folder),
            put=lambda key, data: self._write(key, data, Path.replace),
            create=lambda key, data: self._write(key, data, _create),
            read=self._contents,
            list_keys=self._keys,
            delete=lambda key: (self.folder / key).unlink(missing_ok=True),
        )

    def _contents(self, key: str, most: int) -> bytes | None:
        path = self.folder / key
        if not path.exists():
            return None
        check_private_folder(self.folder)
        check_private_folder(path.parent)
        try:
            file = open_private(path)
        except InvalidRequestError as error:
            raise DamagedRecordError(str(error)) from None
        with file:
            return file.read(most)

    def _keys(self, below: str) -> Iterator[str]:
        folder = self.folder / below
        check_private_folder(self.folder)
        check_private_folder(folder)
        with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
            for entry in entries:
                yield f"{below}{entry.name}/" if entry.is_dir() else f"{below}{entry.name}"

    def _write(self, key: str, data: bytes, move: Callable[[Path, Path], object]) -> bool:
        path = self.folder / key
        partial = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
        try:
            make_private_folder(self.folder)
            make_private_folder(path.parent)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            with os.fdopen(os.open(partial, flags, 0o600), "wb") as file:
                file.write(data)
            move(partial, path)
        finally:  # do not fill the disk with partial files
            with contextlib.suppress(OSError):
                partial.unlink()
        return True


def _create(partial: Path, path: Path) -> None:
    """Create ``path`` from ``partial`` unless it exists: the first of several writers wins."""
    try:
        os.link(partial, path)
    except FileExistsError:
        pass
    except OSError:  # a file system without hard links
        if not path.exists():
            partial.replace(path)


def state_folder() -> Path:
    """Return the folder in which programs of this user keep their state.

    It is ``$XDG_STATE_HOME/diloco``, or its usual place where that is not set.

    Raises:
        InvalidRequestError: The folder would be in the home folder, and there is none.
    """
    from pathlib import Path  # slow to import

    base = Path(os.environ.get("XDG_STATE_HOME", ""))
    if base.is_absolute():  # the XDG specification says that relative paths must be ignored
        return base / "diloco"
    return Path(check_home("the default of XDG_STATE_HOME", "~/.local/state"), "diloco")


def make_private_folder(path: Path) -> None:
    """Make a folder that only this user can enter, and missing folders above it.

    A folder that exists and does not belong to this user alone is refused.

    Raises:
        InvalidRequestError: The folder is refused, as by :func:`check_private_folder`.
        OSError: The folder cannot be made.
    """
    # One by one: parents=True would give those above the permissions of the umask, and everyone who
    # may write there could replace what is below.
    for folder in (*reversed(path.parents), path):
        folder.mkdir(mode=0o700, exist_ok=True)
    check_private_folder(path)


def check_private_folder(path: Path) -> None:
    """Refuse a folder in which another user can write.

    A path that does not exist, or is not a folder, is not refused: its user will notice.

    Raises:
        InvalidRequestError: The folder belongs to another user, or others can write to it; the
            error says what to do.
    """
    try:
        status = path.stat()
    except OSError:
        return
    if not stat.S_ISDIR(status.st_mode):
        return
    if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise InvalidRequestError(
            f"others can write to the folder {path} (it belongs to the user with the id "
            f"{status.st_uid}, and its mode is {status.st_mode & 0o7777:o}), and what is written "
            f"there is believed: take that right away (chmod go-w {path}), or give a folder of "
            "your own, such as a new one in it"
        )


def open_private(path: Path) -> BinaryIO:
    """Open a file that belongs to this user, to read it.

    Raises:
        InvalidRequestError: The path is a link or not a file, or the file belongs to another user.
        OSError: The file is missing or cannot be read.
    """
    refusal = InvalidRequestError(
        f"{path} is a link, or not a file of the user with the id {os.geteuid()}, and is not read: "
        "remove it"
    )
    try:
        # Without blocking, since it could be a FIFO to which no process writes.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno in {errno.ELOOP, errno.EMLINK}:
            raise refusal from error
        raise
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
        os.close(descriptor)
        raise refusal
    return os.fdopen(descriptor, "rb")
