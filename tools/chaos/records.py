"""A run's log as an outsider reads it: one chain that counts no inner step of a rank twice."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import xxhash
from findings import Findings
from objects import Broken, Objects

DELTA = re.compile(
    r"deltas/(\d{8})/(\d{5})\.(\d{4,})\.(\d+)-(\d+)"
    r"\.([0-9a-f]{16})\.([0-9a-f]{16})\.([0-9a-f]{1,16})\.safetensors",
    re.ASCII,
)


class Log:
    """Reads the log of one elastic run.

    Args:
        objects: What the store holds and held.
        manifest: The manifest of the run.
        findings: What is wrong is added to these.

    Attributes:
        commits: The records, in order.
        gaps: Inner steps that no record counts, as (rank, first, one past the last): learned, and
            dropped.
        positions: Inner steps of every rank that the log counts.
    """

    def __init__(self, objects: Objects, manifest: dict[str, Any], findings: Findings) -> None:
        self._objects = objects
        self._manifest = manifest
        self._fragments = manifest["fragments"]
        self._findings = findings
        self.commits: list[dict[str, Any]] = []
        self.gaps: set[tuple[int, int, int]] = set()
        self.positions: dict[int, int] = {}

    def read(self, manifest_bytes: bytes) -> None:
        """Read all records. The first one follows the manifest, of which these are the bytes.

        Raises:
            Broken: A record is missing or damaged.
        """
        previous = run = xxhash.xxh3_64_hexdigest(manifest_bytes)
        incarnations = self._objects.stored("claims")
        counted: list[dict[int, int]] = [{} for _ in self._fragments]
        last = max((int(Path(key).stem) for key in self._objects.stored("commits")), default=0)
        for sync in range(1, last + 1):
            key = f"commits/{sync:08}.json"
            found = self._objects.record(key)
            if found is None:
                raise Broken(f"{key} is missing, and there are later ones")
            commit, data = found
            if commit["kind"] != "commit":
                raise Broken(f"{key} is a {commit['kind']}, and nobody asked for one")
            self.commits.append(commit)
            fragment = (sync - 1) % len(self._fragments)
            self._findings.expect(
                "records",
                (commit["sync"], commit["fragment"]) == (sync, fragment),
                f"{key} is of another sync",
            )
            self._findings.expect(
                "runs",
                commit["run"] == run,
                f"{key} is of run {commit['run']}, and the manifest of {run}",
            )
            self._findings.expect(
                "chain",
                commit["previous"] == previous,
                f"{key} does not follow the record before it",
            )
            previous = xxhash.xxh3_64_hexdigest(data)
            self._check_members(key, commit, counted[fragment], incarnations)
            positions = {rank: position for rank, position in commit["positions"] if position}
            self._findings.expect(
                "positions",
                positions == counted[fragment],
                f"{key} says {positions}, the log {counted[fragment]}",
            )
        for positions in counted:
            for rank, position in positions.items():
                self.positions[rank] = max(position, self.positions.get(rank, 0))

    def _check_members(
        self, key: str, commit: dict[str, Any], counted: dict[int, int], incarnations: set[str]
    ) -> None:
        members = commit["members"]
        ranks = [member["rank"] for member in members]
        self._findings.expect(
            "members", ranks == sorted(set(ranks)), f"{key} has the members {ranks}"
        )
        quorum = self._manifest["min_replicas"]
        self._findings.expect(
            "quorum",
            len(ranks) >= quorum,
            f"{key} has {len(ranks)} members, and {quorum} are needed",
        )
        for member in members:
            rank, first, stop = member["rank"], member["from"], member["to"]
            named = DELTA.fullmatch(member["key"])
            own = (commit["sync"], rank, member["epoch"], first, stop)
            agrees = named is not None and own == tuple(map(int, named.groups()[:5]))
            agrees = agrees and (named[6], named[7]) == (commit["base"], self._schema(commit))
            self._findings.expect("keys", agrees, f"{key} names {member['key']} for {own}")
            incarnation = f"claims/{rank:05}/{member['epoch']:04}.json"
            self._findings.expect(
                "incarnations",
                incarnation in incarnations,
                f"{key} counts an incarnation without a claim: {incarnation}",
            )
            before = counted.get(rank, 0)
            self._findings.expect(
                "steps",
                before <= first < stop,
                (
                    f"{key} counts the inner steps {first} to {stop} of rank {rank}, and {before} "
                    "are counted already"
                ),
            )
            if first > before:
                self.gaps.add((rank, before, first))
            counted[rank] = stop

    def _schema(self, commit: dict[str, Any]) -> str:
        """What the keys of contributions to a sync show of the run and of the fragment."""
        identity = [
            commit["run"],
            self._fragments[(commit["sync"] - 1) % len(self._fragments)]["fingerprint"],
        ]
        return xxhash.xxh3_128_hexdigest(json.dumps(identity).encode())[:16]
