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
from diloco_core._store._drivers._driver import Verdict
from diloco_core._store._drivers._fsspec import FsspecDriver
from diloco_core._store._drivers._remote import RemoteStore
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
    text = rf"s3://bucket/run cannot be opened: .* within 0\.3 s.*{silent}"
    with pytest.raises(StoreUnavailableError, match=text):
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
        text = r"within 0\.2 s. Its endpoint is the one that the driver for"
        with pytest.raises(StoreUnavailableError, match=text):
            open_store(f"{scheme}://bucket/run")
    finally:
        never.set()


def test_clients_leave_it_to_us_to_try_again(small_s3, monkeypatch):
    driver = FsspecDriver("s3://bucket/run")
    small_s3.fail(500, "PUT", times=100)
    small_s3.log.clear()
    with pytest.raises(Exception, match="Injected"):
        driver.put("k", b"x", exclusive=False)
    # Other requests may be those of an opening that was given up before.
    assert len([path for method, path in small_s3.log if "/run/k" in path]) == 1
    monkeypatch.setitem(fsspec.config.conf, "s3", {"config_kwargs": {"read_timeout": 7}})
    assert FsspecDriver("s3://bucket/run")._fs.config_kwargs["read_timeout"] == 7, "set by the user"


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

    @pytest.mark.sampled
    @pytest.mark.parametrize("uri", _URIS.values(), ids=_URIS)
    @pytest.mark.parametrize(
        "verdict", [Verdict.TRANSIENT, Verdict.PERMANENT, Verdict.FORBIDDEN, Verdict.NO_BUCKET]
    )
    def test_in_what_drivers_say(self, uri, verdict, monkeypatch, remote, failing_driver):
        text = f"GET {uri}?X-Amz-Signature={SECRET} for {SECRET}"
        monkeypatch.setattr(RemoteStore, "_probe", lambda *_: None)
        store = remote(failing_driver(lambda: True, verdict, text), uri, patience=0.01)
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

    def test_in_the_answer_to_opening(self, monkeypatch, failing_driver):
        def opened(uri, text, told):
            with pytest.raises(StoreUnavailableError, match=told) as caught:
                RemoteStore(uri, failing_driver(lambda: True, Verdict.FORBIDDEN, text))
            assert SECRET not in shown(caught.value)
            return caught.value.__cause__.__cause__

        opened(_URIS["userinfo"], f"no entry for {SECRET}", "no entry for")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://me:{SECRET}@127.0.0.1:1")
        told = r"signed with <redacted>.*endpoint: http://<redacted>@127"
        opened("s3://bucket/run", f"signed with {SECRET}", told)
        cause = opened("s3://bucket/run", "no entry", "no entry")
        assert isinstance(cause, OSError), "one without secrets is the driver's own"

    @pytest.mark.parametrize(
        "uri",
        [
            f"sftpx://me:{SECRET}@host/run",
            f"sftp://me:{quote(SECRET, safe='')}@host/run",
            f"file://me:{SECRET}@host/run",
            f"zip://run::file:///nowhere?password={SECRET}",
            f"zip://run::ftp://me:{SECRET}@127.0.0.1:1/nowhere",
            f"zip://run::ftp://me:{quote(SECRET, safe='')}@127.0.0.1:1/nowhere",
        ],
    )
    def test_in_uris_that_cannot_be_opened(self, small_s3, uri, monkeypatch):
        monkeypatch.setitem(sys.modules, "paramiko", None)  # as if it were not installed
        errors = (ConfigurationError, StoreUnavailableError, MissingDependencyError)
        with pytest.raises(errors) as caught:
            open_store(uri)
        assert SECRET not in shown(caught.value)


class TestStrayObjects:
    """Test what browsers of stores and desktops leave in a bucket."""

    STRAYS = (
        "", "deltas/", "deltas/00000001/", "deltas//0", "deltas/.DS_Store", ".DS_Store",
        "../outside", "deltas/../0", "deltas/./0", "deltas/line\nbreak",
    )  # fmt: skip
    ODD = ("a b", "100%", "50%25", "é", "a+b&c=d?e", "a:b*c")

    @pytest.mark.sampled
    @pytest.mark.parametrize("stray", STRAYS)
    def test_do_not_appear(self, store, small_s3, stray):
        small_s3.objects[f"run/{stray}"] = b""
        odd = any(part in f"/{stray}" for part in ("//", "/.", "\n")) and "DS_" not in stray
        if store.driver.name == "obstore" and odd:
            # It cannot list past such names. No tool leaves them behind, and that is told.
            text = r"(?s)invalid path.* Remove that object, .*or use fsspec\+s3://"
            with pytest.raises(StoreUnavailableError, match=text):
                store.list("deltas/" if "deltas" in stray else "")
            return
        assert store.list("") == store.list("deltas/") == {}
        small_s3.objects["run/deltas/0"] = b"value"
        assert store.list("") == store.list("deltas/") == {"deltas/0": 5}

    @pytest.mark.parametrize("odd", ODD)
    def test_odd_names_do_no_harm(self, store, small_s3, odd):
        small_s3.objects[f"run/deltas/{odd}"] = b"odd"
        small_s3.objects["run/deltas/0"] = b"value"
        listed = store.list("deltas/")
        assert listed.pop("deltas/0") == 5
        assert set(listed) <= {f"deltas/{odd}"}
