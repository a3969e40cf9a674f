"""A run's objects read from outside: safetensors and JSON, with only json, numpy and xxhash."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

_DTYPES: dict[str, Any] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U8": np.uint8,
    "BOOL": np.bool_,
}
_SEAL = re.compile(rb',\n "xxh3_128": "([0-9a-f]{32})"\n}\n\Z')


class Broken(Exception):  # noqa: N818 - it is a finding
    """An object is not what it should be."""


@dataclass(frozen=True)
class Objects:
    """What a run's store holds, and what it held: two folders whose files lie under their keys.

    Attributes:
        store: The store as it is.
        history: Copies of what was written in the course of the run.
        damaged: Keys of what was damaged on purpose: if nobody has read it since, it may still lie
            there as it is.
    """

    store: Path
    history: Path
    damaged: frozenset[str] = frozenset()

    def read(self, key: str) -> bytes | None:
        """An object as it was written, or as it is now where no copy was taken."""
        for folder in (self.history, self.store):
            try:
                return (folder / key).read_bytes()
            except (FileNotFoundError, NotADirectoryError):
                continue
        return None

    def record(self, key: str) -> tuple[dict[str, Any], bytes] | None:
        """A JSON record, and its bytes. What is never deleted is read from the store as it is.

        Raises:
            Broken: It is damaged.
        """
        path = self.store / key
        aside = key.startswith("state/") or key in self.damaged
        data = self.read(key) if aside else path.read_bytes() if path.is_file() else None
        if data is None:
            return None
        seal = _SEAL.search(data)
        if seal is not None:
            seed = xxhash.xxh3_64_intdigest(key.encode())
            if xxhash.xxh3_128_hexdigest(data[: seal.start()], seed=seed) != seal[1].decode():
                raise Broken(f"the checksum of {key} is wrong")
        try:
            return json.loads(data), data
        except ValueError as error:
            raise Broken(f"{key} is not JSON: {error}") from error

    def stored(self, folder: str) -> set[str]:
        """Keys below a folder of the store as it is."""
        return {
            path.relative_to(self.store).as_posix()
            for path in (self.store / folder).rglob("*")
            if path.is_file() and not path.name.startswith(".")
        }


def tensors(data: bytes, origin: str) -> tuple[dict[str, np.ndarray[Any, Any]], dict[str, str]]:
    """The tensors and the metadata of a safetensors file.

    Raises:
        Broken: It is not one.
    """
    try:
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + size])
        metadata = header.pop("__metadata__", {})
        found = {}
        for name, entry in header.items():
            start, stop = (8 + size + offset for offset in entry["data_offsets"])
            if stop > len(data):
                raise Broken(f"{origin} ends before its tensor {name}")
            found[name] = np.frombuffer(data[start:stop], _DTYPES[entry["dtype"]]).reshape(
                entry["shape"]
            )
    except (ValueError, KeyError, TypeError) as error:
        raise Broken(f"{origin} is not a safetensors file: {error!r}") from error
    return found, metadata
