"""What is planned is what passes through the sockets to S3, with headers; ``planner/test_counted.py`` counts over a folder."""

from contextlib import ExitStack, closing
from itertools import count

import planned_lab as lab
import pytest

from diloco_core._store._open import open_store

WITHIN = 0.02
_numbers = count()


def named(value):
    """A name for options."""
    if not isinstance(value, dict):
        return None
    return "-".join(map(str, value.values())) or "plain"


@pytest.mark.parametrize("params", [13_000, pytest.param(100_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("fixed", {}),
        ("fixed", {"codec": "int8", "state_codec": "int8"}),
        ("sharded", {}),
        ("sharded", {"codec": "e2m1", "state_codec": "int8"}),
        ("sharded", {"codec": "int8", "sync_every": 3, "delay": 1}),
        ("gather", {}),
        ("gather", {"codec": "topk64", "error_feedback": 0.95}),
        pytest.param("gather", {"codec": "e2m1", "publish_every": 8}, marks=pytest.mark.slow),
    ],
    ids=named,
)
def test_bytes_on_the_sockets(moto_url, point_at, kind, options, params):
    """With what a request has around it as ``StoreModel`` has it if it is not told."""
    replicas, place = 3, f"obstore+s3://bucket/r{next(_numbers)}"
    publish_every = options.get("publish_every", 2)
    with ExitStack() as opened:
        counters, stores = [], []
        for _ in range(replicas):
            counters.append(opened.enter_context(lab.CountedServer(moto_url)))
            point_at(counters[-1].url)
            stores.append(opened.enter_context(closing(open_store(place))))
        counted, _ = lab.moved(
            kind,
            stores,
            counters,
            params,
            warm=3 * publish_every + 2,
            syncs=8,
            **{"sync_every": 1, "publish_every": publish_every, **options},
        )
    known = {name: options[name] for name in ("codec", "state_codec") if name in options}
    plan = lab.planned(kind, params, replicas, publish_every=publish_every, **known)
    assert counted == pytest.approx(plan, rel=WITHIN)
