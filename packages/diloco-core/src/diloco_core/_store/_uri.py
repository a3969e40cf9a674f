"""What a store's URI may hold: where the objects are, and nothing that its driver would silently ignore."""

from __future__ import annotations

import re
from typing import NamedTuple

from fsspec.registry import known_implementations

from .._errors import ConfigurationError
from .._redact import redact_uri, userinfo_of


class _Places(NamedTuple):
    """The right places for settings that people write into URIs."""

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
# In abfss://container@account.dfs.core.windows.net/folder, the part before the @ is not a user.
_ACCOUNT = re.compile(r"[^:@/?#]+@[^:@/?#]+\.[^:@/?#]+")
_PORT = re.compile(r"[^:]*:[0-9]*")
# At least two letters: a single one may be a drive.
_SCHEME = re.compile(r"((?:[a-z]+\+)?([A-Za-z][A-Za-z0-9.\-]+)):(/?)")
_AUTHORITY_ENDS = re.compile(r"[/?#]")
# With an address in brackets, or with a port.
_HOST = re.compile(r"\[.*|[^:]*:[0-9]*")


def check_uri(uri: str) -> None:
    """Refuse a URI with parts that its driver would silently ignore, before anything is opened.

    Other schemes (``sftp://`` and many more) are left to their drivers: most of these take a user, a password and a port from
    the URI. In ``memory://`` everything is just a name. Text that is nearly a URI is refused, too, since it would be taken
    for the name of a folder.

    Raises:
        ConfigurationError: The URI is refused. The error says where such parts belong, and shows no secrets.
    """
    if "://" not in uri:
        _check_path(uri)
        return
    for link in uri.split("::"):  # fsspec chains drivers that way
        scheme, separator, location = link.partition("://")
        scheme = scheme.rpartition("+")[2]
        if separator and scheme in _PLACES:
            _check(redact_uri(link), scheme, location, _PLACES[scheme])
        elif separator and scheme not in {"file", "memory"} and _is_cut(location):
            raise ConfigurationError(
                f"{redact_uri(link)!r} holds a user or a password in which one of the characters / ? # stands. A driver would "
                "take it for the end of the host: write %2F, %3F and %23 instead."
            )
        elif separator and scheme == "file" and ("?" in location or "#" in location):
            raise ConfigurationError(
                f"{redact_uri(link)!r}: a folder's URI has no query string and no fragment. If the folder's name holds a "
                "question mark or a number sign, write %3F or %23 for it, or give the plain path."
            )


def _is_cut(location: str) -> bool:
    """Whether a driver would take a character of a user or a password for the end of the host."""
    authority = _AUTHORITY_ENDS.split(location, maxsplit=1)[0]
    return (
        bool(userinfo_of(location)) and "@" not in authority and _HOST.fullmatch(authority) is None
    )


def _check_path(path: str) -> None:
    shown, scheme = redact_uri(path), _SCHEME.match(path)
    advice = "If it is meant to be a folder, give its path from the root, beginning with one slash."
    if scheme is not None and (scheme[3] or scheme[2] in known_implementations):
        meant = redact_uri(f"{scheme[1]}://{path[scheme.end() :].lstrip('/')}")
        raise ConfigurationError(
            f"{shown!r} looks like a URI in which a slash is missing: write {meant}. {advice}"
        )
    if shown != path:
        raise ConfigurationError(
            f"{shown!r} looks like a URI with a user or a password but without a scheme such as s3://. {advice}"
        )


def _check(shown: str, scheme: str, location: str, places: _Places) -> None:
    userinfo = userinfo_of(location)
    advice = f"write only {scheme}://bucket/folder"
    if userinfo and not (places is _AZ and _ACCOUNT.fullmatch(location.partition("/")[0])):
        raise ConfigurationError(
            f"{shown!r} holds a user or a password, which the driver for {scheme}:// would ignore: {advice}. "
            f"Credentials belong {places.credentials}."
        )
    for sign, name in (("?", "query string"), ("#", "fragment")):
        if sign in location:
            raise ConfigurationError(
                f"{shown!r} has a {name}, which the driver for {scheme}:// would ignore: {advice}. Endpoints belong "
                f"{places.endpoint}; credentials {places.credentials}. A folder with {sign!r} in its name cannot be used."
            )
    bucket, _, folder = location.partition("/")
    if not bucket:
        raise ConfigurationError(f"{shown!r} names no bucket: write {scheme}://bucket/folder")
    if _PORT.fullmatch(bucket):
        raise ConfigurationError(
            f"{shown!r} has a port, which the driver for {scheme}:// would ignore: write {scheme}://bucket/folder, beginning "
            f"with a bucket. Endpoints belong {places.endpoint}."
        )
    if any(part in {"", ".", ".."} for part in folder.rstrip("/").split("/") if folder.strip("/")):
        raise ConfigurationError(
            f"{shown!r} has a folder without a name, or one with the name '.' or '..', which drivers treat in different ways: "
            "remove it from the URI"
        )
