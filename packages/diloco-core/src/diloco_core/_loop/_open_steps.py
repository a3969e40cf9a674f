"""The training of a fixed run's replica in fragments whose turn has not come yet.

It is saved with the replica's own state.

With several fragments, each is synced at a different time, and the others then hold inner steps
that no sync counts. They are in no published state. So they are saved with the inner optimizers,
and a run that is resumed exactly there goes on as if it had not stopped. With one fragment, there
is nothing to save, unless the outer loop was loaded in the middle of a period, or of an inner step
that several optimizers take.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .._model._values import as_bytes
from .._outer._fragment import Fragment
from ._counters import Counters


class OpenSteps:
    """These inner steps, as an object that is saved and restored; see :class:`.Stateful`.

    Not thread-safe.

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
