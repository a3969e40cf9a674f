"""The files of a kubeconfig as they are, refused where something in them has another type than it must have.

YAML takes ``5``, ``on`` and ``2026-11-26`` for a number, a truth value and a date. kubectl refuses these where text must be. The
client library finds no context of that name, or takes a text for a list of letters, and goes on without what the file says.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diloco_protocol import AuthError
from diloco_protocol.backend import shown

_KINDS = ("context", "cluster", "user")
_FIELDS: Mapping[str, Mapping[str, type]] = {
    "context": dict.fromkeys(("cluster", "user", "namespace"), str),
    "cluster": {
        **dict.fromkeys(("server", "proxy-url", "tls-server-name"), str),
        **dict.fromkeys(("certificate-authority", "certificate-authority-data"), str),
        "insecure-skip-tls-verify": bool,
    },
    "user": {
        **dict.fromkeys(("token", "tokenFile", "username", "password", "as", "as-uid"), str),
        **dict.fromkeys(("client-certificate", "client-certificate-data"), str),
        **dict.fromkeys(("client-key", "client-key-data"), str),
        "as-groups": list,
        **dict.fromkeys(("as-user-extra", "exec", "auth-provider"), dict),
    },
    "exec": {"command": str, "args": list},
}
_WORDS = {str: "text", bool: "true or false", list: "a list of texts", dict: "a mapping"}
_FOUND = {
    **dict.fromkeys((int, float), "a number"),
    **{
        type(None): "nothing",
        bool: "a truth value",
        str: "text",
        list: "a list",
        dict: "a mapping",
    },
}
_QUOTE = ". If it is meant as text, put it in quotes"


def read_file(file: str) -> dict[str, Any] | None:
    """Return a file's content; None if there is nothing in it, and an empty mapping if there is no file.

    Raises:
        AuthError: It cannot be read, or has a name that is no text. Nothing of it is shown but such a name.
    """
    try:
        import yaml  # type: ignore[import-untyped] # comes with the client; slow to import
    except ImportError:
        return {}
    try:
        config = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = "" if mark is None else f", line {mark.line + 1}"
        raise AuthError(f"the kubeconfig {file} is not YAML{line}") from None
    except (OSError, ValueError, RecursionError) as error:
        why = getattr(error, "strerror", None) or type(error).__name__
        raise AuthError(f"the kubeconfig {file} cannot be read: {why}") from None
    if config is None:
        return None
    where = f"the kubeconfig {file}"
    if not isinstance(config, dict):
        raise AuthError(f"{where} must be a mapping, not {_found(config)}")
    if (current := config.get("current-context")) is not None:
        _check_name(current, where, "current-context")
    for kind in _KINDS:
        entries = config.get(f"{kind}s") or []
        if not isinstance(entries, list):
            raise AuthError(f"{where} must have a list of {kind}s, not {_found(entries)}")
        for number, entry in enumerate(entries):
            place = f"{kind}s[{number}]"
            if not isinstance(entry, dict) or not isinstance(
                entry.get(kind, {}), (dict, type(None))
            ):
                raise AuthError(
                    f"{where} has in {place} no mapping with the {kind}, itself a mapping"
                )
            _check_name(entry.get("name"), where, f"{place}.name")
    return config


def check_entry(kind: str, name: str, entry: Mapping[str, Any]) -> None:
    """Refuse what has another type than kubectl takes, in an entry that is used.

    Args:
        kind: ``context``, ``cluster`` or ``user``.
        name: The entry's.
        entry: What it says.

    Raises:
        AuthError: Something has another type; no value is shown, since it may be a secret.
    """
    where = f"the kubeconfig's {kind} {shown(name)}"
    _check_fields(where, "", _FIELDS[kind], entry)
    for key, values in (entry.get("as-user-extra") or {}).items():
        _check_type(where, f"a key of as-user-extra, {shown(key)},", key, str)
        _check_type(where, f"as-user-extra.{key}", values, list)
    _check_fields(where, "exec.", _FIELDS["exec"], entry.get("exec") or {})


def _check_fields(
    where: str, place: str, fields: Mapping[str, type], entry: Mapping[str, Any]
) -> None:
    for field, wanted in fields.items():
        if (value := entry.get(field)) is not None:
            _check_type(where, f"{place}{field}", value, wanted)


def _check_type(where: str, field: str, value: object, wanted: type) -> None:
    if not isinstance(value, wanted):
        hint = _QUOTE if wanted is str else ""
        raise AuthError(
            f"{where}: {field} must be {_WORDS[wanted]}, and YAML reads it as {_found(value)}{hint}"
        )
    for item in value if isinstance(value, list) else ():
        _check_type(where, f"each of {field}", item, str)


def _check_name(name: object, where: str, place: str) -> None:
    if not isinstance(name, str):
        given = "it is missing" if name is None else f"YAML reads {shown(name)} as {_found(name)}"
        raise AuthError(
            f"{where}: {place} must be text, and {given}: put it in quotes, there and wherever it is named"
        )


def _found(value: object) -> str:
    return _FOUND.get(type(value), f"a {type(value).__name__}")
