"""A process of an earlier run that wakes up late leaves the run alone that uses its prefix by now."""

import pytest
import torch
from keys_lab import MANIFEST, copy_key, keys_of
from strict_lab import Run, in_folder
from training_lab import fill, identical

from diloco_core import RunExistsError, export
from diloco_core.testing import Fault

EMPTIED, BEGUN, WOKEN = 2500.0, 2600.0, 2601.0


class Frozen(Run):
    """Its model also holds what is not synced, which rank 0 uploads before the manifest."""

    def net(self):
        net = fill(torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2)))
        net[0].bias.requires_grad_(False)
        return net


def used_again(run, operation, resume, ranks=2):
    """Rank 0 hangs at an operation until a new run trains under the same prefix. What it and the new run came to."""

    def empty():
        for key in list(run.store.objects):
            run.store.remove(key)

    late = [(0, 0.0, [Fault(0, 1, operation, "zombie", WOKEN)], resume)]
    others = [(rank, 0.0, [], resume) for rank in range(1, ranks)]
    new = [(rank, BEGUN, [], False) for rank in range(ranks)]
    results = run.simulate([*late, *others, *new], 0, events={EMPTIED: empty}, until=12)
    return results[0], results[ranks:]


@pytest.mark.parametrize(
    ("resume", "operations"),
    [
        (False, range(9, 17, 3)),
        (True, range(15, 34, 6)),
        pytest.param(False, range(9, 17), marks=pytest.mark.slow),
        pytest.param(True, range(13, 34), marks=pytest.mark.slow),
    ],
)
def test_nothing_of_the_new_run_changes(resume, operations, tmp_path):
    """Wherever it hangs between two requests of one thread, except in the one that writes the manifest itself."""
    expected = Frozen(2).live(until=12)
    refusals = 0
    for operation in operations:
        run = Frozen(2)
        if resume:
            run.live(until=1)
        late, new = used_again(run, operation, resume)
        assert isinstance(late, Exception)
        refusals += isinstance(late, RunExistsError)
        assert identical([*new, *expected]), operation
        folder = in_folder(run, tmp_path / str(operation))
        assert export(folder, tmp_path / "model") == 12, operation
        assert identical([*run.live(resume=True, until=13), *Frozen(2).live(until=13)]), operation
    assert refusals > 1


def test_a_new_run_gets_back_a_manifest_that_was_overwritten():
    """The request that writes the manifest cannot be called back."""
    run = Run(2)
    other = Run(2)
    other.live(until=1)
    foreign = other.store.objects[MANIFEST]
    results = run.simulate(
        [(rank, 0.0, [], False) for rank in range(2)],
        0,
        events={1.5: lambda: run.store.damage(MANIFEST, foreign)},
        until=12,
    )
    assert identical(results)
    assert run.store.objects[MANIFEST] != foreign
    assert identical(run.live(resume=True, until=13))


def test_a_manifest_that_is_overwritten_while_the_run_is_resumed_is_not_believed():
    """By a new run on the same prefix, when both ranks have seen which run they resume, and have claimed their ranks."""
    run, other = Run(2), Run(2)
    run.live(until=1)
    other.live(until=1)

    def overwritten(*_):
        if len(keys_of(run.store.objects, "claim", life=2)) == 2:
            for harmed in (MANIFEST, copy_key(MANIFEST)):
                run.store.damage(harmed, other.store.objects[harmed])

    run.before = overwritten
    with pytest.raises(RunExistsError, match="holds another run by now"):
        raise run.live(resume=True)[0]
    assert keys_of(run.store.objects, "manifest") == [copy_key(MANIFEST), MANIFEST]
