"""DiLoCo over an object store: replicas train alone, and meet in a bucket or a folder."""

from .__about__ import __version__ as __version__
from ._allreduce import ObjectStoreAllReduce
from ._connect import connect
from ._diloco import DiLoCo
from ._diloco_factory import make_diloco_outer_loop
from ._elastic_settings import Elastic
from ._errors import (
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
from ._exchange import Exchange, SyncReport
from ._exchange_elastic import ElasticExchange
from ._exchange_group import ProcessGroupExchange
from ._exchange_manager import ManagerExchange
from ._exchange_store import ObjectStoreExchange
from ._exchange_threads import InProcessExchange, in_process
from ._export import export
from ._manager import MockManager
from ._plan_costs import StoreModel
from ._planner import ExchangePlan, plan_exchange
from ._timing import Timing
from ._transfer import Transfer

__all__ = [
    "ConfigurationError",
    "CoreError",
    "CorruptedObjectError",
    "DiLoCo",
    "DivergedError",
    "Elastic",
    "ElasticExchange",
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
    "ObjectStoreExchange",
    "ProcessGroupExchange",
    "RendezvousError",
    "RendezvousTimeoutError",
    "ReplicaLostError",
    "RunExistsError",
    "StoreError",
    "StoreModel",
    "StoreUnavailableError",
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
    "plan_exchange",
]
