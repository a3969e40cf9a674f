"""Opening the store of a URI: choose its driver, and check that the store answers.

:mod:`._folder` is for local folders (fsspec's ``file://`` is neither atomic nor exclusive).
:mod:`._remote` is for all stores behind a network; :mod:`._fsspec` or :mod:`._obstore` sends its
requests.
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from typing import NamedTuple

from fsspec.config import conf
from fsspec.registry import known_implementations

from .._errors import ConfigurationError
from .._redact import redact_uri, userinfo_of
from ._api import Store
from ._guard import OPENING_SECONDS, S3, check_endpoint, in_time
from ._transfer import Transfer


def open_store(uri: str, *, reading: bool = False, transfer: Transfer | None = None) -> Store:
    """Open the store of a URI, and try whether it works.

    With ``reading`` the store is only read: nothing is created or written, a folder that does not
    exist counts as an empty store, and permission to list and read is enough.

    A path or ``file://`` is a folder. ``s3://`` uses obstore if that is installed and fsspec has no
    settings for S3 (obstore would not see them); every other scheme uses fsspec. ``obstore+s3://``
    and ``fsspec+s3://`` choose the driver explicitly.

    Raises:
        ConfigurationError: The URI is empty or malformed, its scheme is unknown, or it holds
            credentials or anything else that its driver would ignore; or the variable that names
            the endpoint does not hold a URL.
        StoreUnavailableError: The bucket or folder is missing, access is denied, or the store has
            not answered within 100 seconds.
        MissingDependencyError: The driver of the scheme is not installed.
    """
    if not isinstance(uri, str) or not uri.strip():
        raise ConfigurationError(
            "the rendezvous URI must be text such as 's3://bucket/run', or a folder's path, not "
            f"{uri!r}"
        )
    check_uri(uri)
    check_endpoint(uri.rpartition("://")[0].rpartition("::")[2].rpartition("+")[2])
    return in_time(lambda: _opened(uri, reading, transfer), uri, OPENING_SECONDS)


def _opened(uri: str, reading: bool, transfer: Transfer | None) -> Store:
    from ._drivers._folder import FolderStore
    from ._drivers._fsspec import FsspecDriver
    from ._drivers._obstore import ObstoreDriver
    from ._drivers._remote import RemoteStore

    scheme, separator, path = uri.partition("://")
    if not separator or scheme == "file":
        if transfer not in {None, Transfer()}:
            raise ConfigurationError(
                f"transfer={transfer} has no effect in a folder, to and from which nothing is "
                "sent: leave it out"
            )
        return FolderStore(uri, reading=reading)
    chosen_driver, plus, scheme = scheme.rpartition("+")
    plain_uri = f"{scheme}://{path}"
    if chosen_driver == "obstore" and scheme not in S3:
        raise ConfigurationError(
            f"{redact_uri(uri)!r}: the obstore driver is only for s3://, not for {scheme}://; "
            f"write {redact_uri(plain_uri)!r}"
        )
    if chosen_driver == "obstore" or (not plus and scheme in S3 and _prefers_obstore(scheme)):
        return RemoteStore(plain_uri, ObstoreDriver(plain_uri), reading=reading, transfer=transfer)
    transfer = transfer or Transfer()
    # One more, so that telemetry, which may hang, takes none from the syncs.
    connections = transfer.connections + 1
    driver = FsspecDriver(plain_uri if chosen_driver == "fsspec" else uri, connections)
    return RemoteStore(plain_uri, driver, reading=reading, transfer=transfer)


def _prefers_obstore(scheme: str) -> bool:
    return find_spec("obstore") is not None and not conf.get(scheme)


class _Places(NamedTuple):
    """The right places for settings that people write into URIs."""

    credentials: str
    endpoint: str


_OF_S3 = _Places(
    "in AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or in what the machine or a profile provides",
    "in AWS_ENDPOINT_URL",
)
_GS = _Places(
    "in the file that GOOGLE_APPLICATION_CREDENTIALS names, or in what the machine provides",
    "in STORAGE_EMULATOR_HOST",
)
_AZ = _Places(
    "in AZURE_STORAGE_CONNECTION_STRING, or in AZURE_STORAGE_ACCOUNT_NAME with "
    "AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN",
    "in AZURE_STORAGE_CONNECTION_STRING, as BlobEndpoint",
)
_PLACES = {
    **dict.fromkeys(("s3", "s3a"), _OF_S3),
    **dict.fromkeys(("gs", "gcs"), _GS),
    **dict.fromkeys(("az", "abfs", "abfss"), _AZ),
}
# In abfss://container@account.dfs.core.windows.net/folder, the part before the @ is not a user.
_ACCOUNT = re.compile(r"[^:@/?#]+@[^:@/?#]+\.[^:@/?#]+")
_PORT = re.compile(r"[^:]*:[0-9]*")
# At least two letters: a single one may be a drive.
_SCHEME = re.compile(r"((?:[a-z]+\+)?([A-Za-z][A-Za-z0-9.\-]+)):(/?)")
_NO_COLON = re.compile(r"\A(?:[a-z]+\+)?(?:s3|gs|az)(?=//)")
_AUTHORITY_ENDS = re.compile(r"[/?#]")
# With an address in brackets, or with a port.
_HOST = re.compile(r"\[.*|[^:]*:[0-9]*")


def check_uri(uri: str) -> None:
    """Refuse a URI with parts that its driver would silently ignore, before anything is opened.

    Other schemes (``sftp://`` and many more) are left to their drivers: most of these take a user,
    a password and a port from the URI. In ``memory://`` everything is just a name. Text that is
    nearly a URI is refused, too, since it would be taken for the name of a folder.

    Raises:
        ConfigurationError: The URI is refused. The error says where such parts belong, and shows no
            secrets.
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
                f"{redact_uri(link)!r} holds a user or a password in which one of the characters / "
                "? # stands. A driver would take it for the end of the host: write %2F, %3F and "
                "%23 instead."
            )
        elif separator and scheme == "file" and ("?" in location or "#" in location):
            raise ConfigurationError(
                f"{redact_uri(link)!r}: a folder's URI has no query string and no fragment. If the "
                "folder's name holds a question mark or a number sign, write %3F or %23 for it, or "
                "give the plain path."
            )


def _is_cut(location: str) -> bool:
    """Say whether a driver would see the host end inside the user's name or the password."""
    authority = _AUTHORITY_ENDS.split(location, maxsplit=1)[0]
    return (
        bool(userinfo_of(location)) and "@" not in authority and _HOST.fullmatch(authority) is None
    )


def _check_path(path: str) -> None:
    shown = redact_uri(path)
    path = _NO_COLON.sub(r"\g<0>:", path)
    scheme = _SCHEME.match(path)
    advice = "If it is meant to be a folder, give its path from the root, beginning with one slash."
    if scheme is not None and (scheme[3] or scheme[2] in known_implementations):
        meant = redact_uri(f"{scheme[1]}://{path[scheme.end() :].lstrip('/')}")
        raise ConfigurationError(
            f"{shown!r} looks like a URI in which a colon or a slash is missing: write {meant}. "
            f"{advice}"
        )
    if shown != path:
        raise ConfigurationError(
            f"{shown!r} looks like a URI with a user or a password but without a scheme such as "
            f"s3://. {advice}"
        )


def _check(shown: str, scheme: str, location: str, places: _Places) -> None:
    userinfo = userinfo_of(location)
    advice = f"write only {scheme}://bucket/folder"
    if userinfo and not (places is _AZ and _ACCOUNT.fullmatch(location.partition("/")[0])):
        raise ConfigurationError(
            f"{shown!r} holds a user or a password, which the driver for {scheme}:// would ignore: "
            f"{advice}. Credentials belong {places.credentials}."
        )
    for sign, name in (("?", "query string"), ("#", "fragment")):
        if sign in location:
            raise ConfigurationError(
                f"{shown!r} has a {name}, which the driver for {scheme}:// would ignore: {advice}. "
                f"Endpoints belong {places.endpoint}; credentials {places.credentials}. A folder "
                f"with {sign!r} in its name cannot be used."
            )
    bucket, _, folder = location.partition("/")
    if not bucket:
        raise ConfigurationError(f"{shown!r} names no bucket: write {scheme}://bucket/folder")
    if _PORT.fullmatch(bucket):
        raise ConfigurationError(
            f"{shown!r} has a port, which the driver for {scheme}:// would ignore: write "
            f"{scheme}://bucket/folder, beginning with a bucket. Endpoints belong "
            f"{places.endpoint}."
        )
    if any(part in {"", ".", ".."} for part in folder.rstrip("/").split("/") if folder.strip("/")):
        raise ConfigurationError(
            f"{shown!r} has a folder without a name, or one with the name '.' or '..', which "
            "drivers treat in different ways: remove it from the URI"
        )
