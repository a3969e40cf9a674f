"""The server's own sockets."""

import gc
import socket
import threading
import warnings

from diloco_localcloud import ModalStandIn


def test_connections_accepted_at_the_very_end_are_closed():
    """The loop is held while clients connect, so that it accepts them in the turn in which it is told to stop."""
    stand_in = ModalStandIn()
    stand_in.start()
    serving = stand_in._serving
    held, go_on = threading.Event(), threading.Event()
    serving._loop.call_soon_threadsafe(lambda: (held.set(), go_on.wait()))
    held.wait()
    clients = [socket.create_connection(("127.0.0.1", serving.port)) for _ in range(3)]
    serving._loop.call_soon_threadsafe(serving._over.set)
    go_on.set()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", ResourceWarning)
        stand_in.stop()
        gc.collect()
    for client in clients:
        client.close()
    assert [str(each.message) for each in said] == []
