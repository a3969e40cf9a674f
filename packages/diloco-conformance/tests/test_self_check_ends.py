"""The suite tells harnesses of wrong ends of programs, others' records, and answers not lost."""

import dataclasses
import inspect

import pytest
from test_self_check import mended
from test_toy import ToyHarness
from toy_cloud import CloudError, ToyCloud

from diloco_conformance import PromiseBroken, Resources, Step
from diloco_conformance._lab import Lab
from diloco_conformance._self_check import check_harness


class TestRecords:
    def test_labels_are_those_of_nobody(self):
        class Mine(ToyHarness):
            def labels(self, handle):
                return {"name": handle.metadata["name"]}

        said = mended(Mine, method="labels")
        assert "launched with the label 'conf-self-check', which is in its request, and" in said

    def test_resources_are_those_of_nobody(self):
        class Mine(ToyHarness):
            def resources(self, handle):
                return Resources(cpu=len(handle.metadata))

        said = mended(Mine, method="resources")
        assert "of every replica, whether it was launched with {'cpu': 2} or" in said

    def test_the_store_has_no_secret(self):
        class Mine(ToyHarness):
            def secret(self, value):
                return f"secret-of-{len(value)}-letters"

        said = mended(Mine, method="secret")
        assert "what came of it is 'InvalidRequestError: the toy cloud says NoSuchSecret" in said

    def test_the_store_has_another_secret(self):
        class Mine(ToyHarness):
            def secret(self, value):
                return super().secret(value.upper())

        assert "what came of it is 'CONF-SECRET'" in mended(Mine, method="secret")


class TestEnds:
    def drives(self, wrong):
        class Mine(ToyHarness):
            def drive(self, handle, step, value=None):
                super().drive(handle, *wrong(step, value))

        return mended(Mine, method="drive")

    def test_every_failure_is_a_failure_with_1(self):
        said = self.drives(lambda step, value: (step, 1 if step is Step.FAIL else value))
        assert "drive(…, Step.FAIL, 3) was to make rank 0" in said
        assert "exit with 3, and the world tells Truth(" in said

    def test_every_signal_is_the_same(self):
        said = self.drives(lambda step, value: (step, "SIGKILL" if step is Step.KILL else value))
        assert "drive(…, Step.KILL, 'SIGABRT') was to make rank 0" in said

    def test_a_want_of_memory_is_a_failure(self):
        said = self.drives(
            lambda step, value: (Step.FAIL, 137) if step is Step.OOM else (step, value)
        )
        assert "Step.OOM, None) was to make rank 0" in said
        assert "run out of memory, and the world tells Truth(" in said

    def test_a_failure_is_a_want_of_memory(self):
        said = self.drives(lambda step, value: (Step.OOM if value == 3 else step, value))
        assert "exit with 3, and the world tells Truth(" in said

    def test_where_the_world_does_not_say_the_message_names_both(self):
        class Mine(ToyHarness):
            def truth(self, handle):
                return dataclasses.replace(super().truth(handle), exit_code=...)

            def drive(self, handle, step, value=None):
                super().drive(handle, step, 1 if step is Step.FAIL else value)

        check_harness(Mine, "TestMine")
        lab = Lab(Mine())
        run = lab.up()
        lab.drive(run.replicas[0], Step.FAIL, 3)
        line = inspect.getsourcelines(Mine.drive)[1]
        with pytest.raises(PromiseBroken, match=rf"Or drive\(\) did not .*\s+.*:{line}: drive"):
            lab.observe(run.replicas[0])

    def test_a_lost_result_is_there(self):
        class Mine(ToyHarness):
            def lose(self, handle, left=None):
                self.wanted = handle, left

        assert "after lose(handle) an executor that had seen nothing still" in mended(
            Mine, method="lose"
        )

    def test_a_run_is_not_removed(self):
        class Mine(ToyHarness):
            def remove(self, handle):
                self.wanted = handle

        assert "after remove(handle) and settle() the world still" in mended(Mine, method="remove")

    @pytest.mark.parametrize("hours", [1, -1, 24])
    def test_the_clock_of_the_records_is_another_one(self, hours):
        class Mine(ToyHarness):
            def now(self):
                return super().now() + hours * 3600

        assert f"now() is {hours * 3600:+} s off: what was started" in mended(Mine, method="now")


class TestLostAnswers:
    def cloud(self, **members):
        """A harness of a cloud that loses answers in another way."""

        class Mine(ToyHarness):
            def __init__(self):
                super().__init__()
                self.cloud = type("Cloud", (ToyCloud,), members)(self.clock)

            def inject(self, operation, fault, *, after=0):
                super().inject(operation, fault, after=after)

        return Mine

    @pytest.mark.parametrize("code", ["Ambiguous", "Unanswered"])
    def test_the_request_is_not_done(self, code):
        def call(self, operation):
            if self.faults.get(operation, "")[0:1] == (code,):
                if code == "Ambiguous":
                    del self.faults[operation]
                raise CloudError("ConnectionCut")
            return ToyCloud._call(self, operation)

        said = mended(self.cloud(_call=call), method="inject")
        assert "nothing of a launch lived when the executor heard that its request" in said

    def test_only_the_first_answer_is_lost(self):
        def call(self, operation):
            code, after = self.faults.get(operation, ("", 0))
            if code == "Unanswered" and not after:
                self.faults[operation] = ("Ambiguous", 0)
            return ToyCloud._call(self, operation)

        said = mended(self.cloud(_call=call), method="inject")
        assert "the first launch met 1 errors, and the second one none: every" in said
