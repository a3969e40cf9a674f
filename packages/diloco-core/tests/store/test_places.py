"""Test which driver opens a place, and what is said of one that cannot be used."""

import sys
import zipfile

import fsspec
import pytest

from diloco_core import ConfigurationError, StoreUnavailableError
from diloco_core._store._drivers._folder import FolderStore
from diloco_core._store._drivers._fsspec import FsspecDriver
from diloco_core._store._drivers._obstore import ObstoreDriver
from diloco_core._store._drivers._remote import RemoteStore
from diloco_core._store._open import open_store
from diloco_protocol import MissingDependencyError


class TestBadUris:
    @pytest.mark.parametrize(
        ("uri", "text"),
        [
            *((uri, "rendezvous URI") for uri in ("", "  ", None, 7)),
            ("sftpx://host/run", r"unknown scheme 'sftpx'[^!]*s3://"),
            ("file://runs/a", "three slashes"),
            ("obstore+gs://bucket/run", r"write 'gs://bucket/run'"),
        ],
    )
    def test_are_refused(self, uri, text):
        with pytest.raises(ConfigurationError, match=text) as error:
            open_store(uri)
        assert len(str(error.value)) < 300  # fsspec knows about sixty schemes

    @pytest.mark.parametrize(
        ("uri", "module", "package"),
        [("fsspec+s3://bucket/run", "s3fs", "s3"), ("az://container/run", "adlfs", "azure")],
    )
    def test_a_missing_driver_is_named(self, monkeypatch, uri, module, package):
        monkeypatch.setitem(sys.modules, module, None)  # as if it were not installed
        registry = sys.modules["fsspec.registry"]._registry
        monkeypatch.delitem(registry, package, raising=False)  # nor imported before
        with pytest.raises(
            MissingDependencyError, match=rf"pip install 'diloco-core\[{package}\]'"
        ):
            open_store(uri)

    @pytest.mark.parametrize(
        ("typed", "meant"), [("s3:/bucket/run", "s3://bucket/run"), ("gs:/b/x", "gs://b/x")]
    )
    def test_one_slash_too_few_is_no_folder(self, tmp_path, monkeypatch, typed, meant):
        monkeypatch.chdir(tmp_path)
        with pytest.raises(ConfigurationError, match=meant):
            open_store(typed)
        assert not list(tmp_path.iterdir())
        open_store("./s3:/bucket").put("k", [b"x"])
        assert (tmp_path / "s3:" / "bucket" / "k").exists()

    def test_what_cannot_be_written(self, tmp_path):
        (tmp_path / "file").write_text("x")
        with zipfile.ZipFile(tmp_path / "old.zip", "w") as archive:
            archive.writestr("run/manifest.json", "{}")
        places = [
            (str(tmp_path / "file" / "run"), "cannot be written"),
            ("zip://run::file:///nowhere/at/all.zip", "cannot be opened"),
            (f"zip://run::file://{tmp_path}/old.zip", "cannot be written, read back"),
        ]
        if sys.platform == "linux":  # even root cannot write there
            places.append(("/proc/run", "cannot be written"))
        for uri, told in places:
            with pytest.raises(StoreUnavailableError, match=told):
                open_store(uri)


class TestBadPlaces:
    @pytest.mark.parametrize("scheme", ["obstore+s3", "fsspec+s3"])
    @pytest.mark.parametrize("reading", [False, True])
    def test_a_bucket_that_does_not_exist(self, small_s3, scheme, reading):
        with pytest.raises(StoreUnavailableError, match=r"s3://nowhere/run .*not exist: create it"):
            open_store(f"{scheme}://nowhere/run", reading=reading)

    @pytest.mark.parametrize("method", ["PUT", "GET"])
    def test_a_bucket_that_is_forbidden(self, small_s3, driver, method):
        small_s3.fail(403, method, times=99, code="AccessDenied")
        with pytest.raises(
            StoreUnavailableError, match=r"was denied: .* put, get, list and delete"
        ):
            RemoteStore("s3://bucket/run", driver)

    @pytest.mark.parametrize(
        ("method", "reading", "text"), [("PUT", False, "cannot write"), ("GET", True, "be listed:")]
    )
    def test_a_store_that_is_down(self, small_s3, driver, remote, clock, method, reading, text):
        small_s3.fail(503, method, times=10**6)
        with pytest.raises(StoreUnavailableError, match=rf"{text} .* tried again for up to 5 s"):
            remote(driver, reading=reading)
        assert clock.now <= 5

    def test_one_that_is_only_read_need_not_be_writable(self, small_s3, driver):
        small_s3.objects["run/k"] = b"value"
        small_s3.fail(403, "PUT", times=99, code="AccessDenied")
        small_s3.fail(403, "DELETE", times=99, code="AccessDenied")
        assert RemoteStore("s3://bucket/run", driver, reading=True).get("k") == b"value"

    @pytest.mark.parametrize("kind", [ObstoreDriver, FsspecDriver])
    def test_no_credentials(self, small_s3, monkeypatch, kind, remote):
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
        # Where obstore asks for a cloud machine's role:
        monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:1")
        with pytest.raises(StoreUnavailableError, match=r"s3://bucket/run.*[Cc]redentials"):
            remote(kind("s3://bucket/run"), patience=20)


class TestChoice:
    def test_of_a_driver(self, small_s3, monkeypatch, tmp_path):
        by_path, by_uri = open_store(str(tmp_path / "a b")), open_store((tmp_path / "a b").as_uri())
        by_path.put("x", [b"1"])
        assert isinstance(by_uri, FolderStore)
        assert by_uri.get("x") == b"1"
        assert isinstance(open_store("memory://somewhere/run"), RemoteStore)
        assert open_store("fsspec+memory://by/hand").driver.near
        assert isinstance(open_store("s3://bucket/run").driver, ObstoreDriver)
        assert isinstance(open_store("obstore+s3://bucket/run").driver, ObstoreDriver)
        monkeypatch.setitem(fsspec.config.conf, "s3", {"default_fill_cache": False})
        assert isinstance(open_store("s3://bucket/run").driver, FsspecDriver)

    def test_where_obstore_is_not_installed(self, small_s3, monkeypatch):
        monkeypatch.setitem(sys.modules, "obstore", None)
        assert isinstance(open_store("s3://bucket/run").driver, FsspecDriver)
        with pytest.raises(MissingDependencyError, match=r"pip install 'diloco-core\[obstore\]'"):
            open_store("obstore+s3://bucket/run")
