"""What a call of Modal runs: one replica, once, whatever becomes of calls and containers."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from diloco_protocol import DilocoError, Outcome, Reason
from diloco_protocol.backend import OUTCOME_BYTES, read_bounded

from .__about__ import __version__
from ._errors import bounded
from ._record import checked, parsed, written

_VERSION = 2
_START_FAILED = 2
_LOOK_SECONDS = 0.5
_ASK_SECONDS = 2.0
_RECORD_SECONDS = 20.0
_MOST_ATTEMPTS = 2**30
_KEPT_CHARACTERS = 4000
"""Of an outcome, in the record, which whoever looks reads as a whole."""


class Record:
    """The Dict of a run, as long as Modal answers: a container costs money while it waits, and has a result to report.

    Args:
        held: A ``modal.Dict``.

    Raises:
        UnavailableError: By its methods: there was no answer for some time.
    """

    def __init__(self, held: Any) -> None:
        self._held = held

    def get(self, key: str) -> str | None:
        """The text of an entry; None if there is none."""
        from . import _wire

        def get() -> str | None:
            text: str | None = _wire.get_entry(self._held, key)
            return text

        return bounded(get, _RECORD_SECONDS, f"reading {key}")

    def put(self, key: str, value: Mapping[str, Any], *, skip_if_exists: bool) -> bool:
        """Create an entry; whether it was this call that did."""

        def put() -> bool:
            return bool(self._held.put(key, written(value), skip_if_exists=skip_if_exists))

        return bounded(put, _RECORD_SECONDS, f"writing {key}")


def run_replica(payload: dict[str, Any]) -> str:
    """Run one replica to its end; the function that :func:`build_app` puts into an app.

    It claims its rank in the run's record. If another call holds the rank, it returns at once and trains nothing. It never
    raises, except when Modal ends its container: then the runner gets SIGTERM and its grace, the end is written down, and the
    exception goes on.

    Args:
        payload: What a :class:`ModalSpawnExecutor` has sent.

    Returns:
        The JSON text of an :class:`diloco_protocol.Outcome`.
    """
    try:
        return _run(payload)
    except Exception as error:  # noqa: BLE001 - a TimeoutError of ours would look like Modal's own
        return _refusal(f"the replica could not be started: {type(error).__name__}: {error}")


def _run(payload: dict[str, Any]) -> str:
    version = payload.get("version") if isinstance(payload, dict) else None
    if version != _VERSION:
        how = payload.get("deploy", "modal deploy") if isinstance(payload, dict) else "modal deploy"
        return _refusal(
            f"the launcher sent a payload of version {version!r}, and the deployed app (diloco-modal {__version__}) reads "
            f"version {_VERSION}: deploy the app again with the launcher's diloco-modal ({how})"
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


def claim(payload: dict[str, Any], record: Any, launch: str | None, own: str) -> str | None:
    """Have this call hold its rank; what it returns instead, if it may not."""
    rank = payload["rank"]
    # What runs is in the payload, which comes with the call: a record that a stranger has made decides nothing but this.
    known = parsed(launch or "")
    if not isinstance(known, Mapping) or known.get("id") != payload["launch"]:
        return _refusal("this call is left over from a launch that is gone: it trained nothing")
    if not record.put(f"call-{rank}", {"call": own}, skip_if_exists=True):
        held = _entry(record, f"call-{rank}")
        if held is None or held["call"] != own:
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
            f"it got its container {limit + late:.0f} s after it was asked for, and pending_timeout={limit:g} allows fewer"
        )
        return _ended(record, rank, life.number, life.before, outcome=refused)
    if _cancelled(record, rank):
        _ended(record, rank, life.number, life.before)
        return _refusal("it was cancelled before it had begun")
    with tempfile.TemporaryDirectory(prefix="diloco-") as folder:
        spec, outcome, counter = (Path(folder) / name for name in ("spec", "outcome", "attempts"))
        runner: subprocess.Popen[bytes] | None = None
        try:
            spec.write_text(payload["spec"], encoding="utf-8")
            counter.write_text(json.dumps(life.before))
            # A session of its own: Modal's SIGINT is for us, and the runner is told by SIGTERM.
            runner = subprocess.Popen(
                [
                    sys.executable, "-m", "diloco_protocol.runner", "--spec", str(spec), "--outcome", str(outcome),
                    "--attempts", str(counter), "--restarts", str(payload["restarts"]),
                    "--result-bytes", str(payload["result_bytes"]),
                ],
                env={**os.environ, **payload["env"]},
                start_new_session=True,
            )  # fmt: skip
            code = _watch(runner, counter, life.before, record, rank)
            counted = _counted(counter, life.before)
            return _ended(record, rank, life.number, counted, outcome=_report(outcome, code))
        except BaseException as error:
            # Also what comes before the runner is there, such as Modal's SIGINT: the life has begun, and has to have an end.
            over = runner is not None and runner.poll() is not None
            if runner is not None:
                _end(runner, payload["grace"])
            told = _last_word(outcome, over=over)
            again = False if told or isinstance(error, Exception) else _comes_again()
            counted = _counted(counter, life.before)
            _ended(record, rank, life.number, counted, again=again, outcome=told)
            raise


def _last_word(path: Path, *, over: bool) -> str:
    """What a replica has reported whose container is taken away; empty if it has to run again.

    Args:
        path: Of the report.
        over: Whether it had ended before it was told to. Otherwise only a success counts: a failure comes from being told.
    """
    try:
        outcome = Outcome.from_json(_read(path))
    except (OSError, UnicodeDecodeError, DilocoError):
        return ""
    return outcome.to_json() if over or outcome.exit_code == 0 else ""


def _comes_again() -> bool | None:
    """Whether Modal will run this call again, since it was not stopped but its container is taken away; None if not known."""
    import modal

    own = str(modal.current_function_call_id())
    try:
        from . import _wire

        # There is little time left: Modal kills the container soon.
        look = lambda: _wire.get_status(modal.Client.from_env(), own)  # noqa: E731
        return bool(bounded(look, _ASK_SECONDS, "looking at this call") == "PENDING")
    except Exception:  # noqa: BLE001 - the end has to be written down in any case
        return None


@dataclass(frozen=True)
class Life:
    """One container of a replica.

    Attributes:
        number: From 1.
        before: How many attempts were started before it, and how many of them have failed.
        outcome: What it returns at once instead of running the replica, which has ended in an earlier life: Modal took its
            container away before it had returned that.
    """

    number: int
    before: Mapping[str, int]
    outcome: str | None = None


def new_life(record: Any, rank: int, now: float) -> Life:
    """Begin a life: a container may be taken away, and the same call run again."""
    life, before, own = 1, {"started": 0, "failed": 0}, uuid.uuid4().hex
    while True:
        key, value = f"life-{rank}-{life}", {"attempt": before["started"] + 1, "at": now, "id": own}
        if record.put(key, value, skip_if_exists=True):
            return Life(life, before)
        if (_entry(record, key) or {}).get("id") == own:
            # The answer to the first try was lost, and the client has tried again.
            return Life(life, before)
        end = record.get(f"end-{rank}-{life}")
        if end is not None:
            value = parsed(end)
            outcome = value.get("outcome") if isinstance(value, Mapping) else None
            if isinstance(value, Mapping) and not _is_outcome(outcome):  # then it is run again
                end = written({**value, "outcome": ""})
            known = checked(f"end-{rank}-{life}", end)
            before = {name: known[name] for name in before}
            if outcome is not None and _is_outcome(outcome):
                return Life(life, before, str(outcome))
        else:
            # A life that was killed has written no end; it had one attempt at least, and one more after each failure.
            before["started"] += 1
            while record.get(f"attempt-{rank}-{before['started'] + 1}") is not None:
                before = {"started": before["started"] + 1, "failed": before["failed"] + 1}
        life += 1


def _cancelled(record: Any, rank: int) -> bool:
    """Whether the call was ended while its container was being made.

    Who did that may have seen no life of it, and said that nothing is left.
    """
    try:
        return record.get(f"cancel-{rank}") is not None and _comes_again() is False
    except Exception:  # noqa: BLE001 - then Modal ends the container in any case
        return False


def _entry(record: Any, key: str) -> Mapping[str, Any] | None:
    """An entry of the record; None if there is none.

    Raises:
        DamagedRecordError: It is not what this version writes.
    """
    value = record.get(key)
    return None if value is None else checked(key, value)


def _is_outcome(text: Any) -> bool:
    try:
        return isinstance(text, str) and bool(Outcome.from_json(text))
    except DilocoError:
        return False


def _watch(
    runner: subprocess.Popen[bytes],
    counter: Path,
    before: Mapping[str, int],
    record: Any,
    rank: int,
) -> int:
    """Wait for the end of the runner, and write down each further attempt; its exit status."""
    told = before["started"] + 1
    while True:
        try:
            return runner.wait(_LOOK_SECONDS)
        except subprocess.TimeoutExpired:
            pass
        # What cannot be written down now is tried again at the next look.
        with contextlib.suppress(Exception):
            while told < _counted(counter, before)["started"]:
                at = {"at": time.time()}
                record.put(f"attempt-{rank}-{told + 1}", at, skip_if_exists=True)
                told += 1


def _end(runner: subprocess.Popen[bytes], grace: float) -> None:
    with contextlib.suppress(ProcessLookupError):
        runner.send_signal(signal.SIGTERM)
    try:
        runner.wait(grace + 2.0)
    except BaseException:  # noqa: BLE001 - also a second signal: nothing may be left running
        runner.kill()
        runner.wait()


def _counted(counter: Path, before: Mapping[str, int]) -> dict[str, int]:
    started, failed = before["started"], before["failed"]
    # The replica can write there, too.
    with contextlib.suppress(OSError, ValueError, RecursionError, KeyError, TypeError):
        data = json.loads(_read(counter))
        if all(type(data[name]) is int and 0 <= data[name] < _MOST_ATTEMPTS for name in before):
            started, failed = data["started"], data["failed"]
    # A life is an attempt from its beginning, also if it ends before its runner has counted it: so the record has said.
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
    """Write down the end of a life, and the outcome of the replica, should the call be run again before it has returned it."""
    end = {**counted, "at": time.time(), "again": again, "outcome": kept(outcome)}
    # The result counts even if its end cannot be written down.
    with contextlib.suppress(Exception):
        record.put(f"end-{rank}-{life}", end, skip_if_exists=True)
    return outcome


def kept(outcome: str) -> str:
    """What the record keeps of an outcome: all of a small one, and of another that it succeeded, or why it failed."""
    if len(outcome) <= _KEPT_CHARACTERS:
        return outcome
    whole = Outcome.from_json(outcome)
    why = None if whole.error is None else whole.error[: _KEPT_CHARACTERS // 4]
    if whole.exit_code == 0:
        why = f"Modal took the container away before a result of {len(outcome)} characters was reported"
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
