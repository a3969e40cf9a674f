"""The one request of a launch: an Indexed Job.

It is a plain dict, which every version of the client accepts.
"""

from __future__ import annotations

import hashlib
import json
import math
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from diloco_protocol import InvalidRequestError
from diloco_protocol.backend import FINAL_CODE, RUNNER, is_reserved

from ..__about__ import __version__
from . import _names as names
from ._environment import container_environment, runner_arguments, spec_variables
from ._gpus import PlacedGpus, node_affinity, place_gpus
from ._overlay import apply_overlay
from ._pod import shape_pod
from ._pod_options import CODE_PATH
from ._quantities import check_bytes, check_cpu

if TYPE_CHECKING:
    from diloco_protocol import ReplicaSpec, RunRequest

    from ._options import EKSOptions

MESSAGE_PATH = "/dev/termination-log"
# An object must fit into etcd, and every pod repeats its template.
_MOST_BYTES = 1_000_000


def job_manifest(
    request: RunRequest, options: EKSOptions, *, shown: bool = False
) -> dict[str, Any]:
    """Return the Job of a run. Equal arguments give equal manifests.

    The Job is Indexed, and starts all pods at once. Every index has its own restarts, so the Job
    names the one that failed. A disruption is not a failure, and a replica that was replaced is not
    started again. The deadline is a backstop in case the runner's own timeout fails.
    https://kubernetes.io/docs/concepts/workloads/controllers/job/

    Args:
        request: The launch.
        options: The executor's options.
        shown: Whether to leave secrets out of the encoded parts, for a plan.

    Raises:
        InvalidRequestError: The cluster cannot do what the request asks for; the error says what
            that is and what is allowed.
    """
    count = len(request.ranks)
    name = names.job_name(request.run_id, count)
    labels = _labels(request, options)
    template = apply_overlay(_template(request, options, labels, shown), options.pod_overlay)
    spec: dict[str, Any] = {
        "completionMode": "Indexed",
        "completions": count,
        "parallelism": count,
        "backoffLimitPerIndex": request.max_restarts,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {
            "rules": [
                {
                    "action": "Ignore",
                    "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
                },
                {
                    "action": "FailIndex",
                    "onExitCodes": {
                        "containerName": names.CONTAINER,
                        "operator": "In",
                        "values": [FINAL_CODE],
                    },
                },
            ]
        },
        "template": template,
    }
    if options.on_replica_failure == "fail_run":
        spec["maxFailedIndexes"] = 0
    if options.ttl_seconds_after_finished is not None:
        spec["ttlSecondsAfterFinished"] = options.ttl_seconds_after_finished
    deadline = deadline_seconds(request, options)
    if deadline is not None:
        spec["activeDeadlineSeconds"] = deadline
    annotations = {
        **(options.annotations or {}),
        names.WORLD_SIZE: str(request.world_size),
        names.FIRST_RANK: str(request.ranks[0]),
        names.ENTRYPOINT: request.entrypoint,
    }
    if request.timeout is not None:
        annotations[names.TIMEOUT] = str(request.timeout)
    manifest: dict[str, Any] = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": name,
            "namespace": options.namespace or names.DEFAULT,
            "labels": {**labels, **({names.QUEUE: options.queue} if options.queue else {})},
            "annotations": annotations,
        },
        "spec": spec,
    }
    annotations[names.FINGERPRINT] = _fingerprint(manifest, request.specs(grace=options.grace)[0])
    try:
        size = len(json.dumps(manifest, ensure_ascii=False, allow_nan=False).encode())
    except ValueError as error:  # half of a surrogate pair, in one of the texts
        raise InvalidRequestError(f"the Job cannot be written as JSON: {error}") from None
    if size > _MOST_BYTES:
        raise InvalidRequestError(
            f"the Job would be {size} bytes; a cluster keeps objects of up to {_MOST_BYTES}: put "
            "large arguments into the store and pass their address"
        )
    return manifest


def deadline_seconds(request: RunRequest, options: EKSOptions) -> int | None:
    """Return after how many seconds the cluster itself ends the Job, in case its runners fail to.

    The seconds count from the Job's start, including the wait for nodes. None for no deadline.
    """
    if request.timeout is None or options.pending_timeout is None:
        return None
    seconds = options.pending_timeout + request.timeout * (1 + request.max_restarts)
    return math.ceil(min(seconds, 2**31 - 1))


def _fingerprint(manifest: Mapping[str, Any], spec: ReplicaSpec) -> str:
    """Return a digest of everything on which two launches of one run_id must agree.

    Our own version is left out.
    """
    agreed = json.loads(json.dumps(manifest))
    container = agreed["spec"]["template"]["spec"]["containers"][0]
    # The encoded spec also depends on the order in which the keys of the arguments were written,
    # which has no meaning.
    container["env"] = [entry for entry in container["env"] if not is_reserved(entry["name"])]
    text = json.dumps([agreed, spec.to_dict()], sort_keys=True)
    text = text.replace(f'"{names.VERSION}": "{__version__}"', "")
    return hashlib.sha256(text.encode()).hexdigest()


def _labels(request: RunRequest, options: EKSOptions) -> dict[str, str]:
    owner = {names.OWNER: options.owner} if options.owner else {}
    return {
        **(options.labels or {}),
        **names.check_labels("labels", request.labels),
        **owner,
        names.APPLICATION: "diloco",
        names.MANAGED_BY: names.MANAGER,
        names.VERSION: __version__,
        names.RUN: request.run_id,
        names.COHORT: request.cohort,
    }


def _template(
    request: RunRequest, options: EKSOptions, labels: Mapping[str, str], shown: bool
) -> dict[str, Any]:
    gpu = place_gpus(request.gpu) if request.gpu is not None else None
    if gpu is not None and options.runtime_class_name is not None:
        warnings.warn(
            f"runtime_class_name={options.runtime_class_name!r} together with GPUs: gVisor and "
            "Kata pass only some GPUs through; check that the class does",
            UserWarning,
            stacklevel=2,
        )
    spec = spec_variables(request.specs(grace=options.grace)[0], shown=shown)
    container: dict[str, Any] = {
        "name": names.CONTAINER,
        "image": options.image,
        "command": list(options.command or RUNNER),
        "args": runner_arguments(MESSAGE_PATH, spec),
        "env": container_environment(spec, _with_code(request, options), request.secrets),
        "resources": _resources(request, options, gpu),
        "terminationMessagePath": MESSAGE_PATH,
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        # The runner ends its tree within the grace; the kubelet's own grace is a little longer.
        "terminationGracePeriodSeconds": math.ceil(options.grace) + 5,
        # Replicas do not talk to the cluster; IRSA and Pod Identity bring their own tokens.
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "containers": [container],
    }
    affinity = node_affinity(
        {} if gpu is None else gpu.places,
        spot=request.spot,
        chosen=options.node_selector or {},
        reservation=options.capacity_reservation,
    )
    tolerations = [dict(toleration) for toleration in options.tolerations or ()]
    if gpu is not None:
        gpu_toleration = {
            "key": gpu.resource or options.gpu_resource_key,
            "operator": "Exists",
            "effect": "NoSchedule",
        }
        tolerations += [gpu_toleration] if gpu_toleration not in tolerations else []
    chosen = {
        "serviceAccountName": options.service_account_name,
        "runtimeClassName": options.runtime_class_name,
        "priorityClassName": options.priority_class_name,
        "nodeSelector": dict(options.node_selector or {}),
        "imagePullSecrets": [{"name": name} for name in options.image_pull_secrets or ()],
        "affinity": affinity,
        "tolerations": tolerations,
    }
    pod |= {name: value for name, value in chosen.items() if value}
    shape_pod(pod, options, labels, 0 if gpu is None else gpu.count)
    return {
        "metadata": {
            "labels": dict(labels),
            "annotations": {"karpenter.sh/do-not-disrupt": "true"},
        },
        "spec": pod,
    }


def _resources(
    request: RunRequest, options: EKSOptions, gpu: PlacedGpus | None
) -> dict[str, dict[str, str]]:
    amounts = {
        "cpu": check_cpu("cpu", request.cpu if request.cpu is not None else options.cpu_request),
        "memory": check_bytes(
            "memory", request.memory if request.memory is not None else options.memory_request
        ),
    }
    if options.ephemeral_storage is not None:
        amounts["ephemeral-storage"] = options.ephemeral_storage
    if gpu is not None:
        amounts[gpu.resource or options.gpu_resource_key] = str(gpu.count)
    if options.efa:
        amounts["vpc.amazonaws.com/efa"] = str(options.efa)
    limits = dict(amounts)
    if options.cpu_limit is None:
        del limits["cpu"]
    elif options.cpu_limit != "request":
        limits["cpu"] = options.cpu_limit
    return {"requests": amounts, "limits": limits}


def _with_code(request: RunRequest, options: EKSOptions) -> dict[str, str]:
    env = dict(request.env)
    if options.code is None:
        return env
    if "PYTHONPATH" in request.secrets:
        raise InvalidRequestError(
            f"secrets sets PYTHONPATH, and replicas would not find code={options.code!r}: give "
            "that path in env="
        )
    path = f"{CODE_PATH}:{env['PYTHONPATH']}" if env.get("PYTHONPATH") else CODE_PATH
    return {**env, "PYTHONPATH": path}
