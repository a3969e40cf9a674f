"""The server's own sockets."""

import asyncio
import gc
import socket
import threading
import warnings

import modal
import pytest

from diloco_localcloud import ModalStandIn, StandInError


def test_connections_are_refused_and_accepted_again():
    """On the same port, which nobody else gets meanwhile; what there was is there."""
    with ModalStandIn() as stand_in:
        client, url = stand_in.client(), stand_in.url
        port = int(url.rpartition(":")[2])
        held = modal.Dict.from_name("held", create_if_missing=True, client=client).hydrate()
        held.put("a", 1)
        for _ in range(2):
            for _ in range(2):
                stand_in.refuse()
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", port))
            with pytest.raises(ConnectionRefusedError):
                list(held.items())
            with socket.socket() as another, pytest.raises(OSError, match="in use"):
                another.bind(("127.0.0.1", port))
            for _ in range(2):
                stand_in.accept()
            assert list(held.items()) == [("a", 1)]
        assert stand_in.url == url
        stand_in.refuse()
        client.__exit__(None, None, None)  # older clients have no close
    with pytest.raises(StandInError, match="not started"):
        stand_in.refuse()


def test_connections_accepted_at_the_very_end_are_closed():
    """The loop is held while clients connect: it accepts them in the turn in which it must stop."""
    stand_in = ModalStandIn()
    stand_in.start()
    serving = stand_in._serving
    held, go_on = threading.Event(), threading.Event()
    serving._loop.call_soon_threadsafe(lambda: (held.set(), go_on.wait()))
    held.wait()
    clients = [socket.create_connection(("127.0.0.1", serving.port)) for _ in range(3)]
    closed = asyncio.run_coroutine_threadsafe(serving._close(), serving._loop)
    go_on.set()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", ResourceWarning)
        closed.result()
        stand_in.stop()
        gc.collect()
    for client in clients:
        client.close()
    assert [str(each.message) for each in said] == []
