"""Messages that say a thing once, in whole sentences, and what to do next."""

import pytest
from simulated import Schedule, SimulatedTraining, simulate

import diloco_core
from diloco_core import CorruptedObjectError, Elastic
from diloco_core._exchange._endings import Ending, Progress, conclude
from diloco_core._run._records._keys import MANIFEST
from diloco_core._store._reread import copy_key


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


def test_what_would_only_come_again_is_not_started_again():
    """The runner ends a replica for good whose error says so."""
    final = {
        name
        for name in diloco_core.__all__
        if isinstance(kind := getattr(diloco_core, name), type)
        and issubclass(kind, diloco_core.CoreError)
        and kind.final
    }
    assert final == {
        "AfterRunError",
        "ConfigurationError",
        "FencedError",
        "MismatchError",
        "RunExistsError",
    }
