"""The name of one replica, valid in any process."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from ._checks import check_whole, shown
from ._errors import InvalidRequestError
from ._fields import LARGEST, check_version
from ._json import RECORD_BYTES, canonical, loads_bounded

HANDLE_VERSION = 1


class Metadata(Mapping[str, str]):
    """An immutable, hashable mapping of text to text."""

    __slots__ = ("_items",)

    def __init__(self, items: Mapping[str, str] = {}) -> None:
        if not isinstance(items, Mapping) or any(
            type(text) is not str for pair in items.items() for text in pair
        ):
            raise InvalidRequestError(
                f"a handle's metadata must be a mapping of text to text, not {shown(items)}"
            )
        self._items = dict(sorted(items.items()))

    def __getitem__(self, key: str) -> str:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(tuple(self._items.items()))

    def __repr__(self) -> str:
        return repr(self._items)


@dataclass(frozen=True, slots=True)
class ReplicaHandle:
    """Names one replica of one run.

    A handle is all that is needed to poll, read logs, cancel and collect, in any process. Frozen,
    hashable, equal by value; safe to share between threads.

    Attributes:
        rank: The rank of the replica, from 0 to world_size - 1.
        backend_name: Name of the backend that understands this handle.
        metadata: The backend's own ids, and the cluster, account or host they belong to; an
            immutable mapping of text to text.
        run_id: Name of the launch that the replica belongs to.
        world_size: Number of replicas of the run.

    Raises:
        InvalidRequestError: A value is not allowed.
    """

    rank: int
    backend_name: str
    metadata: Mapping[str, str] = field(default_factory=Metadata)
    run_id: str = field(default="", kw_only=True)
    world_size: int = field(default=1, kw_only=True)

    def __post_init__(self) -> None:
        check_whole("a handle's rank", self.rank, 0, LARGEST)
        check_whole("a handle's world_size", self.world_size, 1, LARGEST)
        if not self.backend_name or type(self.backend_name) is not str:
            raise InvalidRequestError(
                "a handle's backend_name must be text that is not empty, not "
                f"{shown(self.backend_name)}"
            )
        if type(self.run_id) is not str:
            raise InvalidRequestError(f"a handle's run_id must be text, not {shown(self.run_id)}")
        if not isinstance(self.metadata, Metadata):
            object.__setattr__(self, "metadata", Metadata(self.metadata))

    def to_dict(self) -> dict[str, Any]:
        """Return the handle as JSON values, with a version."""
        items = {f.name: getattr(self, f.name) for f in fields(self)}
        return {"version": HANDLE_VERSION, **items, "metadata": dict(self.metadata)}

    def to_json(self) -> str:
        """Return the handle as one line of JSON."""
        return canonical(self.to_dict())

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ReplicaHandle:
        """Make a handle from the result of :meth:`to_dict`.

        Raises:
            SpecVersionError: The data was written by another version.
            InvalidRequestError: The data is not a handle.
        """
        if not isinstance(data, Mapping) or "version" not in data:
            raise InvalidRequestError(f"this is not a handle: {shown(data)}")
        check_version("this handle", dict(data), HANDLE_VERSION)
        try:
            return cls(**{f.name: data[f.name] for f in fields(cls)})
        except KeyError as error:
            raise InvalidRequestError(f"this handle lacks {error}: {shown(dict(data))}") from None

    @classmethod
    def from_json(cls, text: str) -> ReplicaHandle:
        """Make a handle from the result of :meth:`to_json`; raises as :meth:`from_dict` does."""
        return cls.from_dict(loads_bounded(text, "this handle", RECORD_BYTES))


def check_metadata(handle: ReplicaHandle, what: str, needed: Collection[str]) -> None:
    """Refuse a handle without the metadata that lead to something, such as ``"a Job"``.

    Raises:
        InvalidRequestError: It lacks some of them.
    """
    if missing := sorted(set(needed) - handle.metadata.keys()):
        lacks = ", ".join(missing)
        raise InvalidRequestError(
            f"this handle does not lead to {what}: it lacks the metadata {lacks}"
        )
