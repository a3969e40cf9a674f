"""The namespace of a kubeconfig's context, read without the client, since a plan needs none."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

_OF_THE_POD = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
DEFAULT = "default"


def namespace_of_context(kubeconfig: str | os.PathLike[str] | None, context: str | None) -> str:
    """The namespace that kubectl would use; ``default`` if there is none, or nothing can be read.

    Args:
        kubeconfig: A file; None for the pod's own namespace inside a cluster, else ``$KUBECONFIG``, else ``~/.kube/config``.
        context: A context of it; None for its current one.
    """
    if kubeconfig is None and context is None and os.environ.get("KUBERNETES_SERVICE_HOST"):
        try:
            return _OF_THE_POD.read_text(encoding="utf-8").strip() or DEFAULT
        except OSError:
            pass
    given = os.fspath(kubeconfig) if kubeconfig is not None else os.environ.get("KUBECONFIG")
    files = (given or str(Path("~/.kube/config").expanduser())).split(os.pathsep)
    contexts: dict[str, Any] = {}
    for config in map(_read, filter(None, files)):
        context = context or config.get("current-context")
        for entry in config.get("contexts") or []:
            if isinstance(entry, dict):
                contexts.setdefault(str(entry.get("name")), entry.get("context"))
    chosen = contexts.get(context or "")
    found = chosen.get("namespace") if isinstance(chosen, dict) else None
    return found if isinstance(found, str) and found else DEFAULT


def _read(file: str) -> dict[str, Any]:
    try:
        import yaml  # type: ignore[import-untyped] # comes with the client; slow to import

        config = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    except (ImportError, OSError, ValueError):
        return {}
    except yaml.YAMLError:
        return {}
    return config if isinstance(config, dict) else {}
