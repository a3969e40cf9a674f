"""Whole runs in virtual time, over a store that fails on purpose.

Their training has results that follow from the log alone, so that the checks say what such a run
has done wrong.
"""

from ._checks import CheckedStore, broken_promises, flawless, read_log, violations
from ._connection import Connection
from ._recomputed import decoded, sent_of
from ._scheduler import DAMAGES, KINDS, Fault, Killed, Scheduler
from ._simulation import Fixed, Schedule, once, simulate
from ._store import SimulatedStore
from ._training import OtherTraining, SimulatedTraining

__all__ = [
    "DAMAGES",
    "KINDS",
    "CheckedStore",
    "Connection",
    "Fault",
    "Fixed",
    "Killed",
    "OtherTraining",
    "Schedule",
    "Scheduler",
    "SimulatedStore",
    "SimulatedTraining",
    "broken_promises",
    "decoded",
    "flawless",
    "once",
    "read_log",
    "sent_of",
    "simulate",
    "violations",
]
