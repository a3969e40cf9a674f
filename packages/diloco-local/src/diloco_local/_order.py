"""The supervisor's order for one replica."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from diloco_protocol import ReplicaSpec


@dataclass(frozen=True, slots=True)
class Order:
    """The order to start a replica. Its environment is never written to disk.

    Attributes:
        spec: The spec for its runner; every attempt gets it with its own number.
        argv: The begin of its runner's command line; its first word is the interpreter.
        env: Its environment.
        cwd: Its working directory.
    """

    spec: ReplicaSpec
    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: str

    @property
    def rank(self) -> int:
        """Return the replica's rank."""
        return self.spec.rank

    def to_dict(self) -> dict[str, Any]:
        """Return the order as JSON values, for the pipe to the supervisor."""
        return {
            "spec": self.spec.to_dict(),
            "argv": list(self.argv),
            "env": dict(self.env),
            "cwd": self.cwd,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Order:
        """Make an order from what :meth:`to_dict` returned."""
        spec = ReplicaSpec.from_dict(data["spec"])
        return cls(spec, tuple(data["argv"]), data["env"], data["cwd"])
