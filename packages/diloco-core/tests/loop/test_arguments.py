"""Arguments that are not allowed are refused before anything starts, with what was given and what
is allowed.
"""

import re

import numpy as np
import pytest
import torch
from torch import nn

from diloco_core import ConfigurationError, DiLoCo, MismatchError, in_process
from diloco_core._model._partition import Buffers, split
from diloco_core.testing import run_replicas


class Untouched:
    """An exchange that nobody may use yet."""

    rank, world_size = 0, 2

    def refuse(self, *_):
        raise AssertionError("the exchange was used before the arguments were checked")

    join = begin = shards = leave = abort = refuse


def make(model=None, **options):
    model = model or nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    parameters = list(model.parameters()) if isinstance(model, nn.Module) else []
    inner = torch.optim.SGD(parameters or [nn.Parameter(torch.ones(1))])
    arguments = {
        "model": model,
        "inner_optimizer": inner,
        "exchange": Untouched(),
        "sync_every": 6,
        **options,
    }
    return DiLoCo(**arguments)


@pytest.mark.parametrize("sync_every", [5, 7])
def test_sync_every_is_a_multiple_of_the_fragments(sync_every):
    message = (
        rf"sync_every is {sync_every}, but it must be a multiple of the number of fragments, "
        "which is 3"
    )
    with pytest.raises(ConfigurationError, match=message):
        make(sync_every=sync_every, fragments=3)


WRONG = [
    (
        "sync_every",
        [0, -3, 2.0, "6", None, True, [6]],
        (
            "sync_every must be a whole number of inner steps, at least 1, not {!r}. In an elastic "
            "run it may also be a time"
        ),
    ),
    (
        "save_inner_every",
        [-1, 1.0, True, "10", None],
        "save_inner_every must be a whole number of at least 0, not {!r}",
    ),
    (
        "fragments",
        [0, -1, True, 2.0, None],
        "fragments must be a whole number of at least 1, not {!r}",
    ),
    (
        "fragments",
        ["2", "striding", "", {"0": 1}, {1}, nn.Linear(2, 2)],
        "fragments must be a number, 'strided', 'sequential', one of these words with a number "
        "such as ('strided', 4), or a list of modules",
    ),
    (
        "fragments",
        [("striding", 4), ["", 4]],
        "the pattern in fragments must be one of 'strided', 'sequential', not",
    ),
    (
        "fragments",
        [("strided", 0), ("strided", "4"), ("sequential", None), ["strided", 2.0]],
        "the number of fragments must be a whole number of at least 1, not",
    ),
    (
        "outer_lr",
        ["0.7", True, [0.7], float("nan"), float("inf")],
        "outer_lr must be a finite number, not {!r}",
    ),
    ("outer_lr", [0.0, -0.1], "outer_lr must be positive, not {!r}"),
    (
        "outer_momentum",
        ["0.9", True, float("nan")],
        "outer_momentum must be a finite number, not {!r}",
    ),
    ("outer_momentum", [-0.1, 1.0], "outer_momentum must be at least 0 and less than 1, not {!r}"),
    ("nesterov", [1, "yes", 0.5], "nesterov must be True or False, not {!r}"),
    ("init", ["random", 0, ["check"]], "init must be one of 'rank0', 'check', not {!r}"),
    ("buffers", ["sum", 1, ["mean"]], "buffers must be one of 'mean', 'rank0', 'none', not {!r}"),
    ("model", [[nn.Linear(2, 2)], "model", nn.Linear], "model must be a torch.nn.Module, not a "),
    (
        "exchange",
        ["s3://user:secret@host/run", Untouched, object()],
        "exchange must be an object that connect() or in_process() returned, ",
    ),
    ("on_sync", [[], "print", 3], "on_sync must be a function that takes a report, not a"),
    ("stateful", [[1], "loader", object()], "stateful must be a mapping from names"),
    ("stateful", [{1: 2}], "the names in stateful must be text, not 1"),
    (
        "outer_optimizer",
        ["sgd", torch.optim.SGD([nn.Parameter(torch.ones(1))])],
        "outer_optimizer must be a function that",
    ),
]


@pytest.mark.parametrize(
    ("name", "value", "message"), [(n, value, m) for n, values, m in WRONG for value in values]
)
def test_arguments_of_the_wrong_kind(name, value, message):
    with pytest.raises(ConfigurationError) as caught:
        make(**{name: value})
    assert str(caught.value).startswith(message.format(value))
    assert "secret" not in str(caught.value)


class OnlySync(Untouched):
    """As an exchange was written before a sync had two halves."""

    begin = None

    def sync(self, job, *, last=False):
        raise AssertionError


@pytest.mark.parametrize(
    ("exchange", "told"),
    [
        (
            OnlySync(),
            "this OnlySync lacks begin. An exchange of your own implements begin(), which ",
        ),
        (Untouched, "Untouched is a class"),
        (object(), "this object is neither"),
    ],
)
def test_what_an_exchange_lacks_is_said(exchange, told):
    with pytest.raises(ConfigurationError, match=rf"; {re.escape(told)}"):
        make(exchange=exchange)


@pytest.mark.parametrize("name", ["rank", "world_size"])
@pytest.mark.parametrize("value", [-1, 2.0, None, True, "1"])
def test_an_exchange_with_impossible_numbers(name, value):
    exchange = Untouched()
    setattr(exchange, name, value)
    with pytest.raises(ConfigurationError, match=f"exchange.{name} must be"):
        make(exchange=exchange)


def test_numbers_of_numpy_are_numbers(lab):
    model = lab.fill(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    options = {"sync_every": np.int64(4), "fragments": np.int32(2), "outer_lr": np.float32(0.5)}
    outer = DiLoCo(
        model,
        inner,
        in_process(1)[0],
        **options,
        outer_momentum=torch.tensor(0.5),
        save_inner_every=np.uint8(0),
    )
    assert type(outer.sync_every) is int
    with outer:
        for step in range(4):
            lab.push(model, inner, 0, step)
        assert outer.committed == 2


@pytest.mark.parametrize(
    "setting", [{"outer_lr": 0.7}, {"outer_momentum": 0.9}, {"nesterov": True}]
)
def test_settings_of_sgd_beside_another_optimizer_contradict_it(setting):
    ((name, value),) = setting.items()
    with pytest.raises(
        ConfigurationError, match=f"^{name}={value} cannot be given together with outer_optimizer"
    ):
        make(outer_optimizer=lambda p: torch.optim.Adam(p, lr=0.1), **setting)


def test_nesterov_without_momentum_is_refused():
    with pytest.raises(
        ConfigurationError, match="nesterov=True has no effect with outer_momentum=0"
    ):
        make(outer_momentum=0.0, nesterov=True)
    model = nn.Linear(2, 2)
    group = {"params": model, "momentum": 0.0, "nesterov": True}
    with pytest.raises(ConfigurationError, match=r"outer_groups\[0\]: .* with momentum=0: leave"):
        make(model, outer_groups=[group])
    assert make(outer_momentum=0.0, exchange=in_process(1)[0])


def test_settings_are_not_changed_afterwards(lab):
    model = lab.fill(nn.Linear(2, 2))
    outer = DiLoCo(model, torch.optim.SGD(model.parameters()), in_process(1)[0], sync_every=4)
    with pytest.raises(AttributeError, match="sync_every"):
        outer.sync_every = 8


@pytest.mark.parametrize("model", [nn.Linear(2, 2).requires_grad_(False), nn.ReLU()])
def test_a_model_without_trainable_parameters_is_refused(model):
    with pytest.raises(ConfigurationError, match="no trainable parameter"):
        make(model)


def test_fragments_by_number():
    with pytest.raises(
        ConfigurationError, match="4 trainable tensors, which is too few for 6 fragments"
    ):
        make(fragments=6)


def test_fragments_by_module():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(ConfigurationError, match=r"in no fragment: '1.weight', '1.bias'"):
        make(model, fragments=[model[0]])
    with pytest.raises(
        ConfigurationError, match=r"fragment 1 \(Linear\) is not a module of the model"
    ):
        make(model, fragments=[model[0], nn.Linear(2, 2)])
    with pytest.raises(
        ConfigurationError, match=r"fragment 0 \(str\) is not a module of the model"
    ):
        make(model, fragments=["0"])
    with pytest.raises(
        ConfigurationError,
        match=r"fragment 1 \(Linear\) holds no trainable parameter that is not in",
    ):
        make(model, fragments=[model, model[0]])
    with pytest.raises(ConfigurationError, match="at least one module"):
        make(model, fragments=[])
    with pytest.raises(
        ConfigurationError, match="holds a Linear twice, in fragment 0 and in fragment 1"
    ):
        make(model, fragments=[model[0], [model[0], model[1]]])


def test_a_module_and_one_that_contains_it_are_not_both_given():
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Linear(2, 2))
    with pytest.raises(
        ConfigurationError,
        match="'0' is in fragment 0, and again in fragment 1 as a part of 'the model'",
    ):
        make(model, fragments=[model[0], model])
    with pytest.raises(
        ConfigurationError,
        match=r"'0\.1' is in fragment 1, and again in fragment 1 as a part of '0'",
    ):
        make(model, fragments=[model[1], [model[0][1], model[0]]])


def test_a_module_that_is_tied_is_in_the_first_fragment_that_holds_it():
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    model[1].append(model[0])
    parts = split(model, [model[0], model[1]], Buffers.NONE)
    assert [[tensor.name for tensor in part] for part in parts] == [
        ["0.weight", "0.bias"],
        ["1.0.weight", "1.0.bias"],
    ]


def test_tensors_that_cannot_be_synced():
    with pytest.raises(
        ConfigurationError,
        match=r"'weight' has dtype torch.complex64, but only bfloat16, .* can be synced",
    ):
        make(nn.Linear(2, 2, dtype=torch.complex64))
    with pytest.raises(ConfigurationError, match="'weight' is on the meta device"):
        make(nn.Linear(2, 2, device="meta"))
    sparse = nn.Module()
    sparse.weight = nn.Parameter(torch.eye(3).to_sparse())
    with pytest.raises(ConfigurationError, match=r"'weight' is a .* with layout torch.sparse_coo"):
        make(sparse)


def test_it_is_a_value_error_too():
    """For callers that know nothing of our errors."""
    with pytest.raises(ValueError, match="sync_every"):
        make(sync_every=0)


def test_differing_initial_values_are_refused_on_demand(lab):
    """init="check": the replicas were to start from the same values, and do not."""

    def replica(exchange):
        model = lab.fill(nn.Linear(2, 2))
        if exchange.rank == 1:
            model.bias.data[1] += 1e-7
        with DiLoCo(
            model, torch.optim.SGD(model.parameters()), exchange, sync_every=1, init="check"
        ):
            pass

    results = run_replicas(replica, in_process(2))
    assert all(isinstance(result, MismatchError) for result in results)
    assert "differ in tensor 'bias'" in str(results[0])
    assert "load the same checkpoint" in str(results[0])
    assert "init='rank0'" in str(results[0])
    assert lab.train(lambda rank: lab.fill(nn.Linear(2, 2)), in_process(2), init="check")


@pytest.mark.parametrize(
    "wanted",
    [
        "an Adam",
        "an SGD",
        "an LBFGS",
        "an object",
        "a dict",
        "a UserDict",
        "an int",
        "a Linear",
        "a DDP",
    ],
)
def test_classes_have_the_right_article(wanted):
    from diloco_core._checks import kind_of

    assert kind_of(type(wanted.split()[1], (), {})()) == wanted


def test_a_module_does_not_contain_another_whose_name_begins_like_its_own():
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(11)))
    parts = split(model, [list(model[:10]), model[10]], Buffers.NONE)
    assert [tensor.name for tensor in parts[1]] == ["10.weight", "10.bias"]
