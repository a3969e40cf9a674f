"""The function that a call runs: one replica, once, whatever happens to calls and containers."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from diloco_protocol import DilocoError, Outcome, Reason
from diloco_protocol.backend import OUTCOME_BYTES, read_bounded

from .__about__ import __version__
from ._client._lives import Record, comes_again, entry_of, new_life, was_cancelled
from ._state._record import parsed

_VERSION = 2
_START_FAILED = 2
_LOOK_SECONDS = 0.5
_MOST_ATTEMPTS = 1001
"""The most attempts of a life, since no launch has more than 1000 restarts."""
_KEPT_CHARACTERS = 4000
"""The most characters of an outcome in the record, which every look reads as a whole."""


def run_replica(payload: dict[str, Any]) -> str:
    """Run one replica to its end; :func:`build_app` puts this function into an app.

    It claims its rank in the run's record. If another call holds the rank, it returns at once and
    trains nothing. It never raises, except when Modal ends its container: then the runner gets
    SIGTERM and its grace, the end is written down, and the exception is raised again.

    Args:
        payload: The payload that a :class:`ModalSpawnExecutor` has sent.

    Returns:
        The JSON text of an :class:`diloco_protocol.Outcome`.
    """
    try:
        return _run(payload)
    except Exception as error:  # noqa: BLE001 - a TimeoutError would look like Modal's own
        return _refusal(f"the replica could not be started: {type(error).__name__}: {error}")


def _run(payload: dict[str, Any]) -> str:
    version = payload.get("version") if isinstance(payload, dict) else None
    if version != _VERSION:
        how = payload.get("deploy", "modal deploy") if isinstance(payload, dict) else "modal deploy"
        return _refusal(
            f"the launcher sent a payload of version {version!r}, and the deployed app "
            f"(diloco-modal {__version__}) reads version {_VERSION}: deploy the app again with the "
            f"launcher's diloco-modal ({how})"
        )
    import modal

    rank = payload["rank"]
    where = payload["environment_name"]
    record = Record(modal.Dict.from_name(payload["record"], environment_name=where))
    launch = record.get("launch")
    refused = claim(payload, record, launch, str(modal.current_function_call_id()))
    if refused is not None:
        return refused
    missing = [name for name in payload["secrets"] if name not in os.environ]
    if missing:
        names = ", ".join(f"{payload['secrets'][name]!r} has no key {name}" for name in missing)
        return _refusal(f"a Secret of Modal lacks what the launch asked for: {names}")
    return _live(payload, record, rank)


def claim(payload: dict[str, Any], record: Any, launch: str | None, call_id: str) -> str | None:
    """Claim the rank for this call; if it must not run, return the outcome to return instead."""
    rank = payload["rank"]
    # The payload, which comes with the call, says what to run. A record that a stranger's program
    # has made decides only whether to run it.
    known = parsed(launch or "")
    if not isinstance(known, Mapping) or known.get("id") != payload["launch"]:
        return _refusal("this call is left over from a launch that is gone: it trained nothing")
    if not record.put(f"call-{rank}", {"call": call_id}, skip_if_exists=True):
        holder = entry_of(record, f"call-{rank}")
        if holder is None or holder["call"] != call_id:
            return _refusal(f"another call holds rank {rank}: this one trained nothing")
    return None


def _live(payload: dict[str, Any], record: Any, rank: int) -> str:
    life = new_life(record, rank, time.time())
    if life.outcome is not None:
        return life.outcome
    late = time.time() - payload["start_by"]
    if life.number == 1 and late > 0:
        limit = payload["pending_timeout"]
        refused = _refusal(
            f"it got its container {limit + late:.0f} s after it was asked for, and "
            f"pending_timeout={limit:g} allows fewer"
        )
        return _ended(record, rank, life.number, life.before, outcome=refused)
    if was_cancelled(record, rank):
        _ended(record, rank, life.number, life.before)
        return _refusal("it was cancelled before it had begun")
    with tempfile.TemporaryDirectory(prefix="diloco-") as folder:
        spec, outcome, counter = (Path(folder) / name for name in ("spec", "outcome", "attempts"))
        runner: subprocess.Popen[bytes] | None = None
        try:
            spec.write_text(payload["spec"], encoding="utf-8")
            counter.write_text(json.dumps(life.before))
            # In a session of its own, since Modal's SIGINT is for this process, which then sends
            # SIGTERM to the runner.
            runner = subprocess.Popen(
                [
                    sys.executable, "-m", "diloco_protocol.runner", "--spec", str(spec),
                    "--outcome", str(outcome), "--attempts", str(counter),
                    "--restarts", str(payload["restarts"]),
                    "--result-bytes", str(payload["result_bytes"]),
                ],
                env={**os.environ, **payload["env"]},
                start_new_session=True,
            )  # fmt: skip
            code = _watch(runner, counter, life.before, record, rank)
            counted = _counted(counter, life.before)
            return _ended(record, rank, life.number, counted, outcome=_report(outcome, code))
        except BaseException as error:
            # Also for an exception before the runner was started, such as Modal's SIGINT: the life
            # has begun, and needs an end in the record.
            over = runner is not None and runner.poll() is not None
            if runner is not None:
                _end(runner, payload["grace"])
            last_word = _last_word(outcome, over=over)
            again = False if last_word or isinstance(error, Exception) else comes_again()
            counted = _counted(counter, life.before)
            _ended(record, rank, life.number, counted, again=again, outcome=last_word)
            raise


def _last_word(path: Path, *, over: bool) -> str:
    """Return the report of a replica whose container is taken away; empty if it has to run again.

    Args:
        path: The path of the report.
        over: Whether the replica had ended before it was told to end. Otherwise only a success
            counts, since a failure is the effect of being told to end.
    """
    try:
        outcome = Outcome.from_json(_read(path))
    except (OSError, UnicodeDecodeError, DilocoError):
        return ""
    return outcome.to_json() if over or outcome.exit_code == 0 else ""


def _watch(
    runner: subprocess.Popen[bytes],
    counter: Path,
    before: Mapping[str, int],
    record: Any,
    rank: int,
) -> int:
    """Wait for the runner to end, write down each further attempt, and return its exit status."""
    attempt = before["started"] + 1
    while True:
        try:
            return runner.wait(_LOOK_SECONDS)
        except subprocess.TimeoutExpired:
            pass
        # An attempt that cannot be written down now is tried again at the next look.
        with contextlib.suppress(Exception):
            while attempt < _counted(counter, before)["started"]:
                at = {"at": time.time()}
                record.put(f"attempt-{rank}-{attempt + 1}", at, skip_if_exists=True)
                attempt += 1


def _end(runner: subprocess.Popen[bytes], grace: float) -> None:
    with contextlib.suppress(ProcessLookupError):
        runner.send_signal(signal.SIGTERM)
    try:
        runner.wait(grace + 2.0)
    except BaseException:  # noqa: BLE001 - even after a second signal nothing may go on
        runner.kill()
        runner.wait()


def _counted(counter: Path, before: Mapping[str, int]) -> dict[str, int]:
    started, failed = before["started"], before["failed"]
    # The replica can write to this file, too.
    with contextlib.suppress(OSError, ValueError, RecursionError, KeyError, TypeError):
        data = json.loads(_read(counter))
        if all(
            type(data[name]) is int and 0 <= data[name] - n <= _MOST_ATTEMPTS
            for name, n in before.items()
        ):
            started, failed = data["started"], data["failed"]
    # A life counts as an attempt from its beginning, even if it ends before its runner has counted
    # it, since the entry of the life in the record already says so.
    return {"started": max(started, before["started"] + 1), "failed": failed}


def _ended(
    record: Any,
    rank: int,
    life: int,
    counted: Mapping[str, int],
    *,
    again: bool | None = False,
    outcome: str = "",
) -> str:
    """Write down the end of a life and the outcome of the replica; return the outcome.

    The call may be run again before it has returned the outcome, and then finds it there.
    """
    end = {**counted, "at": time.time(), "again": again, "outcome": kept(outcome)}
    # The result counts even if its end cannot be written down.
    with contextlib.suppress(Exception):
        record.put(f"end-{rank}-{life}", end, skip_if_exists=True)
    return outcome


def kept(outcome: str) -> str:
    """Return what the record keeps of an outcome.

    A small one is kept whole; of a large one, that the replica succeeded, or why it failed.
    """
    if len(outcome) <= _KEPT_CHARACTERS:
        return outcome
    whole = Outcome.from_json(outcome)
    why = None if whole.error is None else whole.error[: _KEPT_CHARACTERS // 4]
    if whole.exit_code == 0:
        why = (
            f"a result of {len(outcome)} characters is too long for the record, and only the "
            "record is left"
        )
    return replace(whole, result=None, error=why, traceback=None).to_json()


def _report(path: Path, code: int) -> str:
    try:
        return Outcome.from_json(_read(path)).to_json()
    except (OSError, UnicodeDecodeError, DilocoError) as error:
        status = 128 - code if code < 0 else code or 1
        return Outcome(
            min(status, 255), error=f"the runner ended with {code} and left no report: {error}"
        ).to_json()


def _read(path: Path) -> str:
    with path.open("rb") as file:
        return read_bounded(file, OUTCOME_BYTES, "the runner's report").decode()


def _refusal(message: str) -> str:
    return Outcome(_START_FAILED, error=message, reason=Reason.START_FAILED).to_json()
