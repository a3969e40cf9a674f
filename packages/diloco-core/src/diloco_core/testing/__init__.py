"""For tests and simulations: several replicas in one process, in real time or in virtual time with faults."""

from ._codecs import CodecConformance
from ._scheduler import DAMAGES, KINDS, Fault, Killed
from ._simulation import Node, Outcome, Schedule, run_replicas, simulate
from ._store import SimulatedStore

__all__ = [
    "DAMAGES",
    "KINDS",
    "CodecConformance",
    "Fault",
    "Killed",
    "Node",
    "Outcome",
    "Schedule",
    "SimulatedStore",
    "run_replicas",
    "simulate",
]
