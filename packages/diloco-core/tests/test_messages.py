"""Messages that say a thing once, in whole sentences, and what to do next."""

import pytest
from simulated import Schedule, SimulatedTraining, simulate
from torch import nn, optim

from diloco_core import ConfigurationError, CorruptedObjectError, DiLoCo, Elastic, in_process
from diloco_core._exchange._endings import Ending, Progress, conclude, failure
from diloco_core._loop._saved import STATE_VERSION
from diloco_core._run._records._keys import MANIFEST
from diloco_core._run._states._rollback import named_syncs
from diloco_core._store._reread import copy_key


def test_an_error_that_says_nothing_leaves_no_colon_behind():
    assert failure(1, Progress(), KeyboardInterrupt()).message == "KeyboardInterrupt"
    assert failure(1, Progress(), ValueError("x")).message == "ValueError: x"


def test_one_sync_is_no_plural():
    assert [named_syncs(numbers) for numbers in ((), (7,), (7, 8))] == [
        "nothing",
        "sync 7",
        "syncs 7, 8",
    ]


@pytest.mark.parametrize(
    ("message", "told"),
    [
        (
            "ReplicaLostError: rank 1 has shown no sign of life for 9 s.",
            "rank 1 has shown no sign of life for 9 s (as rank 2 found after 1 sync)",
        ),
        (
            "ReplicaLostError: it is gone",
            "rank 1 is lost, as rank 2 found after 1 sync: ReplicaLostError: it is gone",
        ),
    ],
)
def test_who_is_lost_is_said_once(message, told):
    ending = Ending(2, "failed", Progress(2, 1), message, 1)
    assert str(conclude({2: ending}, [1, 2], 0, Progress(2, 1))) == told


def test_a_number_that_is_text_is_told_from_one_that_is_not():
    model = nn.Linear(1, 1)
    state = {"version": str(STATE_VERSION), "rank": 0, "world_size": 1}
    outer = DiLoCo(model, optim.SGD(model.parameters(), lr=0.1), in_process(1)[0], sync_every=1)
    with pytest.raises(
        ConfigurationError,
        match=r"version is '(\d)' \(a str\) in the saved state, "
        r"but \1 \(an int\) in this outer loop",
    ):
        outer.load_state_dict(state)


@pytest.mark.parametrize("resume", [True, "newest-whole"])
def test_a_damaged_manifest_says_what_to_do(resume):
    settings = {"grace": 5.0, "topology": "sharded"}
    outcome = simulate(
        SimulatedTraining(syncs=1), Schedule(1), Elastic(1, **settings), most_incarnations=1
    )
    for key in (MANIFEST, copy_key(MANIFEST)):
        outcome.store.damage(key, outcome.store.objects[key] + b"\n")
    later = simulate(
        SimulatedTraining(syncs=2),
        Schedule(1),
        Elastic(1, resume=resume, **settings),
        store=outcome.store,
        most_incarnations=1,
    )
    (error,) = later.errors().values()
    assert isinstance(error, CorruptedObjectError)
    for words in (
        "does not end with a checksum. ",
        "'newest-whole' does not help",
        "from a backup",
        "start this one later",
    ):
        assert words.lower() in str(error).lower()
