"""Control of puppets: real replicas that do what a test says."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ._harness import Step, Told
from ._promises import HarnessFault

if TYPE_CHECKING:
    from diloco_protocol import ReplicaHandle


class Puppets:
    """Real replicas of a harness, told what to do through a folder that they and the test can see.

    Launch ``Puppets.entrypoint`` with ``puppets.arguments``, and with ``Puppets.source`` on the
    replicas' import path.

    Args:
        folder: An existing folder.
        patience: Real seconds to wait for a puppet.
    """

    entrypoint = "puppet:perform"
    source = Path(__file__).with_name("replica")

    def __init__(self, folder: Path, *, patience: float = 30.0) -> None:
        self.folder = folder
        self.patience = patience
        if folder.is_dir():
            # Puppets that find the lock free know that this process has ended, for whatever reason.
            lock = os.open(folder / "alive", os.O_CREAT | os.O_WRONLY)
            fcntl.flock(lock, fcntl.LOCK_EX)
            weakref.finalize(self, os.close, lock)
        self._orders: dict[str, int] = {}
        self._lives: dict[tuple[str, int], list[ReplicaHandle]] = {}

    @property
    def arguments(self) -> dict[str, Any]:
        """Return the arguments that the entrypoint needs."""
        return {"puppets": str(self.folder)}

    def name(self, handle: ReplicaHandle, attempt: int = 1) -> str:
        """Return the start of the names of a puppet's files."""
        # A run that was purged, and launched again under its name, has other handles.
        lives = self._lives.setdefault((handle.run_id, handle.rank), [])
        if handle not in lives:
            lives.append(handle)
        return f"{handle.run_id}-{handle.rank}-{attempt}.{lives.index(handle)}"

    def report(self, handle: ReplicaHandle, attempt: int = 1) -> dict[str, Any] | None:
        """Return what a puppet reports of itself; None if it has not come up.

        That is its kwargs, environment, pid and parent.
        """
        try:
            return dict(
                json.loads(
                    (self.folder / f"{self.name(handle, attempt)}.told").read_text(encoding="utf-8")
                )
            )
        except FileNotFoundError:
            return None

    def told(self, handle: ReplicaHandle, attempt: int = 1) -> Told:
        """Return what a puppet was told."""
        report = self.wait(
            lambda: self.report(handle, attempt), f"{self.name(handle, attempt)} to come up"
        )
        environment = report["environment"]
        return Told(
            int(environment["REPLICA_RANK"]),
            int(environment["REPLICA_WORLD_SIZE"]),
            report["kwargs"],
            environment,
        )

    def write(
        self, handle: ReplicaHandle, data: bytes, stream: str = "stdout", attempt: int = 1
    ) -> None:
        """Make a puppet write bytes; return when it has."""
        text = base64.b64encode(data).decode()
        self.order(handle, "write", {"stream": stream, "data": text}, attempt)

    def order(self, handle: ReplicaHandle, step: str, value: Any, attempt: int = 1) -> None:
        """Make a puppet print (return when it has), succeed or fail (return at once)."""
        name = self.name(handle, attempt)
        number = self._orders.get(name, 0)
        self._orders[name] = number + 1
        partial = self.folder / f".{name}.order-{number}"
        partial.write_text(json.dumps({str(step): value}), encoding="utf-8")
        partial.rename(self.folder / f"{name}.order-{number}")
        if step in {Step.PRINT, "write"}:
            done = self.folder / f"{name}.done-{number}"
            self.wait(done.exists, f"{name} to write")

    def wait(self, condition: Callable[[], Any], what: str) -> Any:
        """Wait until a condition holds, and return its value.

        Raises:
            HarnessFault: It did not hold in time.
        """
        start = time.monotonic()
        while not (value := condition()):
            waited = time.monotonic() - start
            if waited > self.patience:
                raise HarnessFault(f"waited {self.patience:g} s for {what}")
            # What has taken long may take a little longer: asking all the time would slow it down.
            time.sleep(min(max(0.005, waited / 6), 0.25))
        return value
