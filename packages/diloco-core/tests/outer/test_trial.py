"""Test which optimizers may take the outer steps: they are tried out, whatever their class."""

import re

import pytest
import torch
from loop_lab import exchanges, live, loop
from torch import nn

from diloco_core import ConfigurationError, in_process


def changed(change):
    """SGD whose parameters' gradients, or whose group, are changed before each step."""

    class Changed(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for parameter in group["params"]:
                    change(parameter, group)
            return super().step(closure)

    return lambda parameters: Changed(parameters, lr=0.1)


def clipped(limit):
    """A limit on the norm of a whole tensor."""
    return changed(lambda parameter, group: nn.utils.clip_grad_norm_([parameter], limit))


def noisy(parameter, group):
    parameter.grad.add_(torch.randn(parameter.shape))


def depends_on_the_next(parameter, group):
    """The last element of a piece depends on the first one of the next."""
    parameter.grad[:-1].add_(parameter.grad[1:].clone())


NOT_ELEMENTWISE = {
    "clipped": clipped(1.0),
    "clipped where it seldom matters": clipped(1e5),
    "a trust ratio": changed(lambda p, _: p.grad.mul_(p.norm() / (p.grad.norm() + 1e-9))),
    "centred": changed(lambda p, _: p.grad.sub_(p.grad.mean())),
    "neighbours": changed(depends_on_the_next),
    # A learning rate that falls with every call, and so as often as there are pieces.
    "counts its calls": changed(lambda _, group: group.update(lr=0.9 * group["lr"])),
    "noisy": changed(noisy),
}


class Forgetful(torch.optim.Optimizer):
    """Its momentum is where nobody looks for it when the state is saved."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})
        self.momentum = {}

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            buffer = self.momentum.setdefault(id(parameter), torch.zeros_like(parameter))
            parameter.sub_(buffer.mul_(0.9).add_(parameter.grad), alpha=0.1)


class Keeps(torch.optim.Optimizer):
    """Plain steps, and something in the state."""

    def __init__(self, parameters, kept, lr=0.1):
        super().__init__(parameters, {"lr": lr})
        self.kept = kept

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(parameter.grad, alpha=0.1)
            self.state[parameter]["kept"] = self.kept(parameter)


class Lion(torch.optim.Optimizer):
    """An optimizer that torch does not know, which counts its steps in a Python number."""

    def __init__(self, parameters, lr=0.1):
        super().__init__(parameters, {"lr": lr, "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["step"], state["average"] = 0, torch.zeros_like(parameter)
                state["step"] += 1
                first, second = group["betas"]
                direction = state["average"] * first + parameter.grad * (1 - first)
                parameter.sub_(direction.sign() / state["step"] ** 0.5, alpha=group["lr"])
                state["average"].lerp_(parameter.grad, 1 - second)


class FilledByConstructor(torch.optim.Optimizer):
    """Like Adagrad of torch 2.11: the constructor makes the state, and a step relies on it."""

    def __init__(self, parameters, lr=0.1):
        super().__init__(parameters, {"lr": lr})
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter].update(
                step=torch.tensor(0.0), sum=torch.full_like(parameter, 0.25)
            )

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["step"] += 1
                state["sum"].addcmul_(parameter.grad, parameter.grad)
                parameter.addcdiv_(parameter.grad, state["sum"].sqrt(), value=-group["lr"])


def refused(message, factory, exchange=None):
    with pytest.raises(ConfigurationError, match=message):
        loop(exchange, outer_optimizer=factory)


@pytest.mark.parametrize("name", NOT_ELEMENTWISE)
def test_what_is_not_elementwise_is_refused_though_its_class_is_sgds(name):
    refused("optimizer Changed is not element-wise", NOT_ELEMENTWISE[name])


@pytest.mark.sampled
@pytest.mark.parametrize("make", [changed(lambda *_: None), Lion, FilledByConstructor])
def test_an_unknown_one_that_is_elementwise_trains(lab, make):
    model = lambda rank: lab.fill(nn.Linear(5, 7))  # noqa: E731
    runs = lab.train(model, in_process(3, chunk_bytes=64), outer_optimizer=make)
    assert lab.identical([*runs, *lab.train(model, in_process(3), outer_optimizer=make)])


@pytest.mark.parametrize(
    ("kept", "text"),
    [
        (lambda p: torch.zeros(2), r"a tensor of shape \[2\] and dtype torch.float32"),
        (lambda p: p.bfloat16(), "a tensor of shape .* and dtype torch.bfloat16"),
        (lambda p: torch.zeros(p.numel(), 2), "a tensor of shape"),
        (lambda p: "text", "a str"),
        (lambda p: [p.clone()], "a list"),
    ],
    ids=["another size", "another dtype", "two dimensions", "text", "a list"],
)
def test_a_state_that_cannot_be_published(kept, text):
    refused(f"'kept', {text}", lambda given: Keeps(given, kept))


def test_a_state_that_can_be_published():
    for kept in (lambda p: None, lambda p: 3, lambda p: torch.tensor(0.5), torch.ones_like):
        assert loop(outer_optimizer=lambda given, kept=kept: Keeps(given, kept))


def sgd_of(*groups, **options):
    return lambda given: torch.optim.SGD(
        [{"params": group(given)} for group in groups], **{"lr": 1.0, **options}
    )


OTHER = lambda given: [nn.Parameter(torch.ones(1))]  # noqa: E731
MAKES = "could not make an optimizer for a list of flat parameters.*"
SURPRISES = {
    "hides its momentum": (Forgetful, "gives other values after its state was saved and loaded"),
    "needs a closure": (torch.optim.LBFGS, "cannot take a step on a dense one-dimensional tensor"),
    "needs sparse gradients": (torch.optim.SparseAdam, "SparseAdam cannot take a step on a dense"),
    "needs matrices": (sgd_of(lambda p: [p[0].view(-1, 1)]), f"{MAKES}ValueError: can't optimize"),
    "raises": (lambda p: 1 / 0, f"{MAKES}ZeroDivisionError"),
    "takes no parameters": (lambda: None, f"{MAKES}TypeError"),
    "makes none": (lambda p: None, "must return a torch.optim.Optimizer, not a NoneType"),
    "of other parameters": (
        sgd_of(OTHER),
        "does not hold the parameters that were passed to outer",
    ),
    "lr 0": (sgd_of(list, lr=0.0), "learning rate must be positive, not 0.0"),
    "lr NaN": (lambda p: Keeps(p, lambda p: None, lr=float("nan")), "must be a finite number"),
    "climbs": (sgd_of(list, maximize=True), "has maximize=True"),
    "two groups": (sgd_of(list, OTHER), "must have one parameter group"),
}


@pytest.mark.parametrize("surprise", SURPRISES)
def test_surprises_have_names(surprise):
    factory, message = SURPRISES[surprise]
    refused(message, factory)


@pytest.mark.parametrize("kind", ["sharded", "gather"])
def test_it_is_tried_in_every_topology(kind):
    """In gather too: everybody updates everything, but in chunks."""
    refused("is not element-wise", clipped(1.0), *exchanges(kind, 1))


@pytest.mark.parametrize(("change", "fits"), [(noisy, False), (lambda *_: torch.rand(3), True)])
def test_trying_leaves_the_random_numbers_of_the_training_alone(change, fits):
    model = nn.Linear(2, 2)
    before = torch.get_rng_state()
    if fits:
        with loop(*exchanges("store", 1), model, outer_optimizer=changed(change))[2]:
            assert torch.equal(torch.get_rng_state(), before)
    else:
        with pytest.raises(ConfigurationError):
            loop(None, model, outer_optimizer=changed(change))
        assert torch.equal(torch.get_rng_state(), before)


def settings_of(factory):
    with loop(outer_optimizer=factory)[2] as outer:
        return outer.state_dict()["settings"]


def test_functions_in_the_settings_are_compared_by_name():
    """The text of a function is another one in every process."""

    def optimizer(parameters):
        made = torch.optim.SGD(parameters, lr=0.1)
        made.param_groups[0]["hook"] = len
        return made

    settings = settings_of(optimizer)
    assert settings["outer_hook"] == "len"
    assert not re.search("0x[0-9a-f]{6}", str(settings))


def test_tensors_in_the_settings_are_compared_with_all_their_digits():
    settings = lambda lr: settings_of(  # noqa: E731
        lambda given: torch.optim.SGD(given, lr=torch.tensor(lr), momentum=0.9)
    )
    assert settings(0.70001) == settings(0.70001)
    assert settings(0.70001) != settings(0.70004)
    assert settings(0.5)["outer_lr"] == "0.5"


@pytest.mark.parametrize(
    ("name", "value"), [("lr", 0.01), ("momentum", 0.5), ("weight_decay", 0.1), ("nesterov", True)]
)
def test_settings_that_change_are_refused_at_the_next_sync(name, value):
    made = []

    def keeps(given):
        made.append(torch.optim.SGD(given, lr=0.7, momentum=0.9))
        return made[-1]

    def change(model):
        for optimizer in made:
            optimizer.param_groups[0][name] = value

    model, inner, outer, _ = loop(fragments=2, outer_optimizer=keeps)
    text = rf"outer_{name} is {value} for fragment \d, but .* in the run"
    with pytest.raises(ConfigurationError, match=text):
        live(model, inner, outer, 0, change, 1)


def test_settings_that_differ_between_fragments_are_refused():
    made = []

    def rate(last=None):
        def factory(given):
            made.append(given)
            return torch.optim.SGD(given, lr=0.1 if len(made) == last else 0.7, momentum=0.9)

        return factory

    # The trial makes some too; the last one is that of the last fragment.
    loop(fragments=2, outer_optimizer=rate())
    last = len(made)
    made.clear()
    with pytest.raises(ConfigurationError, match=r"outer_lr is 0\.1 for fragment 1, but 0\.7 in"):
        loop(fragments=2, outer_optimizer=rate(last))
