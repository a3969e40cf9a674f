"""Names on the cluster: those that we use, and those that Kubernetes allows."""

from __future__ import annotations

import re
from collections.abc import Mapping

from diloco_protocol import InvalidRequestError
from diloco_protocol.backend import shown, text_like

CONTAINER = "replica"
MANAGER = "diloco-eks"
DEFAULT = "default"  # the namespace where none is named

# Our labels, to find runs by.
MANAGED_BY = "app.kubernetes.io/managed-by"
VERSION = "app.kubernetes.io/version"
APPLICATION = "app.kubernetes.io/name"
RUN = "diloco.dev/run-id"
COHORT = "diloco.dev/cohort"
OWNER = "diloco.dev/owner"
# Our annotations.
FINGERPRINT = "diloco.dev/fingerprint"
WORLD_SIZE = "diloco.dev/world-size"
FIRST_RANK = "diloco.dev/first-rank"
ENTRYPOINT = "diloco.dev/entrypoint"
TIMEOUT = "diloco.dev/timeout"
CANCELLED = "diloco.dev/cancelled"
# Labels and annotations of the Job controller.
INDEX = "batch.kubernetes.io/job-completion-index"
CONTROLLER_UID = "batch.kubernetes.io/controller-uid"
FAILURES = "batch.kubernetes.io/job-index-failure-count"
IGNORED_FAILURES = "batch.kubernetes.io/job-index-ignored-failure-count"
# A label of Kueue.
QUEUE = "kueue.x-k8s.io/queue-name"

_LABEL = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
_DNS_LABEL = re.compile(_LABEL)
_DNS_SUBDOMAIN = re.compile(rf"{_LABEL}(\.{_LABEL})*")
_QUALIFIED = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_SECRET_KEY = re.compile(r"[-._a-zA-Z0-9]{1,253}")
_OURS = frozenset(
    {MANAGED_BY, VERSION, APPLICATION, RUN, COHORT, OWNER, QUEUE, "job-name", "controller-uid"}
)


def job_name(run_id: str, n_replicas: int) -> str:
    """Return the name of a run's Job, which is the run_id.

    Raises:
        InvalidRequestError: With the last index appended (the hostname of that pod), the name is
            not a DNS label of at most 63 characters.
    """
    longest = f"{run_id}-{n_replicas - 1}"
    if not _DNS_LABEL.fullmatch(longest) or not _DNS_LABEL.fullmatch(run_id):
        room = 63 - len(longest) + len(run_id)
        raise InvalidRequestError(
            f"the run_id {run_id!r} cannot name a Job of {n_replicas} replicas: 1 to {room} "
            "lower-case letters, digits and dashes are allowed, with a letter or digit at both ends"
        )
    return run_id


check_dns_label = text_like(
    _LABEL, "1 to 63 lower-case letters, digits and dashes, with a letter or digit at both ends"
)
"""Check for the name of a namespace, or another DNS label."""


check_object_name = text_like(
    rf"(?=.{{1,253}}\Z){_LABEL}(\.{_LABEL})*",
    "lower-case letters, digits, dashes and dots, at most 253 characters",
)
"""Check for the name of a service account, secret or class: a DNS subdomain."""


def check_key(what: str, key: object) -> str:
    """Check for the key of a label, annotation or resource: ``[prefix/]name``.

    Raises:
        InvalidRequestError: The value is not such a key.
    """
    prefix, slash, name = key.rpartition("/") if isinstance(key, str) else ("", "", "")
    if not _QUALIFIED.fullmatch(name) or (
        slash and (len(prefix) > 253 or not _DNS_SUBDOMAIN.fullmatch(prefix))
    ):
        raise InvalidRequestError(
            f"{what} has the key {shown(key)}: a name of at most 63 letters, digits, '-', '_' and "
            "'.' is allowed, with an optional DNS prefix and '/' in front"
        )
    return str(key)


def check_labels(what: str, labels: Mapping[str, str]) -> dict[str, str]:
    """Check the labels that a caller gives.

    Raises:
        InvalidRequestError: A key or value is not allowed, or belongs to the launch or the Job
            controller.
    """
    for key, value in labels.items():
        check_key(what, key)
        if is_taken(key):
            raise InvalidRequestError(
                f"{what} may not set {key}: the launch or the Job controller sets it, or queue="
            )
        if value != "":
            check_label_value(f"{what}[{key!r}]", value, "; put longer text into annotations=")
    return dict(labels)


def is_taken(key: str) -> bool:
    """Return whether the launch or the Job controller sets a label or annotation itself."""
    return key in _OURS or key.partition("/")[0] in {"batch.kubernetes.io", "diloco.dev"}


def is_label_value(value: str) -> bool:
    """Return whether a label can have this value.

    The cluster refuses a selector with any other value, and quotes it.
    """
    return _QUALIFIED.fullmatch(value) is not None


def check_label_value(what: str, value: object, hint: str = "") -> str:
    """Check for the value of a label, which is not empty.

    Raises:
        InvalidRequestError: The value is not allowed; the error ends with the ``hint``.
    """
    if not isinstance(value, str) or not _QUALIFIED.fullmatch(value):
        raise InvalidRequestError(
            f"{what} must be at most 63 letters, digits, '-', '_' and '.', with a letter or digit "
            f"at both ends, not {shown(value, what)}{hint}"
        )
    return value


def secret_reference(variable: str, reference: str) -> dict[str, str]:
    """Return ``"secret/key"`` as the ``secretKeyRef`` of an environment variable.

    Raises:
        InvalidRequestError: The text is not such a reference.
    """
    name, _, key = reference.partition("/")
    named = len(name) <= 253 and _DNS_SUBDOMAIN.fullmatch(name)
    if not named or not _SECRET_KEY.fullmatch(key):
        raise InvalidRequestError(
            f"secrets[{variable!r}] must be 'name/key' of a Secret in the run's namespace: a "
            "reference, never a value"
        )
    return {"name": name, "key": key}
