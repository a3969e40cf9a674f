"""What replicas are told whose settings differ, also where one of them has left a setting out."""

import pytest
import torch
from training_lab import fill, run

from diloco_core import DiLoCo, MismatchError, connect, in_process


def one(exchange, **options):
    model = fill(torch.nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with DiLoCo(model, optimizer, exchange, sync_every=4, **options):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()


@pytest.mark.parametrize(
    ("begun", "later", "told"),
    [
        ({}, {"weight": "steps"}, "was begun without weight, but rank 0 was given weight='steps'.* leave weight out, or"),
        ({"weight": "steps"}, {}, "was begun with weight='steps', but rank 0 was given no weight.* pass weight='steps', or"),
        ({"delay": 1}, {"delay": 2}, "was begun with delay=1, but rank 0 was given delay=2.* pass delay=1, or"),
    ],
)  # fmt: skip
def test_a_run_that_is_continued_with_another_setting(tmp_path, begun, later, told):
    one(connect(str(tmp_path), rank=0, world_size=1, min_replicas=1), **begun)
    again = connect(str(tmp_path), rank=0, world_size=1, min_replicas=1, resume=True)
    with pytest.raises(MismatchError, match=told):
        one(again, **later)


def test_two_replicas_of_which_one_has_left_a_setting_out():
    with pytest.raises(BaseExceptionGroup) as caught:
        run(
            lambda exchange: one(exchange, **({"weight": "steps"} if exchange.rank else {})),
            in_process(2),
        )
    texts = {str(error) for error in caught.value.exceptions}
    assert any(
        "differ in setting 'weight'" in text and "not given at rank 0" in text for text in texts
    )
