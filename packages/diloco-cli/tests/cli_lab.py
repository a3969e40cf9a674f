"""What the tests share by import: backends in memory, and the command with given backends."""

import io
import time
from types import SimpleNamespace

from diloco_cli._backends import Backends, read_choice
from diloco_cli._session import Screen, Session
from diloco_protocol import (
    BaseExecutor,
    Capabilities,
    InvalidRequestError,
    Reason,
    ReplicaHandle,
    ReplicaNotFoundError,
    ReplicaState,
    ReplicaStatus,
)

#: Seconds after which a test that waits for real processes fails instead of hanging.
PATIENCE = 240.0
NOW = 1_000_000.0

RUNNING = ReplicaStatus(ReplicaState.RUNNING, started_at=NOW - 90)
DONE = ReplicaStatus(
    ReplicaState.SUCCEEDED,
    reason=Reason.COMPLETED,
    exit_code=0,
    started_at=NOW - 90,
    finished_at=NOW - 30,
)
FAILED = ReplicaStatus(
    ReplicaState.FAILED, reason=Reason.ERROR, exit_code=1, message="ValueError: no data"
)


class World(BaseExecutor):
    """A backend in memory: runs by name, each with one status per rank (None: no record)."""

    supports_inter_replica_network = False
    capabilities = Capabilities(cancel_scope="replica")

    def __init__(self, name, runs, scope="replica", logs=None, results=None, **options):
        super().__init__(**options)
        self.backend_name = name
        self.capabilities = Capabilities(cancel_scope=scope)
        self.runs, self.logs, self.results = runs, logs or {}, results or {}
        self.calls, self.meets = [], {}

    def handles(self, run_id):
        count = len(self.runs[run_id])
        return [
            ReplicaHandle(
                rank, self.backend_name, {"zone": "z1", "pod": f"{rank}"},
                run_id=run_id, world_size=count,
            )
            for rank in range(count)
        ]  # fmt: skip

    def _plan(self, request):
        return []

    def _submit(self, request):
        raise AssertionError("the command launches nothing")

    def _observe_run(self, handles):
        self.calls.append(("observe", len(handles)))
        statuses = self.runs[handles[0].run_id]
        return {each: statuses[each.rank] for each in handles if statuses[each.rank] is not None}

    def _result(self, handle):
        return self.results.get(handle.rank)

    def _stop(self, handle):
        self.calls.append(("stop", handle.rank))

    def _purge(self, handle):
        if not all(status.state.terminal for status in self.runs[handle.run_id]):
            raise InvalidRequestError("it has not ended")
        self.calls.append(("purge", handle.rank))

    def _logs(self, handle, query):
        found = self.logs.get(handle.rank, [])
        if isinstance(found, Exception):
            raise found
        return iter(found)

    def _rendezvous(self, handle):
        self.calls.append(("rendezvous", handle.run_id))
        return self.meets.get(handle.run_id)

    def _list_runs(self):
        return list(self.runs)

    def _attach(self, run_id):
        if run_id not in self.runs:
            raise ReplicaNotFoundError(f"no run {run_id}")
        return self.handles(run_id)


class Broken(World):
    """A backend that answers nothing but an error."""

    def __init__(self, name, error):
        super().__init__(name, {})
        self.error = error

    def _list_runs(self):
        raise self.error

    def _attach(self, run_id):
        raise self.error


def command(*worlds, backend=None, given=(), as_json=False, patience=60.0, out=None):
    """A session whose installed backends are these; ``out()`` and ``err()`` are what it printed."""
    by_name = {world.backend_name: world for world in worlds}
    choice = read_choice(backend, given, {}, sorted(by_name))

    def make(name, options):
        return by_name[name]

    out, err = out or io.StringIO(), io.StringIO()
    session = Session(
        backend,
        given,
        as_json,
        screen=Screen(out, err, {}),
        clock=lambda: NOW,
        backends=lambda choice: Backends(choice, patience=patience, make=make),
    )
    session.__dict__["choice"] = choice
    return SimpleNamespace(session=session, out=out.getvalue, err=err.getvalue)


class Terminal(io.StringIO):
    """A stream that is a terminal."""

    def isatty(self):
        return True


def wait_until(condition, what):
    """Poll until ``condition()`` is true, and return what it returned."""
    deadline = time.monotonic() + PATIENCE
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{what} did not happen within {PATIENCE:g} s"
        time.sleep(0.01)
    return value
