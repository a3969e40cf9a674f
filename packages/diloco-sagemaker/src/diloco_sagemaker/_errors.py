"""What went wrong with a call to AWS, as an error of the protocol's tree."""

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
    MissingDependencyError,
    QuotaExceededError,
    ReplicaNotFoundError,
    ThrottledError,
    UnavailableError,
)
from diloco_protocol.backend import redact_and_cut

# Characters of what AWS or its client says; looking for secrets takes seconds per million
_LONGEST = 16_000
_OTHER_SCHEME = re.compile("https?://[^/]*://")
"""What botocore makes of a proxy with another scheme."""
_UNSENDABLE = "Invalid header"  # and then the value, which may be a token
# An unknown job is a ValidationException, though ResourceNotFound is documented; and so is a stop
# of what has ended.
_NOT_FOUND = re.compile(r"requested resource not found|could not find", re.IGNORECASE)
_HAS_ENDED = re.compile(
    r"rejected because the training job is in status (Stopped|Completed|Failed|Stopping)\b",
    re.IGNORECASE,
)
_QUOTA = re.compile(
    r"service limit '(?P<type>\S+) for (?P<use>[\w ]*usage)' is (?P<quota>\d+) Instances?, with current utilization of "
    r"(?P<used>\d+) Instances? and a request delta of (?P<delta>\d+)"
)
_THROTTLED = frozenset(
    [
        "Throttling",
        "ThrottlingException",
        "ThrottledException",
        "TooManyRequestsException",
        "RequestLimitExceeded",
        "SlowDown",
        "RequestThrottled",
        "RequestThrottledException",
        "ProvisionedThroughputExceededException",
        "LimitExceededException",
        "EC2ThrottledException",
    ]
)
_MISSING = frozenset(
    [
        "ResourceNotFound",
        "ResourceNotFoundException",
        "NoSuchKey",
        "NoSuchBucket",
        "ImageNotFoundException",
        "RepositoryNotFoundException",
    ]
)
_OF_NONE = frozenset(["GetCallerIdentity", "ListTrainingJobs", "Search"])
"""Operations that ask for nothing by its name: an answer that it is not there says nothing of any run."""
_FORBIDDEN = frozenset(
    [
        "AccessDenied",
        "AccessDeniedException",
        "UnauthorizedOperation",
        "AuthorizationError",
        "OptInRequired",
    ]
)
_EXPIRED = frozenset(
    ["ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired"]
)
_AUTH = frozenset(
    [
        "UnrecognizedClientException",
        "InvalidClientTokenId",
        "InvalidAccessKeyId",
        "SignatureDoesNotMatch",
        "InvalidSignatureException",
        "IncompleteSignature",
        "MissingAuthenticationToken",
        "AuthFailure",
        "NotAuthorized",
        "InvalidToken",
    ]
)


LOOK = "Look at the variables AWS_... and HTTP..._PROXY, and at ~/.aws/config"
_OF_FILES = (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError)
NOT_ITS_OWN = " (this answer is not AWS's own, or was cut)"


class MissingError(ReplicaNotFoundError):
    """Raised when there is no such job, stream or object."""


class UnseenError(UnavailableError):
    """Raised when a job is not there that was created a moment ago, so that it may not be seen everywhere yet."""


class TakenError(BackendError):
    """Raised when the name of a job is taken, or a job cannot be removed now (ResourceInUse)."""


class EndedError(BackendError):
    """Raised when a job cannot be stopped, since it has ended or is being ended."""


class UnreachedError(UnavailableError):
    """Raised when there was no connection, so that the request was not sent."""


def to_error(error: Exception, what: str) -> DilocoError:
    """The error for what botocore raised; ``what`` was tried, such as ``"create the training job diloco-run-1-00000"``."""
    from botocore import exceptions as of_botocore  # slow to import
    from urllib3.exceptions import LocationValueError

    if isinstance(error, of_botocore.ClientError):
        return _answered(error.response, error.operation_name, f"cannot {what}")
    text = f"cannot {what}: {redact_and_cut(str(error), _LONGEST) or type(error).__name__}".rstrip(
        "."
    )
    if isinstance(error, of_botocore.HTTPClientError):
        unsent = error.kwargs.get("error")
        if str(unsent).startswith(_UNSENDABLE):
            return AuthError(
                f"cannot {what}: one of the credentials has a character that cannot be sent, such "
                "as a line end: look at AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and "
                "AWS_SESSION_TOKEN, or the same in the profile"
            )
        # A proxy's; an endpoint was looked at before.
        if isinstance(unsent, LocationValueError) or str(unsent) == "Invalid IPv6 URL":
            return InvalidRequestError(f"{text}. {LOOK}")
    if isinstance(error, of_botocore.ProxyConnectionError) and _OTHER_SCHEME.match(
        str(error.kwargs.get("proxy_url"))
    ):
        return InvalidRequestError(
            f"{text}: boto3 takes proxies by http:// and https:// alone. {LOOK}"
        )
    # Of credentials mostly, and no log-in mends it.
    if isinstance(error, of_botocore.InvalidConfigError):
        return AuthError(f"{text}. {LOOK}")
    if isinstance(error, UnicodeEncodeError):
        return InvalidRequestError(
            f"cannot {what}: a name, or one of the credentials, has a character that cannot be sent"
        )
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
    if isinstance(error, _OF_FILES):  # that settings name, such as web_identity_token_file
        return InvalidRequestError(f"{text}. {LOOK}")
    if isinstance(error, (of_botocore.HTTPClientError, of_botocore.ConnectionError, OSError)):
        return UnavailableError(text)
    # What is streamed is read from urllib3 itself, which has errors of its own.
    if isinstance(error, of_botocore.BotoCoreError) or type(error).__module__.startswith(
        ("botocore.", "urllib3.")
    ):
        # An answer that cannot be read, for one: it was cut, or a proxy gave it.
        return UnavailableError(text)
    if isinstance(
        error, (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
    ):
        # botocore has checked what is asked, and looks at no answer before it takes it apart. What
        # was asked may have been done.
        return UnavailableError(f"{text}: {type(error).__name__}{NOT_ITS_OWN}")
    return BackendError(text)


def not_made(error: Exception, what: str) -> DilocoError:
    """The error for a client that could not be made: nobody has been asked yet, and a setting is wrong."""
    known = to_error(error, what)
    if isinstance(known, (AuthError, InvalidRequestError)):
        return known
    return InvalidRequestError(
        f"cannot {what}: {redact_and_cut(str(error), _LONGEST).rstrip('.')}. {LOOK}"
    )


def missing_boto3(error: ImportError) -> MissingDependencyError:
    """The error for an installation without boto3."""
    return MissingDependencyError(f"{error}: run `pip install boto3`")


def quota_in(text: str) -> Mapping[str, str] | None:
    """Type, use, quota and usage, as the message of a ResourceLimitExceeded has them."""
    match = _QUOTA.search(text)
    return None if match is None else match.groupdict()


def _answered(response: Any, operation: str, failed: str) -> BackendError:
    told = response.get("Error", {})
    code, message = (
        redact_and_cut(str(told.get(name, "")), _LONGEST) for name in ("Code", "Message")
    )
    metadata = response.get("ResponseMetadata", {})
    status = metadata.get("HTTPStatusCode", 0)
    text = f"{failed}: {code}: {message}" if message else f"{failed}: {code or status}"
    about = _about(code, message)
    if about is MissingError and operation == "CreateTrainingJob":
        about = InvalidRequestError  # it is something that the request names
    of_none = about is MissingError and operation in _OF_NONE
    if about is not None and metadata.get("RequestId") and not of_none:
        return about(text)
    if about is not None or (code in {"", str(status)} and status not in {0, 429}):
        # botocore found no words of AWS in it: it was cut on its way, or somebody between answered.
        # It says nothing of what was asked for, so that no result is lost and no job is gone
        # because of it.
        return UnavailableError(f"{text}{NOT_ITS_OWN}")
    if code in _THROTTLED or status == 429:
        return ThrottledError(text, retry_after=_seconds(metadata.get("HTTPHeaders", {})))
    if code == "ResourceLimitExceeded":
        return QuotaExceededError(_quota(text, message))
    if code in _EXPIRED:
        # Whoever renews them may be about to.
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
    """The error that says something of what was asked for; None for those that say nothing of it."""
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
