"""The part of the Pod Security Standards that launchers meet.

https://kubernetes.io/docs/concepts/security/pod-security-standards/; the messages are those of the
server.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from .._objects._refusals import AdmissionError

Json = dict[str, Any]

_PREFIX = "pod-security.kubernetes.io/"
_CAPABILITIES = (
    "AUDIT_WRITE CHOWN DAC_OVERRIDE FOWNER FSETID KILL MKNOD NET_BIND_SERVICE SETFCAP SETGID "
    "SETPCAP SETUID SYS_CHROOT"
)
_VOLUMES = (
    "configMap csi downwardAPI emptyDir ephemeral persistentVolumeClaim projected secret name"
)


def level(labels: Mapping[str, str], mode: str) -> str | None:
    """Return ``baseline:latest`` or ``restricted:latest``, if a namespace has such a label.

    The label is the one for the mode: enforce, warn or audit.
    """
    name = labels.get(f"{_PREFIX}{mode}", "privileged")
    if name not in ("baseline", "restricted"):
        return None
    return f"{name}:{labels.get(f'{_PREFIX}{mode}-version', 'latest')}"


def check(wanted: str, spec: Json) -> None:
    """Refuse a pod that does not comply.

    Raises:
        AdmissionError: with everything that is wrong.
    """
    words = problems(wanted, spec)
    if words:
        raise AdmissionError(words.replace("violate ", "violates ", 1))


def problems(wanted: str, spec: Json) -> str:
    """Return what is wrong with a pod, from ``violate PodSecurity`` on; empty if it complies."""
    violations = list(_baseline(spec))
    if wanted.startswith("restricted"):
        violations += _restricted(spec)
    return f'violate PodSecurity "{wanted}": {", ".join(violations)}' if violations else ""


def _baseline(spec: Json) -> Iterator[str]:
    shared = [f"{field}=true" for field in ("hostNetwork", "hostPID", "hostIPC") if spec.get(field)]
    if shared:
        yield f"host namespaces ({', '.join(shared)})"
    containers = _containers(spec)
    if names := [name for name, context in containers if context.get("privileged")]:
        yield f"privileged ({_named(names)} must not set securityContext.privileged=true)"
    for name, context in containers:
        added = (context.get("capabilities") or {}).get("add") or []
        if odd := [capability for capability in added if capability not in _CAPABILITIES.split()]:
            listed = ", ".join(f'"{capability}"' for capability in odd)
            yield (
                f"non-default capabilities ({_named([name])} must not include {listed} in "
                "securityContext.capabilities.add)"
            )
    if names := [volume["name"] for volume in spec.get("volumes") or [] if "hostPath" in volume]:
        yield f"hostPath volumes ({_named(names, 'volume')})"


def _restricted(spec: Json) -> Iterator[str]:
    of_pod, contexts = spec.get("securityContext") or {}, _containers(spec)
    for volume in spec.get("volumes") or []:
        if odd := sorted(volume.keys() - set(_VOLUMES.split())):
            kind = f'uses restricted volume type "{odd[0]}"'
            yield f'restricted volume types (volume "{volume["name"]}" {kind})'
    for words, who, field, complies in _RESTRICTIONS:
        if names := [name for name, context in contexts if not complies({**of_pod, **context})]:
            yield f"{words} ({who}{_named(names)} must set securityContext.{field})"
    if of_pod.get("runAsUser") == 0:
        yield "runAsUser=0 (pod must not set runAsUser=0)"


# What is wrong, who may set it beside the containers, what is to be set, and whether a container's
# security context, with what it takes over from the pod's, complies.
_RESTRICTIONS: tuple[tuple[str, str, str, Callable[[Json], bool]], ...] = (
    (
        "allowPrivilegeEscalation != false",
        "",
        "allowPrivilegeEscalation=false",
        lambda context: context.get("allowPrivilegeEscalation") is False,
    ),
    (
        "unrestricted capabilities",
        "",
        'capabilities.drop=["ALL"]',
        lambda context: "ALL" in ((context.get("capabilities") or {}).get("drop") or []),
    ),
    (
        "runAsNonRoot != true",
        "pod or ",
        "runAsNonRoot=true",
        lambda context: context.get("runAsNonRoot") is True,
    ),
    (
        "seccompProfile",
        "pod or ",
        'seccompProfile.type to "RuntimeDefault" or "Localhost"',
        lambda context: (
            (context.get("seccompProfile") or {}).get("type") in ("RuntimeDefault", "Localhost")
        ),
    ),
)


def _containers(spec: Json) -> list[tuple[str, Json]]:
    both = [*(spec.get("initContainers") or []), *(spec.get("containers") or [])]
    return [(item.get("name", ""), item.get("securityContext") or {}) for item in both]


def _named(names: list[str], what: str = "container") -> str:
    listed = ", ".join(f'"{name}"' for name in names)
    return f"{what}{'s' if len(names) > 1 else ''} {listed}"
