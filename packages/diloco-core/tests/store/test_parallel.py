"""Several things at the same time: in order, not too many, and no further ones after an error."""

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import pytest
from training_lab import PATIENCE

from diloco_core._run._states._publications import Publications
from diloco_core._store._api import InBackground
from diloco_core._store._drivers._remote import RemoteStore
from diloco_core._store._open import open_store
from diloco_core._store._reread import in_parallel

pytestmark = pytest.mark.processes


@pytest.fixture
def store(monkeypatch):
    """A store with threads; nothing but those is used."""
    with ThreadPoolExecutor(16) as pool:
        made = open_store("memory://parallel/run")
        made.near = False
        monkeypatch.setattr(RemoteStore, "creates_at_once", 2)
        monkeypatch.setattr(made, "submit", pool.submit)
        assert isinstance(made, InBackground)
        yield made


class TestInParallel:
    def test_results_come_in_order_and_several_are_under_way(self, store):
        together = threading.Barrier(4)  # one after another, nobody would get past it

        def act(number):
            together.wait(PATIENCE)
            return number

        assert list(in_parallel(store, [partial(act, number) for number in range(12)], 4)) == list(
            range(12)
        )

    def test_not_more_than_was_said(self, store):
        lock, under_way, most = threading.Lock(), 0, 0

        def act():
            nonlocal under_way, most
            with lock:
                under_way += 1
                most = max(most, under_way)
            with lock:
                under_way -= 1

        assert len(list(in_parallel(store, [act] * 50, 3))) == 50
        assert most <= 3

    def test_after_an_error_no_further_one_is_begun(self, store):
        begun = []

        def act(number):
            begun.append(number)
            if number == 1:
                raise ValueError(number)

        with pytest.raises(ValueError, match="1"):
            list(in_parallel(store, (partial(act, number) for number in range(100)), 2))
        assert max(begun) <= 3

    def test_where_requests_cost_nothing_one_after_another_in_this_thread(self, tmp_path):
        threads = list(in_parallel(open_store(str(tmp_path)), [threading.get_ident] * 3, 16))
        assert threads == [threading.get_ident()] * 3


class TestPublications:
    def test_results_are_used_here_and_in_order(self, store):
        publications, used, gates = Publications(store), [], [threading.Event() for _ in range(3)]
        here = threading.get_ident()

        def upload(number):
            assert threading.get_ident() != here
            assert gates[number].wait(PATIENCE)

        def use(number):
            assert threading.get_ident() == here
            used.append(number)

        gates[1].set()
        publications.add(partial(upload, 0), partial(use, 0))
        publications.add(partial(upload, 1), partial(use, 1))
        assert used == []
        gates[0].set()
        publications.add(
            partial(upload, 2), partial(use, 2)
        )  # two are under way: the first one is waited for
        assert used == [0]
        gates[2].set()
        publications.finish()
        assert used == [0, 1, 2]

    def test_an_error_is_raised_and_the_others_are_waited_for(self, store):
        publications, gate, begun, read = (
            Publications(store),
            threading.Event(),
            threading.Event(),
            [],
        )

        def fail():
            raise ValueError("no")

        def upload():
            begun.set()
            assert gate.wait(PATIENCE)
            read.append(1)

        publications.add(fail, lambda: pytest.fail("used"))
        publications.add(upload, lambda: pytest.fail("used"))
        assert begun.wait(PATIENCE)
        with pytest.raises(ValueError, match="no"):
            publications.finish()
        gate.set()
        publications.abandon()
        assert read == [1], "memory may be written to now"

    def test_without_threads_at_once(self):
        done = []
        publications = Publications(SimpleNamespace(near=True))
        publications.add(lambda: done.append("upload"), lambda: done.append("use"))
        assert done == ["upload", "use"]
        publications.finish()
        publications.abandon()
