"""A training for simulated runs, whose results follow from the log alone; and what such a run has done wrong."""

from ._checks import broken_promises, read_log, violations
from ._recomputed import sent_of
from ._training import SimulatedTraining

__all__ = ["SimulatedTraining", "broken_promises", "read_log", "sent_of", "violations"]
