"""Read results of calls and entries of Dicts as bytes, without unpickling them.

Modal's client unpickles everything that a call returns or raises, and everything in a Dict, which
any program may have written; so it runs their code. It reads each message whole, so the size of one
can be checked only then. No other file uses private parts of the client: its RPCs (``_stub``), the
loop on which they run (``synchronize_api``), and the HTTP session that knows the user's proxy. If
these differ in a version of the client, ``test_wire.py`` shows what has moved.
"""

# ruff: noqa: SLF001
from __future__ import annotations

import contextlib
import time
from typing import Any

from modal._utils.async_utils import synchronize_api
from modal._utils.http_utils import ClientSessionRegistry
from modal_proto import api_pb2

from diloco_protocol import InvalidRequestError, UnavailableError
from diloco_protocol.backend import OUTCOME_BYTES, RECORD_BYTES, check_size

from .._state._decode import text_in_cbor, text_in_pickle
from .._state._record import damaged
from .._state._states import End
from ._errors import MissingError

_AROUND = 64
"""More bytes than a pickle adds to a text."""
_ENTRY_BYTES = 256
"""Bytes that an entry takes besides its text."""
_DICT_BYTES = 8 * RECORD_BYTES
"""The most bytes of all entries of a run, in which each replica has several."""
_RAISED = {"FAILURE", "INIT_FAILURE"}
_MESSAGE = 4000
"""Characters that are kept of what Modal says about an end."""


async def _get_end(client: Any, call_id: str, *, value: bool = True) -> End | None:
    """Return how a call has ended; None if it has not.

    Args:
        client: A client of Modal.
        call_id: The call.
        value: Whether to fetch what it returned.

    Raises:
        MissingError: Its result has expired.
        UnavailableError: What it returned could not be fetched.
    """
    request = api_pb2.FunctionGetOutputsRequest(
        function_call_id=call_id, timeout=0, last_entry_id="0-0", requested_at=time.time(),
        start_idx=0, end_idx=0,
    )  # fmt: skip
    reply = await client._stub.FunctionGetOutputs(request)
    if not reply.outputs and reply.num_unfinished_inputs:
        return None
    if not reply.outputs:
        raise MissingError(f"the result of the call {call_id} has expired")
    output = reply.outputs[0]
    result, status = output.result, _word(output.result.status)
    if status != "SUCCESS" or not value:
        raised = status in _RAISED and bool(result.data or result.data_blob_id)
        return End(status, message=result.exception[:_MESSAGE], raised=raised)
    try:
        data = result.data
        if result.WhichOneof("data_oneof") == "data_blob_id":
            data = await _download(client, result.data_blob_id)
        check_size("what it returned", len(data), OUTCOME_BYTES + _AROUND)
    except InvalidRequestError as error:
        return End(status, message=str(error))
    cbor = output.data_format == api_pb2.DATA_FORMAT_CBOR
    text = text_in_cbor(data) if cbor else text_in_pickle(data)
    if text is None:
        return End(status, message="what it returned is not text, and is not unpickled")
    return End(status, text)


async def _download(client: Any, blob_id: str) -> bytes:
    import aiohttp

    reply = await client._stub.BlobGet(api_pb2.BlobGetRequest(blob_id=blob_id))
    pieces, size = [], 0
    try:
        async with ClientSessionRegistry.get_session().get(reply.download_url) as body:
            if body.status != 200:
                final = 400 <= body.status < 500 and body.status not in {408, 429}
                kind = InvalidRequestError if final else UnavailableError
                raise kind(f"its result could not be fetched: HTTP {body.status}")
            if body.headers.get("Content-Encoding", "identity") != "identity":
                raise InvalidRequestError("what it returned was compressed, and is not read")
            async for piece in body.content.iter_any():
                size += len(piece)
                check_size("what it returned", size, OUTCOME_BYTES + _AROUND)
                pieces.append(piece)
    except (aiohttp.ClientError, OSError) as error:
        # The error's text may contain the URL, which gives access to the blob.
        name = type(error).__name__
        raise UnavailableError(f"its result could not be fetched: {name}") from error
    return b"".join(pieces)


async def _get_status(client: Any, call_id: str) -> str:
    """Return Modal's word for the state of a call; empty if there is none.

    ``"PENDING"`` is the word for a call that waits, and also for one that runs.
    """
    request = api_pb2.FunctionGetCallGraphRequest(function_call_id=call_id)
    graph = await client._stub.FunctionGetCallGraph(request)
    inputs = (item for item in graph.inputs if item.function_call_id == call_id)
    return next((_word(item.status) for item in inputs), "")


def _word(status: int) -> str:
    values = api_pb2.GenericResult.GenericStatus.DESCRIPTOR.values_by_number
    if status not in values:
        return f"STATUS_{status}"
    return values[status].name.removeprefix("GENERIC_STATUS_") if status else "PENDING"


async def _get_app(client: Any, call_id: str) -> str:
    """Return the id of the app of a call."""
    request = api_pb2.FunctionCallFromIdRequest(function_call_id=call_id)
    reply = await client._stub.FunctionCallFromId(request)
    return str(reply.metadata.app_id)


async def _find_app(client: Any, app: str, function: str, environment: str) -> str:
    """Return the id of the app that has a function, by their names."""
    request = api_pb2.FunctionGetRequest(
        app_name=app, object_tag=function, environment_name=environment
    )
    reply = await client._stub.FunctionGet(request)
    return str(reply.handle_metadata.app_id)


async def _get_entry(record: Any, key: str) -> str | None:
    """Return the text of an entry of a Dict; empty if it is not text, None if it does not exist."""
    await record.hydrate()
    request = api_pb2.DictGetRequest(dict_id=record.object_id, key=_key(key))
    reply = await record.client._stub.DictGet(request)
    return _text(reply.value) if reply.found else None


async def _get_entries(record: Any) -> dict[str, str]:
    """Return the texts of all entries of a Dict.

    Values that are not text are empty, and keys that are not text become ``?N``.

    Raises:
        DamagedRecordError: The entries are larger than those of any run.
    """
    await record.hydrate()
    request = api_pb2.DictContentsRequest(dict_id=record.object_id, keys=True, values=True)
    texts: dict[str, str] = {}
    size = 0
    stream = record.client._stub.DictContents.unary_stream(request)
    async with contextlib.aclosing(stream):
        async for entry in stream:
            size += len(entry.key) + len(entry.value) + _ENTRY_BYTES
            if size > _DICT_BYTES:
                raise damaged(f"the run's record on Modal has more than {_DICT_BYTES} bytes")
            key = text_in_pickle(entry.key)
            texts[f"?{len(texts)}" if key is None else key] = _text(entry.value)
    return texts


async def _remove_entry(record: Any, key: str) -> None:
    """Remove an entry of a Dict, if it exists, without reading its value."""
    await record.hydrate()
    request = api_pb2.DictPopRequest(dict_id=record.object_id, key=_key(key))
    await record.client._stub.DictPop(request)


async def _remove_dict(record: Any) -> None:
    """Remove a Dict by its id; Modal's client looks its name up first, which may be another's."""
    await record.hydrate()
    await record.client._stub.DictDelete(api_pb2.DictDeleteRequest(dict_id=record.object_id))


def _key(key: str) -> bytes:
    import pickle  # only to write, as Modal's client does

    return pickle.dumps(key, 4)


def _text(value: bytes) -> str:
    text = text_in_pickle(value) if len(value) <= RECORD_BYTES else None
    return text or ""


get_end = synchronize_api(_get_end)
get_status = synchronize_api(_get_status)
get_app = synchronize_api(_get_app)
find_app = synchronize_api(_find_app)
get_entry = synchronize_api(_get_entry)
get_entries = synchronize_api(_get_entries)
remove_entry = synchronize_api(_remove_entry)
remove_dict = synchronize_api(_remove_dict)
