"""Fixed runs in a store that cannot decide: all ranks meet, and begin a folder of their own."""

from functools import cache

import pytest
from damage_lab import flip
from simulated import Killed
from strict_lab import Generations
from training_lab import identical

from diloco_core import (
    ConfigurationError,
    CorruptedObjectError,
    RendezvousTimeoutError,
    ReplicaLostError,
    RunExistsError,
)

pytestmark = pytest.mark.sampled


@cache
def whole():
    """Return what the replicas of a run come to that is not stopped."""
    return Generations(2).live()


def errors(results):
    return [type(result) for result in results if not isinstance(result, dict)]


@pytest.mark.parametrize("operation", range(8, 200, 12))
@pytest.mark.parametrize("rank", [0, 1])
def test_a_death_ends_the_run_and_all_ranks_together_continue_it(rank, operation):
    run = Generations(2, fragments=2)
    results = run.live((rank, operation, "kill after"))
    if errors(results) == []:
        return  # it had done its part by then
    assert isinstance(results[rank], Killed)
    error = results[1 - rank]
    if isinstance(error, ReplicaLostError):
        assert error.rank == rank
        assert "cannot come back by itself" in str(error)
        assert "start all of its ranks again with resume=True" in str(error)
    else:
        assert isinstance(error, (RendezvousTimeoutError, dict))
    if run.begun():
        again = run.live(resume=True)
        assert errors(again) == []
        assert identical(again)
    assert run.store.differing == []


def test_one_earlier_generation_is_kept():
    run = Generations(2)
    for until in range(1, 6):
        run.live(until=until, resume=until > 1)
    assert len(run.begun()) == 2
    assert identical([*run.live(resume=True), *whole()])
    assert {key.split("/")[1] for key in run.store.objects if key.startswith("generations/")} == {
        folder.split("/")[1] for folder in run.begun()
    }


def test_a_run_that_is_alive_is_not_taken_over():
    run = Generations(2, syncs=60)
    first = [(rank, 0.0, [], False) for rank in range(2)]
    second = [(rank, 8.0, [], True) for rank in range(2)]
    results = run.simulate([*first, *second], until=60)
    assert identical(results[:2])
    for error in results[2:]:
        assert isinstance(error, RunExistsError)
        assert "is alive: it has given a sign of life just now" in str(error)
    assert len(run.begun()) == 1


@pytest.mark.parametrize("gap", [0.0, 0.01, 0.05, 0.3, 1.0, 3.0])
@pytest.mark.parametrize("rank", [0, 1])
def test_of_two_processes_of_a_rank_only_one_takes_part(rank, gap):
    run = Generations(2)
    starts = [(0, 0.5), (1, 0.5), (rank, 0.5 + gap)]
    results = run.simulate([(number, start, [], False) for number, start in starts], until=6)
    ended = [result for result in results if isinstance(result, dict)]
    assert identical(ended) if ended else True
    assert len(run.begun()) <= 1
    assert run.store.differing == []
    assert errors(results)
    for result in results:
        assert isinstance(result, (dict, RunExistsError, RendezvousTimeoutError)), result


@pytest.mark.parametrize("gap", [0.0, 0.05, 0.4, 2.0])
def test_of_two_launches_that_resume_one_goes_on(gap):
    run = Generations(2)
    run.live(until=2)
    launches = [(rank, start, [], True) for start in (0.0, gap) for rank in range(2)]
    results = run.simulate(launches, until=6)
    ended = [result for result in results if isinstance(result, dict)]
    assert len(ended) in {0, 2, 4}  # the second one may go on when the first one has ended
    assert identical([*ended, *whole()])
    assert run.store.differing == []


def test_a_process_that_died_while_it_met_the_others(caplog):
    run = Generations(2)
    run.live((1, 9, "kill before"), until=6)
    assert [key for key in run.store.objects if key.startswith("meetings/00001")]
    assert identical([*run.live(resume=bool(run.begun())), *whole()])
    assert "was about to meet the others" in caplog.text


def test_one_that_finds_that_the_store_decides_and_one_that_does_not():
    run = Generations(2)

    class Mixed(Generations):
        def exchange(self, connection, scheduler, limits, resume):
            exchange = super().exchange(connection, scheduler, limits, resume)
            exchange._decides = connection.rank == 0
            return exchange

    mixed = Mixed(2, store=run.store)
    _, other = mixed.live()
    assert isinstance(other, ConfigurationError)
    assert "Use the same driver and the same endpoint for all ranks" in str(other)


class TestDamage:
    @pytest.fixture
    def run(self):
        run = Generations(2, syncs=6)
        run.live(until=4)
        return run

    def test_and_to_the_generation_before(self, run):
        run.live(until=5, resume=True)
        for key in run.keys("state/"):
            run.store.remove(key)
        assert all(isinstance(result, CorruptedObjectError) for result in run.live(resume=True)[:1])
        again = run.live(resume="newest-whole")
        assert identical([*again, *whole()])

    def test_it_is_not_carried_into_the_next_generation(self, run):
        key, *_ = run.keys("state/00000004/")
        damaged = flip(run.store.objects[key], 4 * len(run.store.objects[key]))
        run.store.damage(key, damaged)
        assert identical([*run.live(resume="newest-whole"), *whole()])
        assert damaged not in map(run.store.objects.get, run.keys())

    def test_the_manifest_of_an_earlier_generation_says_the_same(self, run):
        run.live(until=5, resume=True)
        for name in ("manifest.json", "manifest.copy.json"):
            key = run.begun()[0] + name
            run.store.damage(key, flip(run.store.objects[key], 100))
        assert identical([*run.live(resume=True), *whole()])


def test_what_is_completed_too_late_does_not_count():
    """Rank 0 hangs before it writes the manifest, and wakes up when all were started again."""
    run, hung = Generations(2), []
    run.live(until=2)

    def before(process, kind, key):
        writes = process.number == 0 and kind == "put"
        if writes and key.endswith("/manifest.copy.json") and not hung:
            hung.append(key.replace(".copy", ""))
            process.sleep(5000.0)
        elif writes and key.startswith("meetings/") and hung:
            process.sleep(5000.0)

    run.before = before
    first = [(0, 0.0, [], True), (1, 0.0, [], True)]
    second = [(0, 2000.0, [], True), (1, 2000.0, [], True)]
    results = run.simulate([*first, *second], until=4)
    run.before = None
    assert hung[0] in run.store.objects
    assert identical(results[2:])
    assert not run.begun()[0].startswith(hung[0].rpartition("/")[0])
    assert identical([*run.live(resume=True), *whole()])
