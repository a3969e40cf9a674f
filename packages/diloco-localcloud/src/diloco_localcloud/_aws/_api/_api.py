"""The endpoint of all services: who asks, for what, and how it is answered."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from ..._server._faults import Call, Calls, Faults, before
from ..._server._http import CutError, Request, Response
from .._model import _check
from .._model._refused import RefusedError, throttled
from .._model._service import load
from ._faults import REFUSALS, forbidden
from ._rates import Rates
from ._sagemaker import SageMaker

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from .._training._region import Region

Json = dict[str, Any]

_KIND = "application/x-amz-json-1.1"
_CREDENTIAL = re.compile(r"Credential=([^/,]+)/\d+/([^/,]+)/([^/,]+)/aws4_request")
_TARGETS = {"SageMaker": "sagemaker"}


class Api:
    """Answers requests; thread-safe.

    Attributes:
        faults: what goes wrong.
        calls: what was called; the verb is the operation, the resource is the service.
    """

    def __init__(self, region: Region, access_key: str) -> None:
        self._region = region
        self._access_key = access_key
        self.faults = Faults()
        self.calls = Calls()
        self._rates = Rates(region.timeline, region.habits.rates)
        self._services: Mapping[str, Mapping[str, Callable[[Json], Json]]] = {
            "sagemaker": SageMaker(region).operations
        }

    def handle(self, request: Request) -> Response:
        """The answer to a request.

        Raises:
            CutError: a fault has the connection dropped.
        """
        service, operation, name, status = "", "", "", 0
        try:
            service, operation = self._target(request)
            body = _body(request)
            name = str(body.get("TrainingJobName", ""))
            answer = self._answer(service, operation, body)
            status = answer.status
        except RefusedError as refused:
            status = refused.status
            return _refusal(refused)
        else:
            return answer
        finally:
            self.calls.note(Call(operation, service, name, status))

    def _target(self, request: Request) -> tuple[str, str]:
        """What is asked for: service and operation."""
        named = _CREDENTIAL.search(request.headers.get("authorization", ""))
        if named is None:
            raise RefusedError(
                "MissingAuthenticationTokenException", "Missing Authentication Token"
            )
        if named[1] != self._access_key:
            raise RefusedError(
                "UnrecognizedClientException",
                "The security token included in the request is invalid.",
            )
        if named[2] != self._region.name:
            raise RefusedError(
                "InvalidSignatureException",
                f"Credential should be scoped to a valid region. The stand-in is in {self._region.name}, not in {named[2]}.",
            )
        word, _, operation = request.headers.get("x-amz-target", "").partition(".")
        service = _TARGETS.get(word.partition("_")[0])
        if service is None or operation not in self._services[service]:
            known = "; ".join(f"{key}: {', '.join(value)}" for key, value in self._services.items())
            asked = f"{named[3]} {operation or request.path}"
            raise RefusedError(
                "UnknownOperationException", f"the stand-in does not know {asked}; it knows {known}"
            )
        return service, operation

    def _answer(self, service: str, operation: str, body: Json) -> Response:
        fault = self.faults.take(operation, service)
        before(fault, REFUSALS)
        if fault is not None and fault.kind == "forbidden":
            raise forbidden(self._region.caller, service, operation)
        with self._region.lock:
            if not self._rates.admit(operation):
                raise throttled()
            _check.check(load(service), operation, body)
            answer = self._services[service][operation](body)
        if fault is not None and fault.kind == "ambiguous":
            raise CutError
        return Response(200, json.dumps(answer).encode(), _KIND)


def _body(request: Request) -> Json:
    try:
        body = json.loads(request.body or b"{}")
    except ValueError:
        body = None
    if not isinstance(body, dict):
        raise RefusedError("SerializationException", "the body is not a JSON object")
    return body


def _refusal(refused: RefusedError) -> Response:
    body = json.dumps({"__type": refused.code, "message": refused.message}).encode()
    return Response(refused.status, body, _KIND, {"x-amzn-ErrorType": refused.code})
