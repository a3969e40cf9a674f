"""The ``exec`` subresource: runs a command in a container of a pod, over a WebSocket."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import selectors
from collections.abc import Callable
from typing import Any

from ..._server._http import Request, Response
from ..._server._websocket import Talk, WebSocket
from .._control._cluster import Cluster
from .._objects import _refusals, _resources
from .._pods import _facts
from ._access import Route
from ._logs import container_of

Json = dict[str, Any]

STDIN, STDOUT, STDERR, ERROR = range(4)  # the first byte of each message is its channel
CLOSE = 255  # in v5 a message of this channel names, in its second byte, a channel that ends
V4, V5 = "v4.channel.k8s.io", "v5.channel.k8s.io"
PIECE_BYTES = 65536
# The observed part of each message is complete; the part before it follows the sources of
# containerd and runc.
_ENDED = itertools.cycle(
    (
        "container is in CONTAINER_EXITED state",
        f'failed to create exec "{"0" * 64}": cannot exec in a stopped state: unknown',
        "OCI runtime exec failed: exec failed: unable to start container process: error writing "
        "config to pipe: write init-p: broken pipe: unknown",
    )
)
MOST_INPUT_BYTES = 1 << 20  # the most that may wait for the command to read it before reading stops


def serve(cluster: Cluster, request: Request, route: Route) -> Response:
    """Return the answer that upgrades to a WebSocket and runs the command.

    Failures after the handshake go to the error channel, as a real API server does with v5.

    Raises:
        ApiError: 404, or 400 for a request that cannot be served.
    """
    command = request.every("command")
    if request.headers.get("upgrade", "").lower() != "websocket":
        raise _refusals.bad_request(f"Upgrade request required: to a WebSocket with {V5} or {V4}")
    if not command:
        raise _refusals.bad_request("you must specify at least one command for the exec")
    if request.flag("tty"):
        raise _refusals.bad_request("the stand-in has no terminals; leave tty out")
    with cluster.changed:
        pod = cluster.store.get(_resources.PODS, route.namespace, route.name)
        container = container_of(pod, request.query.get("container", ""))
        if "nodeName" not in pod["spec"]:
            raise _refusals.bad_request(f"pod {route.name} does not have a host assigned")

    def run(web_socket: WebSocket) -> None:
        session = _Session(web_socket, command)
        try:
            with cluster.changed:
                kill = cluster.runtime.execute(
                    pod, container, command, session.streams, session.told
                )
            if kill is None:
                raise _refusals.internal_error(_not_running(pod, container))
        except _refusals.ApiError as refusal:
            session.end_with(refusal.body)
        else:
            session.relay(kill, stdin=request.flag("stdin"))
        finally:
            session.close()

    return Response(101, b"", talk=Talk((V5, V4), run))


def _not_running(pod: Json, container: str) -> str:
    """Return why nothing can run in a container.

    For a container that has ended, the observed messages take turns.
    """
    state = _facts.container_status(pod, container).get("state", {"waiting": {}})
    if "waiting" in state:
        return f'unable to upgrade connection: container not found ("{container}")'
    return f"error executing command in container: failed to exec in container: {next(_ENDED)}"


class _Session:
    """Passes data between a client and a command, in one thread."""

    def __init__(self, web_socket: WebSocket, command: list[str]) -> None:
        self._web_socket = web_socket
        self._command = command
        self._event: Json = {}
        self._input = bytearray()
        self._input_ends = False
        self._gone = False  # whether the client has gone
        (theirs, self._stdin), *outputs = os.pipe(), os.pipe(), os.pipe()
        self.streams = [theirs, *(writer for _, writer in outputs)]
        self._outputs = dict(zip((reader for reader, _ in outputs), (STDOUT, STDERR), strict=True))
        self._over, self._say_over = os.pipe()
        self._open = {self._stdin, *self._outputs, self._over, self._say_over, *self.streams}
        os.set_blocking(self._stdin, False)

    def told(self, event: Json) -> None:
        """Record that the command has ended, or was never started; called from another thread."""
        self._event = event
        os.write(self._say_over, b".")

    def relay(self, kill: Callable[[], None], *, stdin: bool) -> None:
        """Pass data on until the command has ended and its output is sent, or the client leaves.

        The command has ended when this returns.
        """
        for stream in self.streams:
            self._shut(stream)
        self._input_ends = not stdin
        self._feed()
        while not self._event or self._outputs.keys() & self._open:
            for source in self._wait():
                if source is self._web_socket:
                    messages = self._web_socket.receive()
                    if messages is None:
                        self._gone = True
                        kill()
                    for message in messages or ():
                        self._take(message)
                elif source in self._outputs:
                    self._pass_on(source)
            self._feed()
        self.end_with(_status(self._event, self._command))

    def end_with(self, status: Json) -> None:
        """Send the final status on the error channel."""
        self._web_socket.send(bytes([ERROR]) + json.dumps(status).encode())

    def close(self) -> None:
        """Close every descriptor."""
        for descriptor in list(self._open):
            self._shut(descriptor)

    def _wait(self) -> list[Any]:
        """Wait, and return what can be read or written.

        The client is listened to only while the command keeps up with its input.
        """
        with selectors.PollSelector() as waiting:
            for output in self._outputs.keys() & self._open:
                waiting.register(output, selectors.EVENT_READ)
            if not self._event:
                waiting.register(self._over, selectors.EVENT_READ)
            if not self._gone and len(self._input) < MOST_INPUT_BYTES:
                waiting.register(self._web_socket, selectors.EVENT_READ)
            if self._input and self._stdin in self._open:
                waiting.register(self._stdin, selectors.EVENT_WRITE)
            return [key.fileobj for key, _ in waiting.select()]

    def _take(self, message: bytes) -> None:
        if message[:1] == bytes([STDIN]) and not self._input_ends:
            self._input += message[1:]
        elif message == bytes([CLOSE, STDIN]) and self._web_socket.subprotocol == V5:
            self._input_ends = True

    def _feed(self) -> None:
        """Write as much to the command's stdin as it takes now; the rest when it takes more."""
        if self._stdin not in self._open:
            return
        try:
            del self._input[: os.write(self._stdin, self._input)]
        except BlockingIOError:
            pass
        except BrokenPipeError:  # the command has closed its stdin
            self._input.clear()
            self._input_ends = True
        if self._input_ends and not self._input:
            self._shut(self._stdin)

    def _pass_on(self, output: int) -> None:
        data = os.read(output, PIECE_BYTES)
        if data:
            self._web_socket.send(bytes([self._outputs[output]]) + data)
        else:
            self._shut(output)

    def _shut(self, descriptor: int) -> None:
        self._open.discard(descriptor)
        with contextlib.suppress(OSError):
            os.close(descriptor)


def _status(event: Json, command: list[str]) -> Json:
    """Return the status of a command that ended, worded as by the kubelet and containerd."""
    if event["event"] == "refused":
        return _refusals.internal_error(
            "error executing command in container: failed to exec in container: OCI runtime exec "
            f"failed: exec failed: unable to start container process: {event['message']}"
        ).body
    if not event["code"]:
        return {"metadata": {}, "status": "Success"}
    message = (
        "command terminated with non-zero exit code: error executing command "
        f"[{' '.join(command)}], exit code {event['code']}"
    )
    causes = [{"reason": "ExitCode", "message": str(event["code"])}]
    failure = {"metadata": {}, "status": "Failure", "reason": "NonZeroExitCode"}
    return {**failure, "message": message, "details": {"causes": causes}}
