"""Reads the store of a run from outside and says whether it tells one true story; knows the format, not the program.

    python tools/chaos/reader.py STORE HISTORY

Every outer step is recomputed in float64 from the contributions that its record names, and compared with what was
published. The records must form one chain; no inner step of a rank may count twice; the ledgers must say that exactly the
batches were learned that the records count; nothing that is named may be missing.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from arithmetic import State, Vector, disagreement, outer_step
from objects import Broken, Objects, tensors

_DELTA = re.compile(
    r"deltas/(\d{8})/(\d{5})\.(\d{4,})\.(\d+)-(\d+)\.([0-9a-f]{16})\.([0-9a-f]{16})\.([0-9a-f]{1,16})\.safetensors",
    re.ASCII,
)


class Reader:
    """Reads one run.

    Args:
        objects: What the store holds and held.

    Attributes:
        counts: How often each thing was checked.
        violations: What is wrong, a sentence each.
        gaps: Inner steps that no record counts, as (rank, first, one past the last): learned, and dropped.
        positions: Inner steps of every rank that the log counts.
    """

    def __init__(self, objects: Objects) -> None:
        self.objects = objects
        self.counts: Counter[str] = Counter()
        self.violations: list[str] = []
        self.gaps: set[tuple[int, int, int]] = set()
        self.positions: dict[int, int] = {}
        self.commits: list[dict[str, Any]] = []
        self.published: dict[tuple[int, int], State] = {}

    def read(self) -> None:
        """Check everything."""
        try:
            found = self.objects.record("manifest.json")
            if found is None:
                raise Broken("there is no manifest")
            self.manifest, self._manifest_bytes = found
            self.fragments = self.manifest["fragments"]
            self._read_log()
            for fragment in range(len(self.fragments)):
                self._replay(fragment)
            self._look_for_what_is_named()
        except Broken as broken:
            self._complain(str(broken))

    def _complain(self, text: str) -> None:
        if len(self.violations) < 100:
            self.violations.append(text)

    def _expect(self, what: str, holds: bool, text: str) -> None:
        self.counts[what] += 1
        if not holds:
            self._complain(text)

    # The log

    def _read_log(self) -> None:
        previous = run = xxhash.xxh3_64_hexdigest(self._manifest_bytes)
        lives = self.objects.stored("claims")
        counted: list[dict[int, int]] = [{} for _ in self.fragments]
        last = max((int(Path(key).stem) for key in self.objects.stored("commits")), default=0)
        for sync in range(1, last + 1):
            key = f"commits/{sync:08}.json"
            found = self.objects.record(key)
            if found is None:
                raise Broken(f"{key} is missing, and there are later ones")
            commit, data = found
            if commit["kind"] != "commit":
                raise Broken(f"{key} is a {commit['kind']}, and nobody asked for one")
            self.commits.append(commit)
            fragment = (sync - 1) % len(self.fragments)
            self._expect(
                "records",
                (commit["sync"], commit["fragment"]) == (sync, fragment),
                f"{key} is of another sync",
            )
            self._expect(
                "runs",
                commit["run"] == run,
                f"{key} is of run {commit['run']}, and the manifest of {run}",
            )
            self._expect(
                "chain",
                commit["previous"] == previous,
                f"{key} does not follow the record before it",
            )
            previous = xxhash.xxh3_64_hexdigest(data)
            self._check_members(key, commit, counted[fragment], lives)
            positions = {rank: position for rank, position in commit["positions"] if position}
            self._expect(
                "positions",
                positions == counted[fragment],
                f"{key} says {positions}, the log {counted[fragment]}",
            )
        for positions in counted:
            for rank, position in positions.items():
                self.positions[rank] = max(position, self.positions.get(rank, 0))

    def _check_members(
        self, key: str, commit: dict[str, Any], counted: dict[int, int], lives: set[str]
    ) -> None:
        members = commit["members"]
        ranks = [member["rank"] for member in members]
        self._expect("members", ranks == sorted(set(ranks)), f"{key} has the members {ranks}")
        quorum = self.manifest["min_replicas"]
        self._expect(
            "quorum",
            len(ranks) >= quorum,
            f"{key} has {len(ranks)} members, and {quorum} are needed",
        )
        for member in members:
            rank, first, stop = member["rank"], member["from"], member["to"]
            named = _DELTA.fullmatch(member["key"])
            own = (commit["sync"], rank, member["epoch"], first, stop)
            agrees = named is not None and own == tuple(map(int, named.groups()[:5]))
            agrees = agrees and (named[6], named[7]) == (commit["base"], self._schema(commit))
            self._expect("keys", agrees, f"{key} names {member['key']} for {own}")
            life = f"claims/{rank:05}/{member['epoch']:04}.json"
            self._expect("lives", life in lives, f"{key} counts a life without a claim: {life}")
            before = counted.get(rank, 0)
            self._expect(
                "steps",
                before <= first < stop,
                f"{key} counts the inner steps {first} to {stop} of rank {rank}, and {before} are counted already",
            )
            if first > before:
                self.gaps.add((rank, before, first))
            counted[rank] = stop

    def _schema(self, commit: dict[str, Any]) -> str:
        """What the keys of contributions to a sync show of the run and of the fragment."""
        identity = [
            commit["run"],
            self.fragments[(commit["sync"] - 1) % len(self.fragments)]["fingerprint"],
        ]
        return xxhash.xxh3_128_hexdigest(json.dumps(identity).encode())[:16]

    # The arithmetic

    def _replay(self, fragment: int) -> None:
        """Recompute all syncs of a fragment, from published state to published state."""
        table = self.fragments[fragment]
        groups, number = table["groups"], len(self.fragments)
        state = self._state(0, fragment)
        if state is None:
            self.counts["initial state unseen"] += 1
        self._totals = Totals(table)
        scales: list[Vector] = []
        steps = 0
        for commit in self.commits[fragment::number]:
            sync = commit["sync"]
            contributions = [
                self._contribution(member["key"], table, state) for member in commit["members"]
            ]
            for member, contribution in zip(commit["members"], contributions, strict=True):
                if contribution is not None:
                    self._check_ledger(member, contribution, table)
            self._totals.add(commit["members"])
            whole = [contribution for contribution in contributions if contribution is not None]
            computed = None
            if state is not None and len(whole) == len(contributions):
                computed, fresh = outer_step(state, whole, groups, self.manifest["settings"])
                scales = (
                    [np.maximum(a, b) for a, b in zip(scales, fresh, strict=True)]
                    if scales and steps
                    else fresh
                )
                steps += 1
            else:
                self.counts["steps not recomputed"] += 1
            published = self._state(sync, fragment)
            if published is not None and computed is not None:
                self._compare(sync, fragment, computed, published, scales, steps)
            if published is not None:
                self._check_done(commit, fragment)
                self._check_totals(sync, published, table)
                steps = 0
            state = published or computed
        if number and self.commits[fragment::number]:
            self._expect(
                "fragments",
                state is not None,
                f"the last state of fragment {fragment} cannot be told",
            )

    def _contribution(
        self, key: str, table: dict[str, Any], before: State | None
    ) -> list[Vector] | None:
        """Flat values of every group; those that the key does not name are as in the state before."""
        data = self.objects.read(key)
        if data is None:
            return None
        found, _ = tensors(data, key)
        named = _DELTA.fullmatch(key)
        carried = int(named[8], 16) if named else 0
        groups = []
        for group, entry in enumerate(table["groups"]):
            values = joined(
                found, [f"shard.{shard}.{group}" for shard in range(table["shards"])], entry
            )
            is_carried = bool(carried >> group & 1)
            self._expect(
                "carried groups",
                is_carried or not len(values),
                f"{key} carries group {group} unnamed",
            )
            self._expect(
                "carried groups",
                is_carried or entry["rule"] != "outer",
                f"{key} lacks group {group}",
            )
            groups.append(values if is_carried or before is None else before.values[group])
        return groups

    def _state(self, sync: int, fragment: int) -> State | None:
        """A published state, where all of its shards were seen."""
        table = self.fragments[fragment]
        shards = []
        sums = []
        for shard in range(table["shards"]):
            key = self._state_key(sync, fragment, shard)
            data = self.objects.read(key)
            if data is None:
                return None
            found, _ = tensors(data, key)
            shards.append(found)
            sums.append(int.from_bytes(found["values.xxh3"].tobytes()[-8:], "little"))
        state = State([])
        for group, entry in enumerate(table["groups"]):
            names = [f"values.{group}", f"outer.momentum_buffer.{group}"]
            state.values.append(
                np.concatenate([found.get(names[0], empty(entry)) for found in shards])
            )
            if any(names[1] in found for found in shards):
                state.momentum[group] = np.concatenate(
                    [found.get(names[1], empty(entry)) for found in shards]
                )
        self.published[sync, fragment] = state
        self._sums = sums
        return state

    def _state_key(self, sync: int, fragment: int, shard: int) -> str:
        folder = f"state/{sync:08}" if sync else f"initial/{self.manifest['initial']}"
        return f"{folder}/{fragment:03}.{shard:05}.safetensors"

    def _compare(
        self,
        sync: int,
        fragment: int,
        computed: State,
        published: State,
        scales: list[Vector],
        steps: int,
    ) -> None:
        self.counts["steps recomputed"] += steps
        for group, (mine, theirs) in enumerate(zip(computed.values, published.values, strict=True)):
            off = disagreement(mine, theirs, scales[group], steps)
            self._expect(
                "values",
                off <= 1,
                f"the state of fragment {fragment} after sync {sync}, group {group}, is not what its contributions make: "
                f"{off:.3g} times as far off as rounding explains",
            )
        self._expect(
            "momentum",
            computed.momentum.keys() == published.momentum.keys(),
            f"the state of fragment {fragment} after sync {sync} has momentum of the groups {sorted(published.momentum)}, "
            f"not {sorted(computed.momentum)}",
        )
        for group in computed.momentum.keys() & published.momentum.keys():
            off = disagreement(
                computed.momentum[group], published.momentum[group], scales[group], steps
            )
            self._expect(
                "momentum",
                off <= 1,
                f"the momentum of fragment {fragment} after sync {sync}, group {group}, is {off:.3g} times as far off as "
                "rounding explains",
            )

    def _check_done(self, commit: dict[str, Any], fragment: int) -> None:
        """The record of a complete state says what its shards and the log say; so does the base of the next sync."""
        sync = commit["sync"]
        record = self.objects.record(f"state/{sync:08}/{fragment:03}.done.json")
        sums = [f"{value:016x}" for value in self._sums]
        if record is not None:
            self._expect(
                "sums",
                record[0]["sums"] == sums,
                f"the done record of sync {sync} has other sums than its shards",
            )
            own = {
                name: value
                for name, value in commit.items()
                if name not in {"kind", "format", "xxh3_128"}
            }
            self._expect(
                "done",
                record[0]["commit"] == own,
                f"the done record of sync {sync} is not of its commit",
            )
        following = sync + len(self.fragments)
        if following <= len(self.commits):
            digest = xxhash.xxh3_64_hexdigest(
                b"".join(value.to_bytes(8, "little") for value in self._sums)
            )
            base = self.commits[following - 1]["base"]
            self._expect(
                "bases",
                base == digest,
                f"sync {following} starts from {base}, and the state before it is {digest}",
            )

    # The ledgers

    def _check_ledger(
        self, member: dict[str, Any], contribution: list[Vector], table: dict[str, Any]
    ) -> None:
        """A contribution holds exactly the batches that it counts."""
        for ledger, values in ledgers(table, contribution):
            expected = np.zeros(values.shape)
            np.subtract.at(
                expected[member["rank"]],
                np.arange(member["from"], member["to"]) % values.shape[1],
                1,
            )
            self._expect(
                "ledgers of contributions",
                bool(np.abs(values - expected).max() < 1e-6),
                f"{member['key']} claims the batches {member['from']} to {member['to']}, but was made from others "
                f"({ledger}: {differences(values, expected)})",
            )

    def _check_totals(self, sync: int, published: State, table: dict[str, Any]) -> None:
        """With plain averaging the global ledger is the sum of what was counted, each batch once."""
        settings = self.manifest["settings"]
        if float(settings["outer_lr"]) != 1.0 or float(settings["outer_momentum"]) != 0.0:
            return
        for ledger, values in ledgers(table, published.values):
            expected = self._totals.values.get(ledger, np.zeros(values.shape))
            self._expect(
                "global ledgers",
                bool(np.abs(values - expected).max() < 1e-6),
                f"after sync {sync} the global {ledger} does not hold every counted batch once: "
                f"{differences(values, expected)}",
            )

    def compare_export(self, path: Path) -> None:
        """The exported model is the newest published state, bit by bit."""
        exported, _ = tensors(path.read_bytes(), path.name)
        for fragment, table in enumerate(self.fragments):
            newest = max(sync for sync, number in self.published if number == fragment)
            groups = self.published[newest, fragment].values
            for tensor in table["tensors"]:
                start, shape = tensor["start"], tensor["shape"]
                values = groups[tensor["group"]][start : start + int(np.prod(shape))].reshape(shape)
                own = exported.get(tensor["name"])
                same = own is not None and np.array_equal(own.astype(values.dtype), values)
                self._expect(
                    "exported tensors",
                    same,
                    f"the export has another {tensor['name']} than the state {newest}",
                )

    # What must be there

    def _look_for_what_is_named(self) -> None:
        """The newest complete state of every fragment, and all that was committed after it."""
        there = (
            self.objects.stored("state")
            | self.objects.stored("deltas")
            | self.objects.stored("initial")
        )
        for fragment, table in enumerate(self.fragments):
            own = [commit["sync"] for commit in self.commits[fragment :: len(self.fragments)]]
            done = max(
                (sync for sync in own if f"state/{sync:08}/{fragment:03}.done.json" in there),
                default=0,
            )
            for shard in range(table["shards"]):
                key = self._state_key(done, fragment, shard)
                self._expect(
                    "named objects",
                    key in there,
                    f"{key} is missing, and it belongs to the newest state",
                )
            for sync in own:
                if sync > done:
                    for member in self.commits[sync - 1]["members"]:
                        text = f"{member['key']} is missing, and no state after it is complete"
                        self._expect("named objects", member["key"] in there, text)


class Totals:
    """What the global ledgers of a fragment must hold under plain averaging.

    Args:
        table: The fragment, as the manifest has it.
    """

    def __init__(self, table: dict[str, Any]) -> None:
        tables = [tensor for tensor in table["tensors"] if tensor["name"].endswith("ledger")]
        self.values = {tensor["name"]: np.zeros(tensor["shape"]) for tensor in tables}

    def add(self, members: list[dict[str, Any]]) -> None:
        """A sync counts for every batch of every member the mean's part of it."""
        for values in self.values.values():
            for member in members:
                batches = np.arange(member["from"], member["to"]) % values.shape[1]
                np.add.at(values[member["rank"]], batches, 1 / len(members))


def ledgers(table: dict[str, Any], groups: list[Vector]) -> list[tuple[str, Vector]]:
    """Name and values of every ledger, out of the flat groups of a fragment."""
    found = []
    for tensor in table["tensors"]:
        if tensor["name"].endswith("ledger"):
            start, shape = tensor["start"], tensor["shape"]
            found.append(
                (
                    tensor["name"],
                    groups[tensor["group"]][start : start + int(np.prod(shape))].reshape(shape),
                )
            )
    return found


def differences(values: Vector, expected: Vector) -> str:
    """The first elements that differ."""
    places = np.argwhere(np.abs(values - expected) >= 1e-6)[:5]
    text = ", ".join(
        f"({r}, {b}) is {values[r, b]:.3g} instead of {expected[r, b]:.3g}" for r, b in places
    )
    return f"{text} and so on" if len(places) == 5 else text


def joined(found: dict[str, Vector], names: list[str], group: dict[str, Any]) -> Vector:
    """The parts of a group's flat vector together; a shard without elements of it has none."""
    parts = [found[name] for name in names if name in found]
    return np.concatenate(parts) if parts else empty(group)


def empty(group: dict[str, Any]) -> Vector:
    """A vector without elements, of a group's dtype."""
    return np.zeros(0, group["dtype"].removeprefix("torch."))


def main() -> int:
    """The command line; returns the exit status."""
    reader = Reader(Objects(Path(sys.argv[1]), Path(sys.argv[2])))
    reader.read()
    print(
        json.dumps(
            {"checks": reader.counts, "violations": reader.violations, "gaps": sorted(reader.gaps)}
        )
    )
    return 1 if reader.violations else 0


if __name__ == "__main__":
    sys.exit(main())
