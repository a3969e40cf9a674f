"""Every fault that can be asked for has the words of the API server, or needs none."""

from __future__ import annotations

from diloco_localcloud._kubernetes._api._api import REFUSALS
from diloco_localcloud._server._faults import KINDS


def test_no_kind_of_fault_is_without_words():
    needs_the_call, only_cuts, is_answered = {"forbidden"}, {"cut", "ambiguous"}, {"delay"}
    assert set(REFUSALS) == set(KINDS) - needs_the_call - only_cuts - is_answered
