"""Opening the store of a URI: choose its driver, and check that the store answers.

:mod:`._folder` is for local folders (fsspec's ``file://`` is neither atomic nor exclusive). :mod:`._remote` is for all stores
behind a network; :mod:`._fsspec` or :mod:`._obstore` sends its requests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._errors import ConfigurationError
from .._redact import redact_uri
from ._guard import OPENING_SECONDS, check_endpoint, in_time
from ._transfer import Transfer
from ._uri import check_uri

if TYPE_CHECKING:
    from ._api import Store

_S3 = {"s3", "s3a"}


def open_store(uri: str, *, reading: bool = False, transfer: Transfer | None = None) -> Store:
    """Open the store of a URI, and try whether it works.

    With ``reading`` the store is only read: nothing is created or written, a folder that does not exist counts as an empty
    store, and permission to list and read is enough.

    A path or ``file://`` is a folder. ``s3://`` uses obstore if that is installed and fsspec has no settings for S3 (obstore
    would not see them); every other scheme uses fsspec. ``obstore+s3://`` and ``fsspec+s3://`` choose the driver explicitly.

    Raises:
        ConfigurationError: The URI is empty or malformed, its scheme is unknown, or it holds credentials or anything else
            that its driver would ignore; or the variable that names the endpoint does not hold a URL.
        StoreUnavailableError: The bucket or folder is missing, access is denied, or the store has not answered within 100
            seconds.
        MissingDependencyError: The driver of the scheme is not installed.
    """
    if not isinstance(uri, str) or not uri.strip():
        raise ConfigurationError(
            f"the rendezvous URI must be text such as 's3://bucket/run', or a folder's path, not {uri!r}"
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
        return FolderStore(uri, reading=reading)
    chosen_driver, plus, scheme = scheme.rpartition("+")
    plain_uri = f"{scheme}://{path}"
    if chosen_driver == "obstore" and scheme not in _S3:
        raise ConfigurationError(
            f"{redact_uri(uri)!r}: the obstore driver is only for s3://, not for {scheme}://; write {redact_uri(plain_uri)!r}"
        )
    if chosen_driver == "obstore" or (not plus and scheme in _S3 and _prefers_obstore(scheme)):
        return RemoteStore(plain_uri, ObstoreDriver(plain_uri), reading=reading, transfer=transfer)
    transfer = transfer or Transfer()
    driver = FsspecDriver(plain_uri if chosen_driver == "fsspec" else uri, transfer.connections)
    return RemoteStore(plain_uri, driver, reading=reading, transfer=transfer)


def _prefers_obstore(scheme: str) -> bool:
    from fsspec.config import conf

    try:
        import obstore  # noqa: F401 - to see whether it is installed
    except ImportError:
        return False
    return not conf.get(scheme)
