"""What is synced is the model's, at every sync: nothing is replaced, converted, added or unfrozen
without a word.
"""

import pytest
import torch
from torch import nn
from watch_lab import Net, make

from diloco_core import (
    ConfigurationError,
    DiLoCo,
    ModelChangedError,
    in_process,
)
from diloco_core._model._memory import first_overlap
from diloco_core.testing import run_replicas

CHANGES = {
    "assign=True": (
        lambda m, i: m.load_state_dict(m.state_dict(), assign=True),
        "base.weight",
        r"'base.weight' is another tensor \(float32\[3, 3\]\) than when the outer loop was made",
    ),
    "a new parameter in place": (
        lambda m, i: setattr(m.body, "weight", nn.Parameter(m.body.weight.detach().clone())),
        "body.weight",
        "'body.weight' is another tensor",
    ),
    "a tie": (
        lambda m, i: setattr(m.body, "weight", m.base.weight),
        "body.weight",
        "'body.weight' is another tensor",
    ),
    "double()": (
        lambda m, i: m.double(),
        "base.weight",
        r"'base.weight' was float32\[3, 3\] .* is now float64\[3, 3\]",
    ),
    "data of another shape": (
        lambda m, i: setattr(m.body.bias, "data", torch.zeros(5)),
        "body.bias",
        r"'body.bias' was float32\[3\] .* is now float32\[5\]",
    ),
    "unfrozen": (
        lambda m, i: m.base.requires_grad_(True),
        "base.weight",
        "'base.weight' was frozen .* trainable now",
    ),
    "added": (
        lambda m, i: m.register_parameter("extra", nn.Parameter(torch.ones(2))),
        "extra",
        r"'extra' \(float32\[2\]\) was not in the model",
    ),
    "removed": (
        lambda m, i: delattr(m, "head"),
        "head.weight",
        "'head.weight' .* is no longer in the model",
    ),
    "renamed": (
        lambda m, i: nn.utils.parametrizations.weight_norm(m.body),
        "body.weight",
        "'body.weight' .* has another name now",
    ),
    "memory of another one": (
        lambda m, i: setattr(m.body.weight, "data", m.base.weight.data),
        "body.weight",
        "'base.weight' and 'body.weight' share memory",
    ),
    "memory of a buffer": (
        lambda m, i: setattr(m, "mean", m.body.bias.detach()),
        "mean",
        "'body.bias' and 'mean' share memory",
    ),
    "expanded": (
        lambda m, i: (
            setattr(m.body.bias, "data", torch.ones(1).expand(3)),
            m.body.requires_grad_(False),
        ),
        "body.bias",
        "elements of 'body.bias' .* share memory with each other",
    ),
    "a buffer of another shape": (
        lambda m, i: setattr(m, "mean", torch.zeros(4)),
        "mean",
        r"buffer 'mean' was float32\[3\] .* is now float32\[4\]",
    ),
    "a buffer of another dtype": (
        lambda m, i: setattr(m, "count", torch.tensor(1.0)),
        "count",
        r"buffer 'count' was int64\[\] .* is now float32\[\]",
    ),
    "a buffer that is gone": (
        lambda m, i: setattr(m, "mean", None),
        "mean",
        "buffer 'mean' .* no longer in the model",
    ),
    "a buffer that is new": (
        lambda m, i: m.head.register_buffer("scale", torch.ones(1)),
        "head.scale",
        "buffer 'head.scale' .* was not in the model",
    ),
    "a group with another model's": (
        lambda m, i: i.add_param_group({"params": list(nn.Linear(7, 1).parameters())}),
        "",
        r"inner optimizer 0 \(SGD\) holds a tensor .*: number 0 of its group 1, float32\[1, 7\]",
    ),
    "a parameter that is no longer held": (
        lambda m, i: i.param_groups[0]["params"].pop(),
        "head.bias",
        r"'head.bias' \(float32\[2\]\) is trainable, but no inner optimizer holds it",
    ),
}


class TestChanges:
    @pytest.mark.parametrize("change", CHANGES)
    def test_are_refused_by_name_at_the_next_sync(self, lab, change):
        apply, tensor, message = CHANGES[change]
        model, inner, outer = make(lab, sync_every=2)

        def train():
            with outer:
                lab.push(model, inner, 0, 0)
                apply(model, inner)
                inner.zero_grad()
                lab.push(model, inner, 0, 1)

        with pytest.raises(ModelChangedError, match=message) as caught:
            train()
        assert caught.value.tensor == tensor
        assert outer.committed == 0

    @pytest.mark.parametrize("change", ["assign=True", "unfrozen", "double()"])
    def test_are_refused_before_anybody_is_met(self, lab, change):
        apply, _, message = CHANGES[change]
        model, inner, outer = make(lab)
        apply(model, inner)
        with pytest.raises(ModelChangedError, match=message):
            outer.__enter__()

    def test_are_refused_at_the_end_too(self, lab):
        """After the last sync: the model would not end as what the replicas agreed on."""
        model, inner, outer = make(lab)

        def train():
            with outer:
                lab.push(model, inner, 0, 0)
                model.body.weight = nn.Parameter(torch.zeros(3, 3))

        with pytest.raises(ModelChangedError, match=r"'body.weight' is another tensor"):
            train()
        assert outer.committed == 1

    def test_the_others_are_told(self, lab):
        def replica(exchange):
            model, inner, outer = make(lab, exchange)
            with outer:
                lab.push(model, inner, exchange.rank, 0)
                if exchange.rank == 1:
                    model.base.requires_grad_(True)
                lab.push(model, inner, exchange.rank, 1)

        first, second = run_replicas(replica, in_process(2))
        assert isinstance(second, ModelChangedError)
        assert "rank 1 failed" in str(first)
        assert "base.weight" in str(first)


class TestWhatIsAllowed:
    def test_freezing_and_unfreezing_again(self, lab):
        """The shards stay; the delta of what is frozen is zero."""

        def replica(exchange):
            model, inner, outer = make(lab, exchange, outer_momentum=0.0)
            with outer:
                lab.push(model, inner, exchange.rank, 0)
                model.body.requires_grad_(False)
                before = lab.values(model)
                lab.push(model, inner, exchange.rank, 1)
                assert torch.equal(before["body.weight"], model.body.weight)
                assert not torch.equal(before["head.weight"], model.head.weight)
                model.body.requires_grad_(True)
                lab.push(model, inner, exchange.rank, 2)
                assert not torch.equal(before["body.weight"], model.body.weight)
            return lab.values(model)

        assert lab.identical(lab.run(replica, in_process(2)))

    @pytest.mark.parametrize("fragments", [1, 2])
    def test_a_buffer_that_forward_assigns_anew_is_followed(self, lab, fragments):
        """Common in plain torch code: self.mean = 0.9 * self.mean + 0.1 * batch.mean(0), with a
        graph behind it.
        """

        def replica(exchange, in_place):
            model, inner, outer = make(lab, exchange, sync_every=2, fragments=fragments)
            seen = []
            with outer:
                for step in range(5):
                    fresh = 0.9 * model.mean.detach() + 0.1 * (
                        model.body.bias * 0 + step + exchange.rank
                    )
                    if in_place:
                        model.mean.copy_(fresh.detach())
                        model.count.add_(1 + exchange.rank)
                    else:
                        model.mean = fresh
                        model.count = model.count + 1 + exchange.rank
                    lab.push(model, inner, exchange.rank, step)
                    seen.append(model.mean.detach().clone())
            return {
                **{name: value.detach() for name, value in lab.values(model).items()},
                "seen": torch.stack(seen),
            }

        anew = lab.run(lambda exchange: replica(exchange, False), in_process(2))
        in_place = lab.run(lambda exchange: replica(exchange, True), in_process(2))
        for here, there in zip(anew, in_place, strict=True):
            assert lab.identical([here, there])
        assert torch.equal(anew[0]["mean"], anew[1]["mean"])
        assert anew[0]["count"].item() == anew[1]["count"].item() == 5

    def test_a_buffer_of_two_names_has_to_stay_one(self, lab):
        model = lab.fill(Net())
        model.head.register_buffer("mean", model.mean)
        model, inner, outer = make(lab, model=model)

        def train():
            with outer:
                lab.push(model, inner, 0, 0)
                model.mean = model.head.mean = torch.ones(3)
                lab.push(model, inner, 0, 1)
                model.mean = torch.ones(3)
                lab.push(model, inner, 0, 2)

        with pytest.raises(
            ModelChangedError, match=r"buffers 'mean' and 'head\.mean' were one tensor"
        ):
            train()
        assert outer.committed == 2

    def test_what_is_not_synced_may_be_assigned_anew(self, lab):
        model, inner, outer = make(lab, buffers="none")
        with outer:
            model.mean, model.cache, model.count = (
                torch.zeros(7),
                torch.zeros(9, dtype=torch.float64),
                None,
            )
            model.register_buffer("late", torch.ones(1))
            lab.push(model, inner, 0, 0)
        assert outer.committed == 1
        model, inner, outer = make(lab)
        with outer:
            model.cache = None
            model.register_buffer("rope", torch.ones(3), persistent=False)
            lab.push(model, inner, 0, 0)
        assert outer.committed == 1

    def test_moving_values_without_replacing_parameters(self, lab):
        """As model.to(device) does: new memory, the same tensors."""
        model, inner, outer = make(lab)
        with outer:
            lab.push(model, inner, 0, 0)
            for parameter in model.parameters():
                parameter.data = parameter.data.clone()
            for module in model.modules():
                for name, buffer in module.named_buffers(recurse=False):
                    setattr(module, name, buffer.clone())
            lab.push(model, inner, 0, 1)
        assert outer.committed == 2

    def test_loading_a_state_and_compiling_in_place(self, lab):
        model, inner, outer = make(lab)
        model.load_state_dict(lab.values(lab.fill(Net(), seed=3)))
        inner.load_state_dict(inner.state_dict())
        with outer:
            lab.push(model, inner, 0, 0)
            inner.load_state_dict(inner.state_dict())
            lab.push(model, inner, 0, 1)
        assert outer.committed == 2


class TestTheStart:
    def refused(self, lab, message, model, optimizer=None, **options):
        with pytest.raises(ConfigurationError, match=message):
            make(lab, model=model, optimizer=optimizer, **options)

    def test_tied_by_memory_and_not_by_identity(self, lab):
        model = Net()
        model.head.weight = nn.Parameter(model.body.weight.data[:2])
        self.refused(
            lab, "'body.weight' and 'head.weight' share memory without being the same tensor", model
        )
        model = Net()
        model.head.bias = nn.Parameter(model.base.bias.data[1:])
        self.refused(lab, "'base.bias' and 'head.bias' share memory", model)
        model = Net()
        model.mean = model.body.bias.data
        self.refused(lab, "'body.bias' and 'mean' share memory", model)
        assert make(lab, model=model, buffers="none")
        model = Net()
        model.body.bias = nn.Parameter(torch.ones(1).expand(3))
        self.refused(lab, "elements of 'body.bias' .* share memory with each other", model)

    def test_parts_of_one_storage_that_are_apart(self, lab):
        """As one flat tensor for all, and as the columns of a matrix."""
        whole = torch.randn(4, 6)
        model = nn.ParameterList(
            [nn.Parameter(whole[:, :2]), nn.Parameter(whole[:, 2:]), nn.Parameter(torch.ones(2))]
        )
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        with DiLoCo(model, inner, in_process(1)[0], sync_every=1) as outer:
            lab.push(model, inner, 0, 0)
        assert outer.committed == 1
        overlapping = nn.ParameterList([nn.Parameter(whole[:, :3]), nn.Parameter(whole[:, 2:])])
        self.refused(lab, "'0' and '1' share memory", overlapping)

    def test_an_optimizer_of_something_else(self, lab):
        model, other = Net(), Net()
        with_more = torch.optim.SGD(
            [{"params": model.parameters()}, {"params": [nn.Parameter(torch.ones(4, 5))]}], lr=1.0
        )
        self.refused(
            lab,
            r"inner optimizer 0 \(SGD\) holds .* number 0 of its group 1, float32\[4, 5\]",
            model,
            with_more,
        )
        self.refused(
            lab,
            "holds a tensor that is not a parameter of the model",
            model,
            torch.optim.Adam(other.parameters()),
        )
        both = [
            torch.optim.SGD(model.parameters(), lr=1.0),
            torch.optim.Adam(other.head.parameters()),
        ]
        self.refused(
            lab,
            r"inner optimizer 1 \(Adam\) holds .* number 0 of its group 0, float32\[2, 3\]",
            model,
            both,
        )

    def test_a_parameter_that_nobody_trains(self, lab):
        model = Net()
        only_body = torch.optim.SGD(model.body.parameters(), lr=1.0)
        self.refused(
            lab, "'head.weight' .* is trainable, but no inner optimizer holds it", model, only_body
        )
        assert make(
            lab, model=model, optimizer=[only_body, torch.optim.SGD(model.head.parameters())]
        )
        assert make(lab, model=model, optimizer=torch.optim.SGD(model.parameters())), (
            "frozen ones in an optimizer are fine"
        )

    def test_a_parameter_without_a_shape(self, lab):
        model = nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(3))
        self.refused(
            lab, "'1.weight' does not have a shape yet: run a batch through the model", model
        )


def test_memory_is_compared_range_by_range():
    flat = torch.zeros(100)
    parts = [flat[index * 10 : index * 10 + 10] for index in (3, 0, 7, 9, 1)]
    assert first_overlap(parts) is None
    assert first_overlap([*parts, flat[5:6]]) is not None
    assert (
        first_overlap([*parts, flat[20:30], torch.empty(0), torch.zeros(3, device="meta")]) is None
    )
    # Behind a range that is longer than the next ones.
    assert first_overlap([flat[::2], flat[1:20:2], flat[21:40:2]]) is None
    assert first_overlap([flat[::2], flat[1:20:2], flat[22:40:2]]) is not None
    assert first_overlap([flat[:50].view(5, 10)[:, :5], flat[:50].view(5, 10)[:, 5:]]) is None
    assert first_overlap([flat[:50].view(5, 10)[:, :6], flat[:50].view(5, 10)[:, 5:]]) is not None


@pytest.mark.parametrize("policy", ["mean", "rank0", "none"])
def test_the_first_buffer_of_a_model_is_refused_too(lab, policy):
    model, inner, outer = make(lab, model=lab.fill(nn.Linear(3, 2)), buffers=policy)

    def train():
        with outer:
            lab.push(model, inner, 0, 0)
            model.register_buffer("cache", torch.zeros(2), persistent=False)
            lab.push(model, inner, 0, 1)
            model.register_buffer("late", torch.zeros(2))
            lab.push(model, inner, 0, 2)

    if policy == "none":
        train()
    else:
        with pytest.raises(
            ModelChangedError, match=r"buffer 'late'.*was not in the model"
        ) as caught:
            train()
        assert caught.value.tensor == "late"
