"""Several processes that are one replica train as one process would."""

import pytest
import torch

from diloco_core import ConfigurationError, DiLoCo, ReplicaExchange, Seconds

from .several import trained

PLAIN = [("plain", 1), ("plain", 1)]
DELAYED = {"options": {"delay": 1, "fragments": ("strided", 3)}}
ELASTIC = {"connect": {"min_replicas": 2}, "options": {"weight": "tokens"}, "evaluate": True}


@pytest.mark.processes
@pytest.mark.parametrize(
    ("replicas", "case"),
    [
        ([("ddp", 2), ("ddp", 2)], {"rate": [3, 1, 0.5]}),
        ([("fsdp", 2), ("fsdp", 2)], DELAYED),
        ([("fsdp", 2), ("plain", 1)], ELASTIC),
        ([("hybrid", 4), ("tensor", 4)], {}),
    ],
    ids=["ddp", "delayed fragments", "elastic", "hybrid and tensor parallel"],
)
def test_they_end_where_plain_replicas_end(tmp_path, replicas, case):
    alone = trained(
        tmp_path, "alone", PLAIN, {**case, "rate": [3, 0, 0.5] if "rate" in case else None}
    )
    several = trained(tmp_path, "several", replicas, case)
    (expected, told), (other, _) = alone
    assert all(torch.equal(expected[name], other[name]) for name in expected)
    first = several[0][0]
    for values, said in several:
        assert all(torch.equal(first[name], values[name]) for name in first), "bit for bit"
        assert (said["committed"], said["reports"]) == (told["committed"], told["reports"])
        assert said["rates"] == told["rates"]
    for name, value in expected.items():
        torch.testing.assert_close(first[name], value, rtol=0, atol=1e-12)
    places = [said["place"] for _, said in several]
    assert places == [
        [rank, 2, process, processes]
        for rank, (_, processes) in enumerate(replicas)
        for process in range(processes)
    ]


def test_seconds_are_refused():
    exchange = ReplicaExchange(0, 2, 0, 2, lambda: None, 1.0)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigurationError, match=r"sync_every=Seconds\(60\) cannot be used yet"):
        DiLoCo(model, optimizer, exchange, sync_every=Seconds(60))


@pytest.mark.processes
@pytest.mark.parametrize(
    ("case", "words"),
    [
        ({"nan_at": 4}, "NonFiniteDeltaError: "),
        ({"wrong_on": 1}, "ConfigurationError: the processes of this replica do not have the same"),
        ({"options": {"outer_lr": -1.0}}, "ConfigurationError: outer_lr"),
        ({"options": {"stateful": {"x": None}}}, "ConfigurationError: stateful= and"),
    ],
    ids=["nan", "settings", "argument", "not yet"],
)
def test_an_error_is_the_same_on_all_of_them(tmp_path, case, words):
    outcomes = trained(tmp_path, "failed", [("ddp", 2)], case)
    raised = [said["raised"] for _, said in outcomes]
    assert raised[0] == raised[1]
    assert raised[0].startswith(words)
