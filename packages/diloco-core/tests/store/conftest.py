"""S3 servers on loopback ports, and the environment that points the drivers at them."""

import contextlib
import functools
import importlib.util
import itertools
import resource
import threading
from pathlib import Path

import boto3
import fsspec
import pytest
from botocore.loaders import JSONFileLoader
from moto.s3.responses import S3Response
from moto.server import ThreadedMotoServer
from training_lab import PATIENCE

from diloco_core._retry import Retries
from diloco_core._store._drivers._driver import Verdict
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
    """What makes a URL the S3 endpoint of a process, which shall not look for credentials."""
    return {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }


@pytest.fixture(autouse=True, scope="session")
def one_reading_of_tables():
    """Let botocore read its megabytes of JSON once, and not for every store that s3fs opens."""
    read = functools.cache(JSONFileLoader().load_file)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JSONFileLoader, "load_file", staticmethod(read))
        yield


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
    keys = {"aws_access_key_id": "test", "aws_secret_access_key": "test"}
    client = boto3.client("s3", endpoint_url=url, region_name="us-east-1", **keys)
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
    """A driver of each kind; s3fs does not try again by itself, so that our own tries are seen."""
    limits = dict.fromkeys(("read_timeout", "connect_timeout"), PATIENCE)
    settings = {"retries": {"total_max_attempts": 1}, **limits}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(fsspec.config.conf, "s3", {"config_kwargs": settings})
        for name, value in environment(small_s3_server.url).items():
            patch.setenv(name, value)
        kinds = {"obstore": ObstoreDriver, "fsspec": FsspecDriver}
        drivers = {name: kind("s3://bucket/run") for name, kind in kinds.items()}
        for driver in drivers.values():
            with contextlib.suppress(FileNotFoundError):
                driver.head("absent")  # s3fs reads its settings at its first request
    return drivers


@pytest.fixture(params=["obstore", "fsspec"])
def driver(request, small_s3_drivers):
    """Each driver for S3, at the small S3."""
    return small_s3_drivers[request.param]


@pytest.fixture
def full_disk():
    """Let no file of this process grow beyond a megabyte: the system refuses the write."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10**6, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


class FailingDriver:
    """Objects in memory; while ``fails()`` is true, every request ends with a chained error."""

    name, near, exclusive, deletes_many, copies = "a driver", False, True, True, 0

    def __init__(self, fails=lambda: False, verdict=Verdict.TRANSIENT, text="no answer"):
        self.fails, self.verdict, self.text, self.objects = fails, verdict, text, {}

    def _ask(self, *args, **options):
        if self.fails():
            try:
                raise ValueError(f"inside: {self.text}")
            except ValueError as inner:
                raise OSError(f"outside: {self.text}") from inner

    head = range = upload = _ask

    def put(self, key, data, *, exclusive):
        self._ask()
        self.objects[key] = bytes(data)

    def get(self, key, largest):
        self._ask()
        return self.objects[key]

    def list(self, prefix):
        self._ask()
        return {key: len(data) for key, data in self.objects.items() if key.startswith(prefix)}

    def delete(self, keys):
        self._ask()
        for key in keys:
            self.objects.pop(key, None)

    def judge(self, error):
        return (Verdict.MISSING if isinstance(error, KeyError) else self.verdict), str(error)


@pytest.fixture
def failing_driver():
    """The class of drivers that fail when they are told to."""
    return FailingDriver


@pytest.fixture
def clock(lab):
    """Time that passes in pauses only."""
    return lab.Clock()


@pytest.fixture
def remote(clock):
    """Open a store over a driver, whose pauses pass on the clock."""
    opened = []

    def over(driver, uri="s3://bucket/run", *, patience=60.0, jitter=0.5, **options):
        retries = Retries(patience, clock=clock, sleep=clock.sleep, jitter=lambda: jitter)
        opened.append(RemoteStore(uri, driver, retries, **options))
        return opened[-1]

    yield over
    for store in opened:
        executor = store.background._executor
        store.close()
        if executor is not None:
            executor.shutdown(wait=True)  # what is under way would be in the next test's log


@pytest.fixture
def store(small_s3, driver, remote):
    """A store on the small S3 with each driver, whose pauses take no time."""
    opened = remote(driver)
    small_s3.log.clear()
    return opened


@pytest.fixture
def s3(small_s3, small_s3_drivers, remote):
    """The same with obstore alone."""
    opened = remote(small_s3_drivers["obstore"])
    small_s3.log.clear()
    return opened


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
    near = {"folder": str(tmp_path / "run"), "memory": f"memory://laws/{next(_numbers)}"}
    if request.param in near:
        store = open_store(near[request.param])
        yield store
        store.close()
    else:
        store = request.getfixturevalue("moto_stores")[request.param]
        yield store
        store.delete(store.list(""))
