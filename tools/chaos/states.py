"""Published states as an outsider reads them: all shards' values, or additions to those before."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from arithmetic import State, decode_int8, int8_slack
from objects import tensors

if TYPE_CHECKING:
    from collections.abc import Callable

    from arithmetic import Vector
    from findings import Findings
    from objects import Objects


class States:
    """Reads the states of one run.

    Args:
        objects: What the store holds and held.
        manifest: The manifest of the run.
        findings: What is wrong is added to these.
        key: Returns where a shard is, given sync, fragment and number; sync 0 is the state at the
            beginning.

    Attributes:
        encoded: Whether states hold what the values were changed by, and only some of them the
            values.
        published: What was read, by sync and fragment.
        sums: The checksums of the values of the state that was read last, shard by shard.
    """

    def __init__(
        self,
        objects: Objects,
        manifest: dict[str, Any],
        findings: Findings,
        key: Callable[[int, int, int], str],
    ) -> None:
        self._objects = objects
        self._key = key
        self._fragments = manifest["fragments"]
        self._findings = findings
        settings = manifest["settings"]
        codec = settings.get("state_codec", "plain")
        if codec not in {"plain", "int8"}:
            raise NotImplementedError(f"states that are published as {codec} are not read")
        self.encoded = codec == "int8"
        self._whole_every = int(settings.get("full_state_every", "1"))
        self.published: dict[tuple[int, int], State] = {}
        self.sums: list[int] = []

    def is_whole(self, sync: int) -> bool:
        """Whether a state holds its values, and not only what they were changed by."""
        turn = (sync - 1) // len(self._fragments) + 1 if sync else 0
        return turn % self._whole_every == 0

    def chain(self, sync: int) -> list[int]:
        """The syncs whose states make the state after a sync: back to one that is whole."""
        syncs = [sync]
        while not self.is_whole(syncs[-1]):
            syncs.append(max(syncs[-1] - len(self._fragments), 0))
        return syncs

    def read(self, sync: int, fragment: int, before: State | None) -> State | None:
        """A state, if all of its shards were seen, and the state before where it is needed."""
        table = self._fragments[fragment]
        shards = []
        for shard in range(table["shards"]):
            key = self._key(sync, fragment, shard)
            data = self._objects.read(key)
            if data is None:
                return None
            shards.append(tensors(data, key)[0])
        self.sums = [
            int.from_bytes(found["values.xxh3"].tobytes()[-8:], "little") for found in shards
        ]
        make = self._added if self.encoded and sync else self._as_it_is
        state = make(shards, table["groups"], before, self.is_whole(sync))
        if state is not None:
            self.published[sync, fragment] = state
        return state

    def _as_it_is(
        self,
        shards: list[dict[str, Vector]],
        groups: list[dict[str, Any]],
        before: State | None,  # noqa: ARG002 - the other way needs it
        whole: bool,  # noqa: ARG002
    ) -> State:
        state = State([])
        for group, entry in enumerate(groups):
            state.values.append(joined(shards, f"values.{group}", entry))
            name = f"outer.momentum_buffer.{group}"
            if any(name in found for found in shards):
                state.momentum[group] = joined(shards, name, entry)
        return state

    def _added(
        self,
        shards: list[dict[str, Vector]],
        groups: list[dict[str, Any]],
        before: State | None,
        whole: bool,
    ) -> State | None:
        """Add the update to the values before.

        A whole state holds the sum as well, which has to be the same.
        """
        if before is None and not whole:
            return None
        state = State([])
        for group, entry in enumerate(groups):
            name = f"update.{group}"
            if entry["rule"] == "outer":
                updates = decoded(shards, name)
                values = (
                    None if before is None else before.values[group] + joined(updates, name, entry)
                )
                for kind, kept in (
                    ("momentum_buffer", state.momentum),
                    ("update_residual", state.residual),
                ):
                    of_kind = f"outer.{kind}.{group}"
                    if any(of_kind in found for found in shards):
                        parts = decoded(shards, of_kind)
                        kept[group] = joined(parts, of_kind, entry)
                        state.slack[kind, group] = np.concatenate(
                            [int8_slack(part[of_kind]) for part in parts]
                        )
            else:
                values = joined(shards, name, entry)
            if whole:
                own = joined(shards, f"values.{group}", entry)
                self._findings.expect(
                    "whole states",
                    values is None or own.tobytes() == values.tobytes(),
                    f"group {group} of a whole state is not the state before it and the update",
                )
                values = own
            assert values is not None
            state.values.append(values)
        return state


def decoded(shards: list[dict[str, Vector]], name: str) -> list[dict[str, Vector]]:
    """The encoded tensor of this name, of the shards that have it."""
    return [{name: decode_int8(found[name])} for found in shards if name in found]


def joined(shards: list[dict[str, Vector]], name: str, group: dict[str, Any]) -> Vector:
    """The parts of a group's flat vector together; a shard without elements of it has none."""
    parts = [found[name] for found in shards if name in found]
    return np.concatenate(parts) if parts else np.zeros(0, group["dtype"].removeprefix("torch."))
