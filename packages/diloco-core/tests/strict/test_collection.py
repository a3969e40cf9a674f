"""What a strict run deletes: contributions and states that all replicas have left behind, and nothing that is still needed."""

import pytest
import torch
from keys_lab import kept, keys_of

from diloco_core import ObjectStoreAllReduce, export
from diloco_core.testing import run_replicas

pytestmark = pytest.mark.processes

KINDS = ("contribution", "state")


def syncs_of(store, kind):
    return sorted({kept(key).sync for key in keys_of(store.list(""), kind)})


@pytest.mark.parametrize("fragments", [1, 2, 3])
def test_the_store_holds_the_newest_states_of_each_fragment(lab, tmp_path, fragments):
    def replica(exchange):
        net = lab.small_model()

        def note(report):
            held.append((report.sync, *(syncs_of(exchange.store, kind) for kind in KINDS)))

        outer, optimizer = lab.outer_loop(
            net, exchange, sync_every=fragments, fragments=fragments, on_sync=note
        )
        optimizer.param_groups[0]["lr"] = 1e-3
        with outer:
            for _ in range(12):
                lab.small_step(net, optimizer)

    held = []
    exchanges = lab.store_exchanges(tmp_path, 2)
    assert run_replicas(replica, exchanges) == [None, None]
    steady = [entry for entry in held if entry[0] > 2 * fragments]
    assert steady
    for _, deltas, states in steady:
        assert deltas[-1] - deltas[0] <= 1, "the other replica may be one sync ahead"
        assert states == list(range(states[-1] - 2 * fragments, states[-1] + 1))
    assert export(str(tmp_path / "run"), tmp_path / "model") > 0


def test_of_means_only_the_last_two_are_there(lab, tmp_path):
    def replica(exchange):
        with ObjectStoreAllReduce(exchange) as reduce:
            for _ in range(6):
                sync = reduce.mean([torch.ones(4)]).sync
                held.append((sync, *(syncs_of(exchange.store, kind)[0] for kind in KINDS)))

    held = []
    lab.run(replica, lab.store_exchanges(tmp_path, 2))
    assert sorted(held) == [
        (sync, sync, max(sync - 1, 0)) for sync in range(6) for _ in range(2)
    ], "the oldest contribution and the oldest mean after each sync"
