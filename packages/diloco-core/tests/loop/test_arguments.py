"""Arguments that are not allowed are refused before anything starts, with what is allowed."""

import re

import numpy as np
import pytest
import torch
from loop_lab import exchanges, loop
from torch import nn

from diloco_core import ConfigurationError, DiLoCo, MismatchError, Seconds, in_process
from diloco_core.testing import run_replicas


class Untouched:
    """An exchange that nobody may use yet."""

    rank, world_size = 0, 2

    def refuse(self, *_):
        raise AssertionError("the exchange was used before the arguments were checked")

    join = begin = shards = leave = abort = refuse


def refused(message, model=None, **options):
    options = {"exchange": Untouched(), "sync_every": 6, **options}
    with pytest.raises(ConfigurationError) as caught:
        loop(model=model, **options)
    assert re.search(message, str(caught.value)), str(caught.value)
    assert "secret" not in str(caught.value)


WHOLE = r"must be a whole number of at least {}, not "
ADAM = {"outer_optimizer": lambda given: torch.optim.Adam(given, lr=0.1)}
INT8 = {"codec": "int8"}
TRIMMED = {"aggregate": "trimmed"}
WRONG = [
    ("sync_every", [0, -3, 2.0, "6", None, True, [6]], "must be a whole number of inner steps"),
    ("save_inner_every", [-1, 1.0, True, "10", None], WHOLE.format(0)),
    ("fragments", [0, -1, True, 2.0, None], WHOLE.format(1)),
    ("fragments", ["2", "striding", "", {"0": 1}, {1}, nn.Linear(2, 2)], "or a list of modules"),
    ("fragments", [("striding", 4), ["", 4]], "must be one of 'strided', 'sequential', not"),
    ("fragments", [("strided", 0), ("strided", "4"), ["strided", 2.0]], WHOLE.format(1)),
    ("outer_lr", ["0.7", True, [0.7], float("nan"), float("inf"), 10**400], "a finite number, not"),
    ("outer_lr", [0.0, -0.1], "must be positive, not"),
    ("outer_momentum", ["0.9", True, float("nan")], "must be a finite number, not"),
    ("outer_momentum", [-0.1, 1.0], "must be at least 0 and less than 1, not"),
    ("nesterov", [1, "yes", 0.5], "must be True or False, not"),
    ("init", ["random", 0, ["check"]], "must be one of 'rank0', 'check', not"),
    ("buffers", ["sum", 1, ["mean"]], "must be one of 'mean', 'rank0', 'none', not"),
    ("on_sync", [[], "print", 3], "must be a function that takes a report, not a"),
    ("stateful", [[1], "loader", object()], "must be a mapping from names"),
    ("stateful", [{1: 2}], "the names in stateful must be text, not 1"),
    ("outer_optimizer", ["sgd", torch.optim.SGD([torch.ones(1)])], "must be a function that"),
    ("delay", [-1, 1.0, True, "1"], WHOLE.format(0)),
    ("alpha", [1.01, -0.1, float("nan"), "half", True], "must be a number from 0"),
    ("weight", ["token", 1, True], "must be one of 'equal', 'steps', 'tokens'"),
    ("aggregate", [None, "median", "krum"], "must be one of 'mean', 'trimmed'"),
    ("clip", ["mean", 1.0, True, "", ["median"]], "must be 'median'"),
    ("exchange", ["s3://user:secret@host/run"], "connect.. or in_process.. returned.*; this str"),
    ("exchange", [object()], "; this object is neither"),
    ("exchange", [Untouched], "; Untouched is a class"),
]


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("name", "value", "message"), [(n, value, m) for n, values, m in WRONG for value in values]
)
def test_a_value_of_the_wrong_kind(name, value, message):
    refused(message, **{name: value})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sync_every": 5, "fragments": 3}, "is 5, but it must be a multiple of .* which is 3"),
        ({"sync_every": 4, "fragments": 2, "delay": 2}, "delay is 2, but it must be less than 2"),
        ({"fragments": 6}, "4 trainable tensors, which is too few for 6 fragments"),
        ({**ADAM, "outer_lr": 0.7}, r"^outer_lr=0\.7 cannot be given together with outer_optimi"),
        ({**ADAM, "outer_momentum": 0.9}, r"^outer_momentum=0\.9 cannot be given together with"),
        ({**ADAM, "nesterov": True}, "^nesterov=True cannot be given together with outer_opt"),
        ({"outer_momentum": 0.0, "nesterov": True}, "True has no effect with outer_momentum=0"),
        ({"trim": 1}, "aggregate='mean' leaves nothing out"),
        ({**TRIMMED, "trim": 0}, "trim must be"),
        ({**TRIMMED, "trim": 0.1}, "trim must be"),
        ({**TRIMMED, "trim": 3}, "at least 7 replicas .* world_size is 5"),
        ({**TRIMMED, "weight": "steps"}, "cannot be used with weight='steps'"),
        ({**TRIMMED, "clip": "median"}, "cannot be used with aggregate='trimmed'"),
        ({"error_feedback": True}, "cannot be used with codec='plain', which loses"),
        *(({**INT8, "error_feedback": value}, r"error_feedback is .*True, False, or a number")
          for value in (0, 0.0, -0.5, 1.5, "yes", torch.nan, [1.0])),
    ],
)  # fmt: skip
def test_what_does_not_go_together(options, message):
    refused(message, **{"exchange": in_process(5)[0], **options})


def test_an_exchange_that_is_not_whole():
    class Half(Untouched):
        begin = None

    refused("; this Half lacks begin$", exchange=Half())
    for name in ("rank", "world_size"):
        for value in (-1, 2.0, None, True, "1"):
            exchange = Untouched()
            setattr(exchange, name, value)
            refused(f"exchange.{name} must be", exchange=exchange)


@pytest.mark.parametrize("kind", ["threads", "store", "manager"])
def test_a_time_where_all_take_the_same_number_of_steps(kind):
    (exchange,) = exchanges(kind, 1)
    name = type(exchange).__name__
    message = rf"sync_every=Seconds\(60\) cannot be used with {name}.*connect with min_replicas="
    refused(message, exchange=exchange, sync_every=Seconds(60))


@pytest.mark.parametrize(
    "options",
    [{"clip": "median"}, {"aggregate": "trimmed"}, {"weight": "steps"}],
    ids=lambda options: next(iter(options)),
)
def test_a_manager_takes_plain_means(options):
    ((name, value),) = options.items()
    exchange = exchanges("manager", 3)[0]
    refused(f"{name}='{value}' cannot be used with ManagerE", exchange=exchange, **options)


def test_numbers_of_numpy_are_numbers(lab):
    model, inner, outer, _ = loop(
        sync_every=np.int64(4),
        fragments=np.int32(2),
        outer_lr=np.float32(0.5),
        outer_momentum=torch.tensor(0.5),
        save_inner_every=np.uint8(0),
    )
    assert type(outer.sync_every) is int
    with outer:
        for step in range(4):
            lab.push(model, inner, 0, step)
        assert outer.committed == 2


def test_what_was_given_is_not_replaced_afterwards():
    outer = loop()[2]
    for name in ("sync_every", "exchange"):
        with pytest.raises(AttributeError):
            setattr(outer, name, None)


def test_models_that_cannot_be_synced():
    for model in ([nn.Linear(2, 2)], "model", nn.Linear):
        with pytest.raises(ConfigurationError, match=r"model must be a torch\.nn\.Module"):
            DiLoCo(model, torch.optim.SGD([torch.ones(1)]), Untouched(), sync_every=6)
    inner = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    for model in (nn.Linear(2, 2).requires_grad_(False), nn.ReLU()):
        refused("no trainable parameter", model, inner=inner)
    complex_one = nn.Linear(2, 2, dtype=torch.complex64)
    refused("'weight' has dtype torch.complex64, but only bfloat16, .* can be synced", complex_one)
    refused("'weight' is on the meta device", nn.Linear(2, 2, device="meta"))
    sparse = nn.Module()
    sparse.weight = nn.Parameter(torch.eye(3).to_sparse())
    refused(r"'weight' is a .* with layout torch.sparse_coo", sparse)


@pytest.mark.parametrize(
    ("fragments", "message"),
    [
        (lambda m: [m[0]], r"in no fragment: '1\.0\.weight', '1\.0\.bias', '1\.1\.weight', "),
        (lambda m: [m[0], nn.Linear(2, 2)], r"fragment 1 \(Linear\) is not a module of the model"),
        (lambda m: ["0"], r"fragment 0 \(str\) is not a module of the model"),
        (lambda m: [[m, nn.ReLU()]], r"fragment 0 \(ReLU\) is not a module of the model"),
        (lambda m: [[[m]]], r"fragment 0 \(list\) is not a module"),
        (lambda m: [m, m[0]], r"fragment 1 \(Linear\) holds no trainable parameter that is not in"),
        (lambda m: [m, []], r"fragment 1 \(an empty list\) holds no trainable parameter"),
        (lambda m: [m, [m[0], m[1]]], r"fragment 1 \(Linear, Sequential\) holds no trainable"),
        (lambda m: [], "at least one module"),
    ],
)
def test_fragments_that_are_not_the_model_once(fragments, message):
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    refused(message, model, fragments=fragments(model))


def test_it_is_a_value_error_too():
    """For callers that know nothing of our errors."""
    with pytest.raises(ValueError, match="sync_every"):
        loop(sync_every=0)


@pytest.mark.parametrize("kind", ["threads", "store"])
def test_differing_initial_values_are_refused_on_demand(lab, kind):
    def replica(exchange):
        model, _, outer, _ = loop(exchange, init="check")
        if exchange.rank == 1:
            model[1].bias.data[1] += 1e-7
        with outer:
            pass

    results = run_replicas(replica, exchanges(kind, 2))
    assert lab.kinds(results) == [MismatchError] * 2
    text = "(?s)differ in tensor '1.bias'.*load the same checkpoint.*init='rank0'"
    assert re.search(text, str(results[0]))
    assert lab.train(lambda rank: lab.fill(nn.Linear(2, 2)), exchanges(kind, 2), init="check")


DIFFERENT = {
    "sync_every": [2, 4],
    "clip": [None, "median"],
    "aggregate": ["mean", "trimmed", "trimmed"],
    "weight": ["steps", "tokens"],
    "delay": [0, 1],
    "alpha": [0.0, 0.5],
    "flush": ["none", "partial"],
    "error_feedback": [0.5, True],
    "outer_lr": [0.5, lambda sync: 0.5],
    "codec": ["plain", "bf16"],
    "state_codec": ["plain", "int8"],
}


@pytest.mark.sampled
@pytest.mark.parametrize("kind", ["threads", "store"])
@pytest.mark.parametrize("name", DIFFERENT)
def test_replicas_that_differ_refuse_each_other(kind, name):
    beside = INT8 if name == "error_feedback" else {}

    def replica(exchange):
        with loop(exchange, **beside, **{name: DIFFERENT[name][exchange.rank]})[2]:
            pass

    errors = run_replicas(replica, exchanges(kind, len(DIFFERENT[name])))
    found = [error for error in errors if isinstance(error, MismatchError)]
    assert found, errors
    assert all(f"setting '{name}'" in str(error) for error in found)
