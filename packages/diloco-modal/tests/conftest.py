"""A stand-in of Modal, executors of it, and a virtual clock."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from diloco_localcloud import ModalStandIn
from diloco_modal import ModalSpawnExecutor
from diloco_protocol import Backoff, Outcome, Reason

sys.path.insert(0, str(Path(__file__).parent))  # for the modules that several tests share

from modal_truth import Record
from wrapper_lab import make_record


class Lab:
    """The stand-in with a deployed app, and the containers in the test's hands."""

    def __init__(self, stand_in):
        self.stand_in, self.world = stand_in, stand_in.world
        self.client = stand_in.client()
        self.world.deploy("diloco", ["replica"])

    def executor(self, **options):
        backoff = Backoff(first=0.1, clock=self.world.now, sleep=self.world.advance)
        chosen = {
            "client": self.client,
            "backoff": backoff,
            "clock": self.world.now,
            "retry_timeout": 5,
            **options,
        }
        return ModalSpawnExecutor(**chosen)

    def launch(self, n=2, executor=None, **options):
        chosen = {"run_id": "run", "timeout": 600, **options}
        return (executor or self.executor()).launch_replicas(
            n, "trainer:train", {"steps": 1}, **chosen
        )

    def call(self, handle):
        return self.world.call(handle.metadata["function_call_id"])

    def record(self, run_id="run"):
        return Record(self.world.dict(f"diloco-{run_id}"))

    def begin(self, handle, life=1):
        """The container starts, and says so."""
        self.call(handle).start()
        value = {"attempt": life, "at": self.world.now()}
        self.record(handle.run_id).put(f"life-{handle.rank}-{life}", value)

    @staticmethod
    def outcome(result=None, *, code=0, reason=None, error=None):
        """What the wrapper returns."""
        reason = reason or (Reason.ERROR if code else Reason.COMPLETED)
        return Outcome(code, result=result, reason=reason, error=error).to_json()

    def finish(self, handle, result=None, **options):
        """The wrapper writes down its end, and returns."""
        life = self.call(handle).attempt
        value = {"started": life, "failed": 0, "at": self.world.now()}
        self.record(handle.run_id).put(f"end-{handle.rank}-{life}", value, skip_if_exists=True)
        self.call(handle).end(self.outcome(result, **options))


# Tests of the standard suite that make thousands of calls of Modal's client, each of which takes
# two milliseconds of processor time. In the default lane the other backends have them; the slow
# lane runs all.
LONG = {
    "test_t1_what_another_thread_asks_meanwhile_changes_no_answer",
    "test_t1_what_another_thread_ends_meanwhile_is_all_that_it_ends",
    "test_g5_hundreds_of_lines",
    "test_g3_what_is_written_last_is_not_lost",
    "test_h10_a_handle_of_any_text",
    "test_l2_who_cannot_look_names_what_may_live",
}


def pytest_collection_modifyitems(items):
    for item in items:
        if item.nodeid.split("::")[1:-1] == ["TestModal"] and item.originalname in LONG:
            item.add_marker(pytest.mark.slow)


@pytest.fixture
def interruptible():
    """SIGINT raises KeyboardInterrupt, even if ignored, as shells do for background programs."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def lab():
    with ModalStandIn() as running:
        made = Lab(running)
        yield made
        made.client.__exit__(None, None, None)  # older clients have no close


@pytest.fixture
def record(monkeypatch, tmp_path):
    """The record of a run whose replica runs here; see ``wrapper_lab``."""
    return make_record(monkeypatch, tmp_path)
