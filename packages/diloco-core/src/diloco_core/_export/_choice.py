"""The choice of the state that is exported: the newest whole one, or the one that was asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from .._errors import CorruptedObjectError, ObjectNotFoundError, RendezvousError
from .._run._records._keys import commit_key
from .._store._api import Store
from ._run_states import RunStates, sentence
from ._stored import read_fragment, reading_again

_TRIES = 8

INCOMPLETE = (
    "If the run is going on, this is normal: a replica is about to write what is missing, or "
    "publish_every= leaves this state out. If no replica is running, the run ended before it was "
    "written, or something has deleted it."
)


class Choice(NamedTuple):
    """The state that is chosen.

    Attributes:
        number: Its number in the log.
        step: The number of outer steps after which it was saved.
        damaged: For each newer state that is damaged, the number of outer steps after which it was
            saved; the newest first.
        errors: The errors of these states.
    """

    number: int
    step: int
    damaged: list[int]
    errors: list[CorruptedObjectError]


def newest_whole(
    store: Store, source: RunStates, dtype: torch.dtype | None, at: int | None
) -> tuple[Choice, dict[str, torch.Tensor]]:
    """Choose a state and read its values. The run may go on in the meantime."""
    damaged: dict[tuple[int, int], CorruptedObjectError] = {}
    vanished = 0
    while vanished < _TRIES:
        choice = _choose(store, source, at, damaged)
        tensors: dict[str, torch.Tensor] = {}
        for index, sync in enumerate(source.state(choice.number)):
            try:
                fragment, files = source.files(index, sync)
                read_fragment(store, fragment, files)
            except (ObjectNotFoundError, CorruptedObjectError) as error:
                # Either the object is damaged, or the run has gone on and deleted it. Its space may
                # have been written over while it was read.
                if sync in source.complete()[index]:
                    damaged[index, sync] = as_damage(error)
                else:
                    vanished += 1
                break
            tensors.update(fragment.tensors(dtype))
        else:
            return choice, tensors
    raise CorruptedObjectError(
        f"the published states in {store.uri} were deleted while they were read, {_TRIES} times: "
        "the run is going on faster than it can be read from here. Try again, or from a machine "
        "closer to the store."
    )


def _choose(
    store: Store,
    source: RunStates,
    at: int | None,
    damaged: Mapping[tuple[int, int], CorruptedObjectError],
) -> Choice:
    """The state ``at``; without that, the newest one that is whole."""
    numbers = source.states(reading_again(source.complete))
    steps = {number: source.outer_steps(number) for number in numbers}
    whole = [
        number
        for number in numbers
        if not any(part in damaged for part in enumerate(source.state(number)))
    ]
    wanted = [number for number in whole if at in {None, steps[number]}]
    if wanted and at is not None:
        return Choice(wanted[0], at, [], [])
    newest = max(whole, default=-1)
    begun = source.begun()
    if wanted:
        harmed = [steps[number] for number in numbers if number > newest]
        return Choice(newest, steps[newest], harmed, list(damaged.values()))
    complete_states = (
        f"Complete states in {store.uri}: {_listed([steps[number] for number in whole])}."
    )
    if damaged and (at is None or at in steps.values()):
        error = next(iter(damaged.values()))
        raise CorruptedObjectError(f"{sentence(error)} {complete_states}") from error
    for number in (each for each in begun if each > max(newest, source.initial_steps)):
        step = source.outer_steps(number)
        if number not in steps and at in {None, step} and (missing := source.missing(number)):
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise CorruptedObjectError(
                f"{the_states([step])} in {store.uri} is incomplete. Missing: {missing[0]}{more}. "
                f"{INCOMPLETE} {complete_states}"
            )
    if source.unknown:
        raise CorruptedObjectError(
            f"{store.uri}/{commit_key(source.unknown)} is damaged or gone. It is the record with "
            "which the run went back to older states. Without it, it is not known which of the "
            "states before it were given up, so none of them is exported. Start the replicas "
            "again: they write again what can be written again, and newer states do not need this "
            f"record. {complete_states}"
        )
    if at is not None:
        present = f"the states {_listed(list(steps.values()))}" if steps else "no complete state"
        raise RendezvousError(
            f"{store.uri} does not hold the state after outer step {at}. It holds {present}. A run "
            "keeps only its newest states."
        )
    raise RendezvousError(
        f"the run at {store.uri} has not published a whole model yet: try again later"
    )


def the_states(steps: list[int]) -> str:
    *others, last = map(str, sorted(steps))
    if not others:
        return f"the state after outer step {last}"
    return f"the states after outer steps {', '.join(others)} and {last}"


def _listed(steps: list[int]) -> str:
    return "after outer steps " + ", ".join(map(str, sorted(steps))) if steps else "none"


def as_damage(error: ObjectNotFoundError | CorruptedObjectError) -> CorruptedObjectError:
    if isinstance(error, CorruptedObjectError):
        return error
    return CorruptedObjectError(f"an object that the run's records name is gone: {error}")
