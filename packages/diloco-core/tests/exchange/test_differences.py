"""What replicas are told whose settings differ, also where one of them has left a setting out."""

from functools import partial

import pytest
import torch
from training_lab import fill, run

from diloco_core import DiLoCo, MismatchError, connect, in_process


def one(exchange, **options):
    model = fill(torch.nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    if "outer_groups" in options:
        options["outer_groups"] = [{"params": model.weight}, {"params": model.bias}]
    with DiLoCo(model, optimizer, exchange, sync_every=4, **options):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()


@pytest.mark.parametrize(
    ("begun", "later", "told"),
    [
        ({}, {"weight": "steps"},
         "was begun without weight, but rank 0 was given weight='steps'.* leave weight out, or"),
        ({"weight": "steps"}, {},
         "was begun with weight='steps', but rank 0 was given no weight.* pass weight='steps', or"),
        ({"delay": 1}, {"delay": 2},
         "was begun with delay=1, but rank 0 was given delay=2.* pass delay=1, or"),
        ({}, {"nesterov": False},
         "was begun with nesterov=True, but rank 0 was given nesterov=False.* pass "
         "nesterov=True, or"),
        ({}, {"outer_optimizer": partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True,
                                         weight_decay=0.1, fused=True)},
         "begun with an outer optimizer whose weight_decay is 0, but rank 0 was given one whose "
         "weight_decay is 0.1."),
        ({}, {"outer_groups": True},
         r"was begun without outer_groups, but rank 0 was given outer_groups=\[{...}, {...}\]"),
        ({"outer_groups": True}, {},
         r"with outer_groups=\[{...}, {...}\], but rank 0 was given no outer_groups.* pass outer"),
    ],
)  # fmt: skip
def test_a_run_that_is_continued_with_another_setting(tmp_path, begun, later, told):
    one(connect(str(tmp_path), rank=0, world_size=1, min_replicas=1), **begun)
    again = connect(str(tmp_path), rank=0, world_size=1, min_replicas=1, resume=True)
    with pytest.raises(MismatchError, match=told):
        one(again, **later)


def test_two_replicas_of_which_one_has_left_a_setting_out():
    given = [{}, {"weight": "steps"}]
    with pytest.raises(BaseExceptionGroup) as caught:
        run(lambda exchange: one(exchange, **given[exchange.rank]), in_process(2))
    texts = [str(e) for e in caught.value.exceptions if "differ in setting 'weight'" in str(e)]
    assert any("not given at rank 0" in text for text in texts)
