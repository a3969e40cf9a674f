"""Messages that say a thing once, in whole sentences, and what to do next."""

import pytest
from simulated import Schedule, SimulatedTraining, simulate
from torch import nn, optim

from diloco_core import ConfigurationError, CorruptedObjectError, DiLoCo, Elastic, in_process
from diloco_core._exchange._endings import Ending, Progress, conclude, failure
from diloco_core._run._records._keys import MANIFEST
from diloco_core._store._reread import copy_key


def test_an_error_that_says_nothing_leaves_no_colon_behind():
    assert failure(1, Progress(), KeyboardInterrupt()).message == "KeyboardInterrupt"
    assert failure(1, Progress(), ValueError("x")).message == "ValueError: x"


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ("rank 1 is away for 9 s.", "rank 1 is away for 9 s (as rank 2 found after 1 sync)"),
        (
            "it is gone",
            "rank 1 is lost, as rank 2 found after 1 sync: ReplicaLostError: it is gone",
        ),
    ],
)
def test_who_is_lost_is_said_once(message, told):
    ending = Ending(2, "failed", Progress(2, 1), f"ReplicaLostError: {message}", 1)
    assert str(conclude({2: ending}, [1, 2], 0, Progress(2, 1))) == told


def test_a_number_that_is_text_is_told_from_one_that_is_not():
    def made():
        model = nn.Linear(1, 1)
        inner = optim.SGD(model.parameters(), lr=0.1)
        return DiLoCo(model, inner, in_process(1)[0], sync_every=1)

    with made() as outer:
        state = outer.state_dict()
    state["version"] = str(state["version"])
    told = r"version is '(\d+)' \(a str\) in the saved state, but \1 \(an int\) in this outer"
    with pytest.raises(ConfigurationError, match=told):
        made().load_state_dict(state)


@pytest.mark.parametrize("resume", [True, "newest-whole"])
def test_a_damaged_manifest_says_what_to_do(resume):
    def life(syncs, **options):
        settings = Elastic(1, grace=5.0, topology="sharded", resume=options.pop("resume", False))
        training = SimulatedTraining(syncs=syncs)
        return simulate(training, Schedule(1), settings, most_incarnations=1, **options)

    store = life(1).store
    for key in (MANIFEST, copy_key(MANIFEST)):
        store.damage(key, store.objects[key] + b"\n")
    (error,) = life(2, resume=resume, store=store).errors().values()
    assert isinstance(error, CorruptedObjectError)
    for words in (
        "does not end with a checksum. ",
        "'newest-whole' does not help",
        "from a backup",
        "start this one later",
    ):
        assert words.lower() in str(error).lower()
