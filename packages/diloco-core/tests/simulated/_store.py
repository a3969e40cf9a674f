"""The objects that all simulated processes share: they are counted, and what must never happen to
them is noted.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from diloco_core._run._records._keys import highest_epochs, parse_inner


@dataclass(slots=True)
class SimulatedStore:
    """What all simulated processes share: objects, counters and checks.

    Attributes:
        objects: Key to content.
        requests: Number of requests by kind.
        sent: Bytes written.
        received: Bytes read.
        after_delete: Called with the keys of every deletion, to check what must still be there.
        written_over: Removed objects whose space was used for others, to the surprise of late
            readers.
        decided: The manifest and the records of the log as they were first written, whatever
            happened to them since.
        changed: Those of them that were written again with other content, which must never be.
        contents: The tensors of contributions and states as they were first written, likewise.
        differing: Those of them that were written again with other content, perhaps after they had
            been removed. That must never be, either, unless the record of a sync was lost, and the
            sync decided once more.
        intrusions: Inner state that an incarnation has saved although it had a successor, and had
            not looked for one just before.
        history: When keys came and went, with their sizes (None: it went), in virtual seconds.
        exclusive: Whether ``create`` refuses existing keys; some stores do not.
    """

    objects: dict[str, bytes] = field(default_factory=dict)
    requests: Counter[str] = field(default_factory=Counter)
    sent: Counter[int] = field(default_factory=Counter)
    received: Counter[int] = field(default_factory=Counter)
    after_delete: Callable[[list[str]], object] | None = None
    exclusive: bool = True
    written_over: set[str] = field(default_factory=set)
    decided: dict[str, bytes] = field(default_factory=dict)
    contents: dict[str, bytes] = field(default_factory=dict)
    changed: list[str] = field(default_factory=list)
    differing: list[str] = field(default_factory=list)
    intrusions: list[str] = field(default_factory=list)
    history: list[tuple[float, str, int | None]] = field(default_factory=list)
    now: float = 0.0
    _folders: dict[str, dict[str, int]] = field(default_factory=lambda: defaultdict(dict))

    def write(self, key: str, data: bytes) -> None:
        """Write an object in one step."""
        decides = key.startswith("commits/") or key == "manifest.json"
        if decides and self.decided.setdefault(key, data) != data:
            self.changed.append(key)
        holds_tensors = key.startswith(("deltas/", "initial/", "state/"))
        if holds_tensors and self.contents.setdefault(key, data) != data:
            self.differing.append(key)
        self._replace(key, data)

    def damage(self, key: str, data: bytes) -> None:
        """The content of an object has changed, and nobody has written it."""
        self._replace(key, data)

    def has_successor(self, key: str) -> bool:
        """Whether a later incarnation of the rank has claimed it than the one that saves inner
        state under this key.
        """
        epoch, _ = parse_inner(key) or (0, 0)
        rank = int(key.split("/")[1])
        return highest_epochs(self.below(f"claims/{rank:05}")).get(rank, 0) > epoch

    def stale(self, prefix: str, seconds: float) -> dict[str, int]:
        """Return what :meth:`below` would have returned so many seconds ago."""
        listing = self.below(prefix)
        folder = prefix.rstrip("/") + "/"
        before: dict[str, int | None] = {}
        for time, key, size in self.history:
            if key.startswith(folder):
                if time <= self.now - seconds:
                    before[key] = size
                else:
                    before.setdefault(key, None)
        for key, size in before.items():
            listing.pop(key, None)
            if size is not None:
                listing[key] = size
        return dict(sorted(listing.items()))

    def _replace(self, key: str, data: bytes) -> None:
        self.objects[key] = data
        self.history.append((self.now, key, len(data)))
        for folder in _folders(key):
            self._folders[folder][key] = len(data)

    def remove(self, key: str) -> None:
        """Remove an object, if it is there."""
        data = self.objects.pop(key, None)
        if data is not None:
            self.history.append((self.now, key, None))
            for folder in _folders(key):
                self._folders[folder].pop(key, None)

    def below(self, prefix: str) -> dict[str, int]:
        """Keys below a folder and their sizes."""
        folder = prefix.rstrip("/")
        return (
            dict(sorted(self._folders[folder].items()))
            if folder
            else {k: len(v) for k, v in self.objects.items()}
        )


def _folders(key: str) -> list[str]:
    parts = key.split("/")[:-1]
    return ["/".join(parts[: number + 1]) for number in range(len(parts))]
