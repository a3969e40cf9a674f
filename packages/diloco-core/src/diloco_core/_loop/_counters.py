"""How far an outer loop has come on one replica."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import torch

from .._arithmetic._rate import NO_RATE, Rate
from .._exchange._resumable import Position
from .._inner._steps import StepCounter
from .._model._values import as_bytes
from .._outer._fragment import Fragment

_SAVED = ("committed", "inner_steps", "since_event", "since_sync", "tokens")


@dataclass(slots=True)
class Counters:
    """Counts inner steps and outer steps.

    Attributes:
        since_sync: For every fragment, the inner steps since its last sync. Its next contribution
            covers them.
        step: Knows which optimizers have stepped in the inner step under way.
        committed: Outer steps that the model has taken.
        inner_steps: Inner steps of this rank.
        since_event: Inner steps since the last sync of any fragment.
        given_up: The number of decisions in the run's log that are not outer steps of the model:
            rollbacks, and the syncs that were given up by them.
        rate: The learning rate of the last outer step.
        tokens: For every fragment, the tokens that were counted since its last sync. Its next
            contribution covers them.
    """

    since_sync: list[int]
    step: StepCounter = field(default_factory=lambda: StepCounter(1))
    committed: int = 0
    inner_steps: int = 0
    since_event: int = 0
    given_up: int = 0
    rate: Rate = NO_RATE
    tokens: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.tokens = [0] * len(self.since_sync)

    @property
    def decisions(self) -> int:
        """The number of syncs that the run has decided, including those that it gave up later."""
        return self.committed + self.given_up

    def steps(self, fragment: int) -> tuple[int, int] | None:
        """Return the inner steps that a fragment's next sync covers; None if there are none.

        They are given as the first one, and one past the last.
        """
        covered = self.since_sync[fragment]
        return (self.inner_steps - covered, self.inner_steps) if covered else None

    def stand_at(self, position: Position) -> None:
        """Continue from the outer steps that an elastic run has taken.

        The count of inner steps never goes back.
        """
        self.committed, self.given_up = position.outer_steps, position.sync - position.outer_steps
        self.rate = position.rate

    def count(self) -> None:
        """Count an inner step."""
        self.inner_steps += 1
        self.since_event += 1
        self.since_sync = [steps + 1 for steps in self.since_sync]

    def close(self, fragment: int) -> None:
        """Note that a fragment has no inner steps that are still to be synced."""
        self.since_sync[fragment] = self.tokens[fragment] = 0

    def close_all(self) -> None:
        """Note that no fragment has inner steps that are still to be synced."""
        self.since_sync = [0] * len(self.since_sync)
        self.tokens = [0] * len(self.since_sync)
        self.since_event = 0

    def state_dict(self) -> dict[str, Any]:
        """The counters by name."""
        counters = {name: copy(getattr(self, name)) for name in _SAVED}
        return {**counters, "outer_lr": self.rate.text, "stepped": self.step.stepped}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from saved counters; other entries of ``state`` are ignored."""
        for name in _SAVED:
            setattr(self, name, copy(state[name]))
        self.rate = Rate.parse(state["outer_lr"]) or NO_RATE
        self.step.load(state["stepped"])


class OpenSteps:
    """A fixed run's inner steps in fragments whose turn has not come yet, as a :class:`.Stateful`.

    With several fragments, each is synced at a different time, and the others then hold inner steps
    that no sync counts. They are in no published state. So they are saved with the inner
    optimizers, and a run that is resumed exactly there goes on as if it had not stopped. With one
    fragment, there is nothing to save, unless the outer loop was loaded in the middle of a period,
    or of an inner step that several optimizers take. Not thread-safe.

    Attributes:
        applied: Whether the replica continues with saved inner steps.
    """

    def __init__(self) -> None:
        self.applied = False
        self._fragments: Sequence[Fragment] = ()
        self._count = Counters([])
        self._loaded: dict[str, Any] = {}

    def watch(self, fragments: Sequence[Fragment], count: Counters) -> None:
        """Save the inner steps of these fragments from now on."""
        self._fragments, self._count = fragments, count

    def state_dict(self) -> dict[str, Any]:
        """Return every fragment's inner steps since its last sync, and the values they changed.

        These are the bytes of the tensors that are not as they were synced.
        """
        count, steps = self._count, list(self._count.since_sync)
        stepped = count.step.stepped
        values = {
            named.name: as_bytes(named.tensor)
            for fragment, since_sync in zip(self._fragments, steps, strict=True)
            if since_sync or stepped or fragment.alpha
            for named in fragment.followed()
        }
        saved = {"since_sync": steps, "since_event": count.since_event, "values": values}
        if any(count.tokens):
            saved["tokens"] = list(count.tokens)
        if stepped:
            saved["stepped"] = stepped
        return saved

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Remember a saved state, for :meth:`apply`."""
        self._loaded = state

    def apply(self, inner_steps: int) -> None:
        """Continue with the saved inner steps.

        The fragments must hold the values of the sync before them.

        Args:
            inner_steps: How many inner steps the replica had taken when it saved them.
        """
        steps, values = self._loaded["since_sync"], self._loaded["values"]
        stepped = [int(number) for number in self._loaded.get("stepped", [])]
        with torch.no_grad():
            for fragment, since_sync in zip(self._fragments, steps, strict=True):
                if since_sync or stepped or fragment.alpha:
                    for named in fragment.followed():
                        saved = values[named.name].view(named.tensor.dtype)
                        named.tensor.copy_(saved.view(named.tensor.shape))
        self.applied = True
        self._count.inner_steps = inner_steps
        self._count.step.load(stepped)
        self._count.since_sync = [int(number) for number in steps]
        self._count.tokens = [int(n) for n in self._loaded.get("tokens", [0] * len(steps))]
        self._count.since_event = int(self._loaded["since_event"])
