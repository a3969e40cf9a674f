"""A process of a replica is killed at any moment, and the replica is started again."""

import random

import pytest
import torch

from .several import results, start, wait

MOMENTS = 20
CASES = {
    "fixed": {},
    "elastic": {"connect": {"min_replicas": 2, "grace": 2.0}},
}


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("kind", ["fixed", "elastic"])
def test_all_replicas_end_with_the_same_bytes(tmp_path, kind):
    draw = random.Random(kind)
    killed = 0
    for moment in range(MOMENTS):
        folder = tmp_path / str(moment)
        case = {"steps": 40, "pause": 0.005, **CASES[kind]}
        kill = [draw.randrange(2), draw.uniform(0.0, 0.5)]
        replicas = [("ddp", 2), ("fsdp", 2)]
        first = start(folder, replicas, 0, case)
        second = start(folder, replicas, 1, {**case, "kill_after": kill})
        statuses = [status for status, _ in wait(second)]
        if any(statuses):
            killed += 1
            assert statuses[kill[0]] == -9, statuses
            second = start(folder, replicas, 1, case)
            ended = wait(second)
            assert [status for status, _ in ended] == [0, 0], (kill, ended)
        ended = wait(first)
        assert [status for status, _ in ended] == [0, 0], (kill, ended)
        (expected, _), *others = results(folder, replicas)
        for values, _ in others:
            assert all(torch.equal(expected[name], values[name]) for name in expected), kill
    assert killed > MOMENTS // 2
