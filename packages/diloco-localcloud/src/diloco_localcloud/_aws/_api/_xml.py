"""Answers of the services that speak XML: STS, and the refusals of S3."""

from __future__ import annotations

import urllib.parse
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

from ..._server._http import Response
from .._model._refused import RefusedError

if TYPE_CHECKING:
    from ..._server._http import Request

_NAMESPACE = "https://sts.amazonaws.com/doc/2011-06-15/"


def sts_operation(request: Request) -> str:
    """Which operation of STS a form asks for."""
    form = urllib.parse.parse_qs(request.body.decode("utf-8", "replace"))
    operation = form.get("Action", [""])[0]
    if operation != "GetCallerIdentity":
        raise RefusedError(
            "InvalidAction",
            f"the stand-in does not know sts {operation}; it knows GetCallerIdentity",
        )
    return operation


def caller_identity(caller: str, account: str) -> Response:
    """Who calls."""
    result = f"<Arn>{escape(caller)}</Arn><UserId>AIDASTANDIN</UserId><Account>{account}</Account>"
    body = (
        f'<GetCallerIdentityResponse xmlns="{_NAMESPACE}"><GetCallerIdentityResult>{result}</GetCallerIdentityResult>'
        "<ResponseMetadata><RequestId>stand-in</RequestId></ResponseMetadata></GetCallerIdentityResponse>"
    )
    return Response(200, body.encode(), "text/xml")


def refusal(service: str, refused: RefusedError) -> Response:
    """An error of STS or S3."""
    code, status = refused.code.removesuffix("Exception"), refused.status
    if service == "s3":
        code = {"UnrecognizedClient": "InvalidAccessKeyId", "InternalFailure": "InternalError"}.get(
            code, code
        )
        if code == "Throttling":
            code, status = "SlowDown", 503
        if code in {"AccessDenied", "InvalidAccessKeyId"}:
            status = 403
    error = f"<Error><Code>{code}</Code><Message>{escape(refused.message)}</Message></Error>"
    if service == "sts":
        error = f'<ErrorResponse xmlns="{_NAMESPACE}">{error}</ErrorResponse>'
    return Response(status, error.encode(), "text/xml" if service == "sts" else "application/xml")
