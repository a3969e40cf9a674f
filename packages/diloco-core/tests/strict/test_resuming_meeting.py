"""How the replicas meet that continue a strict run, when some of them are started once more in the middle."""

import keys_lab
import pytest
from damage_lab import flip
from strict_lab import Run
from training_lab import identical

from diloco_core import RendezvousTimeoutError, RunExistsError
from diloco_core.testing import Killed


@pytest.fixture(params=[True, False], ids=["exclusive", "overwriting"])
def run(request):
    """A run of three ranks that has stopped after three outer steps, on a store with and without exclusive creation."""
    run = Run(3)
    run.live(until=3)
    run.store.exclusive = request.param
    return run


def dies_when_it_has_said(count):
    """Kill the process with the number 2 when it has said so many times whom it sees."""
    said = []

    def before(process, kind, key):
        if process.number == 2 and len(said) >= count and keys_lab.kept(key).kind != "claim":
            process.die()
        if process.number == 2 and kind == "put" and keys_lab.of("meeting")(key):
            said.append(key)

    return before


@pytest.mark.parametrize("first", [0.0, 2.0], ids=["it is there at once", "it comes later"])
@pytest.mark.parametrize(("said", "again"), [(1, 0.5), (1, 8.0), (2, 8.0), (2, 40.0)])
def test_they_have_met_only_when_all_say_the_same(run, first, said, again):
    """Rank 2 is killed before all have met, and started again. What the others have said before that is no answer to it."""
    run.before = dies_when_it_has_said(said)
    # Rank 1 comes last, so nobody has met before it is there.
    starts = [(0, 0.0), (1, first + again + 0.2), (2, first), (2, first + again)]
    results = run.simulate([(rank, start, [], True) for rank, start in starts], until=6)
    assert isinstance(results[2], Killed)
    del results[2]
    assert identical([*results, *Run(3).live()])
    manifest = keys_lab.fields(key := keys_lab.manifest_key(2), run.store.objects[key])
    assert [member["life"] for member in manifest["members"]] == [2, 2, 3]


def test_what_a_dead_process_has_agreed_to_counts_for_nothing_later(run):
    """Ranks 0 and 1 agree on whom they see. Then rank 1 is killed, too, and both it and rank 2 are started again."""

    def before(process, _, key):
        if process.number == 2 and keys_lab.of("meeting")(key):
            process.die()  # it has claimed its rank, and says nothing
        if process.number == 1 and process.clock() > 20.0:
            process.die()

    run.before = before
    starts = [(0, 0.0), (1, 0.0), (2, 0.0), (2, 30.0), (1, 60.0)]
    results = run.simulate([(rank, start, [], True) for rank, start in starts], until=6)
    assert [type(result) for result in results[1:3]] == [Killed, Killed]
    assert identical([results[0], *results[3:], *Run(3).live()])


def test_another_process_of_the_same_rank_is_noticed_while_it_meets():
    """On a store that does not create exclusively, the later one has overwritten the claim."""
    run, claimed = Run(2), []
    run.live(until=3)
    run.store.exclusive = False

    def before(process, kind, key):
        if kind == "create" and keys_lab.of("claim", rank=0)(key):
            process.sleep(1.0 + process.number)
            claimed.append(process.number)

    run.before = before
    first, second = run.simulate([(0, 0.0, [], True) for _ in range(2)], until=6)
    assert claimed == [0, 1]
    with pytest.raises(RunExistsError, match=r"rank 0 of .* is taken by"):
        raise first
    assert run.ended[0] < 60.0
    assert isinstance(second, RendezvousTimeoutError), "nobody else comes"


def test_another_process_of_the_same_rank_is_refused_by_a_store_that_creates_exclusively():
    run = Run(2)
    run.live(until=3)

    def before(process, kind, key):
        if kind == "create" and keys_lab.of("claim", rank=0)(key):
            process.sleep(1.0 + process.number)

    run.before = before
    first, second = run.simulate([(0, 0.0, [], True) for _ in range(2)], until=6)
    assert isinstance(first, RendezvousTimeoutError), "nobody else comes"
    with pytest.raises(RunExistsError, match=r"another process resumes rank 0 .* at this moment"):
        raise second


@pytest.mark.parametrize("whole_again", [True, False])
def test_what_was_damaged_for_a_while_only_is_not_named_when_time_is_up(whole_again):
    """Rank 1 has claimed its rank and was killed; its claim is damaged when rank 0 first looks at it."""
    run, key, claims = Run(2), keys_lab.claim_key(1, 2), []
    run.live(until=3)

    def before(process, *_):
        if process.rank and key in run.store.objects:
            process.die()
        if process.rank == 0 and key in run.store.objects and not claims:
            claims.append(run.store.objects[key])
            run.store.damage(key, flip(claims[0], 100))

    run.before = before
    processes = [(1, 0.0, [], True), (0, 1.0, [], True)]
    events = {40.0: lambda: run.store.damage(key, claims[0]) if whole_again else None}
    _, result = run.simulate(processes, events=events, until=6)
    assert claims
    with pytest.raises(RendezvousTimeoutError, match="missing: rank 1") as raised:
        raise result
    assert (key in str(raised.value)) is not whole_again
