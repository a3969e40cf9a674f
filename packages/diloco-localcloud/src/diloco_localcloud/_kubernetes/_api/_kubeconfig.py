"""The kubeconfig of a stand-in."""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path
from typing import Any

from ..._server._errors import StandInError
from ..._server._files import replace

Json = dict[str, Any]


def config(url: str, token: str, authority: str | None, namespace: str) -> Json:
    """Return it as an object; written as JSON it is valid, since JSON is YAML."""
    cluster: Json = {"server": url}
    if authority is not None:
        cluster["certificate-authority-data"] = base64.b64encode(authority.encode()).decode()
    name = "diloco-stand-in"
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": name, "cluster": cluster}],
        "users": [{"name": name, "user": {"token": token}}],
        "contexts": [
            {"name": name, "context": {"cluster": name, "user": name, "namespace": namespace}}
        ],
        "current-context": name,
    }


def write(path: str | Path, content: Json) -> Path:
    """Write it, readable by the owner only.

    Raises:
        StandInError: it cannot be written there.
    """
    target = Path(path)
    try:
        # Not in place: a process that has an existing file open would read the token. A link stays
        # a link.
        replace(Path(os.path.realpath(target)), (json.dumps(content, indent=2) + "\n").encode())
    except OSError as wrong:
        raise StandInError(
            f"the kubeconfig cannot be written to {target}: {wrong.strerror}; choose another path"
        ) from None
    return target
