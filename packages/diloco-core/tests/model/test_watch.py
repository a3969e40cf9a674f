"""Test that what is synced stays the model's: nothing is replaced or added without a word."""

import pytest
import torch
from loop_lab import Net, live, net_loop
from torch import nn

from diloco_core import ConfigurationError, ModelChangedError, in_process
from diloco_core.testing import run_replicas


def weight_of(module, value):
    module.weight = nn.Parameter(value)


# What is done with the model and its inner optimizer, the tensor that is named, and what is said.
CHANGES = {
    "assign=True": (lambda m, i: m.load_state_dict(m.state_dict(), assign=True), "base.weight",
                    r"is another tensor \(float32\[3, 3\]\) than when the outer loop was made"),
    "a new parameter": (lambda m, i: weight_of(m.body, m.body.weight.detach().clone()),
                        "body.weight", "is another tensor"),
    "a tie": (lambda m, i: setattr(m.body, "weight", m.base.weight),
              "body.weight", "is another tensor"),
    "double()": (lambda m, i: m.double(),
                 "base.weight", r"was float32\[3, 3\] .* is now float64\[3, 3\]"),
    "another shape": (lambda m, i: setattr(m.body.bias, "data", torch.zeros(5)),
                      "body.bias", r"was float32\[3\] .* is now float32\[5\]"),
    "unfrozen": (lambda m, i: m.base.requires_grad_(True),
                 "base.weight", "was frozen .* trainable now"),
    "added": (lambda m, i: m.register_parameter("extra", nn.Parameter(torch.ones(2))),
              "extra", r"\(float32\[2\]\) was not in the model"),
    "removed": (lambda m, i: delattr(m, "head"), "head.weight", ".* is no longer in the model"),
    "renamed": (lambda m, i: nn.utils.parametrizations.weight_norm(m.body),
                "body.weight", ".* has another name now"),
    "another's memory": (lambda m, i: setattr(m.body.weight, "data", m.base.weight.data),
                         "body.weight", "share memory"),
    "a buffer's memory": (lambda m, i: setattr(m, "mean", m.body.bias.detach()),
                          "mean", "share memory"),
    "expanded": (lambda m, i: (setattr(m.body.bias, "data", torch.ones(1).expand(3)),
                               m.body.requires_grad_(False)),
                 "body.bias", ".* share memory with each other"),
    "a buffer of another shape": (lambda m, i: setattr(m, "mean", torch.zeros(4)),
                                  "mean", r"was float32\[3\] .* is now float32\[4\]"),
    "a buffer of another dtype": (lambda m, i: setattr(m, "count", torch.tensor(1.0)),
                                  "count", r"was int64\[\] .* is now float32\[\]"),
    "a buffer less": (lambda m, i: setattr(m, "mean", None), "mean", ".* no longer in the model"),
    "a buffer more": (lambda m, i: m.head.register_buffer("scale", torch.ones(1)),
                      "head.scale", ".* was not in the model"),
    "no longer held": (lambda m, i: i.param_groups[0]["params"].pop(), "head.bias",
                       r"\(float32\[2\]\) is trainable, but no inner optimizer holds it"),
}  # fmt: skip


class TestChanges:
    @pytest.mark.sampled
    @pytest.mark.parametrize("change", CHANGES)
    def test_are_refused_by_name_at_the_next_sync(self, change):
        apply, tensor, message = CHANGES[change]
        message = f"'{tensor}' {message}"
        model, inner, outer = net_loop(sync_every=2)

        def act(model):
            apply(model, inner)
            inner.zero_grad()

        with pytest.raises(ModelChangedError, match=message) as caught:
            live(model, inner, outer, 0, act, 1)
        assert caught.value.tensor == tensor
        assert outer.committed == 0

    def test_are_refused_before_anybody_is_met_and_at_the_end(self):
        """After the last sync, the model would not end as what the replicas agreed on."""
        model, inner, outer = net_loop()
        model.base.requires_grad_(True)
        with pytest.raises(ModelChangedError, match=r"'base.weight' was frozen"):
            outer.__enter__()
        model, inner, outer = net_loop()
        replace = lambda model: weight_of(model.body, torch.zeros(3, 3))  # noqa: E731
        with pytest.raises(ModelChangedError, match=r"'body.weight' is another tensor"):
            live(model, inner, outer, 0, replace)
        assert outer.committed == 1

    def test_a_group_of_another_models_parameters(self):
        _, inner, outer = net_loop()
        inner.add_param_group({"params": list(nn.Linear(7, 1).parameters())})
        text = (
            r"inner optimizer 0 \(SGD\) holds a tensor .*: number 0 of its group 1, float32\[1, 7\]"
        )
        with pytest.raises(ModelChangedError, match=text) as caught:
            outer.__enter__()
        assert caught.value.tensor == ""

    def test_the_others_are_told(self):
        def replica(exchange):
            act = lambda model: model.base.requires_grad_(exchange.rank == 1)  # noqa: E731
            live(*net_loop(exchange), 0, act, 1)

        first, second = run_replicas(replica, in_process(2))
        assert isinstance(second, ModelChangedError)
        assert "rank 1 failed" in str(first)
        assert "base.weight" in str(first)


class TestWhatIsAllowed:
    def test_freezing_and_unfreezing_again(self, lab):
        """The shards stay; the delta of what is frozen is zero."""

        def replica(exchange):
            model, inner, outer = net_loop(exchange, outer_momentum=0.0)
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
        """As in ``self.mean = 0.9 * self.mean + 0.1 * batch.mean(0)``, with a graph behind it."""

        def replica(exchange, in_place):
            model, inner, outer = net_loop(exchange, sync_every=2, fragments=fragments)
            seen = []
            with outer:
                for step in range(5):
                    new = model.body.bias * 0 + step + exchange.rank
                    fresh = 0.9 * model.mean.detach() + 0.1 * new
                    if in_place:
                        model.mean.copy_(fresh.detach())
                        model.count.add_(1 + exchange.rank)
                    else:
                        model.mean = fresh
                        model.count = model.count + 1 + exchange.rank
                    lab.push(model, inner, exchange.rank, step)
                    seen.append(model.mean.detach().clone())
            return {**lab.values(model), "mean": model.mean.detach(), "seen": torch.stack(seen)}

        anew = lab.run(lambda exchange: replica(exchange, False), in_process(2))
        in_place = lab.run(lambda exchange: replica(exchange, True), in_process(2))
        for here, there in zip(anew, in_place, strict=True):
            assert lab.identical([here, there])
        assert torch.equal(anew[0]["mean"], anew[1]["mean"])
        assert anew[0]["count"].item() == anew[1]["count"].item() == 5

    def test_a_buffer_of_two_names_has_to_stay_one(self, lab):
        model = lab.fill(Net())
        model.head.register_buffer("mean", model.mean)
        model, inner, outer = net_loop(model=model)

        def both(model):
            model.mean = model.head.mean = torch.ones(3)

        one = lambda model: setattr(model, "mean", torch.ones(3))  # noqa: E731
        text = r"buffers 'mean' and 'head\.mean' were one tensor"
        with pytest.raises(ModelChangedError, match=text):
            live(model, inner, outer, 0, both, 1, one, 2)
        assert outer.committed == 2

    def test_what_is_not_synced_may_be_assigned_anew(self):
        def assign(model):
            model.mean, model.cache, model.count = torch.zeros(7), torch.zeros(9).double(), None
            model.register_buffer("late", torch.ones(1))

        def assign_what_is_not_saved(model):
            model.cache = None
            model.register_buffer("rope", torch.ones(3), persistent=False)

        assert live(*net_loop(buffers="none"), assign, 0).committed == 1
        assert live(*net_loop(), assign_what_is_not_saved, 0).committed == 1

    def test_moving_and_loading_values_without_replacing_parameters(self, lab):
        """As model.to(device) does: new memory, the same tensors."""

        def move(model):
            for parameter in model.parameters():
                parameter.data = parameter.data.clone()
            for module in model.modules():
                for name, buffer in module.named_buffers(recurse=False):
                    setattr(module, name, buffer.clone())
            inner.load_state_dict(inner.state_dict())

        model, inner, outer = net_loop()
        model.load_state_dict(lab.values(lab.fill(Net(), seed=3)))
        assert live(model, inner, outer, 0, move, 1).committed == 2


class TestTheStart:
    def refused(self, lab, message, model, optimizer=None):
        with pytest.raises(ConfigurationError, match=message):
            net_loop(model=model, inner=optimizer)

    @pytest.mark.parametrize(
        ("change", "text"),
        [
            (lambda m: weight_of(m.head, m.body.weight.data[:2]),
             "'body.weight' and 'head.weight' share memory without being the same tensor"),
            (lambda m: setattr(m.head, "bias", nn.Parameter(m.base.bias.data[1:])),
             "'base.bias' and 'head.bias' share memory"),
            (lambda m: setattr(m, "mean", m.body.bias.data),
             "'body.bias' and 'mean' share memory"),
            (lambda m: setattr(m.body, "bias", nn.Parameter(torch.ones(1).expand(3))),
             "elements of 'body.bias' .* share memory with each other"),
        ],
    )  # fmt: skip
    def test_tied_by_memory_and_not_by_identity(self, lab, change, text):
        model = Net()
        change(model)
        self.refused(lab, text, model)
        if "'mean'" in text:
            assert net_loop(model=model, buffers="none")

    def test_an_optimizer_of_something_else(self, lab):
        model, other = Net(), Net()
        sgd, adam = torch.optim.SGD, torch.optim.Adam
        extra = [{"params": model.parameters()}, {"params": [nn.Parameter(torch.ones(4, 5))]}]
        for optimizer, text in [
            (sgd(extra), r"optimizer 0 \(SGD\) holds .* number 0 of its group 1, float32\[4, 5\]"),
            (adam(other.parameters()), "holds a tensor that is not a parameter of the model"),
            (
                [sgd(model.parameters()), adam(other.head.parameters())],
                r"inner optimizer 1 \(Adam\) holds .* number 0 of its group 0, float32\[2, 3\]",
            ),
        ]:
            self.refused(lab, text, model, optimizer)

    def test_a_parameter_that_nobody_trains(self, lab):
        model = Net()
        body = torch.optim.SGD(model.body.parameters(), lr=1.0)
        text = "'head.weight' .* is trainable, but no inner optimizer holds it"
        self.refused(lab, text, model, body)
        head = torch.optim.SGD(model.head.parameters())
        assert net_loop(model=model, inner=[body, head])
        # Frozen ones in an optimizer are fine.
        assert net_loop(model=model, inner=torch.optim.SGD(model.parameters()))

    def test_a_parameter_without_a_shape(self, lab):
        model = nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(3))
        text = "'1.weight' does not have a shape yet: run a batch through the model"
        self.refused(lab, text, model)


@pytest.mark.parametrize("policy", ["mean", "rank0", "none"])
def test_the_first_buffer_of_a_model_is_refused_too(lab, policy):
    def register(name, **options):
        return lambda model: model.register_buffer(name, torch.zeros(2), **options)

    steps = [0, register("cache", persistent=False), 1, register("late"), 2]
    parts = net_loop(model=lab.fill(nn.Linear(3, 2)), buffers=policy)
    if policy == "none":
        live(*parts, *steps)
        return
    with pytest.raises(ModelChangedError, match=r"buffer 'late'.*was not in the model") as caught:
        live(*parts, *steps)
    assert caught.value.tensor == "late"
