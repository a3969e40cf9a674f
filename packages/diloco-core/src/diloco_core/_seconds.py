"""Seconds in place of inner steps: how long replicas train between two syncs.

Each of them takes whatever number of steps it can.
"""

from __future__ import annotations

from dataclasses import dataclass

from ._checks import check_positive


@dataclass(frozen=True, slots=True)
class Seconds:
    """A value of ``sync_every``: seconds that replicas train between two syncs of a fragment.

    So a replica with slow inner steps takes fewer of them, and the others do not wait for it;
    contributions are weighed by their steps. Only for elastic runs. See ``docs/seconds.md``.

    Attributes:
        value: The number of seconds; finite and above 0. Thread-safe, as the whole object is: it
            cannot be changed.

    Raises:
        ConfigurationError: The value is something else.
    """

    value: float

    def __post_init__(self) -> None:
        check_positive("Seconds(...)", self.value, " of seconds, such as Seconds(60)")
        object.__setattr__(self, "value", float(self.value))

    def __repr__(self) -> str:
        """The call that makes it, with the shortest number that has exactly this value."""
        return f"Seconds({repr(self.value).removesuffix('.0')})"
