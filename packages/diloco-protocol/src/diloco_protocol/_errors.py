"""Every error of the protocol and of the packages built on it is in this tree.

DilocoError ├── MissingDependencyError (ImportError) a package is not installed; names it and the
pip command ├── SpecVersionError a spec, handle or outcome of a version this code does not know └──
BackendError a verb failed; ``retryable`` says whether trying again may help
    ├── ThrottledError too many requests (retryable) ├── UnavailableError server error, refused or
    cut connection (retryable) ├── AuthError no credentials, or expired ones ├── ForbiddenError the
    credentials do not allow it ├── QuotaExceededError a limit of the account or cluster ├──
    InvalidRequestError (ValueError) the request is wrong; nothing was started ├── RunConflictError
    the run_id is taken by a launch with another spec ├── ResultLostError the replica succeeded, but
    its result is gone ├── LaunchError the launch failed; ``survivors`` could not be stopped again
    └── ReplicaNotFoundError (LookupError) there is no record of the replica
"""

from __future__ import annotations

from ._causes import as_shown, clean_causes


class DilocoError(Exception):
    """Base of all errors of diloco.

    Messages quote what others have written: replicas, services, records. So a message of any error
    of ours shows control characters as Python writes them, leaves out what has the form of a
    secret, and has a bounded length. So do the texts of the exceptions that it is made of
    (``raise ... from``): a traceback shows them, too.

    Attributes:
        replaced: Whether another process has taken the place of a replica that ends with this
            error: it is not to be started again.
    """

    replaced: bool = False

    def __init__(self, message: str = "", *arguments: object) -> None:
        clean_causes()
        super().__init__(as_shown(str(message)), *arguments)


class MissingDependencyError(DilocoError, ImportError):
    """Raised when an optional package is needed and not installed; the message has the pip command."""


class SpecVersionError(DilocoError):
    """Raised when something was written by a version that this one does not understand."""


class BackendError(DilocoError):
    """Raised when a backend cannot do what it was asked.

    Attributes:
        retryable: Whether the same call may succeed a little later.
    """

    retryable: bool = False

    def __init__(self, message: str, *, retryable: bool | None = None) -> None:
        super().__init__(message)
        if retryable is not None:
            self.retryable = retryable


class ThrottledError(BackendError):
    """Raised when the backend asks for fewer requests.

    Attributes:
        retry_after: Seconds to wait before the next try, if the backend said so.
    """

    retryable = True

    def __init__(self, message: str, *, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class UnavailableError(BackendError):
    """Raised when the backend cannot be reached or has an internal error."""

    retryable = True


class AuthError(BackendError):
    """Raised when there are no credentials, or they have expired."""


class ForbiddenError(BackendError):
    """Raised when the credentials do not allow the call."""


class QuotaExceededError(BackendError):
    """Raised when a quota or limit is exhausted."""


class InvalidRequestError(BackendError, ValueError):
    """Raised when an argument is not allowed, before anything is started."""


class RunConflictError(BackendError):
    """Raised when a run_id belongs to a launch with another spec."""


class ResultLostError(BackendError):
    """Raised when a replica has certainly succeeded, but its result is gone for good."""


class ReplicaNotFoundError(BackendError, LookupError):
    """Raised when there is no record of a replica: it never existed here, or its record has been removed."""
