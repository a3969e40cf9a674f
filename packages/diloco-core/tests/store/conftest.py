"""S3 servers on loopback ports for the tests of the stores, and the environment that points the
drivers at them.
"""

import contextlib
import importlib.util
import itertools
import threading
from pathlib import Path

import boto3
import fsspec
import pytest
from moto.s3.responses import S3Response
from moto.server import ThreadedMotoServer
from training_lab import PATIENCE

from diloco_core._retry import Retries
from diloco_core._store._drivers._fsspec import FsspecDriver
from diloco_core._store._drivers._obstore import ObstoreDriver
from diloco_core._store._drivers._remote import RemoteStore
from diloco_core._store._open import open_store

_spec = importlib.util.spec_from_file_location("small_s3", Path(__file__).with_name("small_s3.py"))
_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)

_numbers = itertools.count()


_REAL = {"moto_url", "small_s3_server", "small_s3_drivers", "point_at"}


@pytest.hookimpl(tryfirst=True)  # before ``-m`` chooses
def pytest_collection_modifyitems(items):
    """A test that talks to a server waits for something real."""
    for item in items:
        if not _REAL.isdisjoint(item.fixturenames) or "any_store" in item.fixturenames:
            item.add_marker("processes")


def environment(url):
    """What makes a URL the S3 endpoint of a process.

    Nobody shall look for the credentials of a machine.
    """
    return {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }


@pytest.fixture(scope="session")
def moto_url():
    """moto's S3 with an empty bucket, ``bucket``.

    It looks whether an object is there and then writes it, so of two that create it at once both
    may succeed, unlike on S3: writes take turns here.
    """
    put, turn = S3Response.put_object, threading.Lock()

    def put_in_turn(self):
        with turn:
            return put(self)

    S3Response.put_object = put_in_turn
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    url = f"http://{host}:{port}"
    keys = {
        "aws_access_key_id": "test",
        "aws_secret_access_key": "test",
        "region_name": "us-east-1",
    }
    client = boto3.client("s3", endpoint_url=url, **keys)
    client.create_bucket(Bucket="bucket")
    client.close()
    yield url
    server.stop()
    S3Response.put_object = put


@pytest.fixture
def point_at(monkeypatch):
    """A function that makes a URL the S3 endpoint of this process."""

    def point(url):
        for name, value in environment(url).items():
            monkeypatch.setenv(name, value)

    return point


@pytest.fixture(scope="session")
def small_s3_server():
    """A small S3 for the session."""
    with _module.SmallS3() as server:
        yield server


@pytest.fixture
def small_s3(small_s3_server, point_at):
    """A small S3 that is empty and faultless, and the S3 endpoint of this process."""
    small_s3_server.reset()
    point_at(small_s3_server.url)
    return small_s3_server


@pytest.fixture(scope="session")
def small_s3_drivers(small_s3_server):
    """A driver of each kind, for the session. s3fs does not try again by itself, so that our own
    tries are what is tested.
    """
    settings = {
        "retries": {"total_max_attempts": 1},
        "read_timeout": PATIENCE,
        "connect_timeout": PATIENCE,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(fsspec.config.conf, "s3", {"config_kwargs": settings})
        for name, value in environment(small_s3_server.url).items():
            patch.setenv(name, value)
        drivers = {
            "obstore": ObstoreDriver("s3://bucket/run"),
            "fsspec": FsspecDriver("s3://bucket/run"),
        }
        for driver in drivers.values():
            with contextlib.suppress(FileNotFoundError):
                driver.head("absent")  # s3fs reads its settings at its first request
    return drivers


@pytest.fixture(params=["obstore", "fsspec"])
def driver(request, small_s3_drivers):
    """Each driver for S3, at the small S3."""
    return small_s3_drivers[request.param]


@pytest.fixture
def slept():
    """The pauses that were made."""
    return []


@pytest.fixture
def patient():
    """Retries for up to 20 s whose pauses take no time, and the time that they took."""
    now = [0.0]
    return Retries(
        patience=20, clock=lambda: now[0], sleep=lambda s: now.__setitem__(0, now[0] + s)
    ), now


@pytest.fixture
def store(small_s3, driver, slept):
    """A store on the small S3 whose pauses take no time."""
    opened = RemoteStore("s3://bucket/run", driver, Retries(sleep=slept.append, jitter=lambda: 0.5))
    small_s3.log.clear()
    yield opened
    executor = opened._transfers._executor
    opened.close()
    if executor is not None:
        executor.shutdown(wait=True)  # what is under way would be in the next test's log


@pytest.fixture(scope="session")
def moto_stores(moto_url):
    """A store on moto for each driver. One for the session, since s3fs takes a second to open."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment(moto_url).items():
            patch.setenv(name, value)
        stores = {
            scheme: open_store(f"{scheme}://bucket/laws-{scheme[0]}")
            for scheme in ("fsspec+s3", "obstore+s3")
        }
    yield stores
    for store in stores.values():
        store.close()


@pytest.fixture(params=["folder", "memory", "fsspec+s3", "obstore+s3"])
def any_store(request, tmp_path):
    """An empty store of every kind; S3 is moto's."""
    if request.param in {"folder", "memory"}:
        store = open_store(
            str(tmp_path / "run")
            if request.param == "folder"
            else f"memory://laws/{next(_numbers)}"
        )
        yield store
        store.close()
    else:
        store = request.getfixturevalue("moto_stores")[request.param]
        yield store
        store.delete(store.list(""))
