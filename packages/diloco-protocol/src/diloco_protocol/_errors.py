"""The tree of all errors of the protocol and of the packages built on it.

DilocoError
├── MissingDependencyError (ImportError)    a package is not installed; names the pip command
├── SpecVersionError                        a record of a version that this code does not know
└── BackendError                            a verb failed; ``retryable`` if it may work later
    ├── ThrottledError                      too many requests (retryable)
    ├── UnavailableError                    server error, or no connection (retryable)
    ├── AuthError                           no credentials, or expired ones
    ├── ForbiddenError                      the credentials do not allow it
    ├── QuotaExceededError                  a limit of the account or cluster
    ├── InvalidRequestError (ValueError)    the request is wrong; nothing was started
    ├── RunConflictError                    the run_id is taken by a launch with another spec
    ├── ResultLostError                     the replica succeeded, but its result is gone
    ├── LaunchError                         the launch failed; ``survivors`` were not stopped
    └── ReplicaNotFoundError (LookupError)  there is no record of the replica
"""

from __future__ import annotations

from ._texts import as_shown, clean_causes


class DilocoError(Exception):
    """The base class of all errors of diloco.

    Messages quote texts from replicas, services and records. So the message of every error of ours
    shows control characters as Python writes them, leaves out everything that looks like a secret,
    and has a bounded length. The texts of the exceptions that caused it (``raise ... from``) are
    treated in the same way, because a traceback shows them too.

    Attributes:
        final: Whether a replica that ends with this error must not be started again: another
            process has taken its place, or the same error would come again.
    """

    final: bool = False

    def __init__(self, message: str = "", *arguments: object) -> None:
        clean_causes()
        super().__init__(as_shown(str(message)), *arguments)


class MissingDependencyError(DilocoError, ImportError):
    """Raised when an optional package is needed and not installed.

    The message has the pip command.
    """

    final = True


class SpecVersionError(DilocoError):
    """Raised when a record was written by a version that this one does not understand."""


class BackendError(DilocoError):
    """Raised when a backend cannot do what it was asked to do.

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
    """Raised when there is no record of a replica.

    Either it never existed here, or its record has been removed.
    """
