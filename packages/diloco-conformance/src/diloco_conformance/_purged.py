"""Check that a purge leaves nothing of a run, for any executor, from the moment it returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from diloco_protocol import ReplicaNotFoundError

from ._refusals import must_raise

if TYPE_CHECKING:
    from ._check_runs import RunChecks
    from ._model import Run


def check_purged(lab: RunChecks, run: Run, *, promise: str = "C9") -> None:
    """Check that an executor that has seen nothing finds no record, result or log of a run."""
    executor, handle = lab.harness.make_executor(), run.handles[-1]
    text = f"purge({run.name}) returned"
    looks: dict[str, Callable[[], Any]] = {
        "describe": lambda: executor.describe(handle),
        "stream_logs": lambda: executor.stream_logs(handle),
        "log_iter": lambda: list(executor.log_iter(handle)),
        "attach": lambda: executor.attach(run.run_id),
    }
    for name, call in looks.items():
        context = f"{text}, and {name} is asked in another process"
        must_raise(lab, promise, name, call, ReplicaNotFoundError, context)
    exists = lab.verb(promise, lambda: executor.exists(run.run_id))
    if exists or run.run_id in lab.verb(promise, executor.list_runs):
        lab.broken(promise, text, "it is still among the runs")
    (entry,) = lab.verb(promise, lambda: executor.collect([handle], timeout=0))
    if (entry["status"], entry["reason"], entry["result"]) != ("failed", "lost", None):
        lab.broken(promise, text, f"collect says of it: {entry}")
    lab.within("C8", executor.close)
