"""Fixed membership: how replicas leave what they send to no other, and how to read their store.

A replica contributes to the shards that it updates itself without sending anything, so no reader of
the store alone can recompute them. Here every replica writes its whole contribution to a folder
before a sync; what it sends has to be a part of that, and every outer step what these make. If an
incarnation dies in the middle of a sync, the part that it did not send dies with it: the header of
the shard says so, and the part counts as if nothing had been learned.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from arithmetic import State, Vector, decode_int8
from objects import Broken, Objects, tensors
from reader import Reader
from records import DELTA
from states import joined

_SENT = re.compile(r"shard\.(\d+)\.(\d+)", re.ASCII)

if TYPE_CHECKING:
    from collections.abc import Sequence


def leave_contributions(exchange: Any, folder: Path) -> None:
    """Have an exchange write each contribution to a folder before a sync, as all replicas count it.

    Args:
        exchange: What ``connect`` returned.
        folder: Where to; files are named after sync, rank and incarnation.
    """
    import torch
    from safetensors.torch import save_file

    from diloco_core._arithmetic._layout import CHUNK_BYTES
    from diloco_core._arithmetic._sharded import as_sent

    folder.mkdir(parents=True, exist_ok=True)
    begin = exchange.begin

    def watched(job: Any, **options: Any) -> Any:
        groups = [torch.empty(group.numel, dtype=group.dtype) for group in job.layout.groups]
        read = as_sent(job)
        for shard in range(job.layout.shards):
            for piece in job.layout.chunks(shard, CHUNK_BYTES):
                whole = groups[piece.group][piece.start : piece.stop]
                whole.copy_(read(piece, torch.empty_like(whole)))
        incarnation = f"{exchange.position.sync + 1:08}.{exchange.rank:05}.{exchange.epoch:04}"
        save_file(
            {str(index): values for index, values in enumerate(groups)},
            folder / f"{incarnation}.safetensors",
        )
        return begin(job, **options)

    exchange.begin = watched


class FixedReader(Reader):
    """Reads a run with fixed membership; see :class:`reader.Reader`.

    Args:
        objects: What the store holds and held.
        contributions: The folder of :func:`leave_contributions`.
    """

    def __init__(self, objects: Objects, contributions: Path) -> None:
        super().__init__(objects)
        self._contributions = contributions

    def _read_log(self) -> None:
        """Every record names all ranks."""
        ranks = self.manifest["world_size"]
        if (self.manifest["membership"], self.manifest["min_replicas"]) != ("fixed", ranks):
            raise Broken("the manifest is not that of a run with fixed membership")
        super()._read_log()  # which checks that there are min_replicas different ranks

    def _contribution(
        self, key: str, table: dict[str, Any], before: State | None
    ) -> list[Vector] | None:
        """The whole contribution; what was sent of it must be a part of it."""
        named = DELTA.fullmatch(key)
        if named is None:
            raise Broken(f"{key} is no contribution")
        whole = self._left(int(named[1]), int(named[2]), int(named[3]))
        carried = int(named[8], 16)
        groups = [
            whole[str(index)] if carried >> index & 1 or before is None else before.values[index]
            for index in range(len(table["groups"]))
        ]
        data = self.objects.read(key)
        if data is None:
            self.findings.counts["contributions unseen"] += 1
            return groups
        sent, _ = tensors(data, key)
        for name, values in sent.items():
            if match := _SENT.fullmatch(name):
                shard, group = int(match[1]), int(match[2])
                encoded = self._is_int8 and table["groups"][group]["rule"] == "outer"
                same = np.array_equal(
                    (decode_int8(values) if encoded else values).reshape(-1),
                    groups[group][self._places(table, group)[shard]],
                    equal_nan=not encoded,
                )
                self.findings.expect(
                    "sent contributions",
                    same,
                    f"{key} holds another shard {shard} than was contributed",
                )
                self.findings.expect(
                    "own shards",
                    shard % self.manifest["world_size"] != int(named[2]),
                    f"{key} holds shard {shard}, which only its rank needs",
                )
        return groups

    def _counted(
        self,
        commit: dict[str, Any],
        fragment: int,
        contributions: Sequence[list[Vector]],
        before: State | None,
    ) -> list[list[Vector]] | None:
        """The contributions without what was lost with their makers, as the shards' headers say."""
        table = self.fragments[fragment]
        counted = [list(groups) for groups in contributions]
        for shard in range(table["shards"]):
            key = self._state_key(commit["sync"], fragment, shard)
            data = self.objects.read(key)
            if data is None:
                return None
            rank, _, epoch = tensors(data, key)[1].get("without", "").partition(".")
            if not rank:
                continue
            named = [(str(member["rank"]), str(member["epoch"])) for member in commit["members"]]
            self.findings.expect(
                "lost parts",
                (rank, epoch) in named and shard % self.manifest["world_size"] == int(rank),
                (
                    f"{key} is without the part of rank {rank} in incarnation {epoch}, which has "
                    "none in it"
                ),
            )
            if (rank, epoch) not in named or before is None:
                return None
            lost = counted[named.index((rank, epoch))]
            for group, entry in enumerate(table["groups"]):
                place = self._places(table, group)[shard]
                values = lost[group].copy()
                values[place] = 0 if entry["rule"] == "outer" else before.values[group][place]
                lost[group] = values
        return counted

    def _left(self, sync: int, rank: int, epoch: int) -> dict[str, Vector]:
        path = self._contributions / f"{sync:08}.{rank:05}.{epoch:04}.safetensors"
        if not path.exists():
            raise Broken(
                f"incarnation {epoch} of rank {rank} is in sync {sync}, and has not left its "
                f"contribution in {path}"
            )
        return tensors(path.read_bytes(), path.name)[0]

    def _places(self, table: dict[str, Any], group: int) -> list[slice]:
        """Where every shard lies in a group's flat vector; the first state has the same layout."""
        fragment = next(index for index, own in enumerate(self.fragments) if own is table)
        places, start = [], 0
        for shard in range(table["shards"]):
            key = self._state_key(0, fragment, shard)
            data = self.objects.read(key)
            if data is None:
                raise Broken(f"the initial state of fragment {fragment} was not seen")
            found, _ = tensors(data, key)
            stop = start + joined([found], f"values.{group}", table["groups"][group]).size
            places.append(slice(start, stop))
            start = stop
        return places
