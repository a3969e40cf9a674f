"""Which options fit which exchange: the table in docs/train.md says what the loop accepts."""

from pathlib import Path

import pytest
import torch
from loop_lab import exchanges

from diloco_core import ConfigurationError, DiLoCo, ProcessGroupExchange, Seconds

PAGE = Path(__file__).parents[2] / "docs/train.md"
KINDS = {
    "threads": "threads",
    "fixed": "store",
    "sharded": "sharded",
    "gather": "gather",
    "torchft manager": "manager",
}
ELSEWHERE = {"`set_outer_lr`", "`publish_every`, an argument of `connect`"}


class Position:
    """The least that can be saved and restored."""

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


OPTIONS = {
    "`delay`, `alpha`": [{"delay": 1}, {"alpha": 0.5}],
    "`fragments`, `outer_groups`, `buffers`": [
        {"fragments": 2}, {"outer_groups": True}, {"buffers": "none"},
    ],
    "`codec`, `error_feedback`": [{"codec": "int8"}, {"codec": "int8", "error_feedback": True}],
    "`state_codec`": [{"state_codec": "int8"}],
    "`weight`, `clip`, `aggregate`": [
        {"weight": "steps"}, {"clip": "median"}, {"aggregate": "trimmed"},
    ],
    "`outer_lr` as a function": [{"outer_lr": lambda sync: 0.5 / sync}],
    "`sync_every=Seconds(60)`": [{"sync_every": Seconds(60)}],
    '`init="check"`': [{"init": "check"}],
    "`full_state_every`": [{"state_codec": "int8", "full_state_every": 4}],
    "`stateful`, `save_inner_every`": [
        {"stateful": {"generator": Position()}}, {"save_inner_every": 3},
    ],
}  # fmt: skip


def rows():
    text = PAGE.read_text().partition("## What goes with what")[2].partition("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("|")]
    head, _, *body = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return {name: dict(zip(head[1:], cells, strict=True)) for name, *cells in body}


def accepts(exchange, options):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    if options.get("outer_groups"):
        options = {"outer_groups": [{"params": model[0]}, {"params": model[1], "lr": 0.5}]}
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        DiLoCo(model, inner, exchange, **{"sync_every": 4, **options})
    except ConfigurationError:
        return False
    return True


@pytest.fixture
def group(tmp_path):
    store = torch.distributed.FileStore(str(tmp_path / "group"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield ProcessGroupExchange()
    torch.distributed.destroy_process_group()


def test_every_option_is_in_the_table():
    assert set(rows()) == {*OPTIONS, *ELSEWHERE}


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_table_says_is_so(kind):
    (exchange, *_) = exchanges(KINDS[kind], 3)
    said = {name: cells[kind] for name, cells in rows().items() if name in OPTIONS}
    found = {
        name: "yes" if all(accepts(exchange, each) for each in OPTIONS[name]) else "no"
        for name in OPTIONS
    }
    assert found == said
    for name, each in OPTIONS.items():
        if found[name] == "no":
            assert not any(accepts(exchange, options) for options in each), name
    changes = exchange.support.agrees_on_lr
    assert rows()["`set_outer_lr`"][kind] == ("yes" if changes else "no")


def test_what_it_says_of_process_groups_is_so(group):
    for name, options in OPTIONS.items():
        # With one replica there is nothing to trim.
        wanted = [each for each in options if "aggregate" not in each]
        found = {accepts(group, each) for each in wanted}
        assert found == {rows()[name]["process group"] == "yes"}, name
    assert rows()["`set_outer_lr`"]["process group"] == (
        "yes" if group.support.agrees_on_lr else "no"
    )
