"""A stand-in and the real client of it."""

from __future__ import annotations

import asyncio
import contextlib
import re
from typing import Any

import modal
import pytest
from grpclib.client import Channel
from modal_proto.api_grpc import ModalClientStub

from diloco_localcloud import ModalStandIn


class Lab:
    """The real client, and calls of one function of one app."""

    def __init__(self, stand_in: ModalStandIn) -> None:
        self.stand_in, self.world = stand_in, stand_in.world
        self.client = stand_in.client()
        self.world.deploy("app", ["function"])
        self.function = self.find()

    def find(self, app: str = "app", name: str = "function", **more: Any) -> Any:
        return modal.Function.from_name(app, name, client=self.client, **more)

    def spawn(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """A call: the client's hand on it, and the test's."""
        call = self.function.spawn(*args, **kwargs)
        return call, self.world.call(call.object_id)

    def dict(self, name: str = "dict", **more: Any) -> Any:
        options = {"create_if_missing": True, "client": self.client, **more}
        return modal.Dict.from_name(name, **options)

    def ask(self, name: str, message: Any) -> Any:
        """Send what the client would not send."""
        environment = self.stand_in.environment
        token = {
            "x-modal-token-id": environment["MODAL_TOKEN_ID"],
            "x-modal-token-secret": environment["MODAL_TOKEN_SECRET"],
        }

        async def ask() -> Any:
            port = int(self.stand_in.url.rpartition(":")[2])
            async with Channel("127.0.0.1", port) as channel:
                return await getattr(ModalClientStub(channel), name)(message, metadata=token)

        return asyncio.run(ask())

    def graph(self, call: Any) -> tuple[str, str]:
        """(status, task id) of a call, as its graph tells it."""
        (told,) = call.get_call_graph()
        return told.status.name, told.task_id

    @staticmethod
    def pending(call: Any) -> bool:
        """Whether a call has no result yet."""
        try:
            call.get(timeout=0)
        except TimeoutError:
            return True
        return False

    @staticmethod
    @contextlib.contextmanager
    def refused(kind: type[BaseException], message: str = ""):
        """What is asked ends with exactly this exception and part of its message."""
        with pytest.raises(kind) as caught:
            yield caught
        assert type(caught.value) is kind
        assert re.search(message, str(caught.value)), str(caught.value)


@pytest.fixture
def lab():
    with ModalStandIn() as running:
        made = Lab(running)
        yield made
        made.client.__exit__(None, None, None)  # older clients have no close
