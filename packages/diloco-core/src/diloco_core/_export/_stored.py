"""Reading the tensors of a run from the files that its manifest describes, without a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import torch

from .._arithmetic._coded import CodedUpdates
from .._arithmetic._layout import CHUNK_BYTES, Group, Layout, Piece, Rule
from .._arithmetic._sharded import Scratch
from .._errors import ConfigurationError, CorruptedObjectError, DivergedError
from .._exchange._resumable import ResumableJob
from .._run._records._manifest import DTYPES
from .._store._api import ObjectReader, Store
from .._store._reread import list_folders, open_ahead, read_again
from .._timing import Timing
from .._wire._published import Shard, Sums

T = TypeVar("T")

_TIMING = Timing()


class StoredFragment:
    """A fragment into which values are read, as a table of the manifest describes it.

    It is as much of a job as reading published shards needs.

    Args:
        table: The table, which was checked.
        coded: How the run publishes its state; None if it publishes values.
    """

    def __init__(self, table: Mapping[str, Any], coded: CodedUpdates | None = None) -> None:
        groups = tuple(
            Group(DTYPES[group["dtype"]], group["numel"], Rule(group["rule"]))
            for group in table["groups"]
        )
        self.layout = Layout(groups, table["shards"], table.get("block", 1))
        self.fingerprint = str(table.get("fingerprint", ""))
        self.coded = coded
        self._tensors: Sequence[Mapping[str, Any]] = table["tensors"]
        self._copy: list[torch.Tensor] = []

    @property
    def job(self) -> ResumableJob:
        """The fragment, for those that read its shards and call nothing else than what is here."""
        return cast("ResumableJob", self)

    def reserve(self) -> None:
        """Take the memory for all values."""
        self._copy = [
            torch.empty(group.numel, dtype=group.dtype, device="cpu")
            for group in self.layout.groups
        ]

    def destination(self, piece: Piece) -> torch.Tensor:
        """Return the place of a piece's values."""
        return self._copy[piece.group][piece.start : piece.stop]

    def adopt(self, piece: Piece, values: torch.Tensor) -> None:
        """Do nothing: values are read into their place."""

    def tensors(self, dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
        """Return the tensors by name, in their own dtypes, or floating-point ones in another.

        Raises:
            ConfigurationError: The dtype cannot hold a value.
        """
        return {entry["name"]: _tensor(self._copy, entry, dtype) for entry in self._tensors}


class PublishedFile(NamedTuple):
    """The file of a shard of a fragment.

    Attributes:
        key: The key of the file.
        shard: What is in it.
        expected: Its checksums; None if no record says them.
    """

    key: str
    shard: Shard
    expected: Sums | None


def read_fragment(store: Store, fragment: StoredFragment, files: Sequence[PublishedFile]) -> None:
    """Read and verify the values in some files, in this order.

    Each file is read again before it counts as damaged.
    """
    listing = list_folders(store.list, (file.key for file in files))
    for file in files:
        # Before memory is reserved: only the manifest says how many values there are.
        size = listing.get(file.key)
        if size is not None and (rest := file.shard.rest_bytes(size)) <= 0:
            raise CorruptedObjectError(
                f"{store.uri}/{file.key} has {size} bytes, but the values that the manifest says "
                f"are in it have {size - rest}"
            )
    fragment.reserve()
    scratch = Scratch(CHUNK_BYTES)
    shards = {file.key: file.shard for file in files}

    def announce(key: str, reader: ObjectReader) -> None:
        shards[key].announce_load(reader, f"{store.uri}/{key}")

    with open_ahead(store, {key: listing.get(key) for key in shards}, announce) as readers:
        for file, reader in zip(files, readers, strict=True):
            _read(store, file, reader, scratch)


def _read(store: Store, file: PublishedFile, opened: ObjectReader | None, scratch: Scratch) -> None:
    origin = f"{store.uri}/{file.key}"

    def read() -> None:
        nonlocal opened
        already_open, opened = opened, None
        with already_open or store.open(file.key) as reader:
            file.shard.load(reader, origin, scratch, file.expected)

    try:
        reading_again(read)
    except DivergedError as error:
        raise CorruptedObjectError(
            f"{origin} does not fit the files before it: the values after its update do not have "
            "the checksum that it says"
        ) from error


def reading_again(read: Callable[[], T]) -> T:
    """Like :func:`read_again`, but with only two further readings, since a person is waiting."""
    return read_again(_TIMING, read, most=2)


def _tensor(
    flat: list[torch.Tensor], entry: Mapping[str, Any], dtype: torch.dtype | None
) -> torch.Tensor:
    shape, start, group = torch.Size(entry["shape"]), int(entry["start"]), int(entry["group"])
    values = flat[group][start : start + shape.numel()].view(shape)
    model_dtype = DTYPES[entry["dtype"]]
    if dtype is None or not model_dtype.is_floating_point:
        return values.to(model_dtype, copy=True)
    largest = torch.finfo(dtype).max
    too_large = values.isfinite() & (values.abs() > largest)
    if bool(too_large.any()):
        raise ConfigurationError(
            f"dtype={dtype} cannot hold the values of {entry['name']!r}: they go up to "
            f"{values[too_large].abs().max():.6g}, and it can hold up to {largest:.6g}. Leave "
            f"dtype out (the file then has {model_dtype}), or pass one with a larger range."
        )
    return values.to(dtype, copy=True)
