"""Going on from older states where nothing can make the newest ones again: only if asked for, by
all alike, and only once.
"""

import copy

import pytest
from damage_lab import flip
from rollback_lab import rollbacks_in
from simulated import (
    CheckedStore,
    Fault,
    Killed,
    Schedule,
    SimulatedTraining,
    once,
    read_log,
    simulate,
    violations,
)

from diloco_core import CorruptedObjectError, Elastic
from diloco_core._run._records._keys import commit_key, commit_sync, shard_key

_SIZES = (40, 30)


def _settings(min_replicas, topology, **options):
    every = 1 if topology == "gather" else None
    return Elastic(min_replicas, grace=5.0, topology=topology, publish_every=every, **options)


def _stopped(topology):
    """A run that died before it had published its last sync, to which a contribution is damaged."""
    first = {"sharded": 110, "gather": 92}[topology]  # which stops there, as a rule
    for operation in [*range(first, 140, 2), *range(62, first, 2)]:
        training, store = SimulatedTraining(syncs=9, sizes=_SIZES), CheckedStore()
        faults = [Fault(rank, 1, operation, "kill before") for rank in range(2)]
        schedule = Schedule(2, faults=faults, latency=0.001)
        outcome = once(training, schedule, _settings(2, topology), store=store)
        last = _last(store)
        killed = all(isinstance(result, Killed) for result in outcome.results.values())
        if killed and last >= 5 and shard_key(last, (last - 1) % 2, 0, "") not in store.objects:
            key = next(
                key for key in store.objects if key.startswith(f"deltas/{last:08}/00001.0001.")
            )
            data = bytearray(store.objects[key])
            data[len(data) // 2 :] = bytes(len(data) - len(data) // 2)
            store.damage(key, bytes(data))
            return training, store, last
    raise AssertionError("no schedule stops there")


def _last(store):
    return max(filter(None, map(commit_sync, store.decided)), default=0)


@pytest.fixture(scope="module", params=["sharded", "gather"])
def stopped(request):
    return request.param, *_stopped(request.param)


def _resume(stopped, resume, faults=(), syncs=12, most_incarnations=3, store=None, sizes=_SIZES):
    topology, before, original, _ = stopped
    store = store or copy.deepcopy(original)
    training = SimulatedTraining(syncs=syncs, sizes=sizes, salts=dict(before.salts))
    elastic = _settings(2, topology, resume=resume)
    schedule = Schedule(2, seed=3, faults=faults, latency=0.01, restart_after=1.0)
    options = {"store": store, "most_incarnations": most_incarnations}
    outcome = simulate(training, schedule, elastic, **options)
    return outcome, training, store, violations(outcome, training)


def _outer_steps(store):
    """Return how many outer steps the model has taken at the end of the log."""
    log, broken = read_log(store)
    assert broken == []
    return SimulatedTraining(sizes=_SIZES).outer_steps(log)[_last(store)]


def _without_inputs(topology, harm):
    """A run whose newest state has a damaged shard, and lacks what that was computed from."""
    before, store = SimulatedTraining(syncs=3, sizes=(40,)), CheckedStore()
    settings = _settings(2, topology)
    assert simulate(before, Schedule(2, latency=0.001), settings, store=store).finished
    shard = shard_key(3, 0, 1, "")
    delta = next(key for key in store.objects if key.startswith("deltas/00000003/00001."))
    store.damage(shard, harm(store.objects[shard]))
    store.remove(delta)
    return (topology, before, store, 3), shard, delta


@pytest.mark.parametrize("topology", ["sharded", "gather"])
def test_damage_that_nothing_can_mend_is_named_soon(topology, caplog):
    run, shard, delta = _without_inputs(topology, lambda data: data[:50])
    outcome, later, store, _ = _resume(run, True, most_incarnations=1, sizes=(40,))
    gone = "something from which its result is computed is gone"
    for error in outcome.results.values():
        assert type(error) is CorruptedObjectError
        for part in (shard, delta, gone, "resume='newest-whole'", "export()"):
            assert part in str(error)
    assert "times that it was read" not in caplog.text
    assert later.states == {}
    assert _last(store) == 3, "nothing was decided"
    assert outcome.seconds < 25.0, "three times some readings, and a grace for the others to answer"
    *_, wrong = _resume(run, "newest-whole", sizes=(40,))
    assert all("needs it" in what for what in wrong)


def test_a_part_that_cannot_be_made_again_is_gone_back_from(caplog):
    """Its outer state is damaged, which only its owner reads."""

    def harm(data):
        return flip(data, 8 * int.from_bytes(data[:8], "little") + 80)

    run, shard, _ = _without_inputs("sharded", harm)
    *_, store, wrong = _resume(run, "newest-whole", sizes=(40,), most_incarnations=1)
    assert f"{shard} could not be made again" in caplog.text
    assert [record.given_up for record in rollbacks_in(store)] == [(3,)]
    assert all("needs it" in what for what in wrong)


@pytest.mark.sampled
@pytest.mark.parametrize("how", ["gone", "damaged"])
@pytest.mark.parametrize("topology", ["sharded", "gather"])
def test_where_nothing_is_whole_no_collected_object_is_blamed(topology, how, caplog):
    before, store = SimulatedTraining(syncs=6, sizes=(40,)), CheckedStore()
    settings = _settings(2, topology)
    assert simulate(before, Schedule(2, latency=0.001), settings, store=store).finished
    keys = [key for key in store.objects if key.startswith("state/")]
    assert keys
    assert not any(key.startswith("initial/") for key in store.objects)
    for key in keys:
        if how == "gone":
            store.remove(key)
        elif key.endswith(".safetensors"):
            store.damage(key, store.objects[key][:-40] + bytes(40))
    for resume in (True, "newest-whole"):
        outcome, _, _, _ = _resume(
            (topology, before, store, 6), resume, most_incarnations=1, sizes=(40,)
        )
        for error in outcome.results.values():
            assert type(error) is CorruptedObjectError
            assert "initial/" not in str(error)
            text = "holds neither an undamaged state of fragment 0 after any sync nor its initial"
            assert (text if how == "gone" else "state/00000006/000.00000.") in str(error)
            assert "export() writes" not in str(error)
            assert "begin a new run on another prefix" in str(error)
    assert "initial/" not in caplog.text
    assert rollbacks_in(store) == []


def test_newest_whole_goes_on_and_names_what_is_given_up(stopped, caplog):
    _outcome, _training, store, wrong = _resume(stopped, "newest-whole")
    last = stopped[3]
    assert wrong == []
    (rollback,) = rollbacks_in(store)
    assert rollback.sync == last + 1
    assert last in rollback.given_up
    assert rollback.fence == {0: 2, 1: 2}
    assert f"{last}. Replicas that were started earlier will stop" in caplog.text
    assert _outer_steps(store) == _last(store) - 1 - len(rollback.given_up) >= 12


@pytest.mark.sampled
def test_a_joiner_and_a_later_resume_follow_it(stopped):
    _, training, store, _ = _resume(stopped, "newest-whole")
    for resume in (False, True, "newest-whole"):
        again = (stopped[0], training, store, stopped[3])
        _outcome, training, store, wrong = _resume(again, resume, syncs=_outer_steps(store) + 4)
        assert wrong == []
        assert len(rollbacks_in(store)) == 1


@pytest.mark.parametrize("first", [3, pytest.param(12, marks=pytest.mark.slow)])
def test_a_crash_in_the_middle_of_it(stopped, first):
    for operation in range(first, 60, 24):
        faults = [Fault(0, 1, operation, "kill after"), Fault(1, 1, operation + 3, "kill before")]
        _outcome, _training, store, wrong = _resume(stopped, "newest-whole", faults)
        assert wrong == []
        assert rollbacks_in(store)


@pytest.mark.sampled
@pytest.mark.parametrize("first", [5, pytest.param(16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("seconds", [4.0, 60.0])
def test_an_incarnation_that_sleeps_meanwhile_changes_nothing(stopped, seconds, first):
    for operation in range(first, 60, 28):
        faults = [Fault(1, 1, operation, "zombie", seconds)]
        _outcome, _training, _, wrong = _resume(stopped, "newest-whole", faults)
        assert wrong == []


@pytest.mark.sampled
@pytest.mark.parametrize("more", [0, 2])
def test_what_rots_after_it_is_made_again_as_before(stopped, more, caplog):
    """The state before a damaged one may be older than the rollback."""
    _, training, before, _ = _resume(stopped, "newest-whole", syncs=0)
    _, training, before, _ = _resume(
        (stopped[0], training, before, 0), True, syncs=_outer_steps(before) + more
    )
    (rollback,) = rollbacks_in(before)
    syncs = [rollback.sync + number + 1 for number in range(more)] or list(rollback.states)
    keys = [shard_key(sync, (sync - 1) % 2, shard, "") for sync in syncs for shard in range(2)]
    remaining = [key for key in keys if key in before.objects]
    assert remaining
    caplog.clear()
    for key in remaining:
        store = copy.deepcopy(before)
        store.damage(key, store.objects[key][:50])
        options = {"syncs": _outer_steps(store) + 2, "most_incarnations": 1, "store": store}
        *_, store, wrong = _resume((stopped[0], training, store, 0), True, **options)
        assert wrong == [], key
        assert len(rollbacks_in(store)) == 1, "nothing more had to be given up"
    assert "Asking the other replicas" not in caplog.text, (
        "nor was anything of what was given up looked for"
    )


@pytest.mark.sampled
def test_a_damaged_record_of_it_does_not_end_the_run(stopped):
    """It can be read nowhere else, so another one takes its place."""
    _, training, store, _ = _resume(stopped, "newest-whole", syncs=0)
    (rollback,) = rollbacks_in(store)
    key = commit_key(rollback.sync)
    store.damage(key, store.objects[key][:60])
    outcome, later, store, wrong = _resume(
        (stopped[0], training, store, 0), True, most_incarnations=1
    )
    assert {type(error) for error in outcome.results.values()} == {CorruptedObjectError}
    assert later.states == {}
    outcome, later, store, wrong = _resume((stopped[0], training, store, 0), "newest-whole")
    assert wrong == []
    assert [record.states for record in rollbacks_in(store)] == [rollback.states] * 2


def test_incarnations_that_have_read_it_write_it_again(stopped):
    _, training, store, _ = _resume(stopped, "newest-whole", syncs=0)
    (rollback,) = rollbacks_in(store)
    key, whole = commit_key(rollback.sync), store.objects[commit_key(rollback.sync)]
    again = SimulatedTraining(
        syncs=_outer_steps(store) + 3, sizes=_SIZES, salts=dict(training.salts)
    )

    def train(node):
        if node.rank == 1:
            store.damage(key, whole[:60])
        return again(node)

    settings = _settings(2, stopped[0], resume=True)
    schedule = Schedule(2, latency=0.01, starts=[0.0, 2.5])
    outcome = once(train, schedule, settings, store=store)
    assert violations(outcome, again) == []
    assert store.objects[key] == whole


def test_a_second_one_names_what_the_first_had_kept(stopped):
    """It goes back behind the states that the first went on from."""
    _, training, store, _ = _resume(stopped, "newest-whole", syncs=0)
    (first,) = rollbacks_in(store)
    for key in list(store.objects):
        if key.startswith((f"state/{max(first.states):08}/", "kept/", "deltas/")):
            store.damage(key, b"")
    _resume((stopped[0], training, store, 0), "newest-whole", syncs=0, store=store)
    records = rollbacks_in(store)
    assert len(records) == 2
    assert max(first.states) in records[1].given_up
    assert not {first.sync, *first.given_up} & set(records[1].given_up)
