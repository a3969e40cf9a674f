"""Requests at the same time: in order, not too many, and no further ones after an error."""

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from training_lab import PATIENCE

from diloco_core._store._open import open_store
from diloco_core._store._reread import in_parallel

pytestmark = pytest.mark.processes


@pytest.fixture
def store(monkeypatch):
    """A store with threads; nothing but those is used."""
    with ThreadPoolExecutor(16) as pool:
        made = open_store("memory://parallel/run")
        made.near = False
        monkeypatch.setattr(made.background, "submit", pool.submit)
        yield made


def test_results_come_in_order_and_several_are_under_way(store):
    together = threading.Barrier(4)  # one after another, nobody would get past it

    def act(number):
        together.wait(PATIENCE)
        return number

    acts = [partial(act, number) for number in range(12)]
    assert list(in_parallel(store, acts, 4)) == list(range(12))


def test_not_more_than_was_said(store):
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


def test_after_an_error_no_further_one_is_begun(store):
    begun = []

    def act(number):
        begun.append(number)
        if number == 1:
            raise ValueError(number)

    with pytest.raises(ValueError, match="1"):
        list(in_parallel(store, (partial(act, number) for number in range(100)), 2))
    assert max(begun) <= 3


def test_near_stores_act_in_this_thread(tmp_path):
    threads = list(in_parallel(open_store(str(tmp_path)), [threading.get_ident] * 3, 16))
    assert threads == [threading.get_ident()] * 3
