"""Measurements as the repository keeps them: a small JSON file for losses and one for times."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .timing import Time

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

FOLDER = Path(__file__).parent / "results"


class DifferentError(SystemExit):
    """Results of another setup are kept already."""


@dataclass(slots=True)
class Results:
    """The results of one setup.

    What is added is on the disk at once, so that a run that was stopped goes on where it was.

    Attributes:
        path: The file.
        setup: Under what the results hold.
        found: By the name of the row, then by seed or conditions.
    """

    path: Path
    setup: dict[str, Any]
    found: dict[str, dict[str, Any]]

    @classmethod
    def of(cls, path: Path, setup: dict[str, Any] | None = None) -> Results:
        """Those in a file, if there is one.

        Args:
            path: The file.
            setup: Under what more results are to be added; None if they are only read.

        Raises:
            DifferentError: The results in the file hold under another setup.
        """
        if not path.exists():
            return cls(path, setup or {}, {})
        kept = json.loads(path.read_text())
        differing = [] if setup is None else sorted(
            name
            for name in {**setup, **kept["setup"]}
            if setup.get(name) != kept["setup"].get(name)
        )  # fmt: skip
        if differing:
            raise DifferentError(
                f"{path} holds results of another setup ({', '.join(differing)} differ), and both "
                "must not be mixed. To measure everything again, use --again."
            )
        return cls(path, kept["setup"], kept["found"])

    def add(self, row: str, key: str, value: Any) -> None:
        """Keep one result."""
        self.found.setdefault(row, {})[key] = value
        self._write()

    def forget(self, row: str, keys: Sequence[str] | None = None) -> None:
        """Drop the results of a row, or those with some keys.

        Without results there is no file, and any setup may come next.
        """
        found = self.found.pop(row, {})
        left = {key: found[key] for key in found if keys is not None and key not in keys}
        if left:
            self.found[row] = left
        if self.found:
            self._write()
        else:
            self.path.unlink(missing_ok=True)

    def _write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_suffix(".new")
        temporary.write_text(
            json.dumps({"setup": self.setup, "found": self.found}, indent=1) + "\n"
        )
        temporary.replace(self.path)

    def time(self, row: str, link: str) -> Time | None:
        """What was measured of a row on a link, if anything was.

        Of several measurements it is the one with the median utilisation.
        """
        times = [Time(**each) for each in self.found.get(row, {}).get(link, [])]
        if not times:
            return None
        return sorted(times, key=lambda time: time.utilisation)[(len(times) - 1) // 2]

    def add_time(self, row: str, link: str, time: Time) -> None:
        """Keep one measurement of a row on a link."""
        self.add(row, link, [*self.found.get(row, {}).get(link, []), _rounded(time)])

    def change_times(self, change: Callable[[str, str, Time], Time]) -> None:
        """Replace every measurement by what ``change`` makes of it, given its row and its link."""
        for row, links in self.found.items():
            for link, times in links.items():
                links[link] = [_rounded(change(row, link, Time(**time))) for time in times]
        self._write()


def _rounded(time: Time) -> dict[str, Any]:
    return {
        name: value if isinstance(value, str) else float(f"{value:.6g}")
        for name, value in asdict(time).items()
    }
