"""What is planned and what is reported is what a store sees."""

from functools import partial

import planned_lab as lab
import pytest
import torch

from diloco_core._store._open import open_store

OPTIMIZERS = {
    0.0: {"outer_momentum": 0.0},
    1.0: {},
    2.0: {"outer_optimizer": partial(torch.optim.Adam, lr=0.1)},
}
"""By the number of tensors that they keep for a parameter."""
ENCODED = {"state_codec": "int8", "full_state_every": 2}
SPARSE = {"codec": "topk64", "error_feedback": 0.95}


KINDS = ("fixed", "sharded", "gather")
PLANNED = ("codec", "state_codec", "full_state_every", "clip")


def compare(tmp_path, kind, replicas, params, *, outer_state=1.0, publish_every=2, **options):
    """What a replica sends and receives in a sync, and what is planned."""
    counters = [lab.CountedFolder(open_store(str(tmp_path))) for _ in range(replicas)]
    every = {"publish_every": publish_every}
    # Eight syncs, since some records are read once in so many; and after three publications the
    # store holds what it keeps.
    counted, _ = lab.moved(
        kind, counters, counters, params, warm=3 * publish_every, syncs=8, **every,
        **OPTIMIZERS[outer_state], **{"sync_every": 1, **options},
    )  # fmt: skip
    known = {name: options[name] for name in PLANNED if name in options}
    return counted, lab.planned(kind, params, replicas, **every, outer_state=outer_state, **known)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("replicas", "outer_state"), [(1, 1.0), (2, 1.0), (4, 1.0), (3, 0.0), (3, 2.0)]
)
def test_counted(tmp_path, kind, replicas, outer_state):
    counted, plan = compare(tmp_path, kind, replicas, 12_000, outer_state=outer_state)
    assert counted == pytest.approx(plan, rel=0.05)


@pytest.mark.parametrize("kind", KINDS)
def test_records(tmp_path, kind):
    """Hardly anything else is received: a change of their format shows here."""
    counted, plan = compare(tmp_path, kind, 6, 32)
    assert counted[1] == pytest.approx(plan[1], rel=0.12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "options",
    [
        {"codec": "int8"},
        {"codec": "e2m1", "clip": "median"},
        SPARSE,
        ENCODED,
        {**ENCODED, **SPARSE},
        {"codec": "int8", "sync_every": 3, "delay": 1},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_counted_of_what_is_encoded(tmp_path, kind, options):
    if kind != "gather" or "state_codec" not in options:
        counted, plan = compare(tmp_path, kind, 4, 100_000, **options)
        assert counted == pytest.approx(plan, rel=0.05)


def test_counted_of_rare_publications(tmp_path):
    """As in the row of topk64 in the proof: 45 kB received per sync, of which 3 % are records."""
    rarely = {"outer_state": 0.0, "publish_every": 8}
    counted, plan = compare(tmp_path, "gather", 4, 470_784, **rarely, **SPARSE)
    assert counted == pytest.approx(plan, rel=0.05)
    assert plan[1] < 46_000


@pytest.mark.parametrize("kind", ["fixed", "sharded", "gather"])
def test_reported(tmp_path, kind):
    """Reports have contributions and published state, without records."""
    stores = [lab.CountedFolder(open_store(str(tmp_path))) for _ in range(3)]
    payloads = [Payload(store) for store in stores]
    counted, reports = lab.moved(kind, stores, payloads, 24_000, warm=4, syncs=4, sync_every=1)
    reported = [
        sum(getattr(report, name) for each in reports for report in each) / 3 / 4
        for name in ("bytes_sent", "bytes_received")
    ]
    assert reported == pytest.approx(counted, rel=0.05)


class Payload:
    """What a counting store has seen of contributions and published state."""

    def __init__(self, store):
        self._store = store

    @property
    def sent(self):
        return self._store.payload_sent

    @property
    def received(self):
        return self._store.payload_received
