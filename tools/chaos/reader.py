"""Reads a run's store from outside: does it tell one true story? Knows the format alone.

    python tools/chaos/reader.py STORE HISTORY

Every outer step is recomputed in float64 from the contributions that its record names, and compared
with what was published. The records must form one chain; no inner step of a rank may count twice;
the ledgers must say that exactly the batches were learned that the records count; nothing that is
named may be missing.
"""

from __future__ import annotations

import json
import struct
import sys
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash
from arithmetic import State, Vector, decode_int8, disagreement, outer_step
from findings import Findings
from ledgers import Ledgers
from objects import Broken, Objects, tensors
from records import DELTA, Log
from states import States, joined

if TYPE_CHECKING:
    from collections.abc import Sequence


class Reader:
    """Reads one run.

    Args:
        objects: What the store holds and held.

    Attributes:
        findings: What was checked, and what is wrong.
        gaps: Inner steps that no record counts, as (rank, first, one past the last): learned, and
            dropped.
        positions: Inner steps of every rank that the log counts.
    """

    def __init__(self, objects: Objects) -> None:
        self.objects = objects
        self.findings = Findings()
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
            texts = self.manifest["tensors"].values()
            self._is_int8 = all(text.endswith("sent as int8") for text in texts)
            self._states = States(self.objects, self.manifest, self.findings, self._state_key)
            self.published = self._states.published
            self._read_log()
            for fragment in range(len(self.fragments)):
                self._replay(fragment)
            self._look_for_what_is_named()
        except Broken as broken:
            self.findings.add(str(broken))

    def _read_log(self) -> None:
        log = Log(self.objects, self.manifest, self.findings)
        self.commits, self.gaps, self.positions = log.commits, log.gaps, log.positions
        log.read(self._manifest_bytes)

    def _replay(self, fragment: int) -> None:
        """Recompute all syncs of a fragment, from published state to published state."""
        table = self.fragments[fragment]
        groups, number = table["groups"], len(self.fragments)
        state = self._states.read(0, fragment, None)
        if state is None:
            self.findings.counts["initial state unseen"] += 1
        ledgers = Ledgers(table, self.findings)
        scales: list[Vector] = []
        steps = 0
        for commit in self.commits[fragment::number]:
            sync = commit["sync"]
            contributions = [
                self._contribution(member["key"], table, state) for member in commit["members"]
            ]
            for member, contribution in zip(commit["members"], contributions, strict=True):
                if contribution is not None:
                    ledgers.check(member, contribution)
            ledgers.add(commit["members"])
            whole = [contribution for contribution in contributions if contribution is not None]
            computed = None
            counted = None
            if len(whole) == len(contributions):
                counted = self._counted(commit, fragment, whole, state)
            if counted is not None:
                ledgers.take_back(whole, counted)
            if state is not None and counted is not None:
                (lr,) = (
                    struct.unpack(">d", bytes.fromhex(digits))[0] for digits in commit["outer_lr"]
                )
                settings = {**self.manifest["settings"], "outer_lr": str(lr)}
                computed, fresh = outer_step(state, counted, groups, settings)
                scales = (
                    [np.maximum(a, b) for a, b in zip(scales, fresh, strict=True)]
                    if scales and steps
                    else fresh
                )
                steps += 1
            else:
                self.findings.counts["steps not recomputed"] += 1
            published = self._states.read(sync, fragment, state)
            if published is not None and computed is not None:
                self._compare(sync, fragment, computed, published, scales, steps)
            if published is not None:
                self._check_done(commit, fragment)
                if not self._states.encoded:  # what encoding has lost of the batches comes later
                    ledgers.check_global(sync, published.values, self.manifest["settings"])
                steps = 0
            state = published or (None if self._states.encoded else computed)
        if number and self.commits[fragment::number]:
            self.findings.expect(
                "fragments",
                state is not None,
                f"the last state of fragment {fragment} cannot be told",
            )

    def _contribution(
        self, key: str, table: dict[str, Any], before: State | None
    ) -> list[Vector] | None:
        """Flat values of every group; those that the key does not name are as before."""
        data = self.objects.read(key)
        if data is None:
            return None
        found, _ = tensors(data, key)
        named = DELTA.fullmatch(key)
        carried = int(named[8], 16) if named else 0
        groups = []
        for group, entry in enumerate(table["groups"]):
            names = [f"shard.{shard}.{group}" for shard in range(table["shards"])]
            if entry["rule"] == "outer" and self._is_int8:
                found.update({name: decode_int8(found[name]) for name in names if name in found})
            values = joined([{"": found[name]} for name in names if name in found], "", entry)
            is_carried = bool(carried >> group & 1)
            self.findings.expect(
                "carried groups",
                is_carried or not len(values),
                f"{key} carries group {group} unnamed",
            )
            self.findings.expect(
                "carried groups",
                is_carried or entry["rule"] != "outer",
                f"{key} lacks group {group}",
            )
            groups.append(values if is_carried or before is None else before.values[group])
        return groups

    def _counted(
        self,
        # Of use in runs whose contributions are not sent as a whole
        commit: dict[str, Any],  # noqa: ARG002
        fragment: int,  # noqa: ARG002
        contributions: Sequence[list[Vector]],
        before: State | None,  # noqa: ARG002
    ) -> Sequence[list[Vector]] | None:
        """What the contributions count for; None if that cannot be told."""
        return contributions

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
        self.findings.counts["steps recomputed"] += steps
        for group, (mine, theirs) in enumerate(zip(computed.values, published.values, strict=True)):
            residual = published.residual.get(group, np.zeros(1, theirs.dtype))
            slack = published.slack.get(("update_residual", group), 0.0)
            off = disagreement(mine, theirs + residual, scales[group], steps, slack)
            self.findings.expect(
                "values",
                off <= 1,
                f"the state of fragment {fragment} after sync {sync}, group {group}, is not what "
                f"its contributions make: {off:.3g} times as far off as rounding explains",
            )
        self.findings.expect(
            "momentum",
            computed.momentum.keys() == published.momentum.keys(),
            f"the state of fragment {fragment} after sync {sync} has momentum of the groups "
            f"{sorted(published.momentum)}, not {sorted(computed.momentum)}",
        )
        for group in computed.momentum.keys() & published.momentum.keys():
            off = disagreement(
                computed.momentum[group],
                published.momentum[group],
                scales[group],
                steps,
                published.slack.get(("momentum_buffer", group), 0.0),
            )
            self.findings.expect(
                "momentum",
                off <= 1,
                f"the momentum of fragment {fragment} after sync {sync}, group {group}, is "
                f"{off:.3g} times as far off as rounding explains",
            )

    def _check_done(self, commit: dict[str, Any], fragment: int) -> None:
        """A complete state's record agrees with its shards and the log; so does the next base."""
        sync = commit["sync"]
        record = self.objects.record(f"state/{sync:08}/{fragment:03}.done.json")
        sums = [f"{value:016x}" for value in self._states.sums]
        if record is not None:
            self.findings.expect(
                "sums",
                record[0]["sums"] == sums,
                f"the done record of sync {sync} has other sums than its shards",
            )
            own = {
                name: value
                for name, value in commit.items()
                if name not in {"kind", "format", "xxh3_128"}
            }
            self.findings.expect(
                "done",
                record[0]["commit"] == own,
                f"the done record of sync {sync} is not of its commit",
            )
        following = sync + len(self.fragments)
        if following <= len(self.commits):
            digest = xxhash.xxh3_64_hexdigest(
                b"".join(value.to_bytes(8, "little") for value in self._states.sums)
            )
            base = self.commits[following - 1]["base"]
            self.findings.expect(
                "bases",
                base == digest,
                f"sync {following} starts from {base}, and the state before it is {digest}",
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
                self.findings.expect(
                    "exported tensors",
                    same,
                    f"the export has another {tensor['name']} than the state {newest}",
                )

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
            needed = product(self._states.chain(done), range(table["shards"]))
            for key in (self._state_key(sync, fragment, shard) for sync, shard in needed):
                self.findings.expect(
                    "named objects",
                    key in there,
                    f"{key} is missing, and it belongs to the newest state",
                )
            for sync in own:
                if sync > done:
                    for member in self.commits[sync - 1]["members"]:
                        text = f"{member['key']} is missing, and no state after it is complete"
                        self.findings.expect("named objects", member["key"] in there, text)


def main() -> int:
    """The command line; returns the exit status."""
    reader = Reader(Objects(Path(sys.argv[1]), Path(sys.argv[2])))
    reader.read()
    print(
        json.dumps(
            {
                "checks": reader.findings.counts,
                "violations": reader.findings.violations,
                "gaps": sorted(reader.gaps),
            }
        )
    )
    return 1 if reader.findings.violations else 0


if __name__ == "__main__":
    sys.exit(main())
