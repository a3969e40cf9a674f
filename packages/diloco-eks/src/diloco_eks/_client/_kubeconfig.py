"""The kubeconfig: what kubectl and this package read alike, and refusals of everything else."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from re import compile as pattern
from typing import Any
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies_environment

from diloco_protocol import AuthError
from diloco_protocol.backend import shown

from .._request._names import DEFAULT, check_dns_label
from .._request._shape import misfit
from .._state._reading import mapping
from ._plugin import run_plugin

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
# Of each entry, the fields that are obeyed, with their types. YAML reads 5, on and 2026-11-26 as a
# number, a truth value and a date, which kubectl refuses where text is required.
_FIELDS: Mapping[str, Mapping[str, Any]] = {
    "context": dict.fromkeys(("cluster!", "user", "namespace"), str),
    "cluster": {
        **dict.fromkeys(("server!", "proxy-url", "tls-server-name"), str),
        **dict.fromkeys(("certificate-authority", "certificate-authority-data"), str),
        "insecure-skip-tls-verify": bool,
    },
    "user": {
        **dict.fromkeys(("token", "tokenFile"), str),
        **dict.fromkeys(("client-certificate", "client-certificate-data"), str),
        **dict.fromkeys(("client-key", "client-key-data"), str),
        "exec": {
            **dict.fromkeys(("apiVersion!", "command!"), str),
            **dict.fromkeys(("installHint", "interactiveMode"), str),
            "args": [str],
            "env": [{"name!": str, "value!": str}],
            "provideClusterInfo": bool,
        },
    },
}
_IGNORED = {"extensions", "disable-compression"}  # they change nothing about what is asked
_FILES = ("certificate-authority", "client-certificate", "client-key", "tokenFile")
# kubectl and the client library do not agree which of these counts.
_ONE_OF = (
    ("certificate-authority", "certificate-authority-data", "insecure-skip-tls-verify"),
    ("token", "tokenFile", "exec"),
    ("client-certificate", "client-certificate-data"),
    ("client-key", "client-key-data"),
)
_HERE = {"localhost", "127.0.0.1", "::1"}
_SERVER = pattern(r"https://[^@?#\s]+|http://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?(/[^@?#\s]*)?")


@dataclass(frozen=True, slots=True)
class Kubeconfig:
    """The parts of a kubeconfig that the chosen context names.

    Attributes:
        cluster: The context's cluster.
        user: The context's user; empty if the context names none.
    """

    cluster: Mapping[str, Any]
    user: Mapping[str, Any]

    def load(self, configuration: Any) -> float:
        """Put address and credentials into a configuration of the client library.

        Returns:
            Until when the credentials can be used, in Unix seconds.

        Raises:
            AuthError: A plugin gave no credentials.
        """
        from kubernetes import config

        user, expires = self.user, float("inf")
        if plugin := user.get("exec"):
            user, expires = run_plugin(plugin, self.cluster)
        entries = {
            "current-context": "chosen",
            "contexts": [{"name": "chosen", "context": {"cluster": "chosen", "user": "chosen"}}],
            "clusters": [{"name": "chosen", "cluster": dict(self.cluster)}],
            "users": [{"name": "chosen", "user": dict(user)}],
        }
        config.load_kube_config_from_dict(
            entries, client_configuration=configuration, persist_config=False
        )
        set_proxy(configuration, self.cluster.get("proxy-url"))
        return expires


class _Entries:
    """The entries of all files; of two with one name, the first counts, as for kubectl."""

    def __init__(self, kubeconfig: str | os.PathLike[str] | None, context: str | None) -> None:
        paths = os.fspath(kubeconfig) if kubeconfig is not None else os.environ.get("KUBECONFIG")
        self.paths = paths or "~/.kube/config"
        self.context = context
        self.known: dict[str, dict[str, Any]] = {"context": {}, "cluster": {}, "user": {}}
        for file in map(os.path.expanduser, filter(None, self.paths.split(os.pathsep))):
            if file.startswith("~"):  # a folder with such a literal name is never meant
                raise AuthError(
                    f"the kubeconfig {shown(file)} is in a home folder that is not known: name a "
                    "file with kubeconfig= or $KUBECONFIG"
                )
            config = _read_file(file)
            self.context = self.context or config.get("current-context")
            for kind, entries in self.known.items():
                for entry in config.get(f"{kind}s") or []:
                    body = entry.get(kind) or {}
                    entries.setdefault(entry["name"], _with_whole_paths(body, Path(file).parent))

    def choose(self, kind: str, name: str | None) -> dict[str, Any]:
        """Return an entry.

        Raises:
            AuthError: There is no such entry, or it has something that is not obeyed.
        """
        if name not in self.known[kind]:
            raise AuthError(
                f"no cluster can be read from {self.paths}: it has no {kind} {shown(name)}. On "
                "EKS: aws eks update-kubeconfig --name CLUSTER; or give kubeconfig=, context=, or "
                "run inside a pod"
            )
        entry: dict[str, Any] = self.known[kind][name]
        place = f"the kubeconfig's {kind} {name!r}"
        if wrong := misfit(entry, _FIELDS[kind], place):
            raise AuthError(f"{wrong}. Put text in quotes")
        obeyed = {field.rstrip("!") for field in _FIELDS[kind]}
        if unknown := entry.keys() - obeyed - _IGNORED:
            raise AuthError(
                f"{place} has {_listed(unknown)}, which is not obeyed here; "
                f"{_listed(obeyed)} are: use an entry with these alone"
            )
        for group in _ONE_OF:
            if len(both := list(filter(entry.get, group))) > 1:
                raise AuthError(f"{place} has {' and '.join(both)}: leave one of them")
        return entry


def in_cluster(kubeconfig: str | os.PathLike[str] | None, context: str | None) -> bool:
    """Return whether to use the pod's own account: inside a cluster, if no kubeconfig is named."""
    named = kubeconfig is not None or context is not None or os.environ.get("KUBECONFIG")
    inside = os.environ.get("KUBERNETES_SERVICE_HOST") and (ACCOUNT / "token").exists()
    return bool(inside and not named)


def namespace_of(kubeconfig: str | os.PathLike[str] | None, context: str | None) -> str:
    """Return the namespace that kubectl would use; ``default`` if none is named.

    Raises:
        AuthError: The kubeconfig cannot be read.
        InvalidRequestError: The name cannot be that of a namespace.
    """
    if not in_cluster(kubeconfig, context):
        entries = _Entries(kubeconfig, context)
        named = mapping(entries.known["context"].get(entries.context or "")).get("namespace")
        return check_dns_label("the namespace of the kubeconfig's context", named or DEFAULT)
    try:
        account = (ACCOUNT / "namespace").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        account = ""
    named = os.environ.get("POD_NAMESPACE") or account or DEFAULT
    return check_dns_label("the namespace of the pod's account", named)


def read_kubeconfig(kubeconfig: str | os.PathLike[str] | None, context: str | None) -> Kubeconfig:
    """Return what a context names.

    Args:
        kubeconfig: The kubeconfig file; None for ``$KUBECONFIG``, else ``~/.kube/config``.
        context: Name of a context in it; None for the current one.

    Raises:
        AuthError: A file cannot be read, or the context or what it names is missing, has the wrong
            type, or has something that is not obeyed.
    """
    entries = _Entries(kubeconfig, context)
    chosen = entries.choose("context", entries.context)
    cluster = entries.choose("cluster", chosen["cluster"])
    if not _SERVER.fullmatch(cluster["server"]) or (
        cluster.get("proxy-url") and cluster["server"].startswith("http:")
    ):
        raise AuthError(
            f"the server of the kubeconfig's cluster {chosen['cluster']!r} must be an address that "
            "begins with https://, without user, query and fragment; http:// is allowed for "
            "localhost, without proxy-url. Credentials could be read on their way to any other"
        )
    if not chosen.get("user") and cluster["server"].startswith("http:"):
        return Kubeconfig(cluster, {})
    return Kubeconfig(cluster, entries.choose("user", chosen.get("user")))


def set_proxy(configuration: Any, proxy_url: str | None) -> None:
    """Choose the proxy as kubectl does: the kubeconfig's, or the environment's for the scheme."""
    server = urlsplit(str(configuration.host))
    configuration.proxy, configuration.no_proxy = proxy_url, None
    if not proxy_url and server.hostname not in _HERE:
        proxies = getproxies_environment()
        configuration.proxy, configuration.no_proxy = proxies.get(server.scheme), proxies.get("no")
    if not configuration.proxy:
        return
    if "://" not in configuration.proxy:
        configuration.proxy = f"http://{configuration.proxy}"
    parts = urlsplit(configuration.proxy)
    if parts.username is not None:
        from urllib3.util import make_headers

        account = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        configuration.proxy_headers = make_headers(proxy_basic_auth=account)


def _read_file(file: str) -> dict[str, Any]:
    """Return a file's content; empty if there is no file.

    Raises:
        AuthError: The file cannot be read, is no Config of v1, or its lists are not such. None of
            its content is shown, since it may be a secret.
    """
    try:
        import yaml  # type: ignore[import-untyped] # comes with the client; slow to import
    except ImportError:
        return {}
    try:
        config = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    # PyYAML raises errors of any type where an explicit tag does not fit
    except Exception as error:  # noqa: BLE001
        mark = getattr(error, "problem_mark", None)
        line = "" if mark is None else f", line {mark.line + 1}"
        why = getattr(error, "strerror", None) or type(error).__name__
        raise AuthError(f"the kubeconfig {file} cannot be read{line}: {why}") from None
    config = {} if config is None else config
    lists = {f"{kind}s": [{"name!": str, kind: {}}] for kind in _FIELDS}
    if wrong := misfit(config, {"current-context": str, **lists}, "its content"):
        raise AuthError(f"in the kubeconfig {file}, {wrong}. Put text in quotes")
    for field, allowed in (("kind", "Config"), ("apiVersion", "v1")):
        if config.get(field) not in (None, "", allowed):
            raise AuthError(f"the {field} of the kubeconfig {file} must be {allowed}")
    return dict(config)


def _listed(fields: Iterable[object]) -> str:
    return " and ".join(sorted(map(shown, fields)))


def _with_whole_paths(entry: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return an entry in which the paths of files do not depend on the current folder."""
    paths = {name: entry[name] for name in _FILES if isinstance(entry.get(name), str)}
    whole: dict[str, Any] = {
        name: str((folder / path).absolute()) for name, path in paths.items() if path
    }
    plugin = entry.get("exec")
    command = mapping(plugin).get("command")
    if isinstance(command, str) and os.sep in command:
        whole["exec"] = {**mapping(plugin), "command": str((folder / command).absolute())}
    return {**entry, **whole}
