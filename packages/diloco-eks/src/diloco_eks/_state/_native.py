"""The cluster's own words for the state of a replica."""

from __future__ import annotations

from diloco_protocol.backend import redact_and_cut

from ._facts import JobFacts, PodFacts

_SHOWN = 128  # characters of a reason; Kubernetes' own reasons are shorter


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
    shown = redact_and_cut(str(word or ""), _SHOWN)
    return f"pod {pod.name} {pod.phase}" + (f" ({shown})" if shown else "")
