"""What is true of a replica, from DescribeTrainingJob's answer; written anew for the tests."""

import re

from diloco_conformance import Resources, Truth

GPUS = {
    "ml.g6.xlarge": "L4:1",
    "ml.p5.48xlarge": "H100:8",
    "ml.g5.12xlarge": "A10G:4",
    "ml.g5.2xlarge": "any:1",
    "ml.m5.xlarge": None,
}
ENDS = {"Completed": "succeeded", "Failed": "failed", "Stopped": "cancelled"}


def of_handle(job, handle):
    """The job that a handle names: not one of the same name that was created later."""
    if job is None:
        return None
    created = handle.metadata["created"]
    if created.startswith("launch-"):
        strings, (told, _, at) = job.get("HyperParameters", {}), created.partition("@")
        ours = f"launch-{strings.get('DILOCO_FINGERPRINT', '')[:16]}"
        if not at:
            return job if created == f"{ours}-{strings.get('DILOCO_LAUNCH')}" else None
        if told != ours:
            return None
        created = at
    # boto3 rounds to microseconds before the executor rounds to milliseconds, so that the two may
    # differ by one.
    return job if abs(int(created) - job["CreationTime"] * 1000) <= 1 else None


def attempt_of(job):
    """One more than how often it was interrupted."""
    history = [entry["Status"] for entry in job["SecondaryStatusTransitions"]]
    return 1 + sum(status in {"Interrupted", "Restarting"} for status in history)


def truth_of(job):
    """The truth about a job; None: there is none."""
    if job is None:
        return Truth(None, alive=False)
    attempt, status, secondary = attempt_of(job), job["TrainingJobStatus"], job["SecondaryStatus"]
    if status == "Deleting":  # it is what it was
        status = secondary if secondary in ENDS else "Stopped"
    if status in ENDS:
        if status == "Stopped" and secondary != "Stopped":
            return Truth("failed", alive=False, attempt=attempt)
        if status == "Failed":
            code = re.search(r"exit code: (\d+)$", job["FailureReason"])
            memory = bool(re.match("ClientError: .* with more memory", job["FailureReason"]))
            return Truth(
                "failed",
                alive=False,
                attempt=attempt,
                exit_code=137 if memory else int(code[1]) if code else None,
                out_of_memory=memory,
            )
        return Truth(ENDS[status], alive=False, attempt=attempt)
    history = [entry["Status"] for entry in job["SecondaryStatusTransitions"]]
    for again in ("Interrupted", "Restarting"):
        if again in history:
            history = history[len(history) - history[::-1].index(again) :]
    state = "running" if "Training" in history else "pending"
    return Truth(state, alive=True, attempt=attempt, stopping=status == "Stopping")


def resources_of(job):
    """What was asked for, in the words of a launch."""
    return Resources(
        gpu=GPUS[job["ResourceConfig"]["InstanceType"]], spot=job["EnableManagedSpotTraining"]
    )
