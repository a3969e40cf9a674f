"""The files of a kubeconfig, refused if a part has another type than it must have.

YAML reads ``5``, ``on`` and ``2026-11-26`` as a number, a truth value and a date. kubectl refuses
these where text is required. The client library does not find a context of that name, or takes a
text for a list of letters, and continues without the settings in the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from diloco_protocol import AuthError

from .._request._shape import misfit

_CLUSTER = {
    **dict.fromkeys(("server", "proxy-url", "tls-server-name"), str),
    **dict.fromkeys(("certificate-authority", "certificate-authority-data"), str),
    "insecure-skip-tls-verify": bool,
}
_USER: dict[str, Any] = {
    **dict.fromkeys(("token", "tokenFile", "username", "password", "as", "as-uid"), str),
    **dict.fromkeys(("client-certificate", "client-certificate-data"), str),
    **dict.fromkeys(("client-key", "client-key-data"), str),
    "as-groups": [str],
    "as-user-extra": {str: [str]},
    "exec": {
        **dict.fromkeys(("apiVersion", "command", "installHint", "interactiveMode"), str),
        "args": [str],
        "env": [{"name": str, "value": str}],
        "provideClusterInfo": bool,
    },
    "auth-provider": {"name": str, "config": {str: str}},
}
_CONFIG = {
    "current-context": str,
    "contexts": [{"name!": str, "context": dict.fromkeys(("cluster", "user", "namespace"), str)}],
    "clusters": [{"name!": str, "cluster": _CLUSTER}],
    "users": [{"name!": str, "user": _USER}],
}
_KUBECTL = "kubectl refuses it too"
# If both of a pair are given, kubectl and the client library do not agree about which one counts.
_APART = {
    "cluster": (
        ("certificate-authority", "insecure-skip-tls-verify"),
        ("certificate-authority-data", "insecure-skip-tls-verify"),
        ("certificate-authority", "certificate-authority-data"),
    ),
    "user": (
        *((field, "username") for field in ("token", "tokenFile", "exec", "auth-provider")),
        ("exec", "auth-provider"),
        ("client-certificate", "client-certificate-data"),
        ("client-key", "client-key-data"),
    ),
}
_MODES = ("Always", "IfAvailable", "Never")
_PLUGINS = {f"client.authentication.k8s.io/{version}" for version in ("v1", "v1beta1")}


def refused(kind: str, entry: Mapping[str, Any]) -> str | None:
    """Return why a context's cluster or user cannot be used as it is; None if it can.

    The text contains no value.
    """
    both = next((pair for pair in _APART[kind] if all(map(entry.get, pair))), None)
    if both is not None:
        return f"has both {both[0]} and {both[1]}: leave one of them"
    if kind == "cluster":
        return _refused_server(entry)
    if empty := [field for field in ("exec", "auth-provider") if entry.get(field) == {}]:
        return f"has an empty {empty[0]}: {_KUBECTL}"
    plugin = entry.get("exec") or {}
    if entry.get("password") and not entry.get("username"):
        return f"has a password and no username: {_KUBECTL}"
    if plugin and plugin.get("apiVersion") not in _PLUGINS:
        return f"has a plugin whose apiVersion is none of {', '.join(sorted(_PLUGINS))}: {_KUBECTL}"
    if (plugin.get("interactiveMode") or _MODES[0]) not in _MODES:
        return f"has a plugin whose interactiveMode is none of {', '.join(_MODES)}: {_KUBECTL}"
    if str(plugin.get("apiVersion")).endswith("/v1") and not plugin.get("interactiveMode"):
        return (
            f"has a plugin of client.authentication.k8s.io/v1 without interactiveMode: {_KUBECTL}"
        )
    return None


def _refused_server(cluster: Mapping[str, Any]) -> str | None:
    address = cluster.get("server") or ""
    try:
        server = urlsplit(address)
    except ValueError:  # the client gives a better error for it
        return None
    # With a scheme in capitals, the client drops the certificates of the authority and the user.
    if not address.startswith(("https://", "http://")):
        return "has a server that does not begin with https://: write it out"
    if server.query or server.fragment:
        return "has a server with a query or a fragment: leave it out"
    return None


def read_file(file: str) -> dict[str, Any] | None:
    """Return a file's content; None if it is empty, and an empty mapping if there is no file.

    Raises:
        AuthError: The file cannot be read, or a part of it has the wrong type. None of its content
            is shown, since it may be a secret.
    """
    try:
        import yaml  # type: ignore[import-untyped] # comes with the client; slow to import
    except ImportError:
        return {}
    try:
        config: dict[str, Any] | None = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = "" if mark is None else f", line {mark.line + 1}"
        raise AuthError(f"the kubeconfig {file} is not YAML{line}") from None
    # PyYAML raises errors of any type where an explicit tag does not fit
    except Exception as error:  # noqa: BLE001
        why = getattr(error, "strerror", None) or type(error).__name__
        raise AuthError(f"the kubeconfig {file} cannot be read: {why}") from None
    wrong = None if config is None else misfit(config, _CONFIG, "what it holds")
    if wrong is not None:
        hint = (
            ": put it in quotes, there and wherever it is named" if "must be text" in wrong else ""
        )
        raise AuthError(f"in the kubeconfig {file} {wrong.removeprefix('what it holds.')}{hint}")
    for kind in ("contexts", "clusters", "users"):
        named = [entry["name"] for entry in (config or {}).get(kind) or []]
        if len(set(named)) < len(named):
            raise AuthError(f"the kubeconfig {file} has two {kind} of one name: {_KUBECTL}")
    return config
