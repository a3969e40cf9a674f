"""Compare what collect says with what is true."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from diloco_protocol import ReplicaResult, ReplicaState

from ._check_details import attempt_is_known, check_texts, forgotten_timeout
from ._lab import Lab

if TYPE_CHECKING:
    from diloco_protocol import ReplicaHandle, ReplicaStatus

    from ._model import Replica

Progress = Callable[[Mapping["ReplicaHandle", "ReplicaStatus"]], None]


def collect(
    lab: Lab,
    replicas: Sequence[Replica],
    *,
    timeout: float | None = 0.0,
    progress: Progress | None = None,
) -> list[ReplicaResult]:
    """Collect, and judge the time, the order and every entry.

    If ``timeout`` is None, collect is called without it.

    Raises:
        BackendError: collect raised it.
        PromiseBroken: What it returned, or did, is wrong.
    """
    lab.note(f"collect({', '.join(map(str, replicas))}; timeout={timeout})", "collect")
    handles = [replica.handle for replica in replicas]
    before = [lab.harness.truth(handle).state for handle in handles]
    begin = lab.harness.clock()
    options: dict[str, Any] = {} if progress is None else {"progress": progress}
    if timeout is not None:
        options["timeout"] = timeout
        lab.harness.time.limit = begin + timeout + lab.harness.slack
    try:
        results = lab.verb("R6", lambda: lab.executor.collect(handles, **options))
    finally:
        lab.harness.time.limit = None
    took = lab.harness.clock() - begin
    if timeout is not None and took > timeout + lab.harness.slack:
        lab.broken("R2", f"collect came back after {took:g} s", f"its timeout was {timeout:g} s")
    got = [(entry["run_id"], entry["rank"]) for entry in results]
    wanted = [(handle.run_id, handle.rank) for handle in handles]
    if got != wanted:
        lab.broken("R1", f"results of {got}", f"the handles were {wanted}")
    for handle, result in zip(handles, results, strict=True):
        named = ReplicaResult.__annotations__.keys() | handle.metadata.keys()
        if result.keys() != named:
            lab.broken("R1", f"an entry has the keys {sorted(result)}", f"only {sorted(named)}")
    for replica, state, result in zip(replicas, before, results, strict=True):
        lab.adopt(replica, lab.harness.truth(replica.handle))
        _judge(lab, replica, state, result)
    over = all(ReplicaState(entry["status"]).terminal for entry in results)
    if timeout is None and not over:
        lab.broken("R9", f"collect came back after {took:g} s", "not all had ended")
    if timeout is not None and took < timeout - lab.harness.slack and not over:
        lab.broken(
            "R2",
            f"collect came back after {took:g} s",
            f"not all had ended, and its timeout was {timeout:g} s",
        )
    return results


def _judge(lab: Lab, replica: Replica, before: ReplicaState | None, result: ReplicaResult) -> None:
    text = f"collect says of {replica}: {_short(result)}"
    status, answer = result["status"], replica.answer
    check_texts(lab, text, result.get("error"), result.get("signal"))
    if status not in set(ReplicaState):
        lab.broken("S1", text, f"the states are {', '.join(ReplicaState)}")
    true = f"{replica} is {replica.state}"
    lost = (replica.gone and result["reason"] == "lost") or replica.lost
    late = replica.reason == "timeout"
    unseen = late and not replica.gone and forgotten_timeout(lab, replica, result["reason"])
    if answer is not None and not repeats(lab, answer, result) and not lost and not unseen:
        lab.broken("R3", text, f"before, it said {_short(answer)}")
    if replica.gone:
        if not (status == "failed" and result["reason"] == "lost") and replica.told != status:
            lab.broken("R7", text, "there is no record of it")
        return
    if (result["exit_code"] == 0) != (status == "succeeded"):
        lab.broken("R4", text, f"{true}, and the exit code is 0 exactly if it is succeeded")
    if status != replica.state and not _alike(lab, before, status):
        lab.broken("R3" if answer else "S4", text, true)
    if status != "succeeded" and result["result"] is not None:
        lab.broken("R10", text, f"{true}, and has no result")
    if not ReplicaState(status).terminal:
        if result["exit_code"] is not None:
            lab.broken("R4", text, "what has not ended has no exit code")
        return
    if status == "succeeded" and replica.lost and result["error"]:
        if result["result"] is not None:
            lab.broken("R12", text, f"{true}, and its result is lost")
        replica.answer = result
        replica.tell(replica.state)
        return
    if status == "succeeded" and replica.lost and not _same(result["result"], replica.result):
        lab.broken("R12", text, "its result is lost, so there is an error that says so")
    if status == "succeeded" and not _same(result["result"], replica.result):
        lab.broken("R5", text, f"it returned {str(replica.result)[:200]}")
    if replica.reason == "error" and result["exit_code"] != replica.exit_code:
        lab.broken("R4", text, f"its program ended with {replica.exit_code}")
    if status == "succeeded" and result["error"] is not None:
        lab.broken("R4", text, "a success has no error")
    if status != "succeeded" and not result["error"]:
        lab.broken("S8", text, "what has not succeeded has an error that says why")
    if status == "cancelled" and result["exit_code"] is not None:
        lab.broken("R4", text, "in a result, a cancelled replica has no exit code")
    if replica.reason is not None and result["reason"] != replica.reason and not unseen:
        lab.broken("S7" if late else "S8", text, f"the reason is {replica.reason}")
    _agrees(lab, replica, result, text)
    replica.answer = result
    replica.tell(replica.state)


def _agrees(lab: Lab, replica: Replica, result: ReplicaResult, text: str) -> None:
    """Check that an entry has the attempt, the reason and the signal that describe has reported."""
    status = replica.said
    if status is None or not status.state.terminal:
        return
    if attempt_is_known(lab, status) and result["attempt"] != status.attempt:
        lab.broken("R10", text, f"describe says attempt {status.attempt}")
    if (result["reason"], result["signal"]) != (status.reason, status.signal):
        lab.broken("R10", text, f"describe says reason {status.reason}, signal {status.signal}")


def repeats(lab: Lab, first: ReplicaResult, again: ReplicaResult) -> bool:
    """Say whether two answers about a replica are the same.

    The attempts may differ where the backend declares that it forgets those of replicas that it
    ended.
    """
    ended = first["status"] == "cancelled" or first["reason"] == "gang_failed"
    if ended and not lab.capabilities.remembers_ended:
        return {**first, "attempt": 0} == {**again, "attempt": 0}
    return first == again


def _alike(lab: Lab, before: ReplicaState | None, status: str) -> bool:
    """Say whether a status may be reported although it is not true now.

    It may if it was true when collect looked, or if the backend cannot tell the two apart.
    """
    if before is None or before.terminal or ReplicaState(status).terminal:
        return False
    return status == before or not lab.capabilities.distinguishes_pending


def _same(one: Any, other: Any) -> bool:
    """Say whether two JSON values are equal; 1, 1.0 and true are three different values."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)


def _short(result: ReplicaResult) -> str:
    # None is shown, too: a missing value may be the mistake.
    keys = ("status", "reason", "exit_code", "signal", "attempt", "error", "result")
    return ", ".join(f"{key}={str(result.get(key))[:80]}" for key in keys)
