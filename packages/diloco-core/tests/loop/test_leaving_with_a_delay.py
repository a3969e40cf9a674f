"""A block that is left while a sync is under way: what the others have counted is what is reported
and saved.
"""

import threading

import pytest
import torch
from training_lab import PATIENCE, push, run, small_model

from diloco_core import DiLoCo, connect


class Late:
    """What the ranks wait for: the second attempt of rank 0, and the commit that rank 1 makes of
    its first one.
    """

    def __init__(self):
        self.asked_again, self.counted = threading.Event(), threading.Event()


def first_leaves(exchange, late, reports, **options):
    """Sends after two steps, takes one more, and leaves; the other one contributes only when it
    asks again.
    """
    begin, begun = exchange.begin, []

    def begins(job, *, last=False):
        begun.append(job.contribution.steps)
        if len(begun) == 2:
            late.asked_again.set()
            assert late.counted.wait(PATIENCE)
        return begin(job, last=last)

    exchange.begin = begins
    model = small_model()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with DiLoCo(model, inner, exchange, on_sync=reports.append, **options) as outer:
        for step in range(3):
            push(model, inner, 0, step)
    return begun, outer


def other(exchange, late, **options):
    model = small_model()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    options["on_sync"] = lambda _: late.counted.set()
    with DiLoCo(model, inner, exchange, **options):
        push(model, inner, 1, 0)
        assert late.asked_again.wait(PATIENCE)
        for step in range(1, 4):
            push(model, inner, 1, step)


@pytest.mark.parametrize("feedback", [{}, {"codec": "int8", "error_feedback": True}])
def test_the_contribution_that_was_sent_is_the_one_that_counts(tmp_path, caplog, feedback):
    late, reports = Late(), []
    options = {"sync_every": 4, "delay": 2, "save_inner_every": 1, **feedback}

    def train(exchange):
        if exchange.rank:
            return other(exchange, late, **options)
        return first_leaves(exchange, late, reports, **options)

    each = [
        connect(tmp_path, rank=rank, world_size=2, min_replicas=2, topology="gather")
        for rank in range(2)
    ]
    (begun, outer), _ = run(train, each)
    assert begun[:2] == [(0, 2), (0, 2)], "the same contribution"
    (report,) = reports
    assert (report.contribution, report.inner_steps, report.total_inner_steps) == ("counted", 2, 3)
    assert outer.committed == 1
    assert "error feedback" not in caplog.text
    names = {path.name for path in (tmp_path / "inner" / "00000").iterdir()}
    assert names == {
        "0001.00000001.safetensors",  # after the sync that counted it
        *(["0001.00000001.residual.safetensors"] if feedback else []),  # before it was sent
    }
