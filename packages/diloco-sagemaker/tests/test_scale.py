"""What many ranks cost: calls are counted, and time is virtual."""

from collections import Counter

import pytest
from scripted_aws import OnDemandHarness

from diloco_protocol import LaunchError, ReplicaState


@pytest.fixture
def harness():
    made = OnDemandHarness()
    yield made
    made.close()


def counted(harness, act):
    """How often each operation was called meanwhile."""
    before = len(harness.stand_in.calls)
    act()
    return Counter(call.verb for call in list(harness.stand_in.calls)[before:])


def test_a_launch_that_aws_slows_down_takes_hardly_longer_than_it_must(harness):
    """200 creates, of which five per second are let through."""
    harness.world.habits.rates["CreateTrainingJob"] = 5.0
    began = harness.clock()
    try:
        handles = harness.make_executor().launch_replicas(200, "trainer:train", run_id="many")
    except LaunchError as error:
        raise AssertionError("throttling must slow a launch down, not end it") from error
    assert len(handles) == 200
    assert harness.living() == 200
    assert harness.clock() - began <= 1.3 * 200 / 5.0


class TestPages:
    """A hundred ranks fill a page of a list."""

    @pytest.fixture(params=[300, pytest.param(1000, marks=pytest.mark.slow)])
    def launched(self, harness, request):
        executor = harness.make_executor()
        handles = executor.launch_replicas(request.param, "trainer:train", run_id="many")
        for job in harness.world.jobs():
            job.start()
        return executor, handles

    def test_a_look_without_a_change_is_one_list(self, harness, launched):
        executor, handles = launched
        executor._observe(handles)
        looked = counted(harness, lambda: executor._observe(handles))
        assert looked["ListTrainingJobs"] <= len(handles) / 100
        assert set(looked) == {"ListTrainingJobs"}

    @pytest.mark.slow
    def test_an_executor_that_has_seen_nothing_searches(self, harness, launched):
        _, handles = launched
        for job in harness.world.jobs():
            job.fail(1, "no data")
        harness.settle()
        fresh, found = harness.make_executor(), {}
        looked = counted(harness, lambda: found.update(fresh._observe(handles)))
        assert {status.state for status in found.values()} == {ReplicaState.FAILED}
        assert len(found) == len(handles)
        assert looked["ListTrainingJobs"] <= len(handles) / 100
        assert looked["Search"] <= len(handles) / 100
        assert looked["DescribeTrainingJob"] == 0
