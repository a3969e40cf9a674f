"""DiLoCo over an object store: replicas train alone, and meet in a bucket or a folder."""

from .__about__ import __version__ as __version__
from ._allreduce import ObjectStoreAllReduce
from ._arithmetic._clip import Clipped
from ._codecs._codec import Codec
from ._connect import connect
from ._errors import (
    AfterRunError,
    ConfigurationError,
    CoreError,
    CorruptedObjectError,
    DivergedError,
    FencedError,
    FormatError,
    MismatchError,
    ModelChangedError,
    NonFiniteDeltaError,
    NonFiniteUpdateError,
    ObjectNotFoundError,
    ProcessFailedError,
    RendezvousError,
    RendezvousTimeoutError,
    ReplicaLostError,
    RunExistsError,
    StoreError,
    StoreUnavailableError,
    SyncError,
    SyncTimeoutError,
    UnequalSyncsError,
    UnseenStepsError,
)
from ._exchange._base import Exchange
from ._exchange._pending import Pending
from ._exchange._process_group import ProcessGroupExchange
from ._exchange._replica import ReplicaExchange
from ._exchange._report import SyncReport
from ._exchange._threads import InProcessExchange, in_process
from ._export._export import export
from ._journal import open_journal
from ._loop._diloco import DiLoCo, make_diloco_outer_loop
from ._planner._costs import StoreModel
from ._planner._plan import ExchangePlan, plan_exchange
from ._run._exchange import StoreExchange
from ._run._settings import Elastic
from ._seconds import Seconds
from ._simulation._simulate import Simulation, simulate
from ._store._transfer import Transfer
from ._terms._support import Support
from ._timing import Timing
from ._torchft._exchange import ManagerExchange
from ._torchft._manager import MockManager

__all__ = [
    "AfterRunError",
    "Clipped",
    "Codec",
    "ConfigurationError",
    "CoreError",
    "CorruptedObjectError",
    "DiLoCo",
    "DivergedError",
    "Elastic",
    "Exchange",
    "ExchangePlan",
    "FencedError",
    "FormatError",
    "InProcessExchange",
    "ManagerExchange",
    "MismatchError",
    "MockManager",
    "ModelChangedError",
    "NonFiniteDeltaError",
    "NonFiniteUpdateError",
    "ObjectNotFoundError",
    "ObjectStoreAllReduce",
    "Pending",
    "ProcessFailedError",
    "ProcessGroupExchange",
    "RendezvousError",
    "RendezvousTimeoutError",
    "ReplicaExchange",
    "ReplicaLostError",
    "RunExistsError",
    "Seconds",
    "Simulation",
    "StoreError",
    "StoreExchange",
    "StoreModel",
    "StoreUnavailableError",
    "Support",
    "SyncError",
    "SyncReport",
    "SyncTimeoutError",
    "Timing",
    "Transfer",
    "UnequalSyncsError",
    "UnseenStepsError",
    "connect",
    "export",
    "in_process",
    "make_diloco_outer_loop",
    "open_journal",
    "plan_exchange",
    "simulate",
]
