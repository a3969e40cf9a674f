"""Strict runs: how their replicas leave what nobody is sent, and how their store is read from outside.

A replica contributes to the shards that it updates itself without sending anything, so no reader of the store alone can
recompute them. Here every replica writes its whole contribution to a folder before a sync; what it sends has to be a part of
that, and every outer step what these make.
"""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from arithmetic import State, Vector
from objects import Broken, Objects, tensors
from reader import Reader
from states import joined

if TYPE_CHECKING:
    from collections.abc import Callable

_DELTA = re.compile(
    r"deltas/(\d{8})/(\d{5})\.[0-9a-f]{16}\.[0-9a-f]{16}\.([0-9a-f]{1,16})(?:\.(\d+)-(\d+)-([0-9a-f]+))?\.safetensors",
    re.ASCII,
)


def leave_contributions(exchange: Any, folder: Path, counted: Callable[[], int]) -> None:
    """Have a strict exchange write every contribution to a folder before it syncs.

    Args:
        exchange: What ``connect`` returned.
        folder: Where to; files are named after sync and rank.
        counted: The inner steps that have been taken.
    """
    import torch
    from safetensors.torch import save_file

    from diloco_core._arithmetic._layout import Piece

    folder.mkdir(parents=True, exist_ok=True)
    begin, number = exchange.begin, 0

    def watched(job: Any, **options: Any) -> Any:
        nonlocal number
        if job.kind != "initial":
            groups = {}
            for index, group in enumerate(job.layout.groups):
                out = torch.empty(group.numel, dtype=group.dtype)
                groups[str(index)] = job.contributed(Piece(index, 0, group.numel), out).clone()
            target = folder / f"{number:08}.{exchange.rank:05}.safetensors"
            save_file(groups, target, {"to": str(counted())})
        number += 1
        return begin(job, **options)

    exchange.begin = watched


class StrictReader(Reader):
    """Reads a strict run; see :class:`reader.Reader`.

    Args:
        objects: What the store holds and held.
        contributions: The folder of :func:`leave_contributions`.
    """

    def __init__(self, objects: Objects, contributions: Path) -> None:
        super().__init__(objects)
        self._contributions = contributions

    @property
    def _run(self) -> str:
        return str(self.manifest["run"])[:16]

    def _read_log(self) -> None:
        """The records name all ranks, and every rank has taken the same steps since the last sync of the fragment."""
        count, ranks = len(self.fragments), list(range(self.manifest["world_size"]))
        counted = [dict.fromkeys(ranks, 0) for _ in self.fragments]
        stored = self.objects.stored("commits")
        for number in range(len(stored)):
            key = f"commits/{number:08}.{self._run}.json"
            found = self.objects.record(key)
            if found is None:
                raise Broken(f"{key} is missing, and there are later ones")
            record, _ = found
            fragment = number if number < count else (number - count) % count
            same = (record["kind"], record["sync"], record["name"]) == (
                "commit",
                number,
                self.fragments[fragment]["name"],
            )
            self.findings.expect("records", same, f"{key} is of another sync")
            named = [_DELTA.fullmatch(member["key"]) for member in record["members"]]
            whose = [(int(name[1]), int(name[2])) if name else None for name in named]
            self.findings.expect(
                "members",
                whose == [(number, rank) for rank in ranks],
                f"{key} names {record['members']}",
            )
            if number < count:
                continue
            # The rate that was asked for last counts; of several replicas that ask at once, that of the greatest rank.
            proposed = [(int(name[4]), int(name[5]), name[6]) for name in named if name]
            members = []
            for member in record["members"]:
                rank, first = member["rank"], counted[fragment][member["rank"]]
                stop = int(self._left(number, rank)[1]["to"])
                self.findings.expect(
                    "steps",
                    first < stop,
                    f"{key} counts the steps {first} to {stop} of rank {rank}",
                )
                counted[fragment][rank] = stop
                members.append({**member, "from": first, "to": stop})
            steps = {(member["from"], member["to"]) for member in members}
            self.findings.expect(
                "positions",
                len(steps) == 1,
                f"{key} counts other steps of one rank than of another: {steps}",
            )
            self.commits.append(
                {
                    "sync": number - count + 1,
                    "fragment": fragment,
                    "members": members,
                    "outer_lr": [max(proposed)[2]],
                }
            )

    def _left(self, number: int, rank: int) -> tuple[dict[str, Vector], dict[str, str]]:
        path = self._contributions / f"{number:08}.{rank:05}.safetensors"
        if not path.exists():
            raise Broken(
                f"rank {rank} is in sync {number}, and has not left its contribution in {path}"
            )
        return tensors(path.read_bytes(), path.name)

    def _contribution(
        self,
        key: str,
        table: dict[str, Any],
        before: State | None,  # noqa: ARG002
    ) -> list[Vector] | None:
        """The whole contribution; what was sent of it must be a part of it."""
        named = _DELTA.fullmatch(key)
        if named is None:
            raise Broken(f"{key} is no contribution")
        whole, _ = self._left(int(named[1]), int(named[2]))
        groups = [whole[str(index)] for index in range(len(table["groups"]))]
        data = self.objects.read(key)
        if data is None:
            self.findings.counts["contributions unseen"] += 1
            return groups
        sent, _ = tensors(data, key)
        shards = self._shards(int(named[1]), table)
        for index, group in enumerate(groups):
            start = 0
            for number, shard in enumerate(shards):
                stop = start + shard[index]
                own = sent.get(f"shard.{number}.{index}")
                if own is not None:
                    same = np.array_equal(
                        own.reshape(-1), group.reshape(-1)[start:stop], equal_nan=True
                    )
                    self.findings.expect(
                        "sent contributions",
                        same,
                        f"{key} holds another shard {number} than was contributed",
                    )
                start = stop
        return groups

    def _shards(self, number: int, table: dict[str, Any]) -> list[list[int]]:
        """How many elements of every group are in every shard; as in the first state, which has the same layout."""
        fragment = next(index for index, own in enumerate(self.fragments) if own is table)
        sizes = []
        for shard in range(table["shards"]):
            data = self.objects.read(f"state/{fragment:08}/{shard:05}.{self._run}.safetensors")
            if data is None:
                raise Broken(f"the initial state of fragment {fragment} was not seen")
            found, _ = tensors(data, f"state of sync {number}")
            sizes.append(
                [
                    joined([found], f"values.{i}", group).size
                    for i, group in enumerate(table["groups"])
                ]
            )
        return sizes

    def _state_key(self, sync: int, fragment: int, shard: int) -> str:
        number = sync + len(self.fragments) - 1 if sync else fragment
        return f"state/{number:08}/{shard:05}.{self._run}.safetensors"

    def _check_done(self, commit: dict[str, Any], fragment: int) -> None:
        """There are no such records."""

    def _look_for_what_is_named(self) -> None:
        """The newest state of every fragment."""
        there = self.objects.stored("state")
        for fragment, table in enumerate(self.fragments):
            own = [commit["sync"] for commit in self.commits[fragment :: len(self.fragments)]]
            syncs = self._states.chain(max(own, default=0))
            needed = product(syncs, range(table["shards"]))
            for key in (self._state_key(sync, fragment, shard) for sync, shard in needed):
                self.findings.expect(
                    "named objects",
                    key in there,
                    f"{key} is missing, and it belongs to the newest state",
                )
