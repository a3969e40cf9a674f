"""Opening what does not answer, and what is shown of secrets: nothing."""

import logging
import socket
import sys
import threading
from urllib.parse import quote

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from diloco_core import ConfigurationError, StoreUnavailableError
from diloco_core._retry import Retries
from diloco_core._store._drivers._driver import Verdict
from diloco_core._store._drivers._fsspec import FsspecDriver
from diloco_core._store._drivers._remote import RemoteStore
from diloco_core._store._guard import OPENING_SECONDS, in_time
from diloco_core._store._open import open_store
from diloco_protocol import MissingDependencyError

pytestmark = pytest.mark.processes

SECRET = "hunter2/Zx+9q"


@pytest.fixture
def silent():
    """URL of an endpoint that accepts connections and never answers."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize("scheme", ["obstore+s3", "fsspec+s3"])
@pytest.mark.parametrize("reading", [False, True])
def test_an_endpoint_that_never_answers_is_named(silent, point_at, scheme, reading, monkeypatch):
    monkeypatch.setattr("diloco_core._store._open.OPENING_SECONDS", 0.3)
    point_at(silent)
    with pytest.raises(
        StoreUnavailableError,
        match=rf"s3://bucket/run cannot be opened: .* within 0\.3 s.*{silent}",
    ):
        open_store(f"{scheme}://bucket/run", reading=reading)


@pytest.mark.parametrize("when", ["it is made", "it is asked"])
def test_any_driver_is_given_up_in_time(when, monkeypatch):
    monkeypatch.setattr("diloco_core._store._open.OPENING_SECONDS", 0.2)
    never = threading.Event()

    class Hangs(MemoryFileSystem):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            if when == "it is made":
                never.wait()

        def pipe_file(self, *args, **options):
            never.wait()

    scheme = f"hangs{len(when)}"
    fsspec.register_implementation(scheme, Hangs)
    try:
        with pytest.raises(
            StoreUnavailableError,
            match=r"within 0\.2 s. Its endpoint is the one that the driver for",
        ):
            open_store(f"{scheme}://bucket/run")
    finally:
        never.set()


def test_two_minutes_are_enough_for_all():
    assert OPENING_SECONDS < 120


def test_what_fails_in_the_thread_that_opens_is_raised_here():
    def fails():
        raise KeyError("k")

    with pytest.raises(KeyError):
        in_time(fails, "memory://x", 30)
    assert in_time(lambda: 7, "memory://x", 30) == 7


def test_clients_give_up_by_themselves_and_leave_it_to_us_to_try_again(small_s3):
    driver = FsspecDriver("s3://bucket/run")
    assert driver._fs.retries == 1
    assert driver._fs.config_kwargs["connect_timeout"] == 5
    assert driver._fs.config_kwargs["read_timeout"] == 30
    small_s3.fail(500, "PUT", times=100)
    small_s3.log.clear()
    with pytest.raises(Exception, match="Injected"):
        driver.put("k", b"x", exclusive=False)
    tries = [path for method, path in small_s3.log if "/run/k" in path]
    assert len(tries) == 1, "other requests may be those of an opening that was given up before"


def test_what_the_user_has_set_wins(small_s3, monkeypatch):
    monkeypatch.setitem(fsspec.config.conf, "s3", {"config_kwargs": {"read_timeout": 7}})
    assert FsspecDriver("s3://bucket/run")._fs.config_kwargs["read_timeout"] == 7


class Says:
    """A driver that fails, and says everything it knows."""

    name = "a driver"
    near = False
    exclusive = True
    deletes_many = True
    copies = 0

    def __init__(self, verdict, text):
        self.verdict, self.text = verdict, text
        self.fails = False

    def _fail(self, *args, **options):
        try:
            raise ValueError(f"inside: {self.text}")
        except ValueError as inner:
            raise OSError(f"outside: {self.text}") from inner

    def put(self, key, data, *, exclusive):
        self.data = bytes(data)
        if self.fails:
            self._fail()

    def get(self, key, largest):
        return self._fail() if self.fails else self.data

    def list(self, prefix):
        return self._fail() if self.fails else {f"{prefix}{key}": 8 for key in self.keys()}

    def keys(self):
        return []

    def delete(self, keys):
        if self.fails:
            self._fail()

    head = range = upload = _fail

    def judge(self, error):
        return self.verdict, str(error)


def shown(error):
    """Everything that a traceback shows of an error."""
    texts = []
    while error is not None:
        texts.append(f"{error} {error!r}")
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return "\n".join(texts)


_URIS = {
    "userinfo": f"s3://key:{SECRET}@bucket/run",
    "parameter": f"s3://bucket/run?secret={SECRET}",
    "signature": f"az://bucket/run?sig={SECRET}",
}


class TestSecrets:
    @pytest.fixture(autouse=True)
    def logs(self, caplog):
        caplog.set_level(logging.DEBUG, "diloco_core")
        yield
        assert SECRET not in caplog.text

    @pytest.mark.parametrize("uri", _URIS.values(), ids=_URIS)
    @pytest.mark.parametrize(
        "verdict", [Verdict.TRANSIENT, Verdict.PERMANENT, Verdict.FORBIDDEN, Verdict.NO_BUCKET]
    )
    def test_in_what_drivers_say(self, uri, verdict, monkeypatch):
        driver = Says(verdict, f"GET {uri}?X-Amz-Signature={SECRET} for {SECRET}")
        monkeypatch.setattr(RemoteStore, "_probe", lambda *_: None)
        store = RemoteStore(uri, driver, Retries(patience=0.01, sleep=lambda _: None))
        driver.fails = True
        assert SECRET not in store.uri
        for act in (
            lambda: store.put("k", [b"x"]),
            lambda: store.create("k", b"x"),
            lambda: store.put("k", [bytes(2**24)]),
            lambda: store.get("k"),
            lambda: store.open("k"),
            lambda: store.open("k", 10).read_into(0, memoryview(bytearray(5))),
            lambda: store.list(""),
            lambda: store.delete(["k"]),
        ):
            with pytest.raises(StoreUnavailableError) as caught:
                act()
            assert SECRET not in shown(caught.value)
            assert "outside: GET" in str(caught.value)

    def test_in_the_answer_to_opening(self):
        driver = Says(Verdict.FORBIDDEN, f"no entry for {SECRET}")
        driver.fails = True
        with pytest.raises(StoreUnavailableError, match="no entry for") as caught:
            RemoteStore(_URIS["userinfo"], driver)
        assert SECRET not in shown(caught.value)

    def test_in_the_environment(self, monkeypatch):
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://me:{SECRET}@127.0.0.1:1")
        driver = Says(Verdict.FORBIDDEN, f"signed with {SECRET}")
        driver.fails = True
        with pytest.raises(
            StoreUnavailableError, match=r"signed with <redacted>.*endpoint: http://<redacted>@127"
        ) as caught:
            RemoteStore("s3://bucket/run", driver)
        assert SECRET not in shown(caught.value)

    def test_a_cause_without_secrets_is_the_drivers_own(self):
        driver = Says(Verdict.FORBIDDEN, "no entry")
        driver.fails = True
        with pytest.raises(StoreUnavailableError) as caught:
            RemoteStore("s3://bucket/run", driver)
        assert isinstance(caught.value.__cause__.__cause__, OSError)

    @pytest.mark.parametrize(
        ("uri", "kind"),
        [
            (f"sftpx://me:{SECRET}@host/run", ConfigurationError),
            (f"obstore+gs://me:{SECRET}@bucket/run", ConfigurationError),
            (f"file://me:{SECRET}@host/run", ConfigurationError),
            (f"obstore+s3://key:{SECRET}@bucket/run", ConfigurationError),
            (f"fsspec+s3://key:{SECRET}@bucket/run", ConfigurationError),
            (f"zip://run::file:///nowhere?password={SECRET}", ConfigurationError),
            (f"zip://run::ftp://me:{SECRET}@127.0.0.1:1/nowhere", ConfigurationError),
            (
                f"zip://run::ftp://me:{quote(SECRET, safe='')}@127.0.0.1:1/nowhere",
                StoreUnavailableError,
            ),
        ],
    )
    def test_in_uris_that_cannot_be_opened(self, small_s3, uri, kind):
        with pytest.raises(kind) as caught:
            open_store(uri)
        assert SECRET not in shown(caught.value)

    def test_in_uris_whose_driver_is_missing(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "paramiko", None)
        with pytest.raises(MissingDependencyError) as caught:
            open_store(f"sftp://me:{quote(SECRET, safe='')}@host/run")
        assert SECRET not in shown(caught.value)


class TestStrayObjects:
    """What browsers of stores and desktops leave in a bucket."""

    STRAYS = (
        "run/",
        "run/deltas/",
        "run/deltas/00000001/",
        "run/deltas//0",
        "run/deltas/.DS_Store",
        "run/.DS_Store",
        "run/../outside",
        "run/deltas/../0",
        "run/deltas/./0",
        "run/deltas/line\nbreak",
    )
    ODD = (
        "run/deltas/a b",
        "run/deltas/100%",
        "run/deltas/50%25",
        "run/deltas/é",
        "run/deltas/a+b&c=d?e",
        "run/deltas/a:b*c",
    )

    @pytest.fixture(params=["obstore", "fsspec"])
    def store(self, request, small_s3, small_s3_drivers):
        return RemoteStore(
            "s3://bucket/run", small_s3_drivers[request.param], Retries(patience=0.1)
        )

    @pytest.mark.parametrize("stray", STRAYS)
    def test_do_not_appear(self, store, small_s3, stray):
        small_s3.objects[stray] = b""
        if (
            store.driver.name == "obstore"
            and ("//" in stray or "/." in stray or "\n" in stray)
            and "DS_" not in stray
        ):
            # It cannot list past such names. No tool leaves them behind, and that is told.
            with pytest.raises(
                StoreUnavailableError,
                match=r"(?s)invalid path.* Remove that object, .*or use fsspec\+s3://",
            ):
                store.list("deltas/" if "deltas" in stray else "")
            return
        assert store.list("") == store.list("deltas/") == {}
        small_s3.objects["run/deltas/0"] = b"value"
        assert store.list("") == store.list("deltas/") == {"deltas/0": 5}

    @pytest.mark.parametrize("odd", ODD)
    def test_odd_names_do_no_harm(self, store, small_s3, odd):
        small_s3.objects[odd] = b"odd"
        small_s3.objects["run/deltas/0"] = b"value"
        listed = store.list("deltas/")
        assert listed.pop("deltas/0") == 5
        assert set(listed) <= {odd.removeprefix("run/")}

    def test_a_placeholder_is_no_object(self, store, small_s3):
        small_s3.objects["run/deltas/"] = b""
        store.put("deltas/0", [b"x"])
        store.delete(store.list(""))
        assert list(small_s3.objects) == ["run/deltas/"]
