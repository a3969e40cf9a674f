"""All wrong executors."""

import wrong_ends
import wrong_handles
import wrong_others
import wrong_states
from wrong import MUTANTS, harness_of

__all__ = ["MUTANTS", "harness_of", "wrong_ends", "wrong_handles", "wrong_others", "wrong_states"]
