"""The verb ``wait``."""

from __future__ import annotations

from collections.abc import Mapping

from diloco_protocol import ReplicaHandle, ReplicaStatus

from ._exits import UNKNOWN, exit_of_states
from ._facts import counts, counts_in_words, result_facts
from ._look import show_replicas
from ._session import Session


def wait(session: Session, run_id: str) -> int:
    """Wait until every replica of a run has ended, print how, and return the exit code."""
    with session.run(run_id) as run:
        shown: list[str] = []

        def progress(known: Mapping[ReplicaHandle, ReplicaStatus]) -> None:
            states = (
                "unknown" if status.reason == "lost" else status.state.value
                for status in known.values()
            )
            text = counts_in_words(counts(states))
            if text and text not in shown[-1:]:
                session.screen.say(f"{run_id}: {text}")
                shown.append(text)

        with session.looking("wait", run_id, run.backend):
            results = run.executor.collect(run.handles, progress=progress)
    replicas = [result_facts(result) for result in results]
    show_replicas(session, run, replicas)
    lost = any(facts["state"] == "succeeded" and facts["error"] for facts in replicas)
    return exit_of_states(facts["state"] for facts in replicas) or (UNKNOWN if lost else 0)
