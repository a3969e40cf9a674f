"""A replica of several processes that ends early, and what it is when it is started again."""

import json
import signal

import pytest
import torch

from .several import results, run, start, trained, wait

TOLD_TO_END = 143


def same(first, second):
    return all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.processes
@pytest.mark.parametrize(("kind", "times"), [("ddp", 1), ("fsdp", 2)])
def test_told_to_end_they_leave_after_the_same_step_and_go_on_from_there(tmp_path, kind, times):
    """Also if the launcher and torchrun both tell them."""
    replicas = [(kind, 2)]
    whole = trained(tmp_path, "whole", replicas, {"steps": 40})
    ended = run(tmp_path, "parts", replicas, {"steps": 40, "signal": [8, 1], "times": times})
    assert {status for status, _ in ended.values()} == {TOLD_TO_END}, ended
    assert "told to end (SIGTERM)" in ended[0, 0][1]
    back = trained(tmp_path, "parts", replicas, {"steps": 40})
    assert all(
        same(expected, values) for (expected, _), (values, _) in zip(whole, back, strict=False)
    )
    assert back[0][1]["began_at"] in {9, 10}, "the open steps were saved, too"


@pytest.mark.processes
def test_killed_between_two_fragments_they_go_on_with_what_they_had_learned(tmp_path):
    case = {"options": {"fragments": 2, "save_inner_every": 1}}
    (expected, _), _ = trained(tmp_path, "whole", [("fsdp", 2)], case)
    run(tmp_path, "parts", [("fsdp", 2)], {**case, "kill": [10, 0]})
    ended = run(tmp_path, "parts", [("fsdp", 2)], {**case, "asks": True})
    back = results(tmp_path / "parts", [("fsdp", 2)])
    assert all(same(expected, values) for values, _ in back)
    assert [outcome["began_at"] for _, outcome in back] == [9, 9]
    assert "no data loader was restored with it" in ended[0, 0][1]


@pytest.mark.processes
def test_buffers_that_are_not_synced_come_back_on_each_process(tmp_path):
    case = {"how": "buffers", "options": {"buffers": "none", "save_inner_every": 1}}
    whole = trained(tmp_path, "whole", [("fsdp", 2)], case)
    run(tmp_path, "parts", [("fsdp", 2)], {**case, "kill": [8, 1]})
    back = trained(tmp_path, "parts", [("fsdp", 2)], case)
    assert all(
        same(expected, values) for (expected, _), (values, _) in zip(whole, back, strict=True)
    )
    assert not same(whole[0][0], whole[1][0]), "each process has seen its own half"
    assert [outcome["committed"] for _, outcome in (*whole, *back)] == [4] * 4


@pytest.mark.processes
def test_a_process_that_is_told_to_end_while_the_leader_waits_ends_all(tmp_path):
    replicas = [("ddp", 2), ("plain", 1)]  # the second one never comes
    ended = wait(start(tmp_path / "run", replicas, 0, {"told_at_join": [1, signal.SIGTERM]}))
    assert [status for status, _ in ended] == [TOLD_TO_END] * 2, ended


@pytest.mark.processes
def test_a_process_that_fails_while_the_leader_waits_ends_all(tmp_path):
    replicas = [("ddp", 2), ("plain", 1)]  # the second one never comes
    case = {"told_at_join": [1, signal.SIGINT], "connect": {"join_timeout": 60.0}}
    ended = wait(start(tmp_path / "run", replicas, 0, case))
    assert "KeyboardInterrupt" in ended[1][1], ended
    outcome = json.loads((tmp_path / "run" / "0-0.json").read_text())
    assert outcome["raised"] == (
        "ProcessFailedError: process 1 of this replica has failed: KeyboardInterrupt"
    )


@pytest.mark.processes
def test_another_number_of_processes_begins_with_fresh_inner_state(tmp_path):
    ended = run(tmp_path, "run", [("ddp", 2)], {"signal": [8, 0]})
    assert {status for status, _ in ended.values()} == {TOLD_TO_END}, ended
    (status, log), *_ = run(tmp_path, "run", [("plain", 1)], {}).values()
    assert status == 0, log
    assert "was saved by a replica of 2 processes" in log
    assert "this one is one process" in log


@pytest.mark.processes
def test_a_run_of_other_numbers_of_processes_is_resumed_exactly(tmp_path):
    """It ends as plain replicas that never stopped, so the outer state is as it was."""
    case = {"sgd": True, "steps": 36, "global_at": [18]}
    whole = trained(tmp_path, "whole", [("plain", 1), ("plain", 1)], case)
    trained(tmp_path, "parts", [("ddp", 2), ("ddp", 2)], {**case, "steps": 18})
    resumed = {**case, "connect": {"resume": True}}
    back = trained(tmp_path, "parts", [("plain", 1), ("fsdp", 2)], resumed)
    assert [outcome["began_at"] for _, outcome in back] == [18] * 3
    assert back[0][1]["shown"] == back[1][1]["shown"]
    (before,), (expected,) = back[0][1]["shown"], whole[0][1]["shown"]
    for name, end in whole[0][0].items():
        as_shown = (torch.tensor(each[name], dtype=torch.float64) for each in (before, expected))
        torch.testing.assert_close(*as_shown, rtol=0, atol=1e-12)
        for values, _ in back:
            torch.testing.assert_close(values[name], end, rtol=0, atol=1e-12)


@pytest.mark.processes
def test_the_others_fail_where_the_leader_is_killed(tmp_path):
    ended = run(tmp_path, "run", [("plain", 3)], {"kill": [8, 0]})
    assert [status for status, _ in ended.values()] == [-signal.SIGKILL, 0, 0], ended
    for process in (1, 2):
        outcome = json.loads((tmp_path / "run" / f"0-{process}.json").read_text())
        gone = "process 0 of this replica has failed: it is gone"
        unknown = "another process of this replica"  # nothing has reaped it yet
        assert outcome["raised"].removeprefix("ProcessFailedError: ").startswith((gone, unknown))


@pytest.mark.slow
@pytest.mark.processes
def test_a_process_that_hangs_is_named(tmp_path):
    case = {"hang": [8, 1], "connect": {"join_timeout": 10.0, "sync_timeout": 10.0}}
    (_, first), _ = trained(tmp_path, "run", [("plain", 2)], case)
    assert first["raised"] == (
        "ProcessFailedError: process 1 of this replica has failed: it does not answer. It has "
        "taken 8 inner steps inside the block, and another process 12"
    )


@pytest.mark.slow
@pytest.mark.processes
def test_a_leader_that_is_stopped_is_named(tmp_path):
    limits = {"join_timeout": 5.0, "sync_timeout": 10.0, "beat_interval": 1.0, "lost_after": 5.0}
    case = {"kill": [8, 0], "by": signal.SIGSTOP, "connect": limits}
    leader, other = start(tmp_path / "run", [("plain", 2)], 0, case)
    other.communicate()
    leader.kill()
    outcome = json.loads((tmp_path / "run" / "0-1.json").read_text())
    assert outcome["raised"].startswith(
        "ProcessFailedError: process 0 of this replica has failed: it does not answer. It has taken"
    )


@pytest.mark.processes
@pytest.mark.parametrize("kind", ["plain", "ddp"])
def test_a_leader_that_has_failed_is_named_though_it_is_gone(tmp_path, kind):
    case = {"raise_on": [8, 0]}
    first, second = (text["raised"] for _, text in trained(tmp_path, "run", [(kind, 2)], case))
    assert first == "ArithmeticError: a bad batch"
    assert second == f"ProcessFailedError: process 0 of this replica has failed: {first}"


@pytest.mark.processes
@pytest.mark.parametrize("kind", ["plain", "ddp"])  # DDP raises what gloo says in the backward pass
def test_the_process_that_has_failed_is_named_by_the_others(tmp_path, kind):
    case = {"raise_on": [8, 1], "connect": {"return_within": 0.0}}
    first, second, other = (
        text["raised"] for _, text in trained(tmp_path, "run", [(kind, 2), ("plain", 1)], case)
    )
    named = "process 1 of this replica has failed: ArithmeticError: a bad batch"
    assert second == "ArithmeticError: a bad batch"
    assert first == f"ProcessFailedError: {named}"
    assert other.startswith("ReplicaLostError")
    assert named in other
