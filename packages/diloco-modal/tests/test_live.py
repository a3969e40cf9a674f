"""What can be seen of Modal itself, for a few cents; and the same on this machine.

The image needs nothing but this package.
"""

import functools

import pytest
from live_modal import live_app

from diloco_localcloud import ModalProcesses
from diloco_modal import ModalSpawnExecutor, build_app
from diloco_protocol import Backoff

PATIENCE = 600.0


class Live:
    """A run that succeeds, one that is cancelled, and what is known of them."""

    @pytest.fixture
    def execute(self):
        raise NotImplementedError

    def test_a_run(self, execute):
        with execute() as executor:
            handles = executor.launch_replicas(2, "builtins:dict", {"a": 1}, timeout=300)
            try:
                results = executor.collect(handles, timeout=PATIENCE)
                assert [(each["status"], each["result"]) for each in results] == [
                    ("succeeded", {"a": 1})
                ] * 2, results
                with execute() as another:
                    assert another.attach(handles[0].run_id) == handles
                    assert another.collect(handles) == results
            finally:
                end(executor, handles[0].run_id)

    def test_a_cancelled_run(self, execute):
        with execute() as executor:
            (handle,) = executor.launch_replicas(
                1,
                "subprocess:call",
                {"args": "echo up; exec sleep 600", "shell": True},
                timeout=900,
            )
            try:
                lines = executor.log_iter(handle, follow=True)
                assert next(line for line in lines if line == "up")
                status = executor.describe(handle)
                assert (status.state, status.attempt) == ("running", 1)
                executor.cancel(handle)
                (result,) = executor.collect([handle], timeout=PATIENCE)
                assert (result["status"], result["reason"]) == ("cancelled", "cancel_requested")
            finally:
                end(executor, handle.run_id)


def end(executor, run_id):
    """Leave nothing of a run."""
    executor.cancel_run(run_id)
    handles = executor.attach(run_id)
    executor.collect(handles, timeout=PATIENCE)
    executor.purge(handles[0])
    assert run_id not in executor.list_runs()


@pytest.mark.live
class TestLive(Live):
    """A workspace of yours, as ``live_modal`` names it."""

    @pytest.fixture
    def execute(self):
        return functools.partial(ModalSpawnExecutor, app=live_app())


@pytest.mark.processes
@pytest.mark.slow
class TestHere(Live):
    """What ``TestLive`` does, on this machine."""

    @pytest.fixture
    def execute(self):
        with ModalProcesses(grace_seconds=10.0) as stand_in:
            client = stand_in.client()
            build_app().deploy(client=client)
            yield functools.partial(
                ModalSpawnExecutor, client=client, grace=2.0, backoff=Backoff(first=0.1, cap=0.5)
            )
            client.__exit__(None, None, None)  # older clients have no close
