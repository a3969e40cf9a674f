"""The outer optimizer's settings are the same for every fragment, replica and sync."""

import pytest
import torch

from diloco_core import ConfigurationError, in_process


def sgd(lr, made=None):
    def factory(parameters):
        optimizer = torch.optim.SGD(parameters, lr=lr() if callable(lr) else lr, momentum=0.9)
        if made is not None:
            made.append(optimizer)
        return optimizer

    return factory


@pytest.mark.parametrize(
    ("name", "value"), [("lr", 0.01), ("momentum", 0.5), ("weight_decay", 0.1), ("nesterov", True)]
)
def test_that_change_are_refused_at_the_next_sync(lab, name, value):
    (exchange,) = in_process(1)
    made, net = [], lab.small_model()
    outer, inner = lab.outer_loop(
        net, exchange, fragments=2, sync_every=2, outer_optimizer=sgd(0.7, made)
    )

    def train():
        with outer:
            lab.small_step(net, inner)
            for optimizer in made:
                optimizer.param_groups[0][name] = value
            lab.small_step(net, inner)

    with pytest.raises(
        ConfigurationError, match=rf"outer_{name} is {value} for fragment \d, but .* in the run"
    ):
        train()


def test_that_differ_between_fragments_are_refused(lab):
    (exchange,) = in_process(1)
    made = []
    # The trial makes some too; the last one is that of the last fragment.
    lab.outer_loop(
        lab.small_model(), exchange, fragments=2, sync_every=2, outer_optimizer=sgd(0.7, made)
    )
    count = len(made)

    def rate():
        rate.calls += 1
        return 0.1 if rate.calls == count else 0.7

    rate.calls = 0
    with pytest.raises(
        ConfigurationError, match=r"outer_lr is 0\.1 for fragment 1, but 0\.7 in the run"
    ):
        lab.outer_loop(
            lab.small_model(), exchange, fragments=2, sync_every=2, outer_optimizer=sgd(rate)
        )


def test_that_are_tensors_are_compared_with_all_their_digits(lab):
    def settings(lr):
        outer, _ = lab.outer_loop(
            lab.small_model(), in_process(1)[0], outer_optimizer=sgd(torch.tensor(lr))
        )
        return outer._model.settings

    assert settings(0.70001) == settings(0.70001)
    assert settings(0.70001) != settings(0.70004)
    assert settings(0.5)["outer_lr"] == "0.5"
