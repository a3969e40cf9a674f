"""What the cluster itself calls the state of a replica."""

from __future__ import annotations

from ._facts import JobFacts, PodFacts


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
    """Return the words of a pod; it may be gone."""
    if pod is None:
        return "no pod"
    word = pod.terminated.get("reason") if pod.terminated is not None else (pod.waiting or ("",))[0]
    return f"pod {pod.name} {pod.phase}" + (f" ({word})" if word else "")
