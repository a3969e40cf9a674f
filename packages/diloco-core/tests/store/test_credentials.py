"""Credentials end: they are renewed before, and again when the service says so."""

import json
import os
import re
import sys
from datetime import UTC, datetime, timedelta

import fsspec
import pytest
from botocore.credentials import RefreshableCredentials
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import _registry

from diloco_core import StoreUnavailableError
from diloco_core._store._drivers._credentials import credentials_of_botocore
from diloco_core._store._drivers._fsspec import FsspecDriver
from diloco_core._store._drivers._obstore import ObstoreDriver
from diloco_core._store._open import open_store

HOUR = 3600.0
BEGAN = datetime(2026, 1, 1, tzinfo=UTC)
_KEY = re.compile(r"Credential=SET(\d+)/")


class World:
    """A service that takes sets of credentials while they last, and sources that give out new ones.

    Time is injected.
    """

    def __init__(self, s3, folder, patch, clock, remote):
        self.s3, self.folder, self.patch, self.clock, self.remote = s3, folder, patch, clock, remote
        self.lasts, self.taken = HOUR, None
        self.given, self.refused = 0, 0
        self.ends = {}
        s3.allowed = self.allowed
        now = property(lambda _: lambda: BEGAN + timedelta(seconds=clock.now), lambda *_: None)
        patch.setattr(RefreshableCredentials, "_time_fetcher", now, raising=False)
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            patch.delenv(name)
        for name, value in {
            "ENDPOINT_URL": s3.url,
            "ENDPOINT_URL_STS": f"{s3.url}/sts",
            "DEFAULT_REGION": "us-east-1",
            "EC2_METADATA_DISABLED": "true",
            "CONFIG_FILE": str(folder / "config"),
            "SHARED_CREDENTIALS_FILE": str(folder / "credentials"),
        }.items():
            patch.setenv(f"AWS_{name}", value)

    @property
    def now(self):
        return self.clock.now

    @now.setter
    def now(self, seconds):
        self.clock.now = seconds

    def allowed(self, headers):
        """A set is taken until its end; with ``taken``, only for so many seconds."""
        number = int(_KEY.search(headers["Authorization"])[1])
        if self.now < self.ends[number]:
            return None
        self.refused += 1
        return 400, "ExpiredToken"

    def new(self):
        """The next set, and its end as the source states it."""
        self.given += 1
        self.ends[self.given] = self.now + (self.taken or self.lasts)
        end = BEGAN + timedelta(seconds=self.now + self.lasts)
        return f"SET{self.given}", end

    def json(self, token="SessionToken"):
        key, end = self.new()
        keys = {"AccessKeyId": key, "SecretAccessKey": "secret", token: "token"}
        return {**keys, "Expiration": f"{end:%Y-%m-%dT%H:%M:%SZ}"}

    def process(self):
        """A program that prints a set: here it fetches one from the server."""
        self.s3.pages["/set"] = lambda: json.dumps({"Version": 1, **self.json()}).encode()
        program = self.folder / "program.sh"
        program.write_text(f"exec curl -s {self.s3.url}/set\n")
        (self.folder / "config").write_text(f"[default]\ncredential_process = /bin/sh {program}\n")

    def container(self):
        self.s3.pages["/set"] = lambda: json.dumps(self.json(token="Token")).encode()
        (self.folder / "token").write_text("token")
        self.patch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{self.s3.url}/set")
        self.patch.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", str(self.folder / "token"))

    def _sts(self, action):
        def answer():
            fields = "".join(f"<{name}>{value}</{name}>" for name, value in self.json().items())
            return (
                f'<{action}Response xmlns="https://sts.amazonaws.com/doc/2011-06-15/"><{action}Result>'
                f"<Credentials>{fields}</Credentials></{action}Result></{action}Response>"
            ).encode()

        self.s3.pages["/sts"] = self.s3.pages["/sts/"] = answer

    def web_identity(self):
        self._sts("AssumeRoleWithWebIdentity")
        (self.folder / "token").write_text("token")
        self.patch.setenv("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/replica")
        self.patch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(self.folder / "token"))

    def role(self):
        self._sts("AssumeRole")
        (self.folder / "config").write_text(
            "[default]\nrole_arn = arn:aws:iam::123456789012:role/replica\nsource_profile = base\n"
            "[profile base]\naws_access_key_id = BASE\naws_secret_access_key = secret\n"
        )

    def file(self):
        """Another program puts a set into a file, and says nothing about its end."""
        names = {"access_key_id": self.new()[0], "secret_access_key": "s", "session_token": "t"}
        lines = [f"aws_{name} = {value}\n" for name, value in names.items()]
        (self.folder / "credentials").write_text("[default]\n" + "".join(lines))


SOURCES = ("process", "container", "web_identity", "role")
DRIVERS = {"obstore": ObstoreDriver, "fsspec": FsspecDriver}


@pytest.fixture
def world(small_s3, tmp_path, monkeypatch, clock, remote):
    monkeypatch.setitem(fsspec.config.conf, "s3", {})
    yield World(small_s3, tmp_path, monkeypatch, clock, remote)
    small_s3.reset()


def opened(world, name):
    return world.remote(DRIVERS[name]("s3://bucket/run"))


def trained(world, store, days, pause):
    """Writes and reads every so many seconds, for so many days."""
    for number in range(int(days * 24 * HOUR / pause)):
        world.now += pause
        store.put(f"k{number % 3}", [b"%d" % number])
        assert store.get(f"k{number % 3}") == b"%d" % number


def of_each(*quick):
    """Every driver with every source, of which these are in the default lane."""
    every = [f"{name} {source}" for name in DRIVERS for source in SOURCES]
    slow = {each: [pytest.mark.slow] * (each not in quick) for each in every}
    cases = [pytest.param(*each.split(), marks=marks) for each, marks in slow.items()]
    return pytest.mark.parametrize(("name", "source"), cases)


@of_each("obstore process", "fsspec container")
@pytest.mark.parametrize("days", [0.5, pytest.param(14, marks=pytest.mark.slow)])
def test_days_over_sets_of_an_hour(world, name, source, days):
    getattr(world, source)()
    trained(world, opened(world, name), days, pause=0.4 * HOUR)
    assert world.refused == 0, "renewed before the end"
    assert 24 * days - 2 <= world.given <= 60 * days + 4


@of_each("obstore web_identity", "fsspec role")
def test_a_set_that_the_service_ends_early_is_renewed(world, name, source):
    getattr(world, source)()
    world.taken = 0.3 * HOUR
    trained(world, opened(world, name), 0.05, pause=0.4 * HOUR)
    assert world.refused > 0


@pytest.mark.parametrize("name", ["obstore", pytest.param("fsspec", marks=pytest.mark.slow)])
def test_a_file_that_another_program_renews_is_read_again(world, name):
    world.file()
    store = opened(world, name)
    for _ in range(2):
        world.now += 2 * HOUR
        world.file()
        store.put("k", [b"x"])
    assert world.refused == 2
    world.now += 2 * HOUR
    began = world.now
    with pytest.raises(StoreUnavailableError, match=r"ExpiredToken.*Use a source that renews them"):
        store.put("k", [b"x"])
    assert world.now - began < 120


def test_obstore_alone_is_asked_anew(world, monkeypatch):
    """Without botocore, obstore keeps a set until the end that the source states."""
    world.container()
    monkeypatch.setitem(sys.modules, "botocore.session", None)
    world.lasts = 10 * 365 * 24 * HOUR  # obstore's clock is the real one
    world.taken = HOUR
    store = opened(world, "obstore")
    for _ in range(3):
        world.now += 2 * HOUR
        store.put("k", [b"x"])
    assert world.refused == 3


def test_sets_of_fifteen_minutes_are_not_asked_for_at_every_request(world):
    """They are the rule where one role assumes another; botocore would renew them always."""
    world.lasts = 900.0
    world.role()
    provider = credentials_of_botocore()
    for _ in range(400):
        world.now += 9.0
        provider()
    assert 4 <= world.given <= 7


def test_a_source_that_is_away_is_waited_for(world):
    world.process()
    store = opened(world, "obstore")
    page = world.s3.pages.pop("/set")
    world.now += 2 * HOUR
    back = world.now + 30

    def sleep(seconds):
        world.now += seconds
        if world.now > back:
            world.s3.pages["/set"] = page

    object.__setattr__(store._retries, "sleep", sleep)
    store.put("k", [b"x"])
    assert world.now > back


@pytest.mark.parametrize(
    "scheme", ["obstore+s3", pytest.param("fsspec+s3", marks=pytest.mark.slow)]
)
def test_a_source_that_fails_at_the_start_is_named(world, scheme):
    (world.folder / "config").write_text("[default]\ncredential_process = /bin/false\n")
    with pytest.raises(StoreUnavailableError, match=r"custom-process|credential_process"):
        open_store(f"{scheme}://bucket/run")


class Keeping(MemoryFileSystem):
    """A driver that keeps the first token that it found, as those of GCS and Azure may do."""

    protocol = "gs"
    newest, refused = 1, 0

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.token = self.newest

    def pipe_file(self, path, value, mode="overwrite", **options):
        if self.token != self.newest:
            type(self).refused += 1
            error = Exception("Invalid Credentials, 401")
            error.code = 401
            raise error
        super().pipe_file(path, value, mode=mode)


@pytest.mark.parametrize("scheme", ["gs", "az"])
def test_a_driver_that_keeps_its_token_is_made_anew(monkeypatch, scheme, remote):
    monkeypatch.setitem(_registry, scheme, type("Own", (Keeping,), {"protocol": scheme}))
    kind = fsspec.get_filesystem_class(scheme)
    store = remote(FsspecDriver(f"{scheme}://bucket/run"), f"{scheme}://bucket/run")
    kind.newest = 2
    store.put("k", [b"x"])
    assert (store.get("k"), kind.refused) == (b"x", 1)
    monkeypatch.setattr(FsspecDriver, "renew", lambda _: None)
    kind.newest = 3
    with pytest.raises(StoreUnavailableError, match=r"401.*Use a source that renews them"):
        store.put("k", [b"x"])
