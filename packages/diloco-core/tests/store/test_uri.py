"""URIs that say more than their driver obeys are refused unopened, and show no secret."""

import pytest

from diloco_core import ConfigurationError, StoreUnavailableError, connect, export
from diloco_core._store import _open as stores
from diloco_core._store._drivers._obstore import ObstoreDriver
from diloco_core._store._open import check_uri, open_store

SECRET = "hunter2/Zx+9q"


@pytest.fixture(autouse=True)
def nothing_is_opened(monkeypatch):
    def opened(*_):
        raise StoreUnavailableError("it was opened")

    monkeypatch.setattr(stores, "_opened", opened)


@pytest.mark.sampled
@pytest.mark.parametrize("asked", ["", "obstore+", "fsspec+", "simplecache::"])
@pytest.mark.parametrize(
    ("uri", "message"),
    [
        (f"s3://key:{SECRET}@bucket/run", "user or a password.* in AWS_ACCESS_KEY_ID and AWS_SEC"),
        ("s3://key@bucket/run", "holds a user or a password"),
        (f"s3a://key:{SECRET}@bucket", "user or a password.*write only s3a://bucket/folder"),
        (f"gs://me:{SECRET}@bucket/run", "GOOGLE_APPLICATION_CREDENTIALS"),
        (f"az://me:{SECRET}@bucket/run", "AZURE_STORAGE_ACCOUNT_KEY"),
        (f"abfss://box:{SECRET}@account.dfs.core.windows.net/run", "AZURE_STORAGE_ACCOUNT_KEY"),
        (f"s3://bucket/run?secret={SECRET}", "has a query string.* belong in AWS_ENDPOINT_URL"),
        ("s3://bucket/run?endpoint_url=http://minio:9000", "query string.* AWS_ENDPOINT_URL"),
        (f"az://box/run?sig={SECRET}", "has a query string.*AZURE_STORAGE_SAS_TOKEN"),
        ("s3://bucket?region=eu-west-1", "has a query string"),
        ("gs://bucket/run#7", "has a fragment"),
        ("s3://minio:9000/bucket/run", "has a port.* Endpoints belong in AWS_ENDPOINT_URL"),
        ("gs://localhost:4443/bucket", "has a port.* Endpoints belong in STORAGE_EMULATOR_HOST"),
        ("s3:///run", "names no bucket"),
        ("az://", "names no bucket"),
        ("s3://bucket//run", "folder without a name"),
        ("s3://bucket/a//run/", "folder without a name"),
        ("s3://bucket/a/../run", "with the name '.' or '..'"),
        ("s3://bucket/./run", "with the name '.' or '..'"),
    ],
)
def test_what_no_driver_obeys_is_refused(asked, uri, message):
    with pytest.raises(ConfigurationError, match=message) as caught:
        open_store(asked + uri)
    assert SECRET not in str(caught.value)
    assert caught.value.__cause__ is caught.value.__context__ is None


@pytest.mark.parametrize(
    "uri", ["file:///tmp/run?x=1", "file:///tmp/run#1", "zip://x::file:///tmp/run?x"]
)
def test_a_folders_uri_has_no_query_string(uri):
    with pytest.raises(ConfigurationError, match=r"no query string and no fragment.*%3F"):
        open_store(uri)


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        (f"s3:/key:{SECRET}@bucket/run", "'s3:/<redacted>@.* is missing: write s3://<redacted>@"),
        (f"s3:key:{SECRET}@bucket/run", "a slash is missing: write s3://"),
        (f"fsspec+s3:/key:{SECRET}@bucket/run", r"a slash is missing: write fsspec\+s3://"),
        (
            "gs:bucket/run",
            "missing: write gs://bucket/run. If it is meant to be a folder, give its",
        ),
        (f"s3//key:{SECRET}@bucket/run", "a colon or a slash is missing: write s3://<redacted>@"),
        (
            "obstore+s3//bucket/run",
            r"a colon or a slash is missing: write obstore\+s3://bucket/run",
        ),
        (f"//key:{SECRET}@host/run", "looks like a URI with a user or a password"),
        (f"key:{SECRET}@bucket/run", "looks like a URI with a user or a password"),
        (f"ftp://me:{SECRET}@host/run", "in which one of the characters .* write %2F"),
        ("sftp://me:hunter2#Zx+9q@host:22/run", "in which one of the characters"),
        ("sftp://me:hunter2?Zx+9q@host:22/run", "in which one of the characters"),
        ("gs://bucket/run#hunter2", "has a fragment"),
        (f"s3:///key:{SECRET}@bucket/run", "user or a password|names no bucket"),
    ],
)
def test_what_is_nearly_a_uri_is_refused_without_its_secret(uri, message):
    with pytest.raises(ConfigurationError, match=message) as caught:
        open_store(uri)
    assert not any(piece in str(caught.value) for piece in ("hunter2", "Zx+9q"))
    assert caught.value.__cause__ is caught.value.__context__ is None


_BAD_ENDPOINTS = [
    "localhost:9000", "127.0.0.1:9000", "minio", " http://minio:9000", "http://",
    "http:/minio:9000", "http://mi nio", "http://minio:99999", "http://minio:port", "http://[::1", "ftp://minio",
    "s3://minio", "http://minio?x=1", "http://minio#x", "http://minïo",
    f"http://me:{SECRET}@minio:9000", f"me:{SECRET}@minio:9000",
]  # fmt: skip


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT"])
@pytest.mark.parametrize("value", _BAD_ENDPOINTS)
def test_an_endpoint_that_is_no_url_is_named_by_its_variable(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    for scheme in ("s3", "s3a", "obstore+s3", "fsspec+s3", "simplecache::s3"):
        with pytest.raises(
            ConfigurationError, match=f"^{name} must be a URL .* Unset it"
        ) as caught:
            open_store(f"{scheme}://bucket")
        assert not any(piece in str(caught.value) for piece in ("hunter2", "Zx+9q"))
        assert caught.value.__cause__ is caught.value.__context__ is None
    for uri in ("/tmp/run", "gs://bucket", "memory://x"):
        with pytest.raises(StoreUnavailableError, match="it was opened"):
            open_store(uri)


@pytest.mark.parametrize(
    "value",
    ["http://minio:9000", "HTTPS://minio/", "http://[::1]:9000/s3", "http://me:hunter2%2FZ@io", ""],
)
def test_endpoints_that_are_urls_are_obeyed(monkeypatch, value):
    monkeypatch.setenv("AWS_ENDPOINT_URL", value)
    with pytest.raises(StoreUnavailableError, match="it was opened"):
        open_store("s3://bucket/run")


def test_obstore_does_not_survive_an_empty_one(monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "")
    with pytest.raises(ConfigurationError, match=r"AWS_ENDPOINT_URL must be a URL .* not ''"):
        ObstoreDriver("s3://bucket/run")


def test_whoever_opens_is_told(tmp_path):
    uri = f"s3://key:{SECRET}@bucket/run"
    enter = (lambda: connect(uri, rank=0, world_size=1), lambda: export(uri, tmp_path / "model"))
    for act in enter:
        with pytest.raises(ConfigurationError, match="holds a user or a password") as caught:
            act()
        assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    "uri",
    [
        "s3://bucket", "s3://bucket/", "s3://bucket/run/", "s3://bucket/user@host/a:b/c=d&e",
        "s3://arn:aws:s3:eu-west-1:123456789012:accesspoint/place/run",
        "abfss://box@account.dfs.core.windows.net/run", "obstore+s3://bucket/run",
        "sftp://me:password@host:22/run", "memory://key:secret@a?b#c", "memory://key:sec/ret@a",
        "sftp://me:pass%2Fword@host:22/run", "sftp://host:22/run@home",
        "sftp://me:password@host/run@home/a", "sftp://[::1]:22/run@home", "sftp://host/run@home",
        "./s3:/key:secret@bucket", "/s3:/key:secret@bucket", "runs/monday@home", "run-1:2",
        "file:///tmp/a%3Fb", "/tmp/what?#", "C:/x?", "./a::b",
    ],
)  # fmt: skip
def test_what_is_obeyed_is_not(uri):
    check_uri(uri)
