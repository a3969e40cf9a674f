"""The end of a pod, from its own evidence alone, and the cluster's words for its state."""

from __future__ import annotations

from dataclasses import dataclass

from diloco_protocol import (
    InvalidRequestError,
    OutcomeMessage,
    Reason,
    SpecVersionError,
    outcome_from_message,
)
from diloco_protocol.backend import redact_and_cut, redact_text, signal_name

from ._facts import JobFacts, PodFacts, parse_time

# The kubelet could not start the container's program.
_NOT_STARTED = frozenset(
    {"StartError", "ContainerCannotRun", "CreateContainerError", "CreateContainerConfigError"}
)
_SHOWN = 500
_REASON_SHOWN = 128  # characters of a reason; Kubernetes' own reasons are shorter
_MESSAGE_BYTES = 4096  # the kubelet cuts a termination message there


@dataclass(frozen=True, slots=True)
class Verdict:
    """The end of one attempt.

    Attributes:
        reason: Why it ended.
        exit_code: Its program's exit code, where known.
        signal: Name of the signal that ended it, where known.
        message: The text for people.
        started_at: Start of the attempt in Unix seconds.
        finished_at: End of the attempt in Unix seconds.
    """

    reason: Reason
    exit_code: int | None
    signal: str | None
    message: str
    started_at: float | None
    finished_at: float | None


def read_message(pod: PodFacts) -> OutcomeMessage | None:
    """Return what the runner reported in the termination message; None if it did not report.

    If there is no report, the kubelet puts the end of the log there.
    """
    text = _text((pod.terminated or {}).get("message"))
    if not text or len(text) > _MESSAGE_BYTES:
        return None
    try:
        return outcome_from_message(text)
    except (InvalidRequestError, SpecVersionError):
        return None


def is_damaged(pod: PodFacts) -> bool:
    """Return whether the message is a runner's report that cannot be read, not the end of a log."""
    text = _text((pod.terminated or {}).get("message"))
    return text.startswith("{") and '"exit_code":' in text and read_message(pod) is None


def hides_failure(pod: PodFacts) -> bool:
    """Return whether a pod that counts as succeeded did not succeed.

    Its runner reported a failure, or its container left with 0 only because it was told to end:
    another program determined the exit code of the container.
    """
    if pod.terminated is None or pod.phase == "Failed":
        return False
    report = read_message(pod)
    if report is not None:
        return report.outcome.exit_code != 0
    notice = pod.told_to_end if pod.disruption is None else pod.disruption.time
    if notice is None or pod.finished_at is None:
        return pod.disrupted or notice is not None
    return pod.finished_at >= notice  # times are whole seconds


def judge(pod: PodFacts) -> Verdict:
    """Return why a pod failed."""
    end = pod.terminated
    if end is None:
        return _without_container(pod)
    report = read_message(pod)
    outcome = None if report is None else report.outcome
    code = end.get("exitCode")
    exit_code = code if type(code) is int and 0 <= code <= 255 else None
    started, finished = parse_time(end.get("startedAt")), parse_time(end.get("finishedAt"))
    native = _text(end.get("reason"))
    number = end.get("signal")
    name = outcome.signal if outcome is not None else _signal_name(number, exit_code)

    def end_with(reason: Reason, message: str, exit_code: int | None = exit_code) -> Verdict:
        return Verdict(reason, exit_code, name, message, started, finished)

    if native == "OOMKilled":
        return end_with(Reason.OOM, "it ran out of memory (OOMKilled)")
    if native in _NOT_STARTED:
        message = redact_and_cut(_text(end.get("message")) or native, _MESSAGE_BYTES)
        return end_with(Reason.START_FAILED, message)
    if pod.reason == "DeadlineExceeded":
        return end_with(Reason.TIMEOUT, pod.message or "it passed its deadline")
    if pod.disrupted or pod.reason == "Evicted":
        left = ": its container left with code 0 when it was told to end" if exit_code == 0 else ""
        return end_with(Reason.EVICTED, taken_away(pod) + left, exit_code or None)
    if outcome is not None:
        aside = outcome.reason in {Reason.CANCEL_REQUESTED, Reason.COMPLETED}
        reason = Reason.ERROR if aside else outcome.reason
        exit_code = exit_code or outcome.exit_code  # the container's 0 may be another program's
        message = outcome.error or f"it exited with code {exit_code}"
        return end_with(reason, message, exit_code)
    how = f"it was ended by {name}" if name else f"it exited with code {exit_code}"
    # Secrets are removed before the cut, since the part that is cut off may be the beginning of
    # one.
    log = redact_text(_text(end.get("message")))[-_SHOWN:]
    if is_damaged(pod):
        log = "what its runner reported cannot be read"
    return end_with(Reason.ERROR, f"{how}: {log}" if log else how)


def taken_away(pod: PodFacts) -> str:
    """Return which part of the platform took a pod away, in the cluster's words."""
    if pod.message or pod.disruption is None:
        return pod.message or "it was evicted"
    words = (pod.disruption.reason, pod.disruption.message)
    return ": ".join(word for word in words if word) or "it was evicted"


def _without_container(pod: PodFacts) -> Verdict:
    """Return the end of a pod that failed as a whole, without a report of its container's end."""
    message = (
        pod.message
        or (taken_away(pod) if pod.disrupted else pod.reason)
        or "its pod failed, and its container's end is not known"
    )
    if pod.reason == "DeadlineExceeded":
        reason = Reason.TIMEOUT
    elif pod.reason == "Evicted" or pod.disrupted:
        reason = Reason.EVICTED
    else:
        reason = Reason.PLATFORM
    return Verdict(reason, None, None, message, None, None)


def _signal_name(number: object, exit_code: int | None) -> str | None:
    """Return the signal of a container whose runner could not report.

    As the first process of the container, the runner exits with 128 + n.
    """
    if type(number) is not int or not 0 < number < 128:
        number = exit_code - 128 if exit_code is not None and 128 < exit_code < 160 else 0
    return signal_name(number) if number else None


def _text(value: object) -> str:
    return value.strip() if isinstance(value, str) else ""


def native(job: JobFacts, pod: PodFacts | None) -> str:
    """Return the words of a Job and one of its pods."""
    decided = next(
        (c for c in ("Failed", "Complete", "FailureTarget", "Suspended") if c in job.conditions),
        "active",
    )
    condition = job.conditions.get(decided)
    text = f"Job {decided}" + (f" ({condition.reason})" if condition is not None else "")
    return f"{text}; {native_end(pod)}"


def native_end(pod: PodFacts | None) -> str:
    """Return the words of a pod, which may be gone."""
    if pod is None:
        return "no pod"
    word = pod.terminated.get("reason") if pod.terminated is not None else (pod.waiting or ("",))[0]
    shown = redact_and_cut(str(word or ""), _REASON_SHOWN)
    return f"pod {pod.name} {pod.phase}" + (f" ({shown})" if shown else "")
