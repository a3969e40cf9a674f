"""For tests and simulations: several replicas in one process, in real time or in virtual time with faults."""

from ._sim_checks import SimulatedTraining, broken_promises, violations
from ._sim_replicas import run_replicas
from ._sim_scheduler import Killed
from ._sim_store import DAMAGES, KINDS, Fault, SimulatedStore
from ._simulation import Node, Outcome, Schedule, simulate

__all__ = [
    "DAMAGES",
    "KINDS",
    "Fault",
    "Killed",
    "Node",
    "Outcome",
    "Schedule",
    "SimulatedStore",
    "SimulatedTraining",
    "broken_promises",
    "run_replicas",
    "simulate",
    "violations",
]
