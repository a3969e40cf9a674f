"""Define the drivers of stores behind a network: they send single requests, and know errors.

One table for all drivers says what the error codes of services mean. Services are S3 and its kin
(MinIO, R2, Ceph, GCS over S3), GCS and Azure. The status of an answer is only looked at where a
code is unknown or missing: S3 answers 400 and 403 to passing faults, too.

Sources: docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html, botocore's retries,
docs.cloud.google.com/storage/docs/xml-api/reference-status,
developers.cloudflare.com/r2/api/error-codes,
learn.microsoft.com/rest/api/storageservices/blob-service-error-codes, and MinIO's
cmd/api-errors.go.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import Any, NamedTuple, Protocol

from .._api import Buffer
from ._uploads import UploadBlocks


class Verdict(Enum):
    """Say what an error of a driver means."""

    MISSING = auto()
    """The object does not exist."""
    EXISTS = auto()
    """The object exists already."""
    NO_BUCKET = auto()
    """The bucket does not exist."""
    FORBIDDEN = auto()
    """The credentials are missing, wrong, or do not allow this request."""
    EXPIRED = auto()
    """The credentials have ended, or there are none at the moment: the source may have new ones."""
    CLOCK = auto()
    """The service finds that the time of the request is wrong."""
    WRONG_PLACE = auto()
    """The bucket is in another region, or behind another endpoint."""
    TRANSIENT = auto()
    """The request may succeed the next time. Whether this one has taken effect is not known."""
    THROTTLED = auto()
    """The same, and there are too many requests."""
    REFUSED = auto()
    """The service does not have this kind of request, or refuses a header of it."""
    PERMANENT = auto()
    """The request will not succeed the next time either."""

    @property
    def passes(self) -> bool:
        """Say whether the same request may succeed the next time, if nothing is changed."""
        return self in {Verdict.TRANSIENT, Verdict.THROTTLED}


ANEW = {Verdict.TRANSIENT, Verdict.THROTTLED, Verdict.EXPIRED, Verdict.CLOCK}
"""Errors after which an upload in parts may be sent again from the beginning of the object."""


class Sending(NamedTuple):
    """Say how a large object is written.

    Attributes:
        exclusive: Whether it is written only if the key does not exist.
        attempt: Calls a function until it succeeds, for steps that can be repeated, and returns
            what it returns.
        at_once: The number of parts that are sent at the same time.
    """

    exclusive: bool
    attempt: Callable[[Callable[[], Any]], Any]
    at_once: int


class Driver(Protocol):
    """Sends single requests to one prefix; keys are relative to it.

    Thread-safe. It raises the errors of its own library.
    """

    name: str
    near: bool
    exclusive: bool
    """True if an exclusive write is a single step: nothing happens between looking and writing."""
    deletes_many: bool
    """Whether it deletes many objects with one request."""
    copies: int
    """Copies of a part that it holds while it sends the part; 0 if it sends the caller's buffer."""

    def put(self, key: str, data: Buffer, *, exclusive: bool) -> None:
        """Write a small object; if ``exclusive``, only if the key does not exist."""

    def upload(self, key: str, blocks: UploadBlocks, sending: Sending) -> None:
        """Write a large object in one step. ``blocks`` can be iterated over only once."""

    def get(self, key: str, largest: int) -> Buffer:
        """Read a whole object.

        Raises:
            TooLargeError: It has more than ``largest`` bytes; at most a small part of it was read.
        """

    def head(self, key: str) -> tuple[int, Buffer]:
        """An object's size in bytes, and its first bytes if they come with the same request."""

    def range(self, key: str, start: int, stop: int) -> Buffer:
        """Bytes ``start`` to ``stop`` of an object."""

    def list(self, prefix: str) -> dict[str, int]:
        """Keys below a folder and their sizes in bytes."""

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects; those that do not exist are ignored."""

    def judge(self, error: Exception) -> tuple[Verdict, str]:
        """Return what an error means, and its text without details for developers of the driver."""

    def renew(self) -> None:
        """Ask the source of the credentials for new ones.

        Called when the service says that the credentials have ended.
        """


class TooLargeError(Exception):
    """An object is larger than what may be read in one piece.

    Raised by drivers; never leaves the store.
    """

    def __init__(self, size: int) -> None:
        super().__init__(f"{size} bytes")
        self.size = size


_TABLE = {
    Verdict.TRANSIENT: """
        InternalError InternalServerError InternalFailure backendError
        ServiceUnavailable ServiceUnavailableException Busy XMinioServerNotInitialized
        RequestTimeout RequestTimeoutException OperationTimedOut TemporaryRedirect
        OperationAborted ConditionalRequestConflict PriorRequestNotComplete
        AccountBeingCreated ContainerBeingDeleted
        IncompleteBody ClientDisconnect ConnectionClosedByRequester
        BadDigest CrcMismatch Md5Mismatch XAmzContentChecksumMismatch NoSuchUpload
        """,
    Verdict.THROTTLED: """
        SlowDown SlowDownRead SlowDownWrite Throttling ThrottlingException ThrottledException
        RequestThrottled RequestThrottledException RequestLimitExceeded LimitExceededException
        TooManyRequests TooManyRequestsException ErrTooManyRequest BandwidthLimitExceeded
        ServerBusy rateLimitExceeded userRateLimitExceeded
        """,
    Verdict.CLOCK: "RequestTimeTooSkewed RequestInTheFuture",
    Verdict.EXPIRED: """
        ExpiredToken ExpiredTokenException RequestExpired ExpiredRequest TokenRefreshRequired
        InvalidToken InvalidTokenId InvalidAuthenticationInfo
        """,
    Verdict.FORBIDDEN: """
        AccessDenied AccountProblem AllAccessDisabled InvalidAccessKeyId InvalidSecurity
        InvalidObjectState NotSignedUp SignatureDoesNotMatch Unauthorized UnauthorizedAccess
        AuthenticationFailed AuthenticationRequired AuthorizationFailure
        AuthorizationPermissionMismatch InsufficientAccountPermissions
        NoAuthenticationInformation AccountIsDisabled forbidden
        """,
    Verdict.WRONG_PLACE: """
        PermanentRedirect AuthorizationHeaderMalformed IllegalLocationConstraintException
        InvalidRegion
        """,
    Verdict.NO_BUCKET: "NoSuchBucket ContainerNotFound",
    Verdict.MISSING: "NoSuchKey BlobNotFound ResourceNotFound NoSuchVersion",
    Verdict.EXISTS: "PreconditionFailed ConditionNotMet BlobAlreadyExists conditionNotMet",
    Verdict.REFUSED: """
        NotImplemented MethodNotAllowed NotSupported UnsupportedOperation UnsupportedHeader
        UnsupportedHttpVerb ConditionHeadersNotSupported MissingContentMD5 InvalidRequest
        InvalidArgument InvalidDigest XAmzContentSHA256Mismatch FeatureNotEnabled
        """,
}
_BY_CODE = {code: verdict for verdict, codes in _TABLE.items() for code in codes.split()}
_BY_STATUS = {
    301: Verdict.WRONG_PLACE,
    401: Verdict.EXPIRED,
    403: Verdict.FORBIDDEN,
    404: Verdict.MISSING,
    405: Verdict.REFUSED,
    412: Verdict.EXISTS,
    429: Verdict.THROTTLED,
    501: Verdict.REFUSED,
    505: Verdict.PERMANENT,
}
_PASSING = {408, 409, 425}


def verdict_of(status: int | None, code: str | None) -> Verdict | None:
    """Return what an answer with this status and code means; None if there was no answer.

    A code that the table does not have is judged by the status.
    """
    verdict = _BY_CODE.get(code or "")
    if verdict is not None or status is None:
        return verdict
    # Another condition than ours, such as a lease. Without a body there is no code, and botocore
    # puts the status in its place.
    if status == 412 and code not in {None, "412"}:
        return Verdict.PERMANENT
    if 400 <= status < 500 and status not in _PASSING:
        return _BY_STATUS.get(status, Verdict.PERMANENT)
    return _BY_STATUS.get(status, Verdict.TRANSIENT)


def is_known(code: str | None) -> bool:
    """Say whether the table has this code."""
    return code in _BY_CODE


_ADVICE = {
    Verdict.NO_BUCKET: "The bucket does not exist: create it, or correct the URI.",
    Verdict.EXPIRED: "The credentials have ended, or cannot be had at the moment. Use a source "
    "that renews them (a role, web identity, a credential process, SSO): credentials in "
    "environment variables and in files are never renewed. For SSO, log in again. If they are new, "
    "set this machine's clock.",
    Verdict.CLOCK: "The clock of this machine is wrong: set it (with NTP, for instance). S3 allows "
    "15 minutes.",
    Verdict.WRONG_PLACE: "The bucket is in another region, or belongs to another endpoint: set "
    "AWS_REGION and AWS_DEFAULT_REGION to its region, or AWS_ENDPOINT_URL.",
    Verdict.THROTTLED: "The store limits how many requests it takes: use fewer connections= per "
    "replica, or larger shares of its limits.",
}


def advice(verdict: Verdict, verb: str, driver: str) -> str:
    """The text; empty where there is nothing to say.

    Args:
        verdict: What the answer means.
        verb: What was to be done: create, write, read, list or delete.
        driver: The name of the driver.
    """
    if verdict is Verdict.FORBIDDEN:
        conditional = (
            " If they may write, then a policy of the bucket refuses conditional writes "
            "(If-None-Match), which an exclusive write needs: allow them."
            if verb == "create"
            else ""
        )
        return (
            f"Access was denied: check that this process's credentials (those that {driver} finds "
            f"by itself) may put, get, list and delete below the prefix.{conditional}"
        )
    if verdict is Verdict.REFUSED:
        return (
            "The store refuses this kind of request, so it was not tried again. "
            f"{_way_out(verb, driver)}"
        )
    return _ADVICE.get(verdict, "")


def _way_out(verb: str, driver: str) -> str:
    if verb == "create":
        return (
            "It is a conditional write (If-None-Match: *), by which replicas agree on who is "
            "first. Use a store that has them, such as S3, or a folder that all replicas share."
        )
    if driver == "obstore":
        other = "deletes objects one by one" if verb == "delete" else "sends other requests"
        return f"Try fsspec+s3:// in place of s3://, which {other}."
    if "s3" in driver:
        return (
            "If it is the checksum that newer SDKs add, set "
            "AWS_REQUEST_CHECKSUM_CALCULATION=when_required and "
            "AWS_RESPONSE_CHECKSUM_VALIDATION=when_required; or try obstore+s3://."
        )
    return ""
