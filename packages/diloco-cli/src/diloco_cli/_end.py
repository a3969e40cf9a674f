"""The verbs that change something: ``cancel`` and ``purge``. Both say what, and ask."""

from __future__ import annotations

from typing import Literal

from diloco_protocol.backend import cancel_all

from ._exits import BAD_USE, SUCCEEDED
from ._facts import VERSION, place_in_words, place_of
from ._session import Session

_SCOPES = {
    "cancel": "ends {count} of run {run_id}",
    "purge": "removes the records, logs and results of {count} of run {run_id}",
}


def end(session: Session, verb: Literal["cancel", "purge"], run_id: str, *, yes: bool) -> int:
    """End a run, or remove the records of one that has ended, and return the exit code.

    Acts on the replicas that were shown, and not on a run that has taken the name since.
    """
    with session.run(run_id) as run:
        place = place_of(run.handles)
        count = f"{len(run.handles)} replica{'s' * (len(run.handles) > 1)}"
        scope = _SCOPES[verb].format(count=count, run_id=run_id)
        screen = session.screen
        screen.say(f"this {scope}, on {place_in_words(run.backend, place)}")
        if not (yes or screen.confirm(f"{verb} {run_id}?")):
            screen.say("nothing was done")
            return BAD_USE
        if verb == "purge":
            run.executor.purge(run.handles[0])
        elif run.executor.capabilities.cancel_scope == "gang":
            run.executor.cancel(run.handles[0])
        else:
            cancel_all(run.handles, run.executor.cancel)
    facts = {"run_id": run_id, "backend": run.backend, "place": place, "replicas": len(run.handles)}
    if session.as_json:
        screen.json({"version": VERSION, "verb": verb, **facts})
    elif verb == "cancel":
        again = session.choice.again("wait", run_id, run.backend)
        screen.line(f"{run.backend} was asked to end {count}. To wait until they have:\n  {again}")
    else:
        screen.line(f"{run.backend} has removed what it had of {count}")
    return SUCCEEDED
