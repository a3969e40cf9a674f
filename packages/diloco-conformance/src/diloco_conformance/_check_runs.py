"""Check what must be true of whole runs: of all, of settled ones, and of those just launched."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._check import Checks

if TYPE_CHECKING:
    from diloco_protocol import ReplicaHandle

    from ._model import Replica, Run


class RunChecks(Checks):
    """The part of the lab that judges runs."""

    def observe_all(self) -> None:
        """Ask for every replica and judge the answers."""
        for replica in self.replicas():
            self.observe(replica)

    def poll_all(self) -> None:
        """Poll every replica, without asking for more, and judge the answers."""
        for replica in self.replicas():
            self.poll(replica)

    def agree(self) -> None:
        """Check that poll says what describe says, whichever is asked first."""
        for replica in self.replicas():
            self.poll(replica)
            self.observe(replica)
            self.poll(replica)

    def replicas(self) -> list[Replica]:
        """Return all replicas of all runs."""
        return [replica for run in self.runs for replica in run.replicas]

    def check_settled(self, began_at: float) -> None:
        """Check that everything that was to end has ended, now that the world has settled.

        ``began_at`` is when it began to settle, on the world's clock.
        """
        for run in self.runs:
            for replica in run.replicas:
                if not replica.live:
                    continue
                truth = self.harness.truth(replica.handle)
                over = truth.state is None or (truth.state.terminal and not truth.alive)
                if replica.stopping and not over:
                    self.broken(
                        replica.cancelled_by,
                        f"the cancel of {replica} was accepted",
                        f"it goes on: {truth}",
                    )
                if replica.overdue(began_at) and not over:
                    self.broken(
                        "S7",
                        f"launched with timeout={run.timeout}",
                        f"{replica} is past it and goes on: {truth}. Either the platform was not "
                        "told the timeout, or the world does not end in advance() what is overdue",
                    )
                if replica.doomed and not over:
                    self.broken(
                        "S9",
                        "the declared failure scope is the gang",
                        f"{replica} goes on: {truth}",
                    )
                self.adopt(replica, truth)

    def check_launched(self, n: int, run: Run, handles: list[ReplicaHandle]) -> None:
        """Check that a launch gave what was asked for."""
        text = f"launch_replicas gave {[(handle.rank, handle.run_id) for handle in handles]}"
        first = run.first_rank
        world_size = run.options.get("world_size", first + n)
        part = "L1" if first == 0 and world_size == n else "L8"
        if [handle.rank for handle in handles] != list(range(first, first + n)):
            self.broken(
                part,
                text,
                f"{n} replicas were asked for, ranks {first} to {first + n - 1} in order",
            )
        if len({handle.run_id for handle in handles}) != 1 or (
            run.run_id and handles[0].run_id != run.run_id
        ):
            self.broken("L1", text, f"all handles of {run.name} carry its run_id {run.run_id!r}")
        if any(
            handle.world_size != world_size or handle.backend_name != self.executor.backend_name
            for handle in handles
        ):
            self.broken(
                part,
                repr(handles),
                f"world_size is {world_size}, the backend {self.executor.backend_name!r}",
            )
        others = {handle for other in self.runs for handle in other.handles}
        if len(set(handles)) != n or others & set(handles):
            self.broken("L1", text, "another replica has the same handle")
