"""Which of a run's states is exported: the newest one that is whole, or the one that was asked for."""

from __future__ import annotations

from itertools import islice, takewhile
from typing import TYPE_CHECKING, NamedTuple

from .._errors import CorruptedObjectError, ObjectNotFoundError, RendezvousError
from .._run._records._keys import commit_key
from ._run_states import sentence
from ._tensors import as_damage, read_tensors, reading_again

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from .._store._api import Store
    from ._run_states import RunStates

_TRIES = 8
# How many numbers of the log are looked at, from the newest one on, for a state that is not complete.
_MOST_EXPECTED = 1000


class Choice(NamedTuple):
    """The state that is chosen.

    Attributes:
        number: Its number in the log.
        step: The number of outer steps after which it was saved.
        damaged: For each newer state that is damaged, the number of outer steps after which it was saved; the newest first.
        errors: The errors of these states.
        incomplete: Numbers in the log of newer states that are incomplete; the newest first.
    """

    number: int
    step: int
    damaged: list[int]
    errors: list[CorruptedObjectError]
    incomplete: list[int]


class Unfinished(NamedTuple):
    """A state with missing objects: the number of outer steps after which it was saved, and what messages say of it."""

    step: int
    reason: str


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
                tensors.update(
                    read_tensors(store, source.fragments[index], source.files(index, sync), dtype)
                )
            except (ObjectNotFoundError, CorruptedObjectError) as error:
                # Either the object is damaged, or the run has gone on and deleted it. Its space may have been written over
                # while it was read.
                if sync in source.complete()[index]:
                    damaged[index, sync] = as_damage(error)
                else:
                    vanished += 1
                break
        else:
            return choice, tensors
    raise CorruptedObjectError(
        f"the published states in {store.uri} were deleted while they were read, {_TRIES} times: the run is going on faster than "
        "it can be read from here. Try again, or from a machine closer to the store."
    )


def newer_unfinished(source: RunStates, choice: Choice) -> Unfinished | None:
    """The newest incomplete state, if it is still incomplete: if the run is going on, it is complete by now."""
    if not choice.incomplete or max(source.states(source.complete())) >= choice.incomplete[0]:
        return None
    return _unfinished_state(source, choice.incomplete[0])


def _unfinished_state(source: RunStates, number: int) -> Unfinished | None:
    keys = source.missing(number)
    if not keys:
        return None
    first_key, *other_keys = keys
    missing = f"{first_key} is missing"
    if len(other_keys) == 1:
        missing = f"{first_key} and {other_keys[0]} are missing"
    elif other_keys:
        missing = f"{first_key} and {len(other_keys)} other objects are missing"
    return Unfinished(
        source.outer_steps(number),
        f"{missing}. If the run is going on, a replica may be about to write what is missing; if no replica is running, the run "
        "ended before it was written, or something has deleted it.",
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
        return Choice(wanted[0], at, [], [], [])
    newest = max(whole, default=-1)
    newer = takewhile(lambda number: number > newest, source.expected())
    incomplete = [number for number in islice(newer, _MOST_EXPECTED) if number not in steps]
    if wanted:
        harmed = [steps[number] for number in numbers if number > newest]
        return Choice(newest, steps[newest], harmed, list(damaged.values()), incomplete)
    complete_states = (
        f"Complete states in {store.uri}: {_listed([steps[number] for number in whole])}."
    )
    if damaged and (at is None or at in steps.values()):
        error = next(iter(damaged.values()))
        raise CorruptedObjectError(f"{sentence(error)} {complete_states}") from error
    for number in incomplete:
        is_wanted = at in {None, source.outer_steps(number)}
        unfinished = _unfinished_state(source, number) if is_wanted else None
        if unfinished is not None and number > source.initial_steps:
            raise CorruptedObjectError(
                f"{the_states([unfinished.step])} in {store.uri} is incomplete: {unfinished.reason} {complete_states}"
            )
    if source.unknown:
        raise CorruptedObjectError(
            f"{store.uri}/{commit_key(source.unknown)} is damaged or gone. It is the record with which the run went back to "
            "older states. Without it, it is not known which of the states before it were given up, so none of them is "
            "exported. Start the replicas again: they write again what can be written again, and newer states do not need this "
            f"record. {complete_states}"
        )
    if at is not None:
        present = f"the states {_listed(list(steps.values()))}" if steps else "no complete state"
        raise RendezvousError(
            f"{store.uri} does not hold the state after outer step {at}. It holds {present}. A run keeps only its newest states."
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
