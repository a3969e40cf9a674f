"""The contract of every backend: how replicas are launched, watched, cancelled and collected."""

from .__about__ import __version__ as __version__
from ._backoff import Backoff, retry
from ._base import BaseExecutor
from ._cancel import LaunchError
from ._channels import (
    spec_from_arguments,
    spec_from_environment,
    spec_to_arguments,
    spec_to_environment,
)
from ._collect import collect
from ._discovery import executor_names, executors, get_executor, load_errors
from ._entrypoint import entrypoint_name
from ._errors import (
    AuthError,
    BackendError,
    DilocoError,
    ForbiddenError,
    InvalidRequestError,
    MissingDependencyError,
    QuotaExceededError,
    ReplicaNotFoundError,
    ResultLostError,
    RunConflictError,
    SpecVersionError,
    ThrottledError,
    UnavailableError,
)
from ._handle import ReplicaHandle
from ._hooks import Finding, LogQuery, Option, ServerlessExecutor
from ._journal import RecordedRun, RunJournal, StoreJournal
from ._journal_folder import FolderJournal, state_folder
from ._message import (
    OutcomeMessage,
    is_result_line,
    outcome_from_message,
    outcome_to_message,
    result_from_lines,
)
from ._outcome import Outcome
from ._request import Plan, RunRequest, make_request
from ._spec import ReplicaSpec, environment
from ._types import Capabilities, Reason, ReplicaResult, ReplicaState, ReplicaStatus

__all__ = [
    "AuthError", "BackendError", "Backoff", "BaseExecutor", "Capabilities", "DilocoError",
    "Finding", "FolderJournal", "ForbiddenError", "InvalidRequestError", "LaunchError", "LogQuery",
    "MissingDependencyError", "Option", "Outcome", "OutcomeMessage", "Plan", "QuotaExceededError",
    "Reason", "RecordedRun", "ReplicaHandle", "ReplicaNotFoundError", "ReplicaResult",
    "ReplicaSpec", "ReplicaState", "ReplicaStatus", "ResultLostError", "RunConflictError",
    "RunJournal", "RunRequest", "ServerlessExecutor", "SpecVersionError", "StoreJournal",
    "ThrottledError", "UnavailableError", "collect", "entrypoint_name", "environment",
    "executor_names", "executors", "get_executor", "is_result_line", "load_errors", "make_request",
    "outcome_from_message", "outcome_to_message", "result_from_lines", "retry",
    "spec_from_arguments", "spec_from_environment", "spec_to_arguments", "spec_to_environment",
    "state_folder",
]  # fmt: skip
