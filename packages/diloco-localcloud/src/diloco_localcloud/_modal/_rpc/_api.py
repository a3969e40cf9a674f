"""The service that the client calls: identifies the caller, and answers every RPC."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hmac
import inspect
import logging
import struct
from collections.abc import Callable, Mapping
from typing import Any

from google.protobuf import message_factory
from google.protobuf.empty_pb2 import Empty
from grpclib.const import Cardinality, Handler, Status
from grpclib.exceptions import GRPCError, StreamTerminatedError
from grpclib.server import Stream
from modal_proto import api_pb2

from ..._server._faults import Call, Calls, Fault, Faults, before
from ..._server._http import CutError
from ..._server._operations import operations
from .._workspace._refused import RefusedError
from .._workspace._workspace import Workspace
from ._calls import FunctionCalls
from ._containers import Containers
from ._context import Bell, Context
from ._dicts import DictOperations
from ._functions import Functions
from ._logs import LogReader
from ._objects import Objects

_LOG = logging.getLogger("diloco_localcloud")
_SERVICE = "ModalClient"
# Modal takes entries of a Dict of up to 100 MiB.
_MOST_BYTES = 128 << 20
# The most characters in a refusal's message: it is sent in a header, which is compressed in
# quadratic time.
_MESSAGE = 4000
_CONTAINER = "x-stand-in-container"  # sent by containers in place of a token
_NAMES = ("function_call_id", "dict_id", "function_id", "deployment_name", "app_name", "app_id")
_HEAD = struct.Struct(">?I")
_REFUSALS: Mapping[str, Callable[[Fault], RefusedError]] = {
    "throttle": lambda _: RefusedError("RESOURCE_EXHAUSTED", "Rate limit exceeded"),
    "server_error": lambda _: RefusedError("INTERNAL", "Internal error"),
    "unavailable": lambda _: RefusedError("UNAVAILABLE", "Service is unavailable"),
    "unauthorized": lambda _: RefusedError("UNAUTHENTICATED", "Token validation failed"),
    "forbidden": lambda _: RefusedError("PERMISSION_DENIED", "Permission denied"),
    "expired": lambda _: RefusedError("FAILED_PRECONDITION", "The request is no longer valid"),
}

# The HTTP statuses that Google's APIs use for those of gRPC, for the list of calls.
_HTTP = {
    "OK": 200,
    "INVALID_ARGUMENT": 400,
    "FAILED_PRECONDITION": 400,
    "UNAUTHENTICATED": 401,
    "PERMISSION_DENIED": 403,
    "NOT_FOUND": 404,
    "ALREADY_EXISTS": 409,
    "ABORTED": 409,
    "RESOURCE_EXHAUSTED": 429,
    "UNIMPLEMENTED": 501,
    "UNAVAILABLE": 503,
}


class Api:
    """Answers the RPCs of one workspace on one event loop.

    Args:
        workspace: the workspace.
        token: the ID and the secret that a client has to send.
        faults: the faults that requests meet.
        calls: the list in which requests are noted.
        bell: rung after every change of the workspace.
        blob_url: returns, for the ID of a blob and an HTTP method, the URL to send or fetch it.
    """

    def __init__(
        self,
        workspace: Workspace,
        token: tuple[str, str],
        faults: Faults,
        calls: Calls,
        bell: Bell,
        blob_url: Callable[[str, str], str],
    ) -> None:
        self._workspace = workspace
        self._token = token
        self._faults = faults
        self._calls = calls
        groups = (
            FunctionCalls(workspace, bell),
            Containers(workspace, bell),
            LogReader(workspace, bell),
            DictOperations(workspace, bell),
            Functions(workspace, bell),
            Objects(workspace, bell, blob_url),
        )
        self._rpcs: dict[str, Callable[[Any, Context], Any]] = {}
        for group in groups:
            self._rpcs |= operations(group)

    def __mapping__(self) -> dict[str, Handler]:
        """Return every RPC of the service, as grpclib wants it; unserved ones refuse."""
        service = api_pb2.DESCRIPTOR.services_by_name[_SERVICE]
        made = {}
        for method in service.methods:
            kinds = (method.client_streaming, method.server_streaming)
            made[f"/{service.full_name}/{method.name}"] = Handler(
                functools.partial(self._handle, method.name),
                next(cardinality for cardinality in Cardinality if cardinality.value == kinds),
                message_factory.GetMessageClass(method.input_type),
                message_factory.GetMessageClass(method.output_type),
            )
        return made

    async def _handle(self, name: str, stream: Stream[Any, Any]) -> None:
        request, status, key = None, "OK", ""
        try:
            context = self._admit(stream.metadata or {})
            key = context.key
            request = await _receive(stream, _MOST_BYTES)
            await self._answer(name, request, context, stream)
        except RefusedError as refused:
            status = refused.code
            raise GRPCError(Status[refused.code], refused.message[:_MESSAGE]) from None
        except CutError:
            status = ""
            await stream.cancel()
        except (asyncio.CancelledError, StreamTerminatedError):
            status = ""  # the client has gone, or its deadline has passed
            raise
        except Exception:
            _LOG.exception("%s failed", name)
            status = "INTERNAL"
            raise
        finally:
            texts = (str(getattr(request, field, "")) for field in _NAMES)
            subject = next((text for text in texts if text), "")
            code = _HTTP.get(status, 500) if status else 0
            self._calls.note(Call(name, "modal", subject, code, key))

    async def _answer(
        self, name: str, request: Any, context: Context, stream: Stream[Any, Any]
    ) -> None:
        fault = self._faults.take(name, "modal")
        if fault is not None and fault.kind == "delay":
            await asyncio.sleep(fault.delay)
        else:
            before(fault, _REFUSALS)
        rpc = self._rpcs.get(name)
        if rpc is None:
            raise RefusedError("UNIMPLEMENTED", f"the stand-in does not serve {name}")
        if inspect.isasyncgenfunction(rpc):
            async with contextlib.aclosing(rpc(request, context)) as items:
                async for item in items:
                    await stream.send_message(item)
            return
        if inspect.iscoroutinefunction(rpc):
            answer = await rpc(request, context)
        else:
            with self._workspace.lock:
                answer = rpc(request, context)
        if fault is not None and fault.kind == "ambiguous":
            raise CutError
        await stream.send_message(Empty() if answer is None else answer)

    def _admit(self, headers: Mapping[str, Any]) -> Context:
        """Return the context of a request whose sender may ask.

        Raises:
            RefusedError: the sender has neither a token nor a container's header.
        """
        word, key = headers.get(_CONTAINER, ""), str(headers.get("x-idempotency-key", ""))
        if word in self._workspace.containers:
            return Context(key, self._workspace.containers[word])
        sent = (headers.get("x-modal-token-id", ""), headers.get("x-modal-token-secret", ""))
        pairs = zip(sent, self._token, strict=True)
        if not all(hmac.compare_digest(str(one), other) for one, other in pairs):
            raise RefusedError(
                "UNAUTHENTICATED", "Token validation failed. Could not authenticate client."
            )
        return Context(key)


async def _receive(stream: Stream[Any, Any], most: int) -> Any:
    """Return the message of a request; grpclib's own way reads whatever length is announced.

    Raises:
        RefusedError: it is longer than ``most``; it is not read then.
    """
    head = await _read(stream, _HEAD.size)
    compressed, size = _HEAD.unpack(head)
    if compressed:
        raise RefusedError("UNIMPLEMENTED", "the stand-in reads no compressed messages")
    if size > most:
        text = f"a message of {size} bytes; the stand-in reads at most {most}"
        raise RefusedError("RESOURCE_EXHAUSTED", text)
    data = await _read(stream, size)
    return stream._codec.decode(data, stream._recv_type)  # noqa: SLF001


async def _read(stream: Stream[Any, Any], size: int) -> bytes:
    try:
        data: bytes = await stream._stream.recv_data(size)  # noqa: SLF001 - with its flow control
    except AssertionError:  # the stream ended too early
        data = b""
    if len(data) < size:
        raise RefusedError("INVALID_ARGUMENT", "the message of this request is missing or cut off")
    return data
