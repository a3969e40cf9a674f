"""Rank 0 of a living strict run writes its manifest again when that is lost or damaged, and nobody else's."""

import copy

import keys_lab
import pytest
import torch
from damage_lab import flip
from keys_lab import MANIFEST, copy_key, manifest_key
from strict_lab import Run
from training_lab import Clock, fill, identical, push

from diloco_core import DiLoCo, Elastic, ReplicaLostError, RunExistsError, Timing, connect
from diloco_core.testing import SimulatedStore

HARM = {
    "gone": lambda data: None,
    "damaged": lambda data: flip(data, 4 * len(data)),
    "empty": lambda data: b"",
}


@pytest.fixture(autouse=True)
def _at_once(monkeypatch):
    monkeypatch.setattr("diloco_core._store._reread.REREADS", (0.0, 0.0))


class TestInALivingRun:
    @pytest.fixture
    def harmed(self, stopped, monkeypatch):
        """Harms the manifest of the second life when sync 4 is published. For each later sync: whether the manifest was whole."""
        write, key, found, whole = SimulatedStore.write, manifest_key(2), [], []

        def harmful(harm):
            def writing(store, written, data):
                write(store, written, data)
                if written == key and not whole:
                    whole.append(bytes(data))
                published = keys_lab.of("state", rank=0, copy=False)(written)
                sync = keys_lab.kept(written).sync if published else 0
                if sync == 4:
                    store.remove(key)
                    if (harmed := HARM[harm](whole[0])) is not None:
                        write(store, key, harmed)
                if sync > 4:
                    found.append(store.objects.get(key) == whole[0])

            monkeypatch.setattr(SimulatedStore, "write", writing)
            return found

        return harmful

    def is_whole(self, run):
        return identical(run.live(resume=True, until=10))

    @pytest.mark.parametrize("harm", HARM)
    @pytest.mark.parametrize("every", [0, 1], ids=["nothing saved", "inner state saved"])
    def test_at_every_eighth_sync(self, stopped, harmed, harm, every, caplog):
        found = harmed(harm)
        assert identical(stopped.live(resume=True, until=9, save_inner_every=every))
        assert found == [False, False, False, True, True], "eight syncs are done after sync 7"
        assert manifest_key(2) in caplog.text
        assert "It is written again with the same content" in caplog.text
        assert self.is_whole(stopped)

    def test_when_it_leaves(self, stopped, harmed):
        found = harmed("gone")
        assert identical(stopped.live(resume=True))
        assert found == [False, False]
        assert self.is_whole(stopped)

    def test_when_it_fails(self, stopped, harmed):
        harmed("gone")

        def killed(process, _, key):
            if process.rank and keys_lab.of("contribution", sync=6)(key):
                process.die()

        stopped.before = killed
        result, _ = stopped.live(resume=True)
        stopped.before = None
        with pytest.raises(ReplicaLostError, match="rank 1"):
            raise result
        assert self.is_whole(stopped)


class Alone:
    """A run of one replica in a folder, which leaves it after something was done to its objects."""

    def __init__(self, folder):
        self.folder = folder / "run"
        self.life, self.steps = 0, 0

    def live(self, act=lambda: None, more=0):
        """Take two outer steps, and ``more`` after ``act``, and leave. The manifest is looked at at every eighth, and then."""
        clock = Clock()
        timing = Timing(clock=clock, sleep=clock.sleep)
        net = fill(torch.nn.Linear(2, 1))
        inner = torch.optim.SGD(net.parameters(), lr=0.5)
        exchange = connect(self.folder, rank=0, world_size=1, timing=timing, resume=self.life > 0)
        with DiLoCo(net, inner, exchange, sync_every=1, save_inner_every=0) as outer:
            self.life += 1
            for _ in range(2):
                push(net, inner, 0, outer.inner_steps)
            self.store = exchange.store
            act()
            for _ in range(more):
                push(net, inner, 0, outer.inner_steps)

    @property
    def key(self):
        return manifest_key(self.life)

    def get(self, key):
        return (self.folder / key).read_bytes() if (self.folder / key).exists() else None

    def put(self, key, data):
        (self.folder / key).write_bytes(data)

    def gone(self, *more):
        for key in (self.key, copy_key(self.key), *more):
            (self.folder / key).unlink()


class TestWhatIsWrittenAgain:
    @pytest.fixture(params=[1, 2])
    def run(self, request, tmp_path):
        """A run whose next life is its first or its second one."""
        run = Alone(tmp_path)
        for _ in range(1, request.param):
            run.live()
        return run

    def look(self, run, act, more=0):
        """Let rank 0 look at its manifest after ``act``. What it was before; the manifest and its copy afterwards."""
        before = []

        def acting():
            before.append(run.get(run.key))
            act()

        run.live(acting, more)
        assert before[0] is not None
        return before[0], run.get(run.key), run.get(copy_key(run.key))

    def test_it_is_written_where_nothing_speaks_against_it(self, run):
        before, manifest, copy = self.look(run, run.gone)
        assert manifest == copy == before

    def test_what_is_whole_stays_untouched(self, run, caplog):
        written = []

        def act():
            caplog.clear()
            put = run.store.put
            run.store.put = lambda key, parts: written.append(key) or put(key, parts)

        before, manifest, copy = self.look(run, act)
        assert manifest == copy == before
        assert not keys_lab.keys_of(written, "manifest")
        assert keys_lab.keys_of(written, "note") == [keys_lab.note_key(0, run.life)]
        assert not [record for record in caplog.records if record.levelname == "ERROR"]

    def test_after_the_prefix_was_emptied(self, run):
        _, manifest, copy = self.look(run, lambda: run.gone(keys_lab.claim_key(0, run.life)))
        assert manifest is copy is None

    @pytest.mark.parametrize("later", [0, 1], ids=["of another run", "by a later process"])
    def test_after_the_rank_was_claimed(self, run, later):
        def act():
            own, other = (keys_lab.claim_key(0, run.life + more) for more in (0, later))
            run.put(other, keys_lab.sealed_again(own, run.get(own), other, nonce="another"))
            run.gone()

        # A later process is noticed in the next outer step.
        _, manifest, copy = self.look(run, act, more=0 if later else 9)
        assert manifest is copy is None

    def test_over_that_of_another_version(self, run):
        before, manifest, _ = self.look(
            run, lambda: run.put(run.key, b'{"kind": "manifest", "format": 2}')
        )
        assert manifest == before

    def test_over_that_of_another_run(self, run):
        """The claims say whose the prefix is."""

        def act():
            for key in (run.key, copy_key(run.key)):
                other = keys_lab.sealed_again(run.key, run.get(run.key), run=32 * "d")
                run.put(key, other)

        before, manifest, copy = self.look(run, act)
        assert manifest == copy == before


def test_who_was_replaced_meanwhile_writes_none(stopped):
    """Rank 0 hangs before it writes the manifest of its second life, and a later process resumes the run."""
    requests = []

    def before(process, kind, key):
        if process.number:
            return
        if keys_lab.of("manifest", life=2)(key) and kind == "put":
            requests.append(process.operations)
        if process.operations in hangs:
            process.sleep(5000.0)

    again, hangs = copy.deepcopy(stopped), []
    stopped.before = before
    stopped.live(resume=True, until=4)
    assert len(requests) == 2
    # Looking whether it still holds its rank is the last that it does before it writes. Before the second one of the two, the
    # first one has been written.
    for hang, written in ((requests[0] - 1, 0), (requests[1] - 1, 1)):
        run, hangs[:] = copy.deepcopy(again), [hang]
        run.before = before
        processes = [(rank, start, [], True) for start in (0.0, 3000.0) for rank in range(2)]
        results = run.simulate(processes, until=6)
        assert isinstance(results[0], RunExistsError), results[0]
        assert identical(results[2:])
        assert len(keys_lab.keys_of(run.store.objects, "manifest", life=2)) == written


def test_a_first_life_writes_manifest_json_again(monkeypatch):
    run, write = Run(2), SimulatedStore.write

    def harmful(store, written, data):
        write(store, written, data)
        if keys_lab.of("state", sync=1, rank=0)(written):
            store.remove(MANIFEST)

    with monkeypatch.context() as patch:
        patch.setattr(SimulatedStore, "write", harmful)
        assert identical(run.live(until=3))
    assert identical(run.live(resume=True))


@pytest.mark.parametrize("kind", ["strict", "elastic"])
def test_a_run_goes_on_without_a_copy_that_cannot_be_written(kind, tmp_path, caplog):
    clock, folder = Clock(), tmp_path / "run"
    timing = Timing(clock=clock, sleep=clock.sleep)
    options = {"elastic": Elastic(1, grace=600.0)} if kind == "elastic" else {}
    net = fill(torch.nn.Linear(2, 1))
    inner = torch.optim.SGD(net.parameters(), lr=0.5)
    exchange = connect(folder, rank=0, world_size=1, timing=timing, **options)
    with DiLoCo(net, inner, exchange, sync_every=1) as outer:
        copy = folder / copy_key(MANIFEST)
        copy.unlink()
        (copy / "something").mkdir(parents=True)
        for step in range(9):
            push(net, inner, 0, step)
    assert outer.committed == 9
    assert "goes on without this copy of its manifest" in caplog.text
