"""No answer is changed by a network that resets, cuts, throttles and answers with own errors."""

import random

import pytest
from bad_network import FATES, BadNetwork
from scripted_aws import AWSHarness

from diloco_protocol import DilocoError, LaunchError, Outcome, ReplicaNotFoundError
from diloco_protocol import outcome_to_message as to_message


@pytest.fixture(scope="module")
def world():
    harness = AWSHarness()
    network = BadNetwork(harness.stand_in.url)
    harness.network = network
    # The same two for all schedules: to make boto3's clients takes longer than a tenth of one.
    harness.shaken = harness.make_executor(endpoint_url=network.url)
    harness.calm = harness.make_executor()
    try:
        yield harness
    finally:
        harness.shaken.close()
        harness.calm.close()
        network.close()
        harness.close()


class Schedule:
    """One life of a run, seen by an executor behind the bad network and by one that is not."""

    def __init__(self, world, seed):
        self.world, self.network, self.seed = world, world.network, seed
        self.run_id = f"run-{seed}"
        self.shaken, self.calm = world.shaken, world.calm

    def close(self):
        self.network.calm()

    def ask(self, step, call):
        """What a call gives through the bad network; after a documented error, what comes then."""
        self.network.disturb(f"{self.seed} {step}")
        try:
            return call(self.shaken)
        except ReplicaNotFoundError as error:
            return type(error).__name__
        except DilocoError as error:
            if not (getattr(error, "retryable", False) or isinstance(error, LaunchError)):
                text = f"seed {self.seed}, {step}: {error!r} after {self.network.met}"
                raise AssertionError(text) from error
        finally:
            met = self.network.met
            self.network.calm()
        try:
            return call(self.shaken)
        except ReplicaNotFoundError as error:
            return type(error).__name__
        except DilocoError as error:
            raise AssertionError(f"seed {self.seed}, {step}: calm after {met}") from error

    def same(self, step, call):
        """The answer, which is that of the executor that nothing disturbs."""
        got = self.ask(step, call)
        try:
            wanted = call(self.calm)
        except ReplicaNotFoundError as error:
            wanted = type(error).__name__
        assert got == wanted, f"seed {self.seed}, {step}"
        return got

    def jobs(self):
        jobs = self.world.world.jobs(f"diloco-{self.run_id}-")
        return sorted(jobs, key=lambda job: job.name)

    def run(self):
        def launch(executor):
            return executor.launch_replicas(3, "trainer:train", {"a": 1}, run_id=self.run_id)

        handles = self.same("launch", launch)
        assert [job.name for job in self.jobs()] == [
            handle.metadata["job_name"] for handle in handles
        ]
        self.looks("at first", handles)
        first, second, third = self.jobs()
        for job in (first, second, third):
            job.start()
            job.log(f"{job.name} works\nand works\n")
        self.looks("running", handles)
        key = f"runs/{first.name}/output/model/diloco-outcome.json"
        content = Outcome(0, result={"loss": 0.5}).to_json().encode()
        self.world.s3.put_object(Bucket="bucket", Key=key, Body=content)
        first.succeed()
        second.fail(3, to_message(Outcome(3, error="no data"))[0])
        self.world.world.settle()
        statuses, results = self.looks("ended", handles, whole=True)
        assert [status.state.value for status in statuses] == ["succeeded", "failed", "running"]
        assert (results[0]["result"], results[1]["exit_code"]) == ({"loss": 0.5}, 3)
        self.ask("cancel", lambda executor: executor.cancel(handles[2]))
        self.world.world.settle()
        statuses, _ = self.looks("cancelled", handles[2:])
        assert statuses[0].state.value == "cancelled"
        self.ask("purge", lambda executor: executor.purge(handles[0]))
        self.world.world.settle()
        assert self.jobs() == []
        assert self.looks("purged", handles[:1])[0] == ["ReplicaNotFoundError"]

    def looks(self, when, handles, *, whole=False):
        """Ask for what can be asked; unless ``whole``, for one replica, and one thing besides.

        Everything at every look would be twice as many requests, and most of them the same.
        """
        draw = random.Random(f"{self.seed} {when}")
        described = handles if whole else [draw.choice(handles)]
        statuses = [
            self.same(f"describe {handle.rank}, {when}", lambda one, h=handle: one.describe(h))
            for handle in described
        ]
        also, call = draw.choice(
            [
                ("attach", lambda one: one.attach(self.run_id)),
                ("list", lambda one: one.list_runs()),
                ("logs", lambda one: one.stream_logs(handles[0])),
            ]
        )
        self.same(f"{also}, {when}", call)
        if when == "purged":
            return statuses, []
        return statuses, self.same(f"collect, {when}", lambda one: one.collect(handles, timeout=0))


def live(world, seed):
    schedule = Schedule(world, seed)
    try:
        schedule.run()
    finally:
        schedule.close()


def test_the_network_is_as_bad_as_it_says(world):
    """Every kind of disturbance is met, and none when it is calm."""
    seen = set()
    for number in range(40):
        world.network.disturb(f"sample {number}")
        for what in ("CreateTrainingJob a", "ListTrainingJobs ", "GET /bucket/x"):
            for _ in range(3):
                seen.add(world.network.fate(what))
    world.network.calm()
    assert world.network.fate("ListTrainingJobs ") is None
    assert seen == {None, *FATES}


@pytest.mark.sampled
@pytest.mark.parametrize("seed", range(10))
def test_no_answer_is_changed(world, seed):
    live(world, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10, 500))
def test_no_answer_is_changed_in_many_schedules(world, seed):
    live(world, seed)
