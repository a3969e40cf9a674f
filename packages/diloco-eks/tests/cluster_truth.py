"""What is true of a replica, from its Job and pods in the API; written anew for the tests."""

from diloco_conformance import Resources, Truth

UNITS = {"m": 0.001, "Mi": 2**20, "Gi": 2**30}
MODEL, CAPACITY = "karpenter.k8s.aws/instance-gpu-name", "karpenter.sh/capacity-type"


def indexes(text):
    """``"0,2-4"`` as numbers."""
    ranges = [part.split("-") for part in (text or "").split(",") if part]
    return {number for bounds in ranges for number in range(int(bounds[0]), int(bounds[-1]) + 1)}


def index_of(handle):
    """The index of a replica in its Job."""
    return handle.rank - int(handle.metadata["first_rank"])


def condition(job, kind):
    """A condition that holds."""
    found = job["status"].get("conditions") or []
    return next(
        (entry for entry in found if entry["type"] == kind and entry["status"] == "True"), None
    )


def of_handle(job, handle):
    """The Job that a handle names: not one of the same name that was created later."""
    uid = handle.metadata["job_uid"]
    return job if job is not None and uid in {"", job["metadata"]["uid"]} else None


def end_of(pod):
    """What a pod's records say of how its program ended."""
    statuses = (pod or {}).get("status", {}).get("containerStatuses") or []
    ends = [status["state"]["terminated"] for status in statuses if "terminated" in status["state"]]
    if not ends:
        return {}
    return {"exit_code": ends[0]["exitCode"], "out_of_memory": ends[0].get("reason") == "OOMKilled"}


def truth_of(job, pod, index, attempt, *, started):
    """The truth about an index.

    Args:
        job: The Job; None if there is none.
        pod: Its newest pod; None if there is none.
        index: Which one.
        attempt: Its attempt.
        started: Whether this attempt has run.
    """
    if job is None:
        return Truth(None, alive=False)
    alive = pod is not None and pod["status"]["phase"] in {"Pending", "Running"}
    if index in indexes(job["status"].get("completedIndexes")):
        return Truth("succeeded", alive=alive, attempt=attempt)
    if index in indexes(job["status"].get("failedIndexes")):
        return Truth("failed", alive=alive, attempt=attempt, **end_of(pod))
    over = condition(job, "Failed")
    if over is not None and not alive:
        # Nobody sets a deadline on a running Job but who cancels it; its own is hours away.
        state = "cancelled" if over["reason"] == "DeadlineExceeded" else "failed"
        return Truth(state, alive=False, attempt=attempt)
    cancelled = "diloco.dev/cancelled" in (job["metadata"].get("annotations") or {})
    stopping = cancelled or condition(job, "FailureTarget") is not None
    if stopping and started:
        # Its pod may be gone before the Job says that it is over.
        return Truth("running", alive=alive, attempt=attempt, stopping=True)
    states = (
        [entry["state"] for entry in (pod["status"].get("containerStatuses") or [])]
        if alive
        else []
    )
    running = any("running" in state for state in states)
    return Truth(
        "running" if running else "pending", alive=True, attempt=attempt, stopping=stopping
    )


def lives_of(job, pods):
    """How many replicas of a Job cost money."""
    if condition(job, "Failed") is not None:
        return sum(pod["status"]["phase"] in {"Pending", "Running"} for pod in pods)
    ended = indexes(job["status"].get("completedIndexes")) | indexes(
        job["status"].get("failedIndexes")
    )
    return job["spec"]["completions"] - len(ended)


def amount(text):
    """``"500m"`` or ``"3Gi"`` as a number."""
    unit = next((unit for unit in UNITS if text.endswith(unit)), "")
    return float(text.removesuffix(unit)) * UNITS.get(unit, 1)


def resources_of(pod):
    """What a pod asks for, in the words of a launch: what it requires of its node and resources."""
    asked = pod["spec"]["containers"][0]["resources"]["requests"]
    node = pod["spec"].get("affinity", {}).get("nodeAffinity", {})
    required = node.get("requiredDuringSchedulingIgnoredDuringExecution", {})
    terms = [
        {one["key"]: (one["operator"], *one["values"]) for one in term["matchExpressions"]}
        for term in required.get("nodeSelectorTerms", [])
    ]
    spot = {term[CAPACITY] for term in terms if CAPACITY in term}
    models = {term[MODEL][1] for term in terms if MODEL in term}
    count = asked.get("nvidia.com/gpu")
    return Resources(
        cpu=amount(asked["cpu"]),
        memory=int(amount(asked["memory"])),
        gpu=None if count is None else f"{models.pop() if models else 'any'}:{count}",
        spot=None if not spot else spot == {("In", "spot")},
    )
