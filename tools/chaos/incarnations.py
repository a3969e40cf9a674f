"""Follows replicas through their incarnations, by their logs: states agree, inner state returns."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any


class IncarnationReader:
    """Reads the logs of all incarnations of a run.

    Args:
        lines: All lines, rank by rank in the order in which they were written.

    Attributes:
        counts: How often each thing was checked.
        violations: What is wrong, a sentence each.
    """

    def __init__(self, lines: list[dict[str, Any]]) -> None:
        self.counts: Counter[str] = Counter()
        self.violations: list[str] = []
        self._lines = lines

    def read(self, digests: dict[int, str]) -> None:
        """Check everything.

        Args:
            digests: Digests of the published state after syncs, as far as the reader of the store
                knows them.
        """
        self._compare_states(digests)
        ranks: dict[int, list[dict[str, Any]]] = defaultdict(list)
        for line in self._lines:
            ranks[line["rank"]].append(line)
        for rank, lines in ranks.items():
            self._follow(rank, lines)

    def explains(self, rank: int, first: int, stop: int, delay: int) -> bool:
        """Say if the rank told why the run counts no inner step from ``first`` to before ``stop``.

        It began there (the steps before it were another incarnation's, and open in one fragment
        only), it dropped or reloaded there, or it was overtaken there by an earlier incarnation.
        With a delay, a sync that is applied takes the place of the steps that were made while it
        was under way.
        """
        for line in self._lines:
            if (
                line["rank"] == rank
                and line["event"] in {"enter", "sync"}
                and line["counted"] == stop
            ):
                report = line.get("report", {})
                dropped = report.get("contribution") == "dropped" or report.get("reloaded")
                if line["event"] == "sync" and delay == stop - first:
                    return True
                if line["event"] == "enter" or dropped or line["position"] != line["counted"]:
                    return True
        return False

    def _expect(self, what: str, holds: bool, text: str) -> None:
        self.counts[what] += 1
        if not holds and len(self.violations) < 100:
            self.violations.append(text)

    def _compare_states(self, digests: dict[int, str]) -> None:
        """Everybody who made a sync holds the same state after it, and it is the published one."""
        known = dict(digests)
        for line in self._lines:
            if line["event"] == "sync" and line["report"]["committed"]:
                sync = line["report"]["sync"]
                expected = known.setdefault(sync, line["digest"])
                self._expect(
                    "states of replicas",
                    line["digest"] == expected,
                    (
                        f"incarnation {line['incarnation']} of rank {line['rank']} holds another "
                        f"state after sync {sync} than the others"
                    ),
                )

    def _follow(self, rank: int, lines: list[dict[str, Any]]) -> None:
        """Check that inner state is what was saved last, and data goes on where the count ends."""
        saves: dict[int, list[dict[str, Any]]] = defaultdict(list)
        entered: set[int] = set()
        for line in lines:
            who = f"incarnation {line['incarnation']} of rank {rank}"
            if line["event"] == "enter":
                entered.add(line["incarnation"])
                self._check_start(who, line, saves)
            elif line["event"] == "save" and line["incarnation"] in entered:
                saves[line["incarnation"]].append(line)
                self._expect(
                    "saved positions",
                    line["position"] == line["counted"],
                    (
                        f"{who} saved its data position {line['position']} as that of inner step "
                        f"{line['counted']}"
                    ),
                )

    def _check_start(
        self, who: str, line: dict[str, Any], saves: dict[int, list[dict[str, Any]]]
    ) -> None:
        restored = line["restored"]
        position = restored["position"] if restored else 0
        self._expect(
            "starts",
            position + line["skip"] == line["counted"],
            (
                f"{who} goes on at batch {position} + {line['skip']}, and the run has counted "
                f"{line['counted']}"
            ),
        )
        if restored is None:
            return
        self._expect(
            "inner states", restored["same"], f"{who} got back another inner state than was saved"
        )
        candidates = [
            save
            for incarnation, own in saves.items()
            if incarnation != line["incarnation"]
            for save in own
        ]
        known = {(save["position"], save["inner"]) for save in candidates}
        own = (restored["position"], restored["inner"])
        self._expect(
            "inner states",
            own in known,
            f"{who} got back an inner state at batch {own[0]} that nobody saved",
        )
