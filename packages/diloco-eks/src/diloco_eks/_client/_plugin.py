"""Credentials from the plugin that a kubeconfig names.

https://kubernetes.io/docs/reference/config-api/client-authentication.v1/
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diloco_protocol import AuthError
from diloco_protocol.backend import redact_and_cut

from .._state._facts import parse_time
from .._state._reading import mapping, text_of

_SHOWN = 500  # characters of a plugin's output


def run_plugin(
    plugin: Mapping[str, Any], cluster: Mapping[str, Any]
) -> tuple[dict[str, str], float]:
    """Return a user with the credentials that a plugin gives, and until when they can be used.

    Args:
        plugin: The ``exec`` of a user.
        cluster: The cluster, of which the plugin is told if it asks for that.

    Raises:
        AuthError: The plugin gave no credentials.
    """
    import subprocess  # slow to import

    asks = plugin.get("interactiveMode") != "Never" and os.isatty(0)
    spec: dict[str, Any] = {"interactive": asks}
    if plugin.get("provideClusterInfo"):
        spec["cluster"] = dict(cluster)
        if file := cluster.get("certificate-authority"):
            content = base64.b64encode(Path(file).read_bytes())
            spec["cluster"]["certificate-authority-data"] = content.decode()
    info = {"apiVersion": plugin["apiVersion"], "kind": "ExecCredential", "spec": spec}
    variables = {entry["name"]: entry["value"] for entry in plugin.get("env") or ()}
    said, why = b"", ""
    try:
        ended = subprocess.run(
            [plugin["command"], *(plugin.get("args") or ())],
            env={**os.environ, **variables, "KUBERNETES_EXEC_INFO": json.dumps(info)},
            stdin=None if asks else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=None if asks else subprocess.PIPE,  # a person reads it there
            check=False,
        )
        said, why = ended.stderr or b"", f"exit code {ended.returncode}"
        answer = mapping(json.loads(ended.stdout)) if ended.returncode == 0 else {}
    except OSError as error:
        answer, why = {}, str(error)
    except (ValueError, RecursionError):
        answer, why = {}, "its answer is not JSON"
    status = mapping(answer.get("status"))
    user = {"token": text_of(status.get("token"))}
    for name, key in (
        ("client-certificate-data", "clientCertificateData"),
        ("client-key-data", "clientKeyData"),
    ):
        user[name] = base64.b64encode(text_of(status.get(key)).encode()).decode()
    user = {name: text for name, text in user.items() if text}
    end = status.get("expirationTimestamp")
    expires = float("inf") if end is None else parse_time(end)
    if not user or expires is None:
        told = redact_and_cut(said.decode(errors="replace").strip(), _SHOWN)
        raise AuthError(
            f"the kubeconfig's plugin {plugin['command']} gave no credentials that can be used "
            f"({why}). {told} {text_of(plugin.get('installHint'))}".rstrip()
        )
    return user, expires
