"""Every option of an outer loop has an effect in every kind of run, or is refused by name.

What an effect is, is seen from outside: in the models, the reports, the objects of the store, or
what is raised. The lists are complete by the signatures, so that a new option without a row fails
here.
"""

import inspect
import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest
import torch
from loop_lab import exchanges
from training_lab import fill

from diloco_core import ConfigurationError, DiLoCo, ProcessGroupExchange, Seconds, connect
from diloco_core.testing import run_replicas


@dataclass
class Row:
    """An option with a value, and the options beside which it is seen."""

    value: object
    beside: dict = field(default_factory=dict)
    replicas: int = 3


class Box:
    """Something of the user's that can be saved."""

    def state_dict(self):
        return {"position": 3}

    def load_state_dict(self, state):
        pass


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.1)


GROUPS = "a group of its own for a part of the model"
LOOP = {
    "sync_every": [Row(2), Row(Seconds(300))],
    "fragments": [Row(2), Row(("sequential", 2))],
    "outer_lr": [Row(0.3), Row(lambda sync: 0.5 / sync)],
    "outer_momentum": [Row(0.4)],
    "nesterov": [Row(False)],
    "outer_optimizer": [Row(adam)],
    "outer_groups": [Row(GROUPS)],
    "buffers": [Row("rank0"), Row("none")],
    "init": [Row("check")],
    "flush": [Row("none")],
    "delay": [Row(1)],
    "alpha": [Row(0.5)],
    "codec": [Row("int8")],
    "error_feedback": [Row(True, {"codec": "int8"})],
    "weight": [Row("steps"), Row("tokens")],
    "aggregate": [Row("trimmed")],
    "trim": [Row(2, {"aggregate": "trimmed"}, replicas=5)],
    "clip": [Row("median")],
    "state_codec": [Row("int8")],
    "full_state_every": [Row(1, {"state_codec": "int8"})],
    "stateful": [Row({"box": Box()})],
    "save_inner_every": [Row(1)],
    "on_sync": [Row(print)],
}
REFUSED = {"init", "save_inner_every", "full_state_every"}  # by some kinds
KINDS = ["threads", "store", "sharded", "gather", "manager"]


class Net(torch.nn.Module):
    def __init__(self, rank):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4).double() for _ in range(2))
        fill(self, seed=rank)  # every rank begins elsewhere
        self.register_buffer("seen", torch.zeros(2, dtype=torch.float64))


def with_groups(model, options):
    first, second = ({"params": layer} for layer in model.layers)
    groups = [first, {**second, "lr": 0.1}]
    return {**options, "outer_groups": groups} if options.get("outer_groups") else options


def trained(exchange, options, *, raises=False):
    """Return what one replica holds and was told in the end; or what was raised."""
    model, events = Net(exchange.rank), []
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    options = with_groups(model, options)
    asked = options.get("on_sync")

    def on_sync(report):
        values = [report.outer_lr, report.weights, report.bytes_sent, report.bytes_received]
        events.append([report.sync, report.inner_steps, *map(str, values)])
        if hasattr(exchange, "store"):
            events.append(sorted(exchange.store.list(f"inner/{exchange.rank:05}/")))
        if asked is not None:
            events.append("asked")

    options = {"sync_every": 4, **options, "on_sync": on_sync}
    try:
        with DiLoCo(model, inner, exchange, **options) as outer:
            # The flush covers one step more at one of them.
            for step in range(9 + (exchange.rank == 1)):
                generator = torch.Generator().manual_seed(1000 * exchange.rank + step)
                for parameter in model.parameters():
                    gradient = torch.randn(parameter.shape, generator=generator).double()
                    parameter.grad = gradient.mul(1 + 5 * exchange.rank)
                model.seen += exchange.rank
                if options.get("weight") == "tokens":
                    outer.count_tokens(1 + 3 * exchange.rank)
                inner.step()
    except Exception as error:  # what is raised is compared
        if raises:
            raise
        return error
    tensors = {name: tensor.flatten().tolist() for name, tensor in model.state_dict().items()}
    return tensors, events


def objects(exchange):
    """Return where the objects lie that a run has left in its store, and their sizes.

    Their names would show every setting.
    """
    store = getattr(exchange, "store", None)
    if store is None:
        return []
    sizes = {
        key: size for folder in ("inner", "state", "deltas", "unsynced")
        for key, size in store.list(f"{folder}/").items()
    }  # fmt: skip
    return sorted((key.partition("/")[0], size) for key, size in sizes.items())


def over(kind, replicas):
    return lambda options: (
        run(exchanges(kind, replicas), options) if options else plain(kind, replicas)
    )


@cache
def plain(kind, replicas):
    return run(exchanges(kind, replicas), {})


def run(exchanges, options):
    results = run_replicas(lambda exchange: trained(exchange, options), exchanges)
    errors = [result for result in results if isinstance(result, BaseException)]
    refused = [error for error in errors if isinstance(error, ConfigurationError)]
    if refused:
        raise refused[0]
    if errors:
        return sorted(type(error).__name__ for error in errors)
    return results, [objects(exchange) for exchange in exchanges]


def acts_or_is_refused(outcome, name, row):
    """Check that the option changes what comes out, or is refused by name."""
    try:
        without = outcome(row.beside)
    except ConfigurationError as error:
        assert any(option in str(error) for option in row.beside), error  # noqa: PT017
        return
    try:
        result = outcome({**row.beside, name: row.value})
    except ConfigurationError as error:
        assert name in str(error), error  # noqa: PT017
    else:
        assert result != without, f"{name}={row.value!r} does nothing here"


def test_the_list_is_complete():
    parameters = set(inspect.signature(DiLoCo).parameters)
    assert parameters == {*LOOP, "model", "inner_optimizer", "exchange"}


def cases():
    """Every option in every kind of run; by default in one kind each, or in all."""
    for number, name in enumerate(LOOP):
        for position, kind in enumerate(KINDS):
            default = position == number % len(KINDS) or name in REFUSED
            yield pytest.param(kind, name, marks=[] if default else pytest.mark.slow)


@pytest.mark.parametrize(("kind", "name"), list(cases()))
def test_an_option_of_the_loop_does_something_or_is_refused(kind, name):
    for row in LOOP[name]:
        acts_or_is_refused(over(kind, row.replicas), name, row)


def test_publish_every_is_refused_where_auto_chooses_what_publishes_in_every_sync(tmp_path):
    """Also by who finds the run begun; and nothing is trained."""
    options = {"world_size": 2, "min_replicas": 1, "grace": 0.1}
    text = r"publish_every=4 cannot be used .*, which topology='auto' has chosen, since"

    def refused(rank):
        exchange = connect(tmp_path, rank=rank, **options, publish_every=4)
        with pytest.raises(ConfigurationError, match=text):
            trained(exchange, {}, raises=True)
        return sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.*"))

    assert refused(0) == refused(1) == []
    trained(connect(tmp_path, rank=0, **options), {}, raises=True)
    assert not [key for key in refused(1) if "/00001" in key]


def table():
    """The rows of the table: the options that are named in each, and what is said of exchanges."""
    page = Path(__file__).parents[2] / "docs/train.md"
    text = page.read_text().partition("## What goes with what")[2].partition("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("|")]
    head, _, *body = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    for title, *cells in body:
        yield re.findall(r"`(\w+)", title), dict(zip(head[1:], cells, strict=True))


def accepts(exchange, options):
    model = Net(0)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        DiLoCo(model, inner, exchange, **{"sync_every": 4, **with_groups(model, options)})
    except ConfigurationError:
        return "no"
    return "yes"


def as_the_table_says(exchange, column, without=()):
    for names, said in table():
        for name in names:
            # Of these, only a time and a function depend on the exchange.
            rows = LOOP.get(name, [])[name in {"sync_every", "outer_lr"} :]
            found = [accepts(exchange, {**row.beside, name: row.value}) for row in rows]
            if name == "set_outer_lr":
                found = ["yes" if exchange.support.agrees_on_lr else "no"]
            assert name in without or set(found) <= {said[column]}, (name, column)
            assert found or name in {"publish_every", "connect"}, name


@pytest.mark.parametrize("kind", KINDS)
def test_which_options_fit_which_exchange_is_as_the_table_in_the_documentation_says(kind):
    column = {"store": "fixed", "manager": "torchft manager"}.get(kind, kind)
    as_the_table_says(exchanges(kind, 5)[0], column)


def test_what_it_says_of_process_groups_is_so(tmp_path):
    store = torch.distributed.FileStore(str(tmp_path / "group"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:  # with one replica there is nothing to trim
        as_the_table_says(ProcessGroupExchange(), "process group", without={"aggregate"})
    finally:
        torch.distributed.destroy_process_group()
