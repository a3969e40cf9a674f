"""What the stand-in reads before it knows who asks, and how much."""

import asyncio
import http.client
import urllib.parse

import modal
import pytest
from grpclib import GRPCError, Status
from grpclib.client import Channel
from modal_proto import api_pb2
from modal_proto.api_grpc import ModalClientStub

from diloco_localcloud import ModalStandIn
from diloco_localcloud._modal._rpc import _api


def send(stand_in, metadata, size, *, sent=None):
    """Announce a message of so many bytes, send some, and return the status of the early answer."""

    async def act():
        port = int(stand_in.url.rpartition(":")[2])
        async with Channel("127.0.0.1", port) as channel:
            method = ModalClientStub(channel).DictUpdate
            async with method.open(metadata=metadata) as stream:
                await stream.send_request()
                head = b"\0" + size.to_bytes(4, "big")
                await stream._stream.send_data(head + bytes(size if sent is None else sent))
                await stream.recv_message()

    with pytest.raises(GRPCError) as caught:
        asyncio.run(act())
    return caught.value.status


def token(stand_in):
    told = stand_in.environment
    return {
        "x-modal-token-id": told["MODAL_TOKEN_ID"],
        "x-modal-token-secret": told["MODAL_TOKEN_SECRET"],
    }


def test_who_has_no_token_sends_no_message():
    """It is refused while its message is still awaited."""
    with ModalStandIn() as stand_in:
        assert send(stand_in, {}, 1 << 31, sent=10) is Status.UNAUTHENTICATED


@pytest.mark.parametrize("known", [False, True])
def test_the_key_of_a_call_is_kept_only_of_who_has_the_token(known):
    with ModalStandIn() as stand_in:
        sent = {"x-idempotency-key": "k" * 5000, **(token(stand_in) if known else {})}
        send(stand_in, sent, 10)
        (call,) = stand_in.calls
        assert (call.verb, call.request) == ("DictUpdate", "k" * 5000 if known else "")


@pytest.mark.parametrize("over", [0, 1])
def test_a_message_that_is_too_long_is_not_read(monkeypatch, over):
    monkeypatch.setattr(_api, "_MOST_BYTES", 1000)
    with ModalStandIn() as stand_in:
        said = send(stand_in, token(stand_in), 1000 + over, sent=10 if over else None)
        # Zeros are no message either, but they were read.
        assert (said is Status.RESOURCE_EXHAUSTED) == bool(over)


def test_a_refusal_that_names_a_long_id_is_cut():
    """It goes into a header, which would take minutes to compress."""
    with ModalStandIn() as stand_in:
        call = modal.FunctionCall.from_id("fc-" + "x" * 300_000, client=stand_in.client())
        with pytest.raises(modal.exception.NotFoundError) as caught:
            call.get(timeout=0)
        assert len(str(caught.value)) < 5000


def ask(url, method, body=None, headers=None):
    parts = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname, parts.port)
    try:
        connection.putrequest(method, f"{parts.path}?{parts.query}")
        for name, value in (headers or {"Content-Length": len(body or b"")}).items():
            connection.putheader(name, str(value))
        connection.endheaders(body)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def test_a_blob_is_for_who_was_given_its_url(lab):
    made = lab.ask("BlobCreate", api_pb2.BlobCreateRequest(content_length=3))
    (put,) = made.upload_urls.items
    bare = put.partition("?")[0]
    assert ask(put, "PUT", b"abc")[0] == 200
    get = lab.ask("BlobGet", api_pb2.BlobGetRequest(blob_id=made.blob_id)).download_url
    assert ask(get, "GET") == (200, b"abc")
    for url, method in ((bare, "GET"), (bare, "PUT"), (put, "GET"), (get, "PUT"), (get, "HEAD")):
        assert ask(url, method, b"")[0] == 403
    other = lab.ask("BlobCreate", api_pb2.BlobCreateRequest(content_length=3)).blob_id
    assert ask(put.replace(made.blob_id, other), "PUT", b"")[0] == 403
    # Neither is waited for.
    assert ask(bare, "PUT", None, {"Content-Length": 1 << 40})[0] == 403
    assert ask(put, "PUT", None, {"Content-Length": 1 << 40})[0] == 413
    assert ask(get, "GET") == (200, b"abc")


def test_large_arguments_and_results_go_there(lab):
    call, held = lab.spawn(b"a" * 3_000_000)
    held.start()
    held.end(held.arguments[0][0])
    assert len(call.get(timeout=0)) == 3_000_000
    assert isinstance(call, modal.FunctionCall)
