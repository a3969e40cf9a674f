"""Errors of calls to AWS, translated into errors of the protocol."""

from __future__ import annotations

import re
from collections.abc import Mapping
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
_OTHER_SCHEME = re.compile("https?://[^/]*://")
"""The URL that botocore makes of a proxy with another scheme."""
# SageMaker answers with a ValidationException if there is no such job, although ResourceNotFound is
# documented, and also if a job that is to be stopped has ended.
_NOT_FOUND = re.compile(r"requested resource not found|could not find", re.IGNORECASE)
_HAS_ENDED = re.compile(
    r"rejected because the training job is in status (Stopped|Completed|Failed|Stopping)\b",
    re.IGNORECASE,
)
_QUOTA = re.compile(
    r"service limit '(?P<type>\S+) for (?P<use>[\w ]*usage)' is (?P<quota>\d+) Instances?, "
    r"with current utilization of (?P<used>\d+) Instances? and a request delta of (?P<delta>\d+)"
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
_ONCE = frozenset(["CreateTrainingJob", "StopTrainingJob"])
"""Operations that are refused, or say something else, if they have been carried out before."""
_FORBIDDEN = frozenset({
    "AccessDenied", "AccessDeniedException", "UnauthorizedOperation", "AuthorizationError",
    "OptInRequired",
})  # fmt: skip
_EXPIRED = frozenset({
    "ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired",
})  # fmt: skip
_AUTH = frozenset({
    "UnrecognizedClientException", "InvalidClientTokenId", "InvalidAccessKeyId",
    "SignatureDoesNotMatch", "InvalidSignatureException", "IncompleteSignature",
    "MissingAuthenticationToken", "AuthFailure", "NotAuthorized", "InvalidToken",
})  # fmt: skip


_EARLIER = "an earlier try, without an answer, may have been carried out"
LOOK = "Look at the variables AWS_... and HTTP..._PROXY, and at ~/.aws/config"
_OF_FILES = (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError)
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


def to_error(error: Exception, what: str, tries: int = 0) -> DilocoError:
    """Return the error of the protocol for one that botocore raised.

    Args:
        error: The error of botocore.
        what: What was tried, such as ``"create the training job diloco-run-1-00000"``.
        tries: How often the client has tried. With more than one, an earlier try may have been
            carried out, whatever has prevented this one.
    """
    from botocore import exceptions as of_botocore  # slow to import
    from urllib3.exceptions import LocationValueError

    if isinstance(error, of_botocore.ClientError):
        return _answered(error.response, error.operation_name, f"cannot {what}")
    text = f"cannot {what}: {redact_and_cut(str(error), _LONGEST) or type(error).__name__}".rstrip(
        "."
    )
    if tries > 1:
        return UnavailableError(f"{text} ({_EARLIER})")
    if isinstance(error, of_botocore.HTTPClientError):
        unsent = error.kwargs.get("error")
        # The address of a proxy is wrong: that of an endpoint was checked before.
        if isinstance(unsent, LocationValueError) or str(unsent) == "Invalid IPv6 URL":
            return InvalidRequestError(f"{text}. {LOOK}")
    if isinstance(error, of_botocore.ProxyConnectionError) and _OTHER_SCHEME.match(
        str(error.kwargs.get("proxy_url"))
    ):
        return InvalidRequestError(
            f"{text}: boto3 takes proxies by http:// and https:// alone. {LOOK}"
        )
    # Mostly about the settings of credentials, which a new log-in does not repair.
    if isinstance(error, of_botocore.InvalidConfigError):
        return AuthError(f"{text}. {LOOK}")
    if isinstance(error, UnicodeEncodeError):
        return InvalidRequestError(f"cannot {what}: a name has a character that cannot be sent")
    if isinstance(error, of_botocore.NoRegionError):
        return InvalidRequestError(
            f"{text}. Give the executor region=, or set AWS_REGION or AWS_DEFAULT_REGION"
        )
    if isinstance(
        error,
        (
            of_botocore.NoCredentialsError,
            of_botocore.PartialCredentialsError,
            of_botocore.CredentialRetrievalError,
            of_botocore.TokenRetrievalError,
            of_botocore.SSOError,
            of_botocore.ProfileNotFound,
            of_botocore.UnauthorizedSSOTokenError,
            of_botocore.MissingDependencyException,
        ),
    ):
        return AuthError(
            f"{text}. Log in (aws login, aws sso login), set AWS_PROFILE, or give the executor "
            "session="
        )
    if isinstance(error, (of_botocore.ParamValidationError, of_botocore.UnknownServiceError)):
        return InvalidRequestError(text)
    if isinstance(
        error,
        (
            of_botocore.EndpointConnectionError,
            of_botocore.ConnectTimeoutError,
            of_botocore.ProxyConnectionError,
        ),
    ):
        return UnreachedError(text)
    if isinstance(error, _OF_FILES):  # named in settings, such as web_identity_token_file
        return InvalidRequestError(f"{text}. {LOOK}")
    if isinstance(error, (of_botocore.HTTPClientError, of_botocore.ConnectionError, OSError)):
        return UnavailableError(text)
    # A streamed answer is read from urllib3 directly, which raises errors of its own.
    if isinstance(error, of_botocore.BotoCoreError) or type(error).__module__.startswith(
        ("botocore.", "urllib3.")
    ):
        # For example, an answer that cannot be read, because it was cut or came from a proxy.
        return UnavailableError(text)
    if isinstance(
        error, (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
    ):
        # botocore has checked the request, but takes answers apart without checking them first. So
        # the answer is at fault, and what was asked for may have been done.
        return UnavailableError(f"{text}: {type(error).__name__}{NOT_ITS_OWN}")
    return BackendError(text)


def not_made(error: Exception, what: str) -> DilocoError:
    """Return the error for a client that could not be made.

    No request has been sent yet, so a setting is wrong.
    """
    known = to_error(error, what)
    if isinstance(known, (AuthError, InvalidRequestError)):
        return known
    return InvalidRequestError(
        f"cannot {what}: {redact_and_cut(str(error), _LONGEST).rstrip('.')}. {LOOK}"
    )


def quota_in(text: str) -> Mapping[str, str] | None:
    """Return type, use, quota and usage from a message of ResourceLimitExceeded; None without."""
    match = _QUOTA.search(text)
    return None if match is None else match.groupdict()


def _answered(response: Any, operation: str, failed: str) -> BackendError:
    error = response.get("Error", {})
    code, message = (
        redact_and_cut(str(error.get(name, "")), _LONGEST) for name in ("Code", "Message")
    )
    metadata = response.get("ResponseMetadata", {})
    status = metadata.get("HTTPStatusCode", 0)
    text = f"{failed}: {code}: {message.rstrip('.')}" if message else f"{failed}: {code or status}"
    about = _about(code, message)
    if about is MissingError and operation == "CreateTrainingJob":
        about = InvalidRequestError  # what is missing is something that the request names
    of_none = about is MissingError and operation in _OF_NONE
    if about is not TakenError and operation in _ONCE and metadata.get("RetryAttempts"):
        return UnavailableError(f"{text} ({_EARLIER})")
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
        return ThrottledError(text, retry_after=_seconds(metadata.get("HTTPHeaders", {})))
    if code == "ResourceLimitExceeded":
        return QuotaExceededError(_quota(text, message))
    if code in _EXPIRED:
        # Retryable, since a program that renews them may be about to do so.
        return AuthError(
            f"{text}. The credentials have expired: log in again, or renew what gives them",
            retryable=True,
        )
    if code in _AUTH:
        return AuthError(
            f"{text}. AWS does not accept the credentials: look at AWS_PROFILE and the region"
        )
    if code in _FORBIDDEN:
        return ForbiddenError(
            f"{text}. The package has the policies that are needed: launcher_policy.json and "
            "role_policy.json"
        )
    if isinstance(status, int) and status >= 500:
        return UnavailableError(text)
    if code in {
        "InternalFailure",
        "InternalError",
        "ServiceUnavailable",
        "ServiceUnavailableException",
    }:
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


def _quota(text: str, message: str) -> str:
    known = quota_in(message)
    if known is None:
        return f"{text}. Ask for more in the console of Service Quotas, or wait with quota_timeout="
    return (
        f"{text}. The quota of {known['type']} ({known['use']}) is {known['quota']}, of which "
        f"{known['used']} are in use: ask for more in the console of Service Quotas, choose "
        "another type, or wait with quota_timeout= (a job that was stopped frees its quota some "
        "minutes later)"
    )


def _seconds(headers: Mapping[str, str]) -> float | None:
    try:
        seconds = float(headers.get("retry-after", ""))
    except (TypeError, ValueError):
        return None
    return seconds if 0 <= seconds < 86_400 else None
