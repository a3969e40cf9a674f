"""The kubeconfig as kubectl reads it, with settings that the Kubernetes client ignores."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from diloco_protocol import AuthError, InvalidRequestError
from diloco_protocol.backend import redact_and_cut, shown

from .._request._names import DEFAULT, check_dns_label
from .._state._reading import mapping
from ._errors import printable
from ._kubeconfig_file import read_file, refused
from ._no_proxy import needs_no_proxy

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_SHOWN = 500  # characters of a plugin's output
_CREDENTIALS = ("exec", "auth-provider", "token", "tokenFile", "username")


@dataclass(frozen=True, slots=True)
class Kubeconfig:
    """The parts of a kubeconfig that the chosen context names.

    Attributes:
        files: The kubeconfig's files, joined as in ``$KUBECONFIG``.
        context: Name of the context; None if the files name none.
        namespace: Name of the context's namespace; empty if it has none.
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
        """Return which settings kubectl would obey and we cannot, in words."""
        plugin = mapping(self.user.get("exec"))
        mode = plugin.get("interactiveMode")
        texts = []
        if mode in {"Never", "Always"}:
            texts.append(
                f"interactiveMode: {mode} of the plugin {plugin.get('command')} is not obeyed: "
                "the plugin may use the terminal exactly if there is one"
            )
        if plugin.get("provideClusterInfo") and self.cluster.get("certificate-authority"):
            texts.append(
                f"the plugin {plugin.get('command')} is told where the certificate-authority is, "
                "and not what it is: put it into the kubeconfig as certificate-authority-data"
            )
        if self.user.get("token") and self.user.get("tokenFile"):
            texts.append(
                "tokenFile is not read, since there is a token too: kubectl prefers the file"
            )
        if urlsplit(str(self.cluster.get("server"))).username is not None:
            texts.append("the user and password in the server's address are not sent")
        if Path(str(plugin.get("command"))).name not in {"None", "aws", "aws-iam-authenticator"}:
            texts.append(
                f"the plugin {plugin.get('command')} runs in the kubeconfig's folder, not in the "
                "caller's, and what it answers is not checked: a token that is a number and an "
                "expirationTimestamp that is no time are taken"
            )
        if _is_clear(self.cluster, self.cluster.get("proxy-url")):
            texts.append(
                "no credentials are sent, as by kubectl: the server's address begins with http://, "
                "so they could be read on their way"
            )
        elif urlsplit(str(self.cluster.get("server"))).scheme == "http":
            texts.append(
                "credentials are sent without TLS, since the server is on this machine: kubectl "
                "sends none to http://"
            )
        return texts


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
        named = read_kubeconfig(kubeconfig, context).namespace
        return check_dns_label("the namespace of the kubeconfig's context", named or DEFAULT)
    namespace = os.environ.get("POD_NAMESPACE")
    try:
        return namespace or (ACCOUNT / "namespace").read_text(encoding="utf-8").strip() or DEFAULT
    except OSError:
        return DEFAULT
    except UnicodeDecodeError:
        raise InvalidRequestError(
            f"the namespace of the service account, in {ACCOUNT}, is not UTF-8"
        ) from None


def read_kubeconfig(kubeconfig: str | os.PathLike[str] | None, context: str | None) -> Kubeconfig:
    """Return what a context names. As for kubectl, the first of several files takes precedence.

    Args:
        kubeconfig: The kubeconfig file; None for ``$KUBECONFIG``, else ``~/.kube/config``.
        context: Name of a context in it; None for the current one.

    Raises:
        AuthError: A file cannot be read or is in an unknown home folder, or a part of it that is
            used has the wrong type.
    """
    paths = os.fspath(kubeconfig) if kubeconfig is not None else os.environ.get("KUBECONFIG")
    named = filter(None, (paths or "~/.kube/config").split(os.pathsep))
    files = list(map(os.path.expanduser, named))
    # A folder with such a literal name is never meant.
    if homeless := [file for file in files if file.startswith("~")]:
        raise AuthError(
            f"the kubeconfig {shown(homeless[0])} is in a home folder that is not known: name a "
            "file with kubeconfig= or $KUBECONFIG"
        )
    known: dict[str, dict[str, Any]] = {"context": {}, "cluster": {}, "user": {}}
    configs = {file: read_file(file) for file in files}
    for config in filter(None, configs.values()):
        context = context or config.get("current-context")
        for kind, entries in known.items():
            for entry in config.get(f"{kind}s") or []:
                entries.setdefault(entry["name"], entry.get(kind))
    chosen = mapping(known["context"].get(context or ""))
    cluster, user = (
        mapping(known[kind].get(chosen.get(kind) or "")) for kind in ("cluster", "user")
    )
    if chosen.get("cluster") in known["cluster"] and not cluster.get("server"):
        raise AuthError(
            f"the kubeconfig's cluster {chosen['cluster']!r} has no server: add its address, as "
            "aws eks update-kubeconfig does"
        )
    for kind, entry in (("cluster", cluster), ("user", user)):
        if entry and (why := refused(kind, entry)):
            raise AuthError(f"the kubeconfig's {kind} {chosen[kind]!r} {why}")
    if str(cluster.get("server")).lower().startswith("https:") and not chosen.get("user"):
        raise AuthError(
            f"the kubeconfig's context {context!r} names no user: without credentials, requests "
            "would be anonymous"
        )
    missing = chosen.get("user") not in known["user"]
    return Kubeconfig(
        # The client refuses an empty file; if all files are empty, it may report that.
        os.pathsep.join([file for file in files if configs[file] is not None] or files),
        context,
        chosen.get("namespace") or "",
        cluster,
        user,
        (chosen.get("user") or "") if missing else "",
    )


def obey(configuration: Any, kubeconfig: Kubeconfig | None) -> dict[str, str]:
    """Add to a client's configuration the settings that it did not load itself.

    Args:
        configuration: A loaded ``kubernetes.client.Configuration``.
        kubeconfig: The kubeconfig from which it was loaded; None inside a cluster.

    Returns:
        Headers for every request.

    Raises:
        AuthError: The user's credentials could not be obtained.
        InvalidRequestError: There is a setting that cannot be obeyed, and must not be ignored.
    """
    proxy_url = None if kubeconfig is None else kubeconfig.cluster.get("proxy-url")
    _set_proxy(configuration, proxy_url)
    _check_renewed(configuration)
    if kubeconfig is None:
        return {}
    user = kubeconfig.user
    if kubeconfig.unknown:
        raise AuthError(
            f"the context {kubeconfig.context!r} names the user {kubeconfig.unknown!r}, which no "
            f"file of {kubeconfig.files} has: without its credentials, requests would be anonymous"
        )
    missing = next((name for name in _CREDENTIALS if user.get(name)), None)
    # The client ignores a plugin that fails and a provider that it does not know, and would make
    # its calls anonymously.
    if missing and not configuration.api_key and not configuration.cert_file:
        hint = mapping(user.get(missing)).get("installHint") or ""
        raise AuthError(
            f"the user of the context {kubeconfig.context!r} has {missing}, and it gave no "
            f"credentials. {hint}"
        )
    halves = [
        user.get(f"client-{half}") or user.get(f"client-{half}-data")
        for half in ("certificate", "key")
    ]
    if any(halves) and not all(halves):
        raise AuthError(
            f"the user of the context {kubeconfig.context!r} has a client-certificate or a "
            "client-key alone: either is of use only with the other"
        )
    if _is_clear({"server": configuration.host}, configuration.proxy):
        configuration.refresh_api_key_hook = None
        configuration.api_key = {}
    return _impersonation(user)


def _check_renewed(configuration: Any) -> None:
    """Make a token that is loaded anew one that can be sent, or raise an AuthError.

    The client loads it before each call, and would raise errors of files and of its own.
    """
    renew = configuration.refresh_api_key_hook

    def renew_checked(renewed: Any) -> None:
        try:
            if renew is not None:
                with words_of_plugins_cut():
                    renew(renewed)
        # Anything may be wrong with a file or its credential plugin.
        except Exception as error:  # noqa: BLE001
            raise AuthError(
                f"the credentials cannot be loaded anew: {type(error).__name__}: {unquoted(error)}"
            ) from None
        renewed.refresh_api_key_hook = renew_checked  # the client has put its own there again
        for name, secret in renewed.api_key.items():
            scheme, _, token = secret.partition(" ")  # kubectl ignores the line end behind a token
            renewed.api_key[name] = f"{scheme} {_sendable('a token', token)}"

    configuration.refresh_api_key_hook = renew_checked


def unquoted(error: Exception) -> str:
    """Return the words of an error of the client, which quotes whole entries with their secrets."""
    return re.sub(r"\{.*\}", "{...}", str(error), flags=re.DOTALL).rstrip(".")


@contextlib.contextmanager
def words_of_plugins_cut() -> Iterator[None]:
    """Shorten what the client logs, and remove secrets from it.

    When a plugin fails, the client repeats all of its output.
    """
    import logging  # slow to import

    def cut(record: logging.LogRecord) -> bool:
        if record.module == "kube_config":
            record.msg, record.args = printable(redact_and_cut(record.getMessage(), _SHOWN)), ()
        return True

    root = logging.getLogger()
    root.addFilter(cut)
    try:
        yield
    finally:
        root.removeFilter(cut)


def _set_proxy(configuration: Any, proxy_url: object) -> None:
    """Choose the proxy as kubectl does: the kubeconfig's, or the environment's for the scheme."""
    server = urlsplit(str(configuration.host))
    proxy = proxy_url if isinstance(proxy_url, str) and proxy_url else None
    configuration.no_proxy = None  # the client supports less of it than kubectl does
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
    """Return the headers that impersonate another user; without them requests could do more."""
    extra = user.get("as-user-extra") or {}
    fields: dict[str, Any] = {
        "Impersonate-User": user.get("as"),
        "Impersonate-Uid": user.get("as-uid"),
        "Impersonate-Group": user.get("as-groups"),
        **{f"Impersonate-Extra-{quote(key, safe='')}": extra[key] for key in extra},
    }
    headers: dict[str, str] = {}
    for name, value in fields.items():
        values = value if isinstance(value, list) else [value]
        if len(values) > 1:
            raise InvalidRequestError(
                f"the kubeconfig's user has {len(values)} values for {name}, and the Kubernetes "
                "client can send one: leave one of as-groups or as-user-extra, or use an account "
                "that needs no impersonation"
            )
        if values and values[0] is not None and value != "":
            headers[name] = _sendable(name, values[0])
    if headers and "Impersonate-User" not in headers:
        raise InvalidRequestError(
            "the kubeconfig's user has as-uid, as-groups or as-user-extra and no 'as', which "
            "kubectl refuses too: name the user to impersonate, or leave them out"
        )
    return headers


def _is_clear(cluster: Mapping[str, Any], proxy: object = None) -> bool:
    """Return whether requests could be read on their way to the server.

    They cannot if the server is on this machine.
    """
    server = urlsplit(str(cluster.get("server")))
    is_local = server.hostname in {"localhost", "127.0.0.1", "::1"} and not proxy
    return server.scheme != "https" and not is_local


def _variable(name: str) -> str | None:
    return os.environ.get(name) or os.environ.get(name.lower()) or None


def _sendable(what: str, text: str) -> str:
    """Return a text as a header can carry it, without the line end behind it.

    Raises:
        InvalidRequestError: The text is blank, or a header cannot carry it as it is; the error does
            not show it.
    """
    value = text.strip(" \t\r\n")
    if not value.strip() or not value.isprintable():
        raise InvalidRequestError(
            f"the cluster's user has {what} that cannot be sent: it is blank, or has a line end or "
            "another character in it that no header carries"
        )
    return value.encode().decode("latin-1")  # the client encodes this, and the cluster reads UTF-8
