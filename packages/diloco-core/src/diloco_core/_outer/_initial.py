"""The first sync of a fragment: all replicas begin with the values of rank 0."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from .._arithmetic._contribution import Contribution
from .._arithmetic._layout import Group, Layout, Piece, Rule
from .._arithmetic._rate import Proposal
from .._wire._sections import fingerprint
from ._fragment import Fragment


class Initial:
    """The first sync of a fragment, in which all replicas adopt rank 0's global copy.

    Afterwards the store holds a state to start from.

    Args:
        fragment: The fragment.
        into_model: Whether the model takes the values, too. It does not if it was restored from a
            checkpoint.
    """

    kind = "initial"
    coded = None  # there are no values yet to which an update could be added

    def __init__(self, fragment: Fragment, into_model: bool) -> None:
        self.fragment = fragment
        self._into_model = into_model
        self.name = fragment.name
        groups = (Group(group.dtype, group.numel, Rule.FIRST) for group in fragment.layout.groups)
        self.layout = Layout(tuple(groups), fragment.layout.shards, fragment.layout.block)
        # The codec encodes nothing here: values of one replica are sent as they are.
        self.terms = fragment.terms.of_initial_values
        self.fingerprint = fingerprint("initial", fragment.fingerprint)
        # A loop that was loaded goes on with the learning rate that it had.
        self.rate = fragment.rate
        self.contribution = Contribution(proposal=Proposal(fragment.rate))
        self.locate = fragment.locate
        self.starts = fragment.starts
        self.must_be_finite = fragment.must_be_finite
        # Always an empty list: before the first sync, the copies of the replicas differ.
        self.unchanged = list[int]
        self.destination = fragment.destination
        self.published = fragment.destination
        self.keeps_outer = fragment.keeps_outer

    # The arguments are those of SyncJob.
    def contributed(self, piece: Piece, out: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        """The global copy of a piece."""
        return self.destination(piece)

    def update(self, piece: Piece, reduced: torch.Tensor) -> torch.Tensor:
        """Set the global copy to that of rank 0."""
        values = self.destination(piece)
        if values.data_ptr() != reduced.data_ptr():
            values.copy_(reduced)
        return values

    def check_update(self, piece: Piece, values: torch.Tensor, sync: int) -> None:
        """Nothing to check, since contributions were checked and nothing is computed."""

    def adopt(self, piece: Piece, values: torch.Tensor) -> None:
        """Set the model to ``values``, if it is to take them."""
        if self._into_model:
            self.fragment.adopt(piece, values)

    def forget_outer(self, chunks: Iterable[Piece]) -> None:
        """Do nothing: whatever outer state there is was loaded, and no replica updates it."""

    def outer_scalars(self, piece: Piece) -> Mapping[str, float]:
        """Return the scalars that were loaded with the outer loop.

        Empty if it is a new one, since no outer step has been taken.
        """
        self.fragment.prepare_outer(piece)
        return self.fragment.outer_scalars(piece)

    def outer_state(self, piece: Piece) -> Mapping[str, torch.Tensor]:
        """Return the state that was loaded with the outer loop.

        Empty if it is a new one, since no outer step has been taken.
        """
        self.fragment.prepare_outer(piece)
        return self.fragment.outer_state(piece)
