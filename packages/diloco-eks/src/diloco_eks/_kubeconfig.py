"""The kubeconfig as kubectl reads it, with what the Kubernetes client does not obey by itself."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from diloco_protocol import AuthError, InvalidRequestError

from ._no_proxy import needs_no_proxy

DEFAULT = "default"
_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_CREDENTIALS = ("exec", "auth-provider", "token", "tokenFile", "username")


@dataclass(frozen=True, slots=True)
class Kubeconfig:
    """What the chosen context of a kubeconfig names.

    Attributes:
        files: Its files, joined as in ``$KUBECONFIG``.
        context: The context; None if the files name none.
        namespace: The context's namespace; empty if it has none.
        cluster: The context's cluster.
        user: The context's user.
        unknown: The name of the context's user, if no file has that user; else empty.
    """

    files: str
    context: str | None
    namespace: str
    cluster: Mapping[str, Any]
    user: Mapping[str, Any]
    unknown: str

    def unheeded(self) -> list[str]:
        """Return what kubectl would obey and we cannot, for a person to read."""
        plugin = _mapping(self.user.get("exec"))
        mode = plugin.get("interactiveMode")
        texts = []
        if mode in {"Never", "Always"}:
            texts.append(
                f"interactiveMode: {mode} of the plugin {plugin.get('command')} is not obeyed: "
                "the plugin may use the terminal exactly if there is one"
            )
        if self.user.get("token") and self.user.get("tokenFile"):
            texts.append(
                "tokenFile is not read, since there is a token too: kubectl prefers the file"
            )
        if urlsplit(str(self.cluster.get("server"))).username is not None:
            texts.append("the user and password in the server's address are not sent")
        return texts


def in_cluster(kubeconfig: str | os.PathLike[str] | None, context: str | None) -> bool:
    """Return whether to use the pod's own account: inside a cluster, if no kubeconfig is named."""
    named = kubeconfig is not None or context is not None or os.environ.get("KUBECONFIG")
    inside = os.environ.get("KUBERNETES_SERVICE_HOST") and (_ACCOUNT / "token").exists()
    return bool(inside and not named)


def namespace_of(kubeconfig: str | os.PathLike[str] | None, context: str | None) -> str:
    """Return the namespace that kubectl would use; ``default`` if none can be read."""
    if not in_cluster(kubeconfig, context):
        return read_kubeconfig(kubeconfig, context).namespace or DEFAULT
    named = os.environ.get("POD_NAMESPACE")
    try:
        return named or (_ACCOUNT / "namespace").read_text(encoding="utf-8").strip() or DEFAULT
    except OSError:
        return DEFAULT


def read_kubeconfig(kubeconfig: str | os.PathLike[str] | None, context: str | None) -> Kubeconfig:
    """Return what a context names. As for kubectl, the first of several files decides.

    Args:
        kubeconfig: A file; None for ``$KUBECONFIG``, else ``~/.kube/config``.
        context: A context of it; None for the current one.
    """
    given = os.fspath(kubeconfig) if kubeconfig is not None else os.environ.get("KUBECONFIG")
    named = filter(None, (given or "~/.kube/config").split(os.pathsep))
    files = [str(Path(file).expanduser()) for file in named]
    known: dict[str, dict[str, Any]] = {"contexts": {}, "clusters": {}, "users": {}}
    configs = {file: _read(file) for file in files}
    for config in filter(None, configs.values()):
        context = context or config.get("current-context")
        for kind, entries in known.items():
            for entry in config.get(kind) or []:
                if isinstance(entry, dict):
                    entries.setdefault(str(entry.get("name")), entry.get(kind[:-1]))
    chosen = _mapping(known["contexts"].get(context or ""))
    namespace = chosen.get("namespace")
    user = chosen.get("user")
    return Kubeconfig(
        # The client refuses an empty file; if all are, it may say so.
        os.pathsep.join([file for file in files if configs[file] is not None] or files),
        context,
        namespace if isinstance(namespace, str) else "",
        _mapping(known["clusters"].get(str(chosen.get("cluster")))),
        _mapping(known["users"].get(str(user))),
        str(user) if user and str(user) not in known["users"] else "",
    )


def obey(configuration: Any, kubeconfig: Kubeconfig | None) -> dict[str, str]:
    """Add to a client's configuration what it did not take from kubeconfig and environment.

    Args:
        configuration: A ``kubernetes.client.Configuration`` that has been loaded.
        kubeconfig: Where it was loaded from; None inside a cluster.

    Returns:
        Headers for every request.

    Raises:
        AuthError: The user's credentials could not be had.
        InvalidRequestError: There is a setting that cannot be obeyed, and must not be passed over.
    """
    given = None if kubeconfig is None else kubeconfig.cluster.get("proxy-url")
    _set_proxy(configuration, given)
    if kubeconfig is None:
        return {}
    user = kubeconfig.user
    if kubeconfig.unknown:
        raise AuthError(
            f"the context {kubeconfig.context!r} names the user {kubeconfig.unknown!r}, which no "
            f"file of {kubeconfig.files} has: without its credentials, requests would be anonymous"
        )
    missing = next((name for name in _CREDENTIALS if user.get(name)), None)
    # The client passes over a plugin that fails and a provider that it does not know, and would
    # make its calls as nobody.
    if missing and not configuration.api_key and not configuration.cert_file:
        hint = _mapping(user.get(missing)).get("installHint") or ""
        raise AuthError(
            f"the user of the context {kubeconfig.context!r} has {missing}, and it gave no "
            f"credentials. {hint}"
        )
    renew = configuration.refresh_api_key_hook

    def renew_stripped(renewed: Any) -> None:
        """Leave out the line end behind a token, as kubectl does; the client sets it before each call."""
        if renew is not None:
            renew(renewed)
        for name, secret in renewed.api_key.items():
            renewed.api_key[name] = secret.strip()

    configuration.refresh_api_key_hook = renew_stripped
    return _impersonation(user)


def _set_proxy(configuration: Any, given: object) -> None:
    """Choose the proxy as kubectl does: the kubeconfig's, or the environment's for the scheme."""
    server = urlsplit(str(configuration.host))
    proxy = given if isinstance(given, str) and given else None
    configuration.no_proxy = None  # of which the client understands less than kubectl
    if proxy is None and not needs_no_proxy(server, _variable("NO_PROXY") or ""):
        proxy = _variable(f"{server.scheme.upper()}_PROXY")
    configuration.proxy = proxy
    if proxy is None:
        return
    parts = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    if parts.scheme not in {"http", "https"}:
        raise InvalidRequestError(
            f"the proxy {proxy} cannot be used: the Kubernetes client knows proxies of http:// and "
            "https://"
        )
    configuration.proxy = parts.geturl()
    if parts.username is not None:
        from urllib3.util import make_headers

        account = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        configuration.proxy_headers = make_headers(proxy_basic_auth=account)


def _impersonation(user: Mapping[str, Any]) -> dict[str, str]:
    """Return the headers that make requests somebody else's; without them they could do more."""
    extra = _mapping(user.get("as-user-extra"))
    asked: dict[str, Any] = {
        "Impersonate-User": user.get("as"),
        "Impersonate-Uid": user.get("as-uid"),
        "Impersonate-Group": user.get("as-groups"),
        **{f"Impersonate-Extra-{quote(str(key), safe='')}": extra[key] for key in extra},
    }
    headers: dict[str, str] = {}
    for name, value in asked.items():
        values = value if isinstance(value, list) else [value]
        if len(values) > 1:
            raise InvalidRequestError(
                f"the kubeconfig's user has {len(values)} values for {name}, and the Kubernetes "
                "client can send one: leave one of as-groups or as-user-extra, or use an account "
                "that needs no impersonation"
            )
        if values and values[0]:
            headers[name] = str(values[0])
    if headers and "Impersonate-User" not in headers:
        raise InvalidRequestError(
            "the kubeconfig's user has as-uid, as-groups or as-user-extra and no 'as', which "
            "kubectl refuses too: name the user to impersonate, or leave them out"
        )
    return headers


def _variable(name: str) -> str | None:
    return os.environ.get(name) or os.environ.get(name.lower()) or None


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _read(file: str) -> dict[str, Any] | None:
    """A file as the client finds it; None if there is nothing in it."""
    try:
        import yaml  # type: ignore[import-untyped] # comes with the client; slow to import

        config = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    except (ImportError, OSError, ValueError):
        return {}
    except yaml.YAMLError:
        return {}
    return config if isinstance(config, dict) else None if config is None else {}
