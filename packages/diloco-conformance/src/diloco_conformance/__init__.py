"""The suite that every executor must pass: one contract, checked against a model of the truth."""

from .__about__ import __version__ as __version__
from ._harness import Ability, Fault, Harness, Operation, Step, Told, Truth
from ._machine import ExecutorMachine
from ._promises import PROMISES, HarnessFault, PromiseBroken
from ._puppets import Puppets
from ._suite import ExecutorConformance
from ._time import VirtualTime
from ._world_hooks import Resources

__all__ = [
    "PROMISES",
    "Ability",
    "ExecutorConformance",
    "ExecutorMachine",
    "Fault",
    "Harness",
    "HarnessFault",
    "Operation",
    "PromiseBroken",
    "Puppets",
    "Resources",
    "Step",
    "Told",
    "Truth",
    "VirtualTime",
]
