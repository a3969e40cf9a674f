"""A journal in a folder of this user's own, which is believed."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, ClassVar

from ._checks import check_home
from ._errors import InvalidRequestError
from ._journal import StoreJournal
from ._journal_records import DamagedRecordError
from ._private import check_private_folder, make_private_folder, open_private, write_private

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


class FolderJournal(StoreJournal):
    """A journal in a folder.

    There is one folder per run, and one file per launch, per end and per log, each written in one
    step. The names of runs and backends are escaped so that each is one valid file name, and no two
    are the same. The folder belongs to this user alone (mode 0700, its files 0600), since everyone
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
            write_private(partial, data.decode())
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
