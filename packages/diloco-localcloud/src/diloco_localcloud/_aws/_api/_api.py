"""The endpoint of all services: identifies the caller and the operation, and answers."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..._server._faults import Call, Calls, Faults, before
from ..._server._http import CutError, Request, Response
from ..._server._operations import operations
from .._model import _check
from .._model._refused import RefusedError, throttled
from .._training._region import Region
from . import _s3, _xml
from ._account import Quotas, Registry
from ._faults import REFUSALS, Rates, forbidden
from ._logs import CloudWatchLogs
from ._sagemaker import SageMaker

Json = dict[str, Any]

_KIND = "application/x-amz-json-1.1"
_SCOPE = r"([^/,]{1,128})/\d{1,8}/([^/,]{1,64})/([^/,]{1,64})/aws4_request"
# Matched at the beginning: a search through a long header would take quadratic time.
_HEADER = re.compile(rf"AWS4-HMAC-SHA256 +Credential={_SCOPE}")
_QUERY = re.compile(_SCOPE)
_TARGETS = {
    "Logs": "logs",
    "SageMaker": "sagemaker",
    "ServiceQuotasV20190624": "service-quotas",
    "AmazonEC2ContainerRegistry": "ecr",
}
_GLOBAL = "iam"  # requests to IAM are signed for another region
_MOST_BYTES = 5 << 30  # in an object that is put in one request; S3's own limit
_MOST_BYTES_OF_JSON = 1 << 20  # the largest possible CreateTrainingJob takes a third of it


@dataclass
class _Asked:
    """The operation that a request asks for, as far as it has been read."""

    service: str = ""
    operation: str = ""
    name: str = ""
    body: Json = field(default_factory=dict)

    @property
    def xml(self) -> bool:
        """Return whether the service sends its errors as XML."""
        return self.service in {"s3", "sts", "iam"}


class Api:
    """Answers requests; thread-safe.

    Attributes:
        faults: the faults that requests meet.
        calls: the requests so far; the verb is the operation, the resource is the service.
        s3: the objects.
    """

    def __init__(self, region: Region, access_key: str) -> None:
        self._region = region
        self._access_key = access_key
        self.faults = Faults()
        self.calls = Calls()
        self._rates = Rates(region.timeline, region.habits.rates)
        self._services: Mapping[str, Mapping[str, Callable[[Json], Any]]] = {
            **dict.fromkeys(("sts", "iam"), operations(_xml.Identity(region))),
            "ecr": operations(Registry(region)),
            "logs": operations(CloudWatchLogs(region)),
            "sagemaker": operations(SageMaker(region)),
            "service-quotas": operations(Quotas(region)),
        }
        self.s3 = _s3.S3()

    def admit(self, head: Request) -> Response | None:
        """Return the refusal of a request without the key or with too large a body, or None.

        It needs only the head, so that the body of a refused request is never read.
        """
        call = _Asked()
        try:
            self._authenticate(head, call)
            most = _MOST_BYTES if call.service == "s3" else _MOST_BYTES_OF_JSON
            if int(head.headers.get("content-length", "0")) > most:
                code, status = ("", 400) if call.service == "s3" else ("Request", 413)
                words = f"Your proposed upload exceeds the maximum allowed size of {most} bytes"
                raise RefusedError(f"{code}EntityTooLarge", words, status)
        except RefusedError as refused:
            answer = _refused(call, refused)
            self.calls.note(Call("", "", "", answer.status))  # nothing from an unknown sender
            return _with_id(call, answer)
        return None

    def handle(self, request: Request) -> Response:
        """Return the answer to a request that was admitted.

        Raises:
            CutError: a fault requires that the connection be dropped.
        """
        call = _Asked()
        try:
            self._identify(request, call)
            answer = self._answer(request, call)
        except RefusedError as refused:
            answer = _refused(call, refused)
        except CutError:
            self.calls.note(Call(call.operation, call.service, call.name, 0))
            raise
        self.calls.note(Call(call.operation, call.service, call.name, answer.status))
        return _with_id(call, answer)

    def _authenticate(self, request: Request, call: _Asked) -> None:
        """Read which service the request is for, and refuse a sender without the key."""
        access_key, region, call.service = self._credential(request)
        if access_key != self._access_key:
            raise RefusedError(
                "UnrecognizedClientException",
                "The security token included in the request is invalid.",
            )
        if region != self._region.name and call.service != _GLOBAL:
            raise RefusedError(
                "InvalidSignatureException",
                "Credential should be scoped to a valid region. The stand-in is in "
                f"{self._region.name}, not in {region}: ask it there, or start it with "
                f"region={region!r} (as a command, --region {region}).",
            )

    def _identify(self, request: Request, call: _Asked) -> None:
        """Read which operation the request is for, on which object."""
        self._authenticate(request, call)
        if call.service == "s3":
            call.operation, call.name = _s3.operation(request), request.path.lstrip("/")
            return
        code = "InvalidAction" if call.xml else "UnknownOperationException"
        if call.xml:
            call.body = dict(_xml.form(request))
            operation = str(call.body.get("Action", ""))
        else:
            word, _, operation = request.headers.get("x-amz-target", "").partition(".")
            call.service = _TARGETS.get(word.partition("_")[0], call.service)
            call.body = _body(request)
        if operation not in self._services.get(call.service, ()):
            known = "; ".join(f"{key}: {', '.join(value)}" for key, value in self._services.items())
            words = f"{call.service} {operation or request.path}; it knows {known}; and s3"
            raise RefusedError(code, f"the stand-in does not know {words}")
        call.operation, call.name = operation, str(call.body.get("TrainingJobName", ""))

    def _credential(self, request: Request) -> tuple[str, str, str]:
        """Return the access key, the region and the service for which a request is signed."""
        named = _HEADER.match(request.headers.get("authorization", ""))
        # A presigned URL has them in its query; one of the older kind has only the key.
        named = named or _QUERY.fullmatch(request.query.get("X-Amz-Credential", ""))
        if named is not None:
            return named[1], named[2], named[3]
        if "AWSAccessKeyId" in request.query:
            return request.query["AWSAccessKeyId"], self._region.name, "s3"
        raise RefusedError("MissingAuthenticationTokenException", "Missing Authentication Token")

    def _answer(self, request: Request, call: _Asked) -> Response:
        fault = self.faults.take(call.operation, call.service)
        before(fault, REFUSALS)
        if fault is not None and fault.kind == "forbidden":
            raise forbidden(self._region.caller, call.service, call.operation)
        if call.service == "s3":
            answer = self.s3.answer(request)
        else:
            with self._region.lock:
                if not self._rates.admit(call.operation):
                    raise throttled()
                if not call.xml:
                    _check.check(_check.load(call.service), call.operation, call.body)
                result = self._services[call.service][call.operation](call.body)
            if isinstance(result, str):
                answer = Response(200, result.encode(), "text/xml")
            else:
                answer = Response(200, json.dumps(result).encode(), _KIND)
        if fault is not None and fault.kind == "ambiguous":
            raise CutError
        return answer


def _body(request: Request) -> Json:
    try:
        body = json.loads(request.body or b"{}")
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict):
        raise RefusedError("SerializationException", "the body is not a JSON object")
    return body


def _with_id(call: _Asked, answer: Response) -> Response:
    """Return an answer with the id of its request, as all of AWS have."""
    mark = "x-amz-request-id" if call.service == "s3" else "x-amzn-RequestId"
    return replace(answer, headers={mark: str(uuid.uuid4()), **answer.headers})


def _refused(call: _Asked, refused: RefusedError) -> Response:
    if call.xml:
        return _xml.refusal(call.service, refused)
    body = json.dumps({"__type": refused.code, "message": refused.message}).encode()
    return Response(refused.status, body, _KIND, {"x-amzn-ErrorType": refused.code})
