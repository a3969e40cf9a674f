"""Which optimizers may take the outer steps: they are tried out, whatever their class."""

import re

import pytest
import torch
from torch import nn

from diloco_core import ConfigurationError, DiLoCo, Elastic, StoreExchange, in_process
from diloco_core._outer._groups import try_out
from diloco_core._outer._optimizer import OuterOptimizer
from diloco_core._store._open import open_store
from diloco_core._terms._terms import OuterGroup


class Changed(torch.optim.SGD):
    """SGD whose gradients are changed before each step: by default not at all."""

    def change(self, parameter):
        pass

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                self.change(parameter)
        return super().step(closure)


class Clipped(Changed):
    """A limit on the norm of a whole tensor."""

    def change(self, parameter):
        nn.utils.clip_grad_norm_([parameter], 1.0)


class ClippedHigh(Changed):
    """The same, where it seldom matters."""

    def change(self, parameter):
        nn.utils.clip_grad_norm_([parameter], 1e5)


class TrustRatio(Changed):
    """As in LARS."""

    def change(self, parameter):
        parameter.grad.mul_(parameter.norm() / (parameter.grad.norm() + 1e-9))


class Centred(Changed):
    def change(self, parameter):
        parameter.grad.sub_(parameter.grad.mean())


class Neighbours(Changed):
    """The last element of a piece depends on the first one of the next."""

    def change(self, parameter):
        parameter.grad[:-1].add_(parameter.grad[1:].clone())


class CountsItsCalls(Changed):
    """A learning rate that falls with every call, and so as often as there are pieces."""

    def change(self, parameter):
        self.param_groups[0]["lr"] *= 0.9


class Noisy(Changed):
    def change(self, parameter):
        parameter.grad.add_(torch.randn(parameter.shape))


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
    """An optimizer that torch does not know: it steps by the sign of an average, and counts its
    steps in a Python number.
    """

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


NOT_ELEMENTWISE = [Clipped, ClippedHigh, TrustRatio, Centred, Neighbours, CountsItsCalls, Noisy]


@pytest.mark.parametrize("kind", NOT_ELEMENTWISE)
def test_what_is_not_elementwise_is_refused_though_its_class_is_sgds(kind):
    with pytest.raises(
        ConfigurationError, match=f"the outer optimizer {kind.__name__} is not element-wise"
    ):
        try_out(lambda parameters: kind(parameters, lr=0.1))


@pytest.mark.parametrize(
    "kind",
    [
        torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.Adam, torch.optim.Adamax,
        torch.optim.AdamW, torch.optim.ASGD, torch.optim.NAdam, torch.optim.RAdam,
        torch.optim.RMSprop, torch.optim.Rprop, torch.optim.SGD, Changed, Lion,
        FilledByConstructor,
    ],
)  # fmt: skip
def test_what_is_elementwise_is_taken_whatever_its_class(kind):
    try_out(lambda parameters: kind(parameters, lr=0.1))


def test_what_its_steps_depend_on_is_in_its_state():
    with pytest.raises(
        ConfigurationError,
        match="Forgetful gives other values after its state was saved and loaded",
    ):
        try_out(Forgetful)


@pytest.mark.parametrize(
    ("kept", "said"),
    [
        (lambda p: torch.zeros(2), r"'kept', a tensor of shape \[2\] and dtype torch.float32"),
        (
            lambda p: torch.zeros(p.numel(), dtype=torch.bfloat16),
            "'kept', a tensor of shape .* and dtype torch.bfloat16",
        ),
        (lambda p: torch.zeros(p.numel(), 2), "'kept', a tensor of shape"),
        (lambda p: "text", "'kept', a str"),
        (lambda p: [p.clone()], "'kept', a list"),
    ],
    ids=["another size", "another dtype", "two dimensions", "text", "a list"],
)
def test_a_state_that_cannot_be_published(kept, said):
    with pytest.raises(ConfigurationError, match=said):
        try_out(lambda parameters: Keeps(parameters, kept))


@pytest.mark.parametrize(
    "kept",
    [lambda p: None, lambda p: 3, lambda p: torch.tensor(0.5), torch.ones_like],
    ids=["nothing", "a number", "a tensor of no dimensions", "a tensor"],
)
def test_a_state_that_can_be_published(kept):
    try_out(lambda parameters: Keeps(parameters, kept))


SURPRISES = {
    "needs a closure": (
        torch.optim.LBFGS,
        "LBFGS cannot take a step on a dense one-dimensional tensor",
    ),
    "needs sparse gradients": (torch.optim.SparseAdam, "SparseAdam cannot take a step on a dense"),
    "needs matrices": (
        lambda p: torch.optim.SGD([{"params": [p[0].view(-1, 1)]}], lr=1.0),
        (
            "could not make an optimizer for a list of flat parameters.*ValueError: can't optimize "
            "a non-leaf"
        ),
    ),
    "raises": (
        lambda p: 1 / 0,
        "could not make an optimizer for a list of flat parameters.*ZeroDivisionError",
    ),
    "takes no parameters": (
        lambda: None,
        "could not make an optimizer for a list of flat parameters.*TypeError",
    ),
    "makes none": (lambda p: None, "must return a torch.optim.Optimizer, not a NoneType"),
    "of other parameters": (
        lambda p: torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0),
        "does not hold the parameters that were passed to outer_optimizer",
    ),
    "lr 0": (
        lambda p: torch.optim.Adam(p, lr=0.0),
        "outer learning rate must be positive, not 0.0",
    ),
    "lr NaN": (
        lambda p: Keeps(p, lambda p: None, lr=float("nan")),
        "outer learning rate must be a finite number",
    ),
    "climbs": (lambda p: torch.optim.SGD(p, lr=1.0, maximize=True), "has maximize=True"),
    "two groups": (
        lambda p: torch.optim.SGD(
            [{"params": p}, {"params": [nn.Parameter(torch.ones(1))]}], lr=0.1
        ),
        "must have one parameter group",
    ),
}


@pytest.mark.parametrize("surprise", SURPRISES)
def test_surprises_have_names(lab, surprise):
    model = lab.fill(nn.Linear(2, 2))
    factory, message = SURPRISES[surprise]
    with pytest.raises(ConfigurationError, match=message):
        DiLoCo(
            model,
            torch.optim.SGD(model.parameters()),
            in_process(1)[0],
            sync_every=1,
            outer_optimizer=factory,
        )


@pytest.mark.parametrize("topology", ["sharded", "gather"])
def test_it_is_tried_in_every_topology(lab, tmp_path, topology):
    """In gather too: everybody updates everything, but in chunks."""
    exchange = StoreExchange(open_store(str(tmp_path)), 0, 1, Elastic(1, topology=topology))
    model = lab.fill(nn.Linear(2, 2))
    with pytest.raises(ConfigurationError, match="Clipped is not element-wise"):
        DiLoCo(
            model,
            torch.optim.SGD(model.parameters()),
            exchange,
            sync_every=1,
            outer_optimizer=lambda p: Clipped(p, lr=0.1),
        )


def test_an_unknown_one_trains(lab):
    runs = lab.train(
        lambda rank: lab.fill(nn.Linear(5, 7)), in_process(3, chunk_bytes=64), outer_optimizer=Lion
    )
    whole = lab.train(lambda rank: lab.fill(nn.Linear(5, 7)), in_process(3), outer_optimizer=Lion)
    assert lab.identical([*runs, *whole])


def test_trying_leaves_the_random_numbers_of_the_training_alone():
    torch.manual_seed(3)
    wanted = torch.rand(4)
    torch.manual_seed(3)
    with pytest.raises(ConfigurationError):
        try_out(lambda parameters: Noisy(parameters, lr=0.1))
    assert torch.equal(torch.rand(4), wanted)


def test_functions_in_the_settings_are_compared_by_name():
    """The text of a function is another one in every process."""

    def optimizer(parameters):
        made = torch.optim.SGD(parameters, lr=0.1)
        made.param_groups[0]["hook"] = len
        return made

    settings = OuterOptimizer([OuterGroup(optimizer)]).settings
    assert settings["outer_hook"] == "len"
    assert not re.search("0x[0-9a-f]{6}", str(settings))
