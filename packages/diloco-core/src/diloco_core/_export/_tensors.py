"""Reading the tensors of a run from its published files: verified, and read again before a file counts as damaged."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import xxhash

from .._arithmetic._layout import CHUNK_BYTES, Group, Layout, Piece, Rule
from .._errors import ConfigurationError, CorruptedObjectError, ObjectNotFoundError
from .._store._reread import copy_key, open_ahead, read_again
from .._timing import Timing
from .._wire._coded import EncodedUpdate
from .._wire._published import ValuesReader, end_sums
from .._wire._sections import Section, view

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from .._store._api import ObjectReader, Store
    from ._run_states import PublishedFile

_TIMING = Timing()
_log = logging.getLogger("diloco_core")

T = TypeVar("T")


def reading_again(read: Callable[[], T]) -> T:
    """Like :func:`read_again`, but with only two further readings, since a person is waiting."""
    return read_again(_TIMING, read, most=2)


def as_damage(error: ObjectNotFoundError | CorruptedObjectError) -> CorruptedObjectError:
    if isinstance(error, CorruptedObjectError):
        return error
    return CorruptedObjectError(f"an object that the run's records name is gone: {error}")


def read_tensors(
    store: Store, table: Mapping[str, Any], files: list[PublishedFile], dtype: torch.dtype | None
) -> dict[str, torch.Tensor]:
    """Read and verify the tensors in some files. Each file is read again before it counts as damaged."""
    if not files:
        return {}
    layout = Layout(tuple(map(_group, table["groups"])), table["shards"], table.get("block", 1))
    flat = [torch.empty(group.numel, dtype=group.dtype, device="cpu") for group in layout.groups]
    by_key = {file.key: file for file in files}
    listing: dict[str, int] = {}
    for folder in sorted({file.key.rpartition("/")[0] for file in files}):
        listing.update(store.list(f"{folder}/"))

    def announce(key: str, reader: ObjectReader) -> None:
        _announce(store, layout, by_key[key], reader)

    with open_ahead(store, {key: listing.get(key) for key in by_key}, announce) as readers:
        for file, opened in zip(files, readers, strict=True):
            try:
                _read_file(store, layout, flat, file, opened)
            except (CorruptedObjectError, ObjectNotFoundError) as error:
                if copy_key(file.key) not in listing:
                    raise
                _log.warning("%s. Its copy is read instead.", str(as_damage(error)).rstrip("."))
                copy = replace(file, key=copy_key(file.key))
                _read_file(store, layout, flat, copy, None)
    return {entry["name"]: _tensor(flat, entry, dtype) for entry in table["tensors"]}


def _read_file(
    store: Store,
    layout: Layout,
    flat: list[torch.Tensor],
    file: PublishedFile,
    opened: ObjectReader | None,
) -> None:
    """Read a file into its place in ``flat``, again if it is damaged; ``opened`` serves only the first reading."""

    def read() -> None:
        nonlocal opened
        reader, opened = opened or store.open(file.key), None
        with reader:
            if file.update is not None:
                checksum = _add_update(store, layout, flat, file, reader)
            else:
                values = _values(store, layout, file, reader)
                for piece in layout.shard(file.shard):
                    values.read(_part(flat, piece))
                checksum = values.verify().values
        if file.checksum not in {None, checksum}:
            raise CorruptedObjectError(
                f"{store.uri}/{file.key} does not have the checksum that the record of its sync says"
            )

    reading_again(read)


def _add_update(
    store: Store,
    layout: Layout,
    flat: list[torch.Tensor],
    file: PublishedFile,
    reader: ObjectReader,
) -> int:
    """Add the update in a file to its place in ``flat``. Returns the checksum of the new values."""
    origin = f"{store.uri}/{file.key}"
    update = _update(layout, file)
    expected = end_sums(reader, origin).values
    if file.checksum not in {
        None,
        expected,
    }:  # checked before anything is added, as the update itself is
        raise CorruptedObjectError(
            f"{origin} does not have the checksum that the record of its sync says"
        )
    data, offset = update.read(reader, origin, CHUNK_BYTES), 0
    digest = xxhash.xxh3_64(seed=file.seed)
    for chunk in layout.chunks(file.shard, CHUNK_BYTES):
        values = _part(flat, chunk)
        offset = update.add(data, chunk, offset, values)
        digest.update(view(values))
    if digest.intdigest() != expected:
        raise CorruptedObjectError(
            f"{origin} does not fit the files before it: the values after its update do not have the checksum that it says"
        )
    return expected


def _announce(store: Store, layout: Layout, file: PublishedFile, reader: ObjectReader) -> None:
    """Announce what will be read of a file."""
    if file.update is not None:
        _update(layout, file).announce(reader)
    else:
        _values(store, layout, file, reader)


def _update(layout: Layout, file: PublishedFile) -> EncodedUpdate:
    assert file.update is not None
    codec, seed = file.update
    return EncodedUpdate(layout, file.shard, codec, seed, Section("values", (), file.seed))


def _values(
    store: Store, layout: Layout, file: PublishedFile, reader: ObjectReader
) -> ValuesReader:
    """A reader of a file's values. Making it announces what it will read."""
    section = Section("values", layout.shard(file.shard), file.seed)
    return ValuesReader(reader, layout, section, f"{store.uri}/{file.key}")


def _tensor(
    flat: list[torch.Tensor], entry: Mapping[str, Any], dtype: torch.dtype | None
) -> torch.Tensor:
    shape, start, group = torch.Size(entry["shape"]), int(entry["start"]), int(entry["group"])
    values = flat[group][start : start + shape.numel()].view(shape)
    model_dtype = _dtype(entry["dtype"])
    if dtype is None or not model_dtype.is_floating_point:
        return values.to(model_dtype, copy=True)
    largest = torch.finfo(dtype).max
    too_large = values.isfinite() & (values.abs() > largest)
    if bool(too_large.any()):
        raise ConfigurationError(
            f"dtype={dtype} cannot hold the values of {entry['name']!r}: they go up to {values[too_large].abs().max():.6g}, "
            f"and it can hold up to {largest:.6g}. Leave dtype out (the file then has {model_dtype}), or pass one with a "
            "larger range."
        )
    return values.to(dtype, copy=True)


def _part(flat: list[torch.Tensor], piece: Piece) -> torch.Tensor:
    return flat[piece.group][piece.start : piece.stop]


def _group(entry: Mapping[str, Any]) -> Group:
    return Group(_dtype(entry["dtype"]), entry["numel"], Rule(entry["rule"]))


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise CorruptedObjectError(
            f"the manifest names the dtype {name!r}, which this version of torch does not know"
        )
    return dtype
