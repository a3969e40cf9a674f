"""Writing the model in a run's store to a file, without any replica."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from .._checks import is_whole, yes_or_no
from .._errors import ConfigurationError, CorruptedObjectError, ObjectNotFoundError
from .._run._generations._names import place_of_run
from .._store._api import Store
from .._store._drivers._folder import FolderStore
from .._store._open import open_store
from .._wire._safetensors import entry, header_bytes
from .._wire._sections import view
from ._choice import INCOMPLETE, as_damage, newest_whole, the_states
from ._run_states import find_source, sentence, unsynced_files, without_unsynced
from ._stored import read_fragment

_log = logging.getLogger("diloco_core")


def export(
    uri: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    at: int | None = None,
    synced_only: bool = False,
) -> int:
    """Write the model that a run's store holds to a safetensors file.

    A strict ``load_state_dict`` accepts it.

    The file has an entry for every entry of the model's ``state_dict()``: tied tensors under all of
    their names, and without the names of wrappers (``torch.compile``, ``DistributedDataParallel``,
    ``DataParallel``). Tensors that were not synced (frozen parameters, and buffers under
    ``buffers="none"``) are as they were when the run began, at the replica that began it. Entries
    that a file of tensors cannot hold (the extra state of modules, what hooks add, quantised
    tensors) are left out, and a warning names them.

    Without ``at``, the file holds the newest state whose values are whole. A run that is going on
    is not disturbed. If the values of a newer state are damaged, a warning in the log says which,
    and so does ``damaged`` in the file's metadata. Only what the file needs is read and verified,
    so damage in the headers of shards and in the outer optimizer's state is not noticed. A run that
    is resumed finds and repairs it.

    The log says how many outer steps older than the run the file is, and so does ``behind`` in its
    metadata: a gather run publishes its state only every few syncs. If it holds the values with
    which the run began, a warning says so.

    Syncs that were committed but not published when an elastic run stopped are not in the file. The
    first replica that resumes the run completes them.

    Args:
        uri: The run's prefix; for a folder also a path.
        path: The file to write; replaced in one step. Its name ends in ``.safetensors``, or has no
            ending. The same state of the same run gives the same bytes.
        dtype: Dtype of floating-point tensors; that of the model if left out (the store holds at
            least float32).
        synced_only: Leave out the tensors that were not synced, and do not read them: for a store
            that has lost them. Load the file with ``strict=False`` into a model that has them from
            elsewhere.
        at: The number of outer steps (``DiLoCo.committed``) after which the state was saved; the
            store keeps only the last few states. If the run has gone back to older states, those
            that it gave up are not used.

    Returns:
        The number of outer steps after which the state was saved (0: the initial state).

    Raises:
        RendezvousError: There is no run, or its model is not there: it has none, or has not
            published one yet. Or the state ``at`` is not there.
        CorruptedObjectError: The store does not hold what its records promise. The state ``at`` is
            damaged or incomplete, or all states are, or the manifest, or the tensors that were not
            synced. The error says what to do.
        StoreUnavailableError: The store cannot be listed and read; it need not be writable.
        ConfigurationError: ``dtype`` is not a floating-point dtype or cannot hold a value of the
            model, ``at`` is not a number of outer steps, or ``path`` cannot be written or lies in
            the run's own folder. Its folder must exist.
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ConfigurationError(
            f"dtype must be a floating-point dtype such as torch.float32, not {dtype!r}"
        )
    if at is not None and (not is_whole(at) or at < 0):
        raise ConfigurationError(f"at must be a number of outer steps, 0 or more, not {at!r}")
    if not isinstance(path, (str, os.PathLike)):
        raise ConfigurationError(f"path must be the name of a file, not {path!r}")
    if not isinstance(uri, (str, os.PathLike)):
        raise ConfigurationError(f"uri must be the run's prefix, as text or a path, not {uri!r}")
    yes_or_no("synced_only", synced_only)
    target = Path(path)
    with _replacing(target) as temporary:
        store: Store = open_store(os.fspath(uri), reading=True)
        if isinstance(store, FolderStore) and target.resolve().is_relative_to(store.root.resolve()):
            raise _unwritable(
                target, "it is in the run's own folder, where only the run's objects belong"
            )
        if target.suffix not in {"", ".safetensors"}:
            raise ConfigurationError(
                f"path must end in .safetensors, not in {target.suffix!r} as {str(target)!r} does: "
                "it is a safetensors file, whatever its name. Read it with "
                "safetensors.torch.load_file; torch.save(load_file(path), 'model.pt') makes one "
                "that torch.load reads."
            )
        try:
            store = place_of_run(store)
            source = find_source(store)
            unsynced = source.manifest.unsynced
            choice, tensors = newest_whole(store, source, dtype, at)
            step = choice.step
            if unsynced and not synced_only:
                rest, files = unsynced_files(unsynced)
                try:
                    read_fragment(store, rest, files)
                except (ObjectNotFoundError, CorruptedObjectError) as error:
                    raise CorruptedObjectError(
                        f"{sentence(as_damage(error))} {without_unsynced(unsynced)}"
                    ) from error
                tensors.update(rest.tensors(dtype))
        finally:
            store.close()
        aliases = unsynced.get("aliases", {})
        tensors.update({alias: tensors[name] for alias, name in aliases.items() if name in tensors})
        metadata = {"run_id": source.manifest.run_id, "sync": str(step), "format": "pt"}
        if choice.damaged:
            metadata["damaged"] = ", ".join(map(str, choice.damaged))
            _log.warning(
                "%s in %s cannot be used: %s The file holds the state after outer step %d.",
                the_states(choice.damaged),
                store.uri,
                " ".join(map(sentence, choice.errors)),
                step,
            )
        # Outer steps that the run has taken since, as far as the store shows them.
        counted = at is None and not source.unknown
        age = max(0, source.outer_steps(source.newest) - step) if counted else 0
        if age:
            metadata["behind"] = str(age)
        if not choice.damaged:
            _tell_age(target, step, age)
        _tell_omitted(target, unsynced)
        try:
            _save(tensors, temporary, metadata)
            temporary.replace(target)
        except OSError as error:
            raise _unwritable(target, str(error)) from error
    return step


def _tell_age(target: Path, step: int, age: int) -> None:
    if step == 0:
        since = f": {age} outer steps were taken since" if age else ""
        _log.warning(
            "%s holds the model as it was when the run began (outer step 0), and nothing that was "
            "trained%s. The run has not published a newer state of the whole model yet.",
            target,
            since,
        )
    elif age:
        _log.warning(
            "%s holds the state after outer step %d, and the run has taken %d more since. Newer "
            "states are incomplete. %s",
            target,
            step,
            age,
            INCOMPLETE,
        )


def _tell_omitted(target: Path, unsynced: Mapping[str, Any]) -> None:
    if omitted := unsynced.get("omitted"):
        _log.warning(
            (
                "%s does not hold these entries of the model's state_dict(), which "
                "get_extra_state() or hooks of the model add: %s"
            ),
            target,
            ", ".join(omitted),
        )
    if special := unsynced.get("special"):
        _log.warning(
            "%s does not hold these tensors of the model, since they are of classes (quantised "
            "ones, for instance) or dtypes that a safetensors file cannot hold: %s. Take them "
            "from the model that the run began with.",
            target,
            ", ".join(f"{name} ({what})" for name, what in special.items()),
        )


def _save(tensors: Mapping[str, torch.Tensor], path: Path, metadata: Mapping[str, str]) -> None:
    """Write tensors to a safetensors file.

    The same tensors give the same bytes: the safetensors library shuffles metadata.
    """
    # The widest dtypes first, so that each tensor begins at a multiple of its item size.
    names = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    entries: dict[str, object] = {}
    end = 0
    for name in names:
        start, end = end, end + tensors[name].nbytes
        entries[name] = entry(tensors[name].dtype, tensors[name].shape, start, end)
    with path.open("wb") as file:
        file.write(header_bytes(entries, metadata))
        for name in names:
            file.write(view(tensors[name].contiguous()))


@contextlib.contextmanager
def _replacing(target: Path) -> Iterator[Path]:
    """A new file beside ``target``.

    It is made at once, so that an error of writing shows before anything is read.
    """
    if target.is_dir():
        raise _unwritable(target, "it is a folder")
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        temporary.touch(exist_ok=False)
    except OSError as error:
        raise _unwritable(target, error.strerror or str(error)) from error
    try:
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


def _unwritable(target: Path, reason: str) -> ConfigurationError:
    return ConfigurationError(
        f"{str(target)!r} cannot be written: {reason}. Use a path in a folder that exists, that "
        "this user may write to, and that has room."
    )
