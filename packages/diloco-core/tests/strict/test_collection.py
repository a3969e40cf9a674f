"""What a strict run deletes: contributions and states that all replicas have left behind, and nothing that is still needed."""

import pytest

from diloco_core import export
from diloco_core.testing import run_replicas

pytestmark = pytest.mark.processes

FOLDERS = ("deltas", "state")


def syncs_below(store, folder):
    return sorted({int(key.split("/")[1]) for key in store.list(f"{folder}/")})


@pytest.mark.parametrize("fragments", [1, 2])
def test_the_store_holds_the_newest_states_of_each_fragment(lab, tmp_path, fragments):
    def replica(exchange):
        net = lab.small_model()

        def note(report):
            held.append((report.sync, *(syncs_below(exchange.store, f) for f in FOLDERS)))

        outer, optimizer = lab.outer_loop(
            net, exchange, sync_every=2, fragments=fragments, on_sync=note
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
