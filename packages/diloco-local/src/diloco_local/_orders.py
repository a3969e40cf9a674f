"""Turn a launch request into the supervisor's orders: pure, so that the plan is what is started."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from diloco_protocol import InvalidRequestError, ReplicaSpec, RunRequest
from diloco_protocol.backend import refuse

from ._environment import SAFE_PATH, compose
from ._processes import MARKER
from ._rundir import RunDir
from ._verdict import LATEST

_LABELS = 1 << 22
_RESTARTS = ("--restarts", "{restarts}")


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


@dataclass(frozen=True, slots=True)
class Setting:
    """The setting in which the replicas of an executor run.

    Attributes:
        python: The interpreter.
        cwd: The working directory.
        folders: The import path, ahead of the interpreter's own.
        grace: Seconds between SIGTERM and SIGKILL.
        base: The inherited environment.
    """

    python: str
    cwd: str
    folders: tuple[str, ...]
    grace: float
    base: Mapping[str, str]


def check_request(request: RunRequest) -> None:
    """Refuse what a local process cannot be given.

    Raises:
        InvalidRequestError: Says what was asked for and what to do instead.
    """
    reasons = {
        "spot": "there is no interruptible capacity on this machine; leave spot out",
        "secrets": (
            "there is no secret store here; replicas inherit the launcher's environment (see "
            "inherit_env), so export them"
        ),
        "cpu": (
            "processes are not confined to CPUs here; set thread numbers such as OMP_NUM_THREADS "
            "by env="
        ),
        "memory": "processes are not confined to an amount of memory here; leave memory out",
    }
    refuse(request, "local processes", reasons)
    if MARKER in request.env:
        raise InvalidRequestError(
            f"env={{{MARKER!r}: …}} cannot be honoured by local processes: the launch itself sets "
            "this variable for every replica"
        )
    if request.timeout is not None and request.timeout > LATEST:
        raise InvalidRequestError(
            f"timeout={request.timeout:g} is longer than {LATEST} s: give less, or None for no "
            "limit"
        )
    if (size := len(json.dumps(dict(request.labels)))) > _LABELS:
        raise InvalidRequestError(
            f"labels have {size} characters as JSON, and {_LABELS} are allowed"
        )


def fingerprint(request: RunRequest, *chosen: object) -> str:
    """Return a digest of all that two launches of one run_id must agree on.

    Args:
        request: The launch.
        *chosen: Other choices of the caller, as JSON values. Values that are only taken from the
            launching process (its environment, folder and import path) are left out: a retry may
            come from another process.
    """
    return hashlib.sha256(json.dumps([request.fingerprint(), *chosen]).encode()).hexdigest()


def make_orders(
    request: RunRequest, setting: Setting, devices: Sequence[str | None]
) -> list[Order]:
    """Return the orders that the supervisor carries out, in rank order."""
    # Nothing interrupts a replica here: one that is not restarted after a failure never comes back.
    specs = request.specs(grace=setting.grace, restarts=request.max_restarts > 0)
    return [
        Order(
            spec=spec,
            argv=(setting.python, *SAFE_PATH, "-m", "diloco_protocol.runner"),
            env=compose(setting.base, [request.env], setting.folders, share),
            cwd=setting.cwd,
        )
        for spec, share in zip(specs, devices, strict=True)
    ]


def show_orders(
    run: RunDir, orders: Iterable[Order], base: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Return orders as JSON to look at, with inherited variables by name only."""
    return [
        {
            "rank": order.rank,
            "run": str(run.path),
            "argv": [*order.argv, "--spec", "{spec}", "--outcome", "{outcome}", *_RESTARTS],
            "cwd": order.cwd,
            "env": {
                name: value for name, value in sorted(order.env.items()) if base.get(name) != value
            },
            "inherited": sorted(
                name for name, value in order.env.items() if base.get(name) == value
            ),
            "spec": order.spec.to_dict(),
        }
        for order in orders
    ]
