"""What goes wrong between client and server."""

from __future__ import annotations

import asyncio
import urllib.error
import urllib.request

import modal
import pytest
from grpclib.exceptions import StreamTerminatedError
from modal import exception

from diloco_localcloud import ModalStandIn, StandInError
from diloco_localcloud._modal._rpc._blobs import Blobs
from diloco_localcloud._modal._workspace._workspace import Workspace
from diloco_localcloud._server._timeline import Timeline


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("throttle", exception.ResourceExhaustedError),
        ("server_error", exception.InternalError),
        ("unavailable", exception.ServiceError),
        ("unauthorized", exception.AuthError),
        ("forbidden", exception.PermissionDeniedError),
        ("expired", exception.ConflictError),
        ("cut", StreamTerminatedError),
    ],
)
def test_nothing_is_done(lab, kind, error):
    lab.function.hydrate()
    lab.stand_in.faults.add(kind, verb="FunctionMap", resource="modal", times=None)
    with lab.refused(error):
        lab.function.spawn()
    lab.stand_in.faults.clear()
    assert lab.world.calls() == []
    lab.function.spawn()


@pytest.mark.parametrize("kind", ["server_error", "unavailable", "cut"])
def test_the_client_tries_again(lab, kind):
    lab.function.hydrate()
    lab.stand_in.faults.add(kind, verb="FunctionMap")
    lab.function.spawn()
    assert [call.status for call in lab.stand_in.calls if call.verb == "FunctionMap"][1:] == [200]
    assert len(lab.world.calls()) == 1


def test_a_call_whose_answer_is_lost_is_made_once(lab):
    lab.function.hydrate()
    lab.stand_in.faults.add("ambiguous", verb="FunctionMap", times=2)
    call = lab.function.spawn("only")
    assert [each.call_id for each in lab.world.calls()] == [call.object_id]
    assert [each.status for each in lab.stand_in.calls if each.verb == "FunctionMap"] == [0, 0, 200]
    lab.function.spawn("another")
    requests = [each for each in lab.stand_in.calls.requests() if each.verb == "FunctionMap"]
    assert [each.status for each in requests] == [0, 200]


def test_two_calls_are_two(lab):
    assert lab.function.spawn().object_id != lab.function.spawn().object_id
    assert len(lab.world.calls()) == 2


def test_a_call_whose_answers_are_all_lost_is_made_all_the_same(lab):
    lab.function.hydrate()
    lab.stand_in.faults.add("ambiguous", verb="FunctionMap", times=None)
    with lab.refused(StreamTerminatedError):
        lab.function.spawn()
    assert len(lab.world.calls()) == 1


def test_an_entry_whose_answer_is_lost_is_there_and_not_ours(lab):
    held = lab.dict()
    held.hydrate()
    lab.stand_in.faults.add("ambiguous", verb="DictUpdate")
    assert not held.put("a", 1, skip_if_exists=True)
    assert held["a"] == 1


def test_an_answer_that_comes_late(lab):
    call, _ = lab.spawn()
    lab.stand_in.faults.add("delay", verb="FunctionGetCallGraph", seconds=0.2, times=1)
    assert lab.graph(call) == ("PENDING", "")
    lab.stand_in.faults.add("delay", verb="FunctionGetCallGraph", seconds=3600)

    async def impatient():
        await asyncio.wait_for(call.get_call_graph.aio(), 0.05)

    with pytest.raises(TimeoutError):
        asyncio.run(impatient())


def test_what_is_not_served_says_so(lab):
    with lab.refused(exception.UnimplementedError, "the stand-in does not serve QueueGetOrCreate"):
        modal.Queue.from_name("queue", create_if_missing=True, client=lab.client).hydrate()


def test_another_token(lab, monkeypatch):
    for name, value in lab.stand_in.environment.items():
        monkeypatch.setenv(name, value)
    token = lab.stand_in.environment["MODAL_TOKEN_ID"]
    for pair in ((token, "as-none"), ("ak-none", lab.stand_in.environment["MODAL_TOKEN_SECRET"])):
        stranger = modal.Client.from_credentials(*pair)
        with lab.refused(exception.AuthError, "Token validation failed"):
            stranger.hello()
        stranger.__exit__(None, None, None)
    lab.client.hello()


def test_the_list_of_calls_names_what_was_asked(lab):
    call, _ = lab.spawn()
    lab.pending(call)
    asked = [(each.verb, each.resource, each.name, each.status) for each in lab.stand_in.calls]
    assert asked[-1] == ("FunctionGetOutputs", "modal", call.object_id, 200)
    assert asked[0][0] == "FunctionGet"


def test_large_arguments_and_results_go_through_blobs(lab):
    large = "x" * 3_000_000
    call, scripted = lab.spawn(large)
    assert scripted.arguments == ((large,), {})
    assert lab.stand_in.calls.count("BlobCreate") == 1
    scripted.start()
    scripted.end(large)
    assert call.get(timeout=0) == large
    assert lab.stand_in.calls.count("BlobGet") == 1


def test_a_blob_that_is_not_there():
    blobs = Blobs(Workspace(Timeline(0.0)))
    blobs.start()
    with pytest.raises(urllib.error.HTTPError, match="404") as caught:
        urllib.request.urlopen(blobs.url("bl-none", "GET"))
    caught.value.close()
    blobs.stop()


def test_ports():
    with pytest.raises(StandInError, match="port must be from 0 to 65535, not 70000"):
        ModalStandIn(port=70000)
    with ModalStandIn() as running:
        with pytest.raises(StandInError, match="already running"):
            running.start()
        port = int(running.url.rpartition(":")[2])
        with pytest.raises(StandInError, match=f"port {port} of 127.0.0.1 cannot be used"):
            ModalStandIn(port=port).start()
    running.stop()
    with pytest.raises(StandInError, match="not started"):
        running.url  # noqa: B018
