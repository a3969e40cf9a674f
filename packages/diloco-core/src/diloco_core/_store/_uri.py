"""What a store's URI may say: where the objects are, and nothing that its driver would pass over in silence."""

from __future__ import annotations

import re
from typing import NamedTuple

from fsspec.registry import known_implementations

from .._errors import ConfigurationError
from .._redact import redact_uri, userinfo_of


class _Places(NamedTuple):
    """Where things belong that people write into URIs."""

    credentials: str
    endpoint: str


_S3 = _Places(
    "in AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or in what the machine or a profile provides",
    "in AWS_ENDPOINT_URL",
)
_GS = _Places(
    "in the file that GOOGLE_APPLICATION_CREDENTIALS names, or in what the machine provides",
    "in STORAGE_EMULATOR_HOST",
)
_AZ = _Places(
    "in AZURE_STORAGE_CONNECTION_STRING, or in AZURE_STORAGE_ACCOUNT_NAME with AZURE_STORAGE_ACCOUNT_KEY or "
    "AZURE_STORAGE_SAS_TOKEN",
    "in AZURE_STORAGE_CONNECTION_STRING, as BlobEndpoint",
)
_PLACES = {
    **dict.fromkeys(("s3", "s3a"), _S3),
    **dict.fromkeys(("gs", "gcs"), _GS),
    **dict.fromkeys(("az", "abfs", "abfss"), _AZ),
}
# abfss://container@account.dfs.core.windows.net/folder names no user.
_ACCOUNT = re.compile(r"[^:@/?#]+@[^:@/?#]+\.[^:@/?#]+")
_PORT = re.compile(r"[^:]*:[0-9]*")
# One letter may be a drive.
_SCHEME = re.compile(r"((?:[a-z]+\+)?([A-Za-z][A-Za-z0-9.\-]+)):(/?)")
_AUTHORITY_ENDS = re.compile(r"[/?#]")
# With an address in brackets, or with a port.
_HOST = re.compile(r"\[.*|[^:]*:[0-9]*")


def check_uri(uri: str) -> None:
    """Refuse what no driver obeys, before anything is opened: a user would wonder for long where it went.

    Other schemes (``sftp://`` and many more) are left to their drivers: most of these take a user, a password and a port from
    the URI. In ``memory://`` everything is just a name. What is nearly a URI is refused, too: it would be a folder's name.

    Raises:
        ConfigurationError: It says where such things belong; what may be secret is not shown.
    """
    if "://" not in uri:
        _check_path(uri)
        return
    for link in uri.split("::"):  # fsspec chains drivers that way
        scheme, separator, rest = link.partition("://")
        scheme = scheme.rpartition("+")[2]
        if separator and scheme in _PLACES:
            _check(redact_uri(link), scheme, rest, _PLACES[scheme])
        elif separator and scheme not in {"file", "memory"} and _is_cut(rest):
            raise ConfigurationError(
                f"{redact_uri(link)!r} holds a user or a password with one of the signs / ? # in it, where a driver sees the end "
                "of the host. Write %2F, %3F and %23 for them."
            )
        elif separator and scheme == "file" and ("?" in rest or "#" in rest):
            raise ConfigurationError(
                f"{redact_uri(link)!r}: a folder's URI has no query string and no fragment. Where they are part of a name, "
                "write %3F for the question mark and %23 for the number sign, or give the plain path."
            )


def _is_cut(rest: str) -> bool:
    """Whether a driver would see the end of the host in the middle of a password."""
    authority = _AUTHORITY_ENDS.split(rest, maxsplit=1)[0]
    return bool(userinfo_of(rest)) and "@" not in authority and _HOST.fullmatch(authority) is None


def _check_path(path: str) -> None:
    shown, scheme = redact_uri(path), _SCHEME.match(path)
    advice = "Where it is meant to be a folder, give its path from the root on, with one slash at its beginning."
    if scheme is not None and (scheme[3] or scheme[2] in known_implementations):
        meant = redact_uri(f"{scheme[1]}://{path[scheme.end() :].lstrip('/')}")
        raise ConfigurationError(
            f"{shown!r} looks like a URI with a slash too few: write {meant}. {advice}"
        )
    if shown != path:
        raise ConfigurationError(
            f"{shown!r} looks like a URI with a user or a password, and has no scheme. {advice}"
        )


def _check(shown: str, scheme: str, rest: str, places: _Places) -> None:
    userinfo = userinfo_of(rest)
    where = f"write {scheme}://bucket/folder alone"
    if userinfo and not (places is _AZ and _ACCOUNT.fullmatch(rest.partition("/")[0])):
        raise ConfigurationError(
            f"{shown!r} holds a user or a password, which the driver for {scheme}:// does not read from there: {where}. "
            f"Credentials belong {places.credentials}."
        )
    for sign, name in (("?", "query string"), ("#", "fragment")):
        if sign in rest:
            raise ConfigurationError(
                f"{shown!r} has a {name}, which the driver for {scheme}:// does not obey: {where}. Endpoints belong "
                f"{places.endpoint}; credentials {places.credentials}. A folder whose name has a {sign!r} cannot be used."
            )
    bucket, _, folder = rest.partition("/")
    if not bucket:
        raise ConfigurationError(
            f"{shown!r} names no bucket: a prefix is written {scheme}://bucket/folder"
        )
    if _PORT.fullmatch(bucket):
        raise ConfigurationError(
            f"{shown!r} has a port, which the driver for {scheme}:// does not obey: a bucket comes first, as in "
            f"{scheme}://bucket/folder. Endpoints belong {places.endpoint}."
        )
    if any(part in {"", ".", ".."} for part in folder.rstrip("/").split("/") if folder.strip("/")):
        raise ConfigurationError(
            f"{shown!r} has a folder without a name, or one that is called '.' or '..': drivers would make different "
            "prefixes of it"
        )
