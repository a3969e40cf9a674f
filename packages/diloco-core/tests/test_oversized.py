"""An object that is larger than any record is treated as a damaged record in its place is."""

import pytest
from simulated import Schedule, SimulatedStore, SimulatedTraining, simulate
from strict_lab import Run

from diloco_core import Elastic
from diloco_core._run._records._keys import claim_key, commit_key
from diloco_core._store._api import RECORD_BYTES

pytestmark = pytest.mark.sampled

LARGE = bytes(RECORD_BYTES + 1)
SYNCS = 3


class Meddled(SimulatedStore):
    """A store with some objects; once a key is written, ``meddle(store)`` is called."""

    def __init__(self, objects=(), when="", meddle=None):
        super().__init__()
        self.when = ""
        for key, data in dict(objects).items():
            super().write(key, data)
        self.written, self.when, self.meddle = [], when, meddle

    def write(self, key, data):
        super().write(key, data)
        if key == self.when:
            self.when = ""
            self.meddle(self)
        if key not in getattr(self, "written", [key]):
            self.written.append(key)


def elastic(store, topology, syncs=SYNCS, *, resume=False):
    """Return how the replicas of an elastic run end, and its store."""
    training = SimulatedTraining(syncs=syncs, sizes=(12,), sync_every=2, save_every=2)
    settings = Elastic(2, grace=5.0, topology=topology, resume=resume)
    outcome = simulate(
        training, Schedule(2, latency=0.01), settings, store=store, most_incarnations=1, limit=500.0
    )
    return {incarnation: type(error) for incarnation, error in outcome.errors().items()}


def fixed(store, syncs=SYNCS, *, resume=False, kills=()):
    results = Run(store=store, syncs=syncs).live(*kills, resume=resume)
    return [type(result) for result in results]


KINDS = {
    "fixed": fixed,
    "sharded": lambda store, *args, **options: elastic(store, "sharded", *args, **options),
    "gather": lambda store, *args, **options: elastic(store, "gather", *args, **options),
}


def same_end(live, objects, key, harmed, **options):
    """A run over these objects ends as it does where the object is only damaged."""
    ends = []
    for data in (harmed, LARGE):
        store = Meddled(objects)
        store.damage(key, data)
        ends.append(live(store, **options))
    assert ends[0] == ends[1], key


@pytest.fixture(scope="module", params=KINDS)
def stopped(request):
    """How a kind of run goes on, the objects of one that stopped, and the keys it writes next."""
    live, store = KINDS[request.param], Meddled()
    live(store)
    more = Meddled(store.objects)
    live(more, SYNCS + 2, resume=True)
    return live, store.objects, [key for key in more.written if key not in store.objects]


def some(keys, first):
    """The last one of every second folder."""
    return list({key.partition("/")[0]: key for key in keys}.values())[first::2]


@pytest.mark.parametrize("resume", [True, "newest-whole"])
def test_in_the_place_of_an_object(stopped, resume):
    live, objects, _ = stopped
    for key in some(sorted(objects), resume is True):
        same_end(live, objects, key, objects[key][:-9], syncs=SYNCS + 1, resume=resume)


@pytest.mark.parametrize("resume", [True, "newest-whole"])
def test_where_nothing_was_yet(stopped, resume):
    live, objects, keys = stopped
    for key in some(sorted(keys), resume is True):
        same_end(live, objects, key, b"stray", syncs=SYNCS + 1, resume=resume)


@pytest.mark.parametrize("topology", ["sharded", "gather"])
@pytest.mark.parametrize("key", [claim_key(0, 1), claim_key(0, 2), commit_key(2), commit_key(3)])
def test_while_the_run_goes_on(topology, key):
    ends = [
        elastic(
            Meddled((), commit_key(2), lambda store, data=data: store.damage(key, data)), topology
        )
        for data in (b"stray", LARGE)
    ]
    assert ends[0] == ends[1]
