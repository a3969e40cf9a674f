"""Taking a model out of a run's store, without any replica."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

from ._elastic_records import MANIFEST, Done, Manifest, done_key, shard_key
from ._elastic_rules import newest_done
from ._errors import ConfigurationError, CorruptedObjectError, ObjectNotFoundError, RendezvousError
from ._layout import Group, Layout, Piece, Rule
from ._store import open_store
from ._wire import Section, SectionReader, seed

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from ._store import Store

_TRIES = 8


def export(uri: str, path: str | os.PathLike[str], *, dtype: torch.dtype | None = None) -> int:
    """Write the model that a run's store holds to a safetensors file: every synced tensor under its name in the model.

    It is the newest state whose shards are all published; a run that goes on meanwhile is not disturbed. What was
    committed but not published when a run stopped is taken by the first replica that resumes it. Elastic runs only.

    Args:
        uri: The run's prefix.
        path: The file to write; replaced in one step.
        dtype: Dtype of floating-point tensors; that of the model if left out (the store holds at least float32).

    Returns:
        How many syncs the newest part of the state has seen (0: the initial state).

    Raises:
        RendezvousError: There is no run, or a strict one.
        CorruptedObjectError: The store does not hold what its records promise.
        ConfigurationError: ``dtype`` is no floating-point dtype.
    """
    if dtype is not None and not dtype.is_floating_point:
        raise ConfigurationError(f"dtype must be a floating-point dtype, not {dtype}")
    store = open_store(uri)
    try:
        data = store.get(MANIFEST)
    except ObjectNotFoundError:
        raise RendezvousError(f"{store.uri} holds no run: there is no {MANIFEST}") from None
    manifest = Manifest.from_json(data, f"{store.uri}/{MANIFEST}")
    newest: list[int] = []
    for _ in range(_TRIES):
        newest = newest_done(store.list("state/"), len(manifest.fragments))
        try:
            tensors = {
                name: tensor
                for index, sync in enumerate(newest)
                for name, tensor in _fragment(store, manifest, index, sync, dtype).items()
            }
            break
        except ObjectNotFoundError:
            continue  # the run has gone on and collected it
        except CorruptedObjectError:
            # Or it was removed while it was read, and its space written over.
            if newest_done(store.list("state/"), len(manifest.fragments)) == newest:
                raise
    else:
        raise CorruptedObjectError(f"the published state in {store.uri} kept vanishing while it was read")
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        save_file(tensors, temporary, {"run_id": manifest.run_id, "sync": str(max(newest)), "format": "pt"})
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
    return max(newest)


def _fragment(
    store: Store, manifest: Manifest, index: int, sync: int, dtype: torch.dtype | None
) -> dict[str, torch.Tensor]:
    table = manifest.fragments[index]
    key = done_key(sync, index)
    done = Done.from_json(store.get(key), f"{store.uri}/{key}") if sync else manifest.done(index)
    layout = Layout(tuple(map(_group, table["groups"])), table["shards"])
    flat = [torch.empty(group.numel, dtype=group.dtype) for group in layout.groups]
    for number, checksum in enumerate(done.sums):
        key = shard_key(sync, index, number, manifest.initial)
        where = seed(table["fingerprint"], sync or manifest.initial, "values", number)
        section = Section("values", layout.shard(number), where)
        with store.open(key) as reader:
            values = SectionReader(reader, layout, [section], 0, f"{store.uri}/{key}")
            for piece in section.pieces:
                values.read(_part(flat, piece))
            values.verify()
        if values.digest != checksum:
            raise CorruptedObjectError(f"{store.uri}/{key} is not what the record of its sync says")
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
