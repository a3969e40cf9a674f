"""Calls that are processes: Modal's own entrypoint of containers, below the stand-in."""

from __future__ import annotations

import asyncio
import importlib
import os
import time
from pathlib import Path

import modal
import modal_functions
import pytest
from google.protobuf.empty_pb2 import Empty
from grpclib.client import Channel
from grpclib.exceptions import GRPCError
from modal import exception
from modal_proto.api_grpc import ModalClientStub
from standin_lab import PATIENCE

from diloco_localcloud import ModalProcesses, StandInError

pytestmark = pytest.mark.processes


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def child(lab, call):
    """The process that the function has started, outside its group."""
    return int(lab.written(call, "child").split()[1])


def test_a_function_runs(lab):
    secrets = [modal.Secret.from_name("bucket")]
    call, held = lab.spawn("answer", 1, 2, secrets=secrets)
    assert call.get(timeout=PATIENCE) == ((1, 2), {}, call.object_id, "value")
    lab.gone(held)
    assert (held.status, held.attempt, held.pid) == ("success", 1, None)
    logs = {(entry.source, entry.message) for entry in call.logs.tail()}
    assert {("stdout", "to stdout\n"), ("stderr", "to stderr\n")} <= logs
    assert {entry.message for entry in call.logs.tail(source="stdout")} == {"to stdout\n"}


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        ("exception", ValueError, "no more data"),
        ("timeout", TimeoutError, "barrier"),
        ("exit", SystemExit, "3"),
        ("death", exception.RemoteError, "Runner failed with exit code: 5"),
    ],
)
def test_how_functions_fail(lab, kind, error, message):
    call, held = lab.spawn("fail", kind)
    lab.gone(held)
    with pytest.raises(error, match=message) as caught:
        call.get(timeout=0)
    assert type(caught.value) is error


def test_the_dict_is_that_of_the_client(lab):
    held = modal.Dict.from_name("run", create_if_missing=True, client=lab.client)
    held["launch"] = 1
    call, _ = lab.spawn("claim", 0)
    assert call.get(timeout=PATIENCE) is True
    assert held["call-0"] == call.object_id
    again, _ = lab.spawn("claim", 0)
    assert again.get(timeout=PATIENCE) is False
    assert held["call-0"] == lab.world.dict("run").get("call-0") == call.object_id


def test_large_arguments_and_results(lab):
    large = "x" * 3_000_000
    call, _ = lab.spawn("answer", large)
    assert call.get(timeout=PATIENCE)[0] == (large,)
    assert lab.stand_in.calls.count("BlobCreate") == 2


def test_a_preempted_container_ends_and_another_gets_the_input(lab):
    call, held = lab.spawn("wait")
    first = child(lab, call)
    held.preempt()
    lab.until(lambda: held.attempt == 2)
    assert not alive(first)
    assert lab.written(call, "told") == "told KeyboardInterrupt\n"
    lab.until(lambda: held.has_container and child(lab, call) != first)
    assert held.status == "running"
    held.stop()
    lab.gone(held)


@pytest.mark.parametrize(
    ("terminate", "told"), [(True, "KeyboardInterrupt"), (False, "InputCancellation")]
)
def test_terminated_at_once_and_the_container_later(lab, tmp_path, terminate, told):
    call, held = lab.spawn("wait", "", str(tmp_path / "last"))
    first = child(lab, call)
    call.cancel(terminate_containers=terminate)
    assert (held.status, held.has_container) == ("terminated", True)
    assert lab.written(call, "told") == f"told {told}\n"
    assert held.has_container
    with pytest.raises(exception.RemoteError):
        call.get(timeout=0)
    (tmp_path / "last").touch()
    lab.gone(held)
    assert not alive(first)
    assert held.attempt == 1


def test_what_is_cancelled_before_it_has_its_input_never_runs(lab, tmp_path):
    first = tmp_path / "first"
    lab.stand_in.faults.add("delay", verb="ContainerHello", seconds=0.2)
    call, held = lab.spawn("wait", str(first))
    lab.until(lambda: held.has_container)
    call.cancel()
    lab.gone(held)
    assert held.status == "terminated"
    assert not first.exists()


def test_who_ignores_sigint_is_killed_after_the_grace(lab):
    lab.world.habits.grace_seconds = 0.1
    call, held = lab.spawn("ignore")
    lab.written(call, "ready")
    call.cancel(terminate_containers=True)
    lab.gone(held)
    assert held.status == "terminated"


def test_a_killed_container_leaves_no_result_and_no_process(lab):
    call, held = lab.spawn("wait")
    first, root = child(lab, call), held.pid
    held.kill()
    lab.gone(held)
    with pytest.raises(exception.RemoteError, match="exit code: 137"):
        call.get(timeout=0)
    assert not alive(first)
    assert not alive(root)


def test_the_timeout_of_the_function(lab):
    call, held = lab.spawn("wait", timeout=1)
    lab.gone(held)
    with pytest.raises(exception.FunctionTimeoutError, match="timeout of 1s"):
        call.get(timeout=0)
    assert lab.written(call, "told") == "told KeyboardInterrupt\n"


@pytest.mark.slow
def test_out_of_memory(lab):
    call, held = lab.spawn("eat", 600, memory=(128, 400))
    lab.gone(held)
    with pytest.raises(exception.RemoteError, match="out of memory"):
        call.get(timeout=0)
    assert held.status == "kernel_oom_kill"


def not_importable():
    """In a module that containers do not find."""


def test_a_module_that_cannot_be_imported(lab):
    call = lab.deploy(not_importable).spawn()
    held = lab.world.call(call.object_id)
    lab.gone(held)
    with pytest.raises(ModuleNotFoundError):
        call.get(timeout=0)
    assert held.status == "init_failure"


def test_local_files_are_where_modal_puts_them(lab, tmp_path, monkeypatch):
    (tmp_path / "sent_along.py").write_text(
        "import os\n\n"
        "def where():\n"
        "    import beside\n"
        "    return __file__, beside.TEXT, os.getcwd()\n"
    )
    (tmp_path / "beside.py").write_text(f"TEXT = {'x' * 5_000_000!r}\n")  # as a blob
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("sent_along")
    image = modal.Image.debian_slim().add_local_python_source("sent_along", "beside")
    path, text, folder = lab.deploy(module.where, image=image).spawn().get(timeout=PATIENCE)
    assert path == f"{folder}/sent_along.py"
    assert Path(folder).name == "root"
    assert not path.startswith(str(tmp_path))
    assert len(text) == 5_000_000


def test_a_function_that_is_sent_along(lab):
    call = lab.deploy(lambda x: x + 1, "plus", serialized=True).spawn(2)
    assert call.get(timeout=PATIENCE) == 3


def test_max_containers(lab):
    function = lab.deploy(modal_functions.wait, max_containers=1)
    first, second = function.spawn(), function.spawn()
    child(lab, first)
    held = lab.world.call(second.object_id)
    assert held.status == "pending"
    lab.world.call(first.object_id).stop()
    lab.until(lambda: held.status == "running")
    assert [call.attempt for call in lab.world.calls()] == [1, 1]
    held.stop()
    lab.gone(held)


def test_a_function_without_code(lab):
    app = modal.App.lookup("empty", client=lab.client, create_if_missing=True)
    inside = lab.stand_in._workspace
    with inside.lock:
        made = inside.create_function(inside.app(app.app_id), "none")
        inside.publish(made.app, "empty", {"none": made.function_id}, "DEPLOYED")
    call = modal.Function.from_name("empty", "none", client=lab.client).spawn()
    with pytest.raises(exception.InternalFailure, match="'none' was deployed without code"):
        call.get(timeout=PATIENCE)


def test_what_only_a_container_may_ask(lab):
    environment = lab.stand_in.environment
    token = {
        "x-modal-token-id": environment["MODAL_TOKEN_ID"],
        "x-modal-token-secret": environment["MODAL_TOKEN_SECRET"],
    }

    async def ask():
        port = int(lab.stand_in.url.rpartition(":")[2])
        async with Channel("127.0.0.1", port) as channel:
            await ModalClientStub(channel).ContainerHello(Empty(), metadata=token)

    with pytest.raises(GRPCError, match="only a container may ask for this"):
        asyncio.run(ask())


def test_everything_ends_with_the_stand_in(tmp_path):
    here = str(Path(modal_functions.__file__).parent)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([here, os.environ.get("PYTHONPATH", "")])}
    with ModalProcesses(env=env) as running:
        client = running.client()
        app = modal.App("app", include_source=False)
        function = app.function()(modal_functions.wait)
        app.deploy(client=client)
        first = tmp_path / "first"
        call = function.spawn(str(first))
        held = running.world.call(call.object_id)
        deadline = time.monotonic() + PATIENCE
        while not (first.exists() and first.read_text()) and time.monotonic() < deadline:
            time.sleep(0.01)
        root, folder = held.pid, running._folder
        client.__exit__(None, None, None)
    assert not alive(int(first.read_text()))
    assert not alive(root)
    assert not folder.exists()
    running.stop()
    with pytest.raises(StandInError, match="make a new one"):
        running.start()


def test_what_is_refused():
    with pytest.raises(StandInError, match="grace_seconds must be 0 or more, not -1"):
        ModalProcesses(grace_seconds=-1)
    with ModalProcesses() as running, pytest.raises(TimeoutError, match="not come in 0 s"):
        running.world.wait_for(lambda: False, 0)
