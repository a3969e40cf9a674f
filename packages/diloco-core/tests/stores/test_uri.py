"""URIs that say more than their driver obeys are refused before anything is opened, and show no secret."""

import pytest

from diloco_core import ConfigurationError, StoreUnavailableError, connect, export
from diloco_core import _store as stores
from diloco_core._store import open_store
from diloco_core._store_uri import check_uri

SECRET = "hunter2/Zx+9q"


@pytest.fixture(autouse=True)
def nothing_is_opened(monkeypatch):
    def opened(*_):
        raise StoreUnavailableError("it was opened")

    monkeypatch.setattr(stores, "_opened", opened)


@pytest.mark.parametrize("asked", ["", "obstore+", "fsspec+", "simplecache::"])
@pytest.mark.parametrize(
    ("uri", "message"),
    [
        (f"s3://key:{SECRET}@bucket/run", "holds a user or a password.* belong in AWS_ACCESS_KEY_ID and AWS_SECRET"),
        ("s3://key@bucket/run", "holds a user or a password"),
        (f"s3a://key:{SECRET}@bucket", "holds a user or a password.*write s3a://bucket/folder"),
        (f"gs://me:{SECRET}@bucket/run", "GOOGLE_APPLICATION_CREDENTIALS"),
        (f"az://me:{SECRET}@bucket/run", "AZURE_STORAGE_ACCOUNT_KEY"),
        (f"abfss://box:{SECRET}@account.dfs.core.windows.net/run", "AZURE_STORAGE_ACCOUNT_KEY"),
        (f"s3://bucket/run?secret={SECRET}", "has a query string.* Endpoints belong in AWS_ENDPOINT_URL"),
        ("s3://bucket/run?endpoint_url=http://minio:9000", "has a query string.* Endpoints belong in AWS_ENDPOINT_URL"),
        (f"az://box/run?sig={SECRET}", "has a query string.*AZURE_STORAGE_SAS_TOKEN"),
        ("s3://bucket?region=eu-west-1", "has a query string"),
        ("gs://bucket/run#7", "has a fragment"),
        ("s3://minio:9000/bucket/run", "has a port.* Endpoints belong in AWS_ENDPOINT_URL"),
        ("gs://localhost:4443/bucket", "has a port.* Endpoints belong in STORAGE_EMULATOR_HOST"),
        ("s3:///run", "names no bucket"),
        ("az://", "names no bucket"),
        ("s3://bucket//run", "folder without a name"),
        ("s3://bucket/a//run/", "folder without a name"),
        ("s3://bucket/a/../run", "called '.' or '..'"),
        ("s3://bucket/./run", "called '.' or '..'"),
    ],
)
def test_what_no_driver_obeys_is_refused(asked, uri, message):
    with pytest.raises(ConfigurationError, match=message) as caught:
        open_store(asked + uri)
    assert SECRET not in str(caught.value)
    assert caught.value.__cause__ is caught.value.__context__ is None


@pytest.mark.parametrize("uri", ["file:///tmp/run?x=1", "file:///tmp/run#1", "zip://x::file:///tmp/run?x"])
def test_a_folders_uri_has_no_query_string(uri):
    with pytest.raises(ConfigurationError, match=r"no query string and no fragment.*%3F"):
        open_store(uri)


def test_whoever_opens_is_told(tmp_path):
    uri = f"s3://key:{SECRET}@bucket/run"
    for act in (lambda: connect(uri, rank=0, world_size=1), lambda: export(uri, tmp_path / "model")):
        with pytest.raises(ConfigurationError, match="holds a user or a password") as caught:
            act()
        assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    "uri",
    [
        "s3://bucket",
        "s3://bucket/",
        "s3://bucket/run/",
        "s3://bucket/user@host/a:b/c=d&e",
        "s3://arn:aws:s3:eu-west-1:123456789012:accesspoint/place/run",
        "abfss://box@account.dfs.core.windows.net/run",
        "obstore+s3://bucket/run",
        "sftp://me:password@host:22/run",
        "memory://key:secret@a?b#c",
        "file:///tmp/a%3Fb",
        "/tmp/what?#",
        "C:/x?",
        "./a::b",
    ],
)
def test_what_is_obeyed_is_not(uri):
    check_uri(uri)
