"""The end that a replica had reached by itself when its run was ended because of another one."""

from __future__ import annotations

import json
from dataclasses import replace

from diloco_protocol import Reason
from diloco_protocol.backend import redact_and_cut

from ._facts import JobFacts, PodFacts
from ._verdict import Verdict, judge, read_message
from ._whose_end import ended_by_itself

_SHOWN = 500


def own_end(pod: PodFacts | None, job: JobFacts) -> Verdict | None:
    """Return a replica's own failure, which the controller did not count.

    The controller was ending the run already.

    Args:
        pod: The replica's last pod, as it was last seen.
        job: The replica's Job, which has failed.

    Returns:
        The failure, or None if the replica had not failed by itself, or if that is not known.
    """
    if pod is None or pod.disrupted:
        return None
    verdict = judge(pod) if pod.terminated is not None else None
    if verdict is not None and verdict.reason is Reason.TIMEOUT:
        return verdict
    started, decided = pod.started_at, job.decided_at
    if ended_by_itself(pod, decided) and verdict is not None:
        return verdict if verdict.exit_code else None
    if job.timeout is None or started is None or decided is None:
        return None
    base = verdict or Verdict(Reason.TIMEOUT, None, None, "", started, decided)
    ended = decided if base.finished_at is None else min(decided, base.finished_at)
    if started + job.timeout > ended:
        return None
    message = (
        f"it ran for longer than its timeout of {job.timeout:g} s; the end of another rank came "
        "before its own was counted"
    )
    return replace(base, reason=Reason.TIMEOUT, message=message)


def uncounted_success(pod: PodFacts | None, job: JobFacts) -> str:
    """Return text for the message of a replica that succeeded too late to be counted.

    It is empty for all others.
    """
    if pod is None or pod.terminated is None or not ended_by_itself(pod, job.decided_at):
        return ""
    report = read_message(pod)
    if pod.terminated.get("exitCode") != 0 or report is None or report.outcome.exit_code != 0:
        return ""
    text = (
        "; its own program had ended with exit code 0 before, which the cluster had not counted yet"
    )
    if report.result_lines:
        return f"{text}, and its result went with its log"
    return f"{text}, and returned {redact_and_cut(json.dumps(report.outcome.result), _SHOWN)}"
