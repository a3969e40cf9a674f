"""Errors of calls to AWS, translated into errors of the protocol."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

from diloco_protocol import (
    AuthError,
    BackendError,
    DilocoError,
    ForbiddenError,
    InvalidRequestError,
    QuotaExceededError,
    ReplicaNotFoundError,
    ThrottledError,
    UnavailableError,
)
from diloco_protocol.backend import redact_and_cut

# Characters of a text of AWS or its client; looking for secrets takes seconds per million
_LONGEST = 16_000
# In botocore's complaint about a parameter, which may be a token
_VALUE = re.compile(r", value: .*?(?=, (?:type|valid)|\Z)", re.DOTALL)
# SageMaker answers with a ValidationException if there is no such job, although ResourceNotFound is
# documented, and also if a job that is to be stopped has ended.
_NOT_FOUND = re.compile(r"requested resource not found|could not find", re.IGNORECASE)
_HAS_ENDED = re.compile(
    r"rejected because the training job is in status (Stopped|Completed|Failed|Stopping)\b",
    re.IGNORECASE,
)
_THROTTLED = frozenset({
    "Throttling", "ThrottlingException", "ThrottledException", "TooManyRequestsException",
    "RequestLimitExceeded", "SlowDown", "RequestThrottled", "RequestThrottledException",
    "ProvisionedThroughputExceededException", "LimitExceededException", "EC2ThrottledException",
})  # fmt: skip
_MISSING = frozenset({
    "ResourceNotFound", "ResourceNotFoundException", "NoSuchKey", "NoSuchBucket",
    "ImageNotFoundException", "RepositoryNotFoundException",
})  # fmt: skip
_OF_NONE = frozenset(["GetCallerIdentity", "ListTrainingJobs", "Search"])
"""Operations that ask for nothing by name: their "not found" says nothing about any run."""
_OF_CREDENTIALS = frozenset({
    "AssumeRole", "AssumeRoleWithWebIdentity", "GetRoleCredentials", "CreateToken",
    "CreateOAuth2Token",
})  # fmt: skip
"""Operations by which boto3 itself fetches credentials: what they lack is no job and no result."""
_REFUSALS: tuple[tuple[str, Callable[[str], BackendError], str], ...] = (
    (
        "ResourceLimitExceeded", QuotaExceededError,
        "Choose another type, or wait with quota_timeout= (a job that was stopped frees its quota "
        "some minutes later)",
    ),
    (
        # Retryable, since a program that renews them may be about to do so.
        "ExpiredToken ExpiredTokenException TokenRefreshRequired RequestExpired",
        partial(AuthError, retryable=True),
        "The credentials have expired: log in again, or renew what gives them",
    ),
    (
        "UnrecognizedClientException InvalidClientTokenId InvalidAccessKeyId NotAuthorized "
        "SignatureDoesNotMatch InvalidSignatureException IncompleteSignature AuthFailure "
        "MissingAuthenticationToken InvalidToken", AuthError,
        "AWS does not accept the credentials: look at AWS_PROFILE and the region",
    ),
    (
        "AccessDenied AccessDeniedException UnauthorizedOperation AuthorizationError OptInRequired",
        ForbiddenError,
        "The package has the policies that are needed: launcher_policy.json and role_policy.json",
    ),
)  # fmt: skip
"""Codes of AWS, the errors that they become, and what to do."""
_LOOK = "Look at region=, the variables AWS_... and HTTP..._PROXY, and ~/.aws/config"
_LOG_IN = "Log in (aws login, aws sso login), set AWS_PROFILE, or give the executor session="
NOT_ITS_OWN = " (this answer is not AWS's own, or was cut)"


class MissingError(ReplicaNotFoundError):
    """Raised when there is no such job, stream or object."""


class UnseenError(UnavailableError):
    """Raised when a job that was created a moment ago is not found, and may not be visible yet."""


class TakenError(BackendError):
    """Raised when the name of a job is taken, or a job cannot be removed now (ResourceInUse)."""


class EndedError(BackendError):
    """Raised when a job cannot be stopped, since it has ended or is being ended."""


class UnreachedError(UnavailableError):
    """Raised when there was no connection, so that the request was not sent."""


def to_error(error: Any, what: str) -> DilocoError:
    """Return the error of the protocol for one that botocore raised.

    Args:
        error: The error of botocore.
        what: What was tried, such as ``"create the training job diloco-run-1-00000"``.
    """
    from botocore import exceptions as of_botocore  # slow to import

    if isinstance(error, of_botocore.ClientError):
        return _answered(error.response, error.operation_name, f"cannot {what}")
    text = f"cannot {what}: {redact_and_cut(str(error), _LONGEST) or type(error).__name__}".rstrip(
        "."
    )
    no_credentials = (
        of_botocore.NoCredentialsError, of_botocore.PartialCredentialsError,
        of_botocore.CredentialRetrievalError, of_botocore.TokenRetrievalError,
        of_botocore.SSOError, of_botocore.ProfileNotFound, of_botocore.InvalidConfigError,
        of_botocore.MissingDependencyException,
    )  # fmt: skip
    if isinstance(error, no_credentials) or "credentials are still expired" in str(error):
        return AuthError(f"{text}. {_LOG_IN}. {_LOOK}")
    # What is of this class itself was not sent.
    unsent = error.kwargs.get("error") if type(error) is of_botocore.HTTPClientError else error
    if "header value" in str(unsent):  # the value, which may be a credential, is in the text
        return AuthError(
            f"cannot {what}: one of the credentials, or the region, has a character that cannot be "
            f"sent, such as a line end. {_LOOK}"
        )
    if (
        isinstance(error, (of_botocore.NoRegionError, of_botocore.ParamValidationError))
        or isinstance(unsent, (UnicodeEncodeError, FileNotFoundError, PermissionError))
        or (unsent is not error and isinstance(unsent, ValueError))  # such as the URL of a proxy
    ):
        return InvalidRequestError(f"{_VALUE.sub('', text)}. {_LOOK}")
    unreached = (
        of_botocore.EndpointConnectionError, of_botocore.ConnectTimeoutError,
        of_botocore.ProxyConnectionError,
    )  # fmt: skip
    if isinstance(error, unreached):
        return UnreachedError(f"{text}. {_LOOK}")
    if isinstance(error, of_botocore.SSLError):  # such as for a file of certificates
        return UnavailableError(f"{text}. {_LOOK}")
    # A streamed answer is read from urllib3 directly, which raises errors of its own.
    if isinstance(error, (of_botocore.BotoCoreError, OSError)) or type(error).__module__.startswith(
        "urllib3."
    ):
        # For example, an answer that cannot be read, because it was cut or came from a proxy.
        return UnavailableError(text)
    # botocore has checked the request, but takes answers apart without checking them first. So the
    # answer is at fault, and what was asked for may have been done.
    return UnavailableError(f"{text}: {type(error).__name__}{NOT_ITS_OWN}")


def not_made(error: Exception, what: str) -> DilocoError:
    """Return the error for a client that could not be made.

    No request has been sent yet, so a setting is wrong.
    """
    known = to_error(error, what)
    if isinstance(known, (AuthError, InvalidRequestError)):
        return known
    return InvalidRequestError(
        f"cannot {what}: {redact_and_cut(str(error), _LONGEST).rstrip('.')}. {_LOOK}"
    )


def _answered(response: Any, operation: str, failed: str) -> BackendError:
    error = response.get("Error", {})
    code, message = (
        redact_and_cut(str(error.get(name, "")), _LONGEST) for name in ("Code", "Message")
    )
    metadata = response.get("ResponseMetadata", {})
    status = metadata.get("HTTPStatusCode", 0)
    text = f"{failed}: {code}: {message.rstrip('.')}" if message else f"{failed}: {code or status}"
    about = None if operation in _OF_CREDENTIALS else _about(code, message)
    if about is MissingError and operation == "CreateTrainingJob":
        about = InvalidRequestError  # what is missing is something that the request names
    of_none = about is MissingError and operation in _OF_NONE
    if about is not None and metadata.get("RequestId") and not of_none:
        return about(text)
    throttled = code in _THROTTLED or status == 429
    foreign = not metadata.get("RequestId") or code in {"", str(status)}
    if about is not None or (foreign and status and not throttled):
        # It was cut on its way, or something in between, such as a proxy, has answered. It says
        # nothing about what was asked for, so no result counts as lost and no job as gone because
        # of it.
        return UnavailableError(f"{text}{NOT_ITS_OWN}")
    if throttled:
        wanted = str(metadata.get("HTTPHeaders", {}).get("retry-after", ""))
        known = wanted.isdecimal() and len(wanted) < 6
        return ThrottledError(text, retry_after=float(wanted) if known else None)
    for codes, kind, advice in _REFUSALS:
        if code in codes.split():
            return kind(f"{text}. {advice}")
    if status >= 500:
        return UnavailableError(text)
    if code.startswith("Validation") or code == "InvalidObjectState" or status == 400:
        return InvalidRequestError(text)
    return BackendError(text)


def _about(code: str, message: str) -> type[BackendError] | None:
    """Return the class of an error that tells the state of what was asked for; None for others."""
    if code in {"ResourceInUse", "ResourceInUseException"}:
        return TakenError
    if code in _MISSING or (code == "ValidationException" and _NOT_FOUND.search(message)):
        return MissingError
    if code == "ValidationException" and _HAS_ENDED.search(message):
        return EndedError
    return None
