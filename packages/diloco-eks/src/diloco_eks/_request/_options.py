"""The options of an executor: its arguments, checked once."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal, cast

from diloco_protocol import Backoff, InvalidRequestError, RunJournal
from diloco_protocol.backend import (
    RUNNER,
    Options,
    check_backoff,
    check_callable,
    check_command,
    check_flag,
    check_journal,
    check_json,
    check_names,
    check_path,
    check_restarts,
    check_run_prefix,
    check_seconds,
    check_text,
    check_texts,
    check_variables,
    check_whole,
    details,
    one_of,
    option,
    or_none,
    seconds,
    shown,
    text_like,
    whole,
)

from ._names import check_dns_label, check_key, check_label_value, check_labels, check_object_name
from ._overlay import check_overlay
from ._pod_options import check_mounts, check_pull_secrets
from ._quantities import check_bytes, check_cpu
from ._shape import misfit

_DAY = 86_400
_OWN = "one of the executor's own"


def _check_api(name: str, value: object) -> Any:
    # It is of whichever class the caller's client has.
    call = {"batch_api": "create_namespaced_job", "core_api": "list_namespaced_pod"}[name]
    if isinstance(value, type) or not (hasattr(value, "api_client") and hasattr(value, call)):
        raise InvalidRequestError(
            f"{name} must be an API of the package kubernetes that has {call}, not a value of type "
            f"{type(value).__name__}"
        )
    return value


_check_image = text_like("[!-~]+", "the name of a container image")


def _check_node_selector(name: str, values: object) -> dict[str, str]:
    selector = check_texts(name, values)
    for key, value in selector.items():
        check_key(name, key)
        if value != "":
            check_label_value(f"{name}[{key!r}]", value)
    return selector


def _check_resource(name: str, value: object) -> str:
    # Without a prefix it would be one that Kubernetes has itself, such as cpu.
    if "/" not in (key := check_key(name, value)):
        raise InvalidRequestError(
            f"{name} must be the name of an extended resource with its prefix, such as "
            f"'nvidia.com/gpu', not {shown(key)}"
        )
    return key


def _check_labels(name: str, values: object) -> dict[str, str]:
    return check_labels(name, check_texts(name, values))


def _check_annotations(name: str, values: object) -> dict[str, str]:
    annotations = check_texts(name, values)
    for key in annotations:
        check_key(name, key)
        if key.startswith("diloco.dev/"):
            raise InvalidRequestError(f"{name} may not set {key}: the launch sets it")
    return annotations


def _check_tolerations(name: str, value: object) -> tuple[dict[str, Any], ...]:
    fields = dict.fromkeys(("key", "operator", "value", "effect"), str)
    value = list(value) if isinstance(value, tuple) else value
    if wrong := misfit(value, [{**fields, "tolerationSeconds": int}], name):
        raise InvalidRequestError(wrong)
    check_json(value, name)
    return tuple(copy.deepcopy(cast("list[dict[str, Any]]", value)))


def _check_namespaces(name: str, value: object) -> tuple[str, ...]:
    return tuple(check_dns_label(name, namespace) for namespace in check_names(name, value))


def _check_ttl(name: str, value: object) -> int | None:
    # With a shorter time, a caller that waits for a run may find nothing of it any more.
    return check_whole(name, value, 60, 2**31 - 1, none=True)


def _check_cpu_limit(name: str, value: object) -> str:
    return "request" if value == "request" else check_cpu(name, value)


_check_reservation = text_like(
    "cr-[0-9a-f]+|block",
    "the id of a capacity reservation such as 'cr-0123456789abcdef0', or 'block'",
)


@dataclass(frozen=True, eq=False, repr=False)
class EKSOptions(Options):
    """The options of an :class:`EKSExecutor`: its constructor's arguments, checked. Immutable.

    Attributes:
        image: The replicas' container image.
        namespace: The namespace in which runs are launched and looked for; the executor determines
            it when it is first needed.
        other_namespaces: Other namespaces whose runs this executor may look at, end and remove by
            their handles.
        service_account_name: The service account of the pods, which carries their AWS role (IRSA or
            Pod Identity). It must exist.
        node_selector: Node selector of the pods. If it names a GPU model, an instance type or a
            capacity type (that of ``spot=``), the executor adds no node affinity of its own for
            that.
        tolerations: Tolerations of the pods; the one for GPU nodes is added.
        runtime_class_name: RuntimeClass of the pods (gVisor, Kata and the like); together with GPUs
            it causes a warning.
        command: The command that starts the runner; the runner's own arguments are appended.
        cpu_request: CPU of a replica if the launch does not say; both request and limit.
        memory_request: Memory of a replica if the launch does not say; both request and limit.
        ttl_seconds_after_finished: Seconds for which a run can be queried after its end, at least
            60; None: until it is deleted. Later only the journal knows how it ended, and executors
            that saw it.
        backoff_limit: Restarts of a failed replica if the launch does not say (``max_restarts``).
        gpu_resource_key: The extended resource that counts GPUs.
        run_id: Prefix of the names of runs that the caller does not name.
        batch_api: A ``kubernetes.client.BatchV1Api`` to use in place of ``context`` and
            ``kubeconfig``.
        core_api: A ``kubernetes.client.CoreV1Api`` to use with it.
        context: Name of the kubeconfig's context.
        kubeconfig: The kubeconfig file.
        env: Environment variables for every launch; those of the launch itself take precedence.
        labels: Labels of Jobs and pods.
        annotations: Annotations of Jobs; any text.
        owner: Value of the label ``diloco.dev/owner``.
        on_replica_failure: ``fail_run``: one replica that has failed for good ends the run.
            ``continue``: the others continue, for elastic membership.
        pending_timeout: Seconds that waiting for nodes and images may add to a run before the
            cluster ends it; together with ``timeout`` it determines the Job's deadline. None: there
            are only the runners' deadlines.
        grace: Seconds between SIGTERM and SIGKILL.
        queue: Name of Kueue's local queue.
        ephemeral_storage: Local disk of a replica, such as ``100Gi``.
        shm_size: Size of ``/dev/shm``, such as ``8Gi``; counts as memory. With several GPUs it is
            as large as the memory if left out.
        efa: Number of EFA devices of a replica.
        cpu_limit: CPU limit of a replica: ``request`` for as much as it requests, an amount, or
            None for no limit, so that it may use idle CPUs of its node.
        priority_class_name: PriorityClass of the pods. It must exist.
        image_pull_secrets: Names of Secrets with the credentials of the image's registry.
        mounts: Path → ``pvc/NAME`` (FSx, EFS and EBS too, by a claim of their driver),
            ``configmap/NAME`` or ``secret/NAME``, with ``:ro`` behind it for read-only.
        code: Name of a ConfigMap with Python modules, which replicas can import.
        topology: ``one_zone``: all replicas in one zone, whichever it is; ``spread_zones`` or
            ``spread_nodes``: as evenly as possible. None: wherever there is room.
        capacity_reservation: Id of a capacity reservation (``cr-…``; Karpenter's nodes), or
            ``block`` for capacity blocks.
        restricted: Whether pods comply with the Pod Security Standard "restricted": user 1000, no
            privileges. The image must allow that.
        pod_overlay: A pod template that is merged over the executor's own by name (volumes, pull
            secrets, security context and so on).
        request_timeout: Seconds for a connection to the cluster, and between two pieces of an
            answer.
        retry_timeout: Seconds for which calls are tried again while the cluster throttles, fails,
            cannot be reached, or refuses the credentials; ``collect`` has its own timeout.
        journal: A journal that records launches and ends for longer than the cluster keeps them.
        backoff: Delays of ``collect`` and between tries, with their clock and sleep.
        clock: Returns the time in Unix seconds; for tests.

    Raises:
        InvalidRequestError: A value is not allowed; the error says what was given and what is
            allowed.
    """

    image: str = field(metadata=details(check=_check_image))
    _: KW_ONLY
    namespace: str | None = option(
        None, check=check_dns_label, shown="the context's, else `default`"
    )
    other_namespaces: Sequence[str] = option((), check=_check_namespaces, shown="none")
    service_account_name: str | None = option(
        None, check=check_object_name, shown="the namespace's default"
    )
    node_selector: Mapping[str, str] | None = option(None, check=_check_node_selector)
    tolerations: Sequence[Mapping[str, Any]] | None = option(None, check=_check_tolerations)
    runtime_class_name: str | None = option(None, check=check_object_name)
    command: Sequence[str] | None = option(None, check=check_command, shown=" ".join(RUNNER))
    cpu_request: str = option("4", check=check_cpu, type="quantity")
    memory_request: str = option("16Gi", check=check_bytes, type="quantity")
    ttl_seconds_after_finished: int | None = option(3600, check=_check_ttl)
    backoff_limit: int = option(0, check=check_restarts)
    gpu_resource_key: str = option("nvidia.com/gpu", check=_check_resource)
    run_id: str | None = option(None, check=check_run_prefix, shown="run")
    batch_api: Any = option(None, check=_check_api, type="BatchV1Api", shown=_OWN)
    core_api: Any = option(None, check=_check_api, type="CoreV1Api", shown=_OWN)
    context: str | None = option(None, check=check_text, shown="the current one")
    kubeconfig: str | os.PathLike[str] | None = option(
        None,
        check=check_path,
        shown="`$KUBECONFIG`, else the pod's own account in a cluster, else `~/.kube/config`",
    )
    env: Mapping[str, str] | None = option(None, check=check_variables)
    labels: Mapping[str, str] | None = option(None, check=_check_labels)
    annotations: Mapping[str, str] | None = option(None, check=_check_annotations)
    owner: str | None = option(None, check=check_label_value)
    on_replica_failure: Literal["fail_run", "continue"] = option(
        "fail_run", check=one_of("fail_run", "continue")
    )
    pending_timeout: float | None = option(3600, check=or_none(check_seconds))
    grace: float = option(10.0, check=seconds(_DAY))
    queue: str | None = option(None, check=check_label_value)
    ephemeral_storage: str | None = option(None, check=check_bytes, type="quantity")
    shm_size: str | None = option(None, check=check_bytes, type="quantity")
    efa: int = option(0, check=whole(0, 64))
    cpu_limit: str | None = option(
        "request", check=or_none(_check_cpu_limit), type="quantity or `request`"
    )
    priority_class_name: str | None = option(None, check=check_object_name)
    image_pull_secrets: Sequence[str] | None = option(None, check=check_pull_secrets)
    mounts: Mapping[str, str] | None = option(None, check=check_mounts)
    code: str | None = option(None, check=check_object_name)
    topology: Literal["one_zone", "spread_zones", "spread_nodes"] | None = option(
        None, check=one_of("one_zone", "spread_zones", "spread_nodes")
    )
    capacity_reservation: str | None = option(None, check=_check_reservation)
    restricted: bool = option(False, check=check_flag)
    pod_overlay: Mapping[str, Any] | None = option(None, check=check_overlay, type="pod template")
    request_timeout: float = option(30.0, check=seconds(_DAY))
    retry_timeout: float = option(30.0, check=seconds(_DAY))
    journal: RunJournal | None = option(None, check=check_journal)
    backoff: Backoff | None = option(None, check=check_backoff, shown="1 s to 15 s")
    clock: Callable[[], float] = option(time.time, check=check_callable, hidden=True)
