"""Harness faults that would blind a test, or be called the executor's."""

import re
from dataclasses import replace

import pytest
from test_self_check import fault, mended
from test_toy import ToyHarness

from diloco_conformance import Step


class TestTheTruth:
    def test_everybody_is_always_being_ended(self):
        class Mine(ToyHarness):
            def truth(self, handle):
                return replace(super().truth(handle), stopping=True)

        said = mended(Mine, method="truth")
        assert "of a replica that the suite has not ended: stopping must say" in said

    def test_nobody_is_ever_being_ended(self):
        class Mine(ToyHarness):
            def truth(self, handle):
                return replace(super().truth(handle), stopping=False)

        assert "of a replica whose cancel was accepted, and" in mended(Mine, method="truth")

    def test_every_life_is_the_first(self):
        class Mine(ToyHarness):
            def truth(self, handle):
                return replace(super().truth(handle), attempt=1)

        assert "attempt must be 2. If the platform itself" in mended(Mine, method="truth")

    def test_somebody_lives_in_a_fresh_world(self):
        class Mine(ToyHarness):
            def living(self):
                return super().living() + 1

        assert "living() is 1 in a fresh world, before" in mended(Mine, method="living")


class TestWhatIsKept:
    def test_calls_are_counted_up_to_a_number(self):
        class Mine(ToyHarness):
            def calls(self):
                return min(super().calls(), 20)

        assert "calls() was 20 before poll and list_runs" in mended(Mine, method="calls")

    @pytest.mark.parametrize("part", [slice(0, 1), slice(-1, None)], ids=["first", "last"])
    def test_only_one_request_is_kept(self, part):
        class Mine(ToyHarness):
            def sent(self):
                return super().sent()[part]

        assert "it must keep all requests, in order" in mended(Mine, method="sent")


class TestWhatIsDone:
    def test_what_is_written_is_not_recorded(self):
        class Mine(ToyHarness):
            def write(self, handle, data, stream="stdout"):
                if b"to write" not in data:
                    super().write(handle, data, stream)

        assert r"after write(…, b'to write\n') there is no such line" in mended(
            Mine, method="write"
        )

    @pytest.mark.parametrize(("step", "value"), [("KILL", "'SIGABRT'"), ("OOM", "None")])
    def test_a_failure_is_not_driven(self, step, value):
        class Mine(ToyHarness):
            def drive(self, handle, one, value=None):
                if one is not Step[step]:
                    super().drive(handle, one, value)

        said = mended(Mine, method="drive")
        assert f"drive(…, Step.{step}, {value}) changed nothing: the world" in said

    def test_a_run_is_removed_at_once(self):
        class Mine(ToyHarness):
            def remove(self, handle):
                super().remove(handle)
                self.settle()

        assert "after remove(handle) the run is gone at once" in mended(Mine, method="remove")

    def test_one_replica_of_a_run_expires(self):
        class Mine(ToyHarness):
            def expire(self, handles):
                super().expire(handles[:1])

        assert re.search(r"of rank 1 of run \d+: it must have", mended(Mine, method="expire"))

    def test_everything_expires(self):
        class Mine(ToyHarness):
            def expire(self, handles):
                assert handles
                self.cloud.jobs.clear()

        assert "after expire(handles) another run is gone too" in mended(Mine, method="expire")

    @pytest.mark.parametrize(("times", "said"), [(0, "at once"), (2, "2 times")])
    def test_what_is_to_be_done_between_is_done_at_another_time(self, times, said):
        class Mine(ToyHarness):
            def between(self, action):
                if not times:
                    action()
                else:
                    super().between(lambda: [action() for _ in range(times)])

        assert f"between(action) called action {said}: it must be" in mended(Mine, method="between")

    def test_to_settle_takes_days(self):
        class Mine(ToyHarness):
            def settle(self):
                self.time.sleep(100_000)
                super().settle()

        assert "settle() let 100000 s pass although nothing was" in mended(Mine, method="settle")


class TestDisturbances:
    @pytest.mark.parametrize("only", ["throttle", "server error", "refused", "cut"])
    def test_one_kind_does_not_disturb(self, only):
        class Mine(ToyHarness):
            def inject(self, operation, fault, *, after=0):
                if fault != only:
                    super().inject(operation, fault, after=after)

        said = mended(Mine, method="inject")
        assert f": '{only}'>) changes nothing: an executor that" in said

    def test_one_ends_the_other(self):
        class Mine(ToyHarness):
            def inject(self, operation, fault, *, after=0):
                self.cloud.faults.clear()
                super().inject(operation, fault, after=after)

        assert "several operations add up" in mended(Mine, method="inject")

    def test_only_one_of_several_is_ended(self):
        class Mine(ToyHarness):
            def clear(self):
                for name in list(self.cloud.faults)[:1]:
                    del self.cloud.faults[name]

        assert "and clear(), a launch is refused: clear() must" in fault(Mine)
