"""What the error codes of services mean: S3 and its kin (MinIO, R2, Ceph, GCS over S3), GCS and Azure. One table for all drivers.

The status of an answer is only looked at where a code is unknown or missing: S3 answers faults that pass with 400 and 403, too.

Sources: docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html, botocore's retries,
docs.cloud.google.com/storage/docs/xml-api/reference-status, developers.cloudflare.com/r2/api/error-codes,
learn.microsoft.com/rest/api/storageservices/blob-service-error-codes, and MinIO's cmd/api-errors.go.
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
        InvalidToken InvalidTokenId
        """,
    Verdict.FORBIDDEN: """
        AccessDenied AccountProblem AllAccessDisabled InvalidAccessKeyId InvalidSecurity
        InvalidObjectState NotSignedUp SignatureDoesNotMatch Unauthorized UnauthorizedAccess
        AuthenticationFailed AuthenticationRequired AuthorizationFailure
        AuthorizationPermissionMismatch InsufficientAccountPermissions InvalidAuthenticationInfo
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
    401: Verdict.FORBIDDEN,
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
    """What an answer with this status and code means; None if there was no answer.

    A code that the table does not have is judged by the status.
    """
    verdict = _BY_CODE.get(code or "")
    if verdict is not None or status is None:
        return verdict
    if 400 <= status < 500 and status not in _PASSING:
        return _BY_STATUS.get(status, Verdict.PERMANENT)
    return _BY_STATUS.get(status, Verdict.TRANSIENT)


def is_known(code: str | None) -> bool:
    """Whether the table has this code."""
    return code in _BY_CODE
