"""Taking a model out of a run's store, without any replica."""

from __future__ import annotations

import contextlib
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from ._errors import ConfigurationError, CorruptedObjectError, ObjectNotFoundError
from ._export_sources import find_source
from ._layout import Group, Layout, Piece, Rule
from ._published import ValuesReader
from ._store import open_store
from ._store_ahead import open_ahead
from ._wire import Section

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Mapping

    from ._export_sources import Source
    from ._store import Store

_TRIES = 8


def export(uri: str, path: str | os.PathLike[str], *, dtype: torch.dtype | None = None) -> int:
    """Write the model that a run's store holds to a safetensors file: every synced tensor under its name in the model.

    It is the newest state whose shards are all published; a run that goes on meanwhile is not disturbed. What was
    committed but not published when an elastic run stopped is taken by the first replica that resumes it.

    Args:
        uri: The run's prefix.
        path: The file to write; replaced in one step.
        dtype: Dtype of floating-point tensors; that of the model if left out (the store holds at least float32).

    Returns:
        How many outer steps the newest part of the state has seen (0: the initial state).

    Raises:
        RendezvousError: There is no run, or one without a model, or it has not published one yet.
        CorruptedObjectError: The store does not hold what its records promise.
        StoreUnavailableError: The store cannot be listed and read; it need not be writable.
        ConfigurationError: ``dtype`` is no floating-point dtype, or ``path`` cannot be written. Its folder must exist.
    """
    if dtype is not None and not dtype.is_floating_point:
        raise ConfigurationError(f"dtype must be a floating-point dtype, not {dtype}")
    target = Path(path)
    with _replacing(target) as temporary:
        store = open_store(uri, reading=True)
        try:
            source = find_source(store)
            newest, tensors = _newest_whole(store, source, dtype)
        finally:
            store.close()
        steps = source.outer_steps(max(newest))
        try:
            save_file(tensors, temporary, {"run_id": source.run_id, "sync": str(steps), "format": "pt"})
            temporary.replace(target)
        except (SafetensorError, OSError) as error:
            raise _unwritable(target, str(error)) from error
    return steps


@contextlib.contextmanager
def _replacing(target: Path) -> Iterator[Path]:
    """A new file beside ``target``, made at once: what cannot be written is known before anything is read."""
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


def _unwritable(target: Path, why: str) -> ConfigurationError:
    return ConfigurationError(
        f"{str(target)!r} cannot be written: {why}. Name a file in a folder that exists, that this user may write, and that "
        "has room."
    )


def _newest_whole(store: Store, source: Source, dtype: torch.dtype | None) -> tuple[list[int], dict[str, torch.Tensor]]:
    """The newest state, and after which sync of each fragment it is; the run may go on while it is read."""
    for _ in range(_TRIES):
        try:
            newest = source.newest()
        except ObjectNotFoundError:
            continue  # collected between two looks
        try:
            parts = [_fragment(store, source, index, sync, dtype) for index, sync in enumerate(newest)]
            return newest, {name: tensor for part in parts for name, tensor in part.items()}
        except ObjectNotFoundError:
            continue  # the run has gone on and collected it
        except CorruptedObjectError:
            # Or it was removed while it was read, and its space written over.
            if source.newest() == newest:
                raise
    raise CorruptedObjectError(f"the published state in {store.uri} kept vanishing while it was read")


def _fragment(
    store: Store, source: Source, index: int, sync: int, dtype: torch.dtype | None
) -> dict[str, torch.Tensor]:
    table = source.fragments[index]
    layout = Layout(tuple(map(_group, table["groups"])), table["shards"])
    flat = [torch.empty(group.numel, dtype=group.dtype, device="cpu") for group in layout.groups]
    files = source.files(index, sync)
    with open_ahead(store, [file.key for file in files]) as readers:
        for number, (file, opened) in enumerate(zip(files, readers, strict=True)):
            section = Section("values", layout.shard(number), file.seed)
            with opened or store.open(file.key) as reader:
                values = ValuesReader(reader, layout, section, f"{store.uri}/{file.key}")
                for piece in section.pieces:
                    values.read(_part(flat, piece))
                checksum = values.verify().values
            if file.checksum not in {None, checksum}:
                raise CorruptedObjectError(f"{store.uri}/{file.key} is not what the record of its sync says")
    return {entry["name"]: _tensor(flat, entry, dtype) for entry in table["tensors"]}


def _tensor(flat: list[torch.Tensor], entry: Mapping[str, Any], dtype: torch.dtype | None) -> torch.Tensor:
    shape, start, group = torch.Size(entry["shape"]), int(entry["start"]), int(entry["group"])
    values = flat[group][start : start + shape.numel()].view(shape)
    own = _dtype(entry["dtype"])
    return values.to(dtype if dtype is not None and own.is_floating_point else own).contiguous().clone()


def _part(flat: list[torch.Tensor], piece: Piece) -> torch.Tensor:
    return flat[piece.group][piece.start : piece.stop]


def _group(entry: Mapping[str, Any]) -> Group:
    return Group(_dtype(entry["dtype"]), entry["numel"], Rule(entry["rule"]))


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise CorruptedObjectError(f"the manifest names the dtype {name!r}, which torch does not know")
    return found
