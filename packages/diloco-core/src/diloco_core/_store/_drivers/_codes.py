"""What the error codes of services mean, and what to do about them. One table for all drivers.

Services are S3 and its kin (MinIO, R2, Ceph, GCS over S3), GCS and Azure. The status of an answer
is only looked at where a code is unknown or missing: S3 answers 400 and 403 to passing faults, too.

Sources: docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html, botocore's retries,
docs.cloud.google.com/storage/docs/xml-api/reference-status,
developers.cloudflare.com/r2/api/error-codes,
learn.microsoft.com/rest/api/storageservices/blob-service-error-codes, and MinIO's
cmd/api-errors.go.
"""

from __future__ import annotations

from ._driver import Verdict

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
