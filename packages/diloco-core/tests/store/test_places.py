"""Which driver opens a place, and what is said of one that cannot be used."""

import sys

import fsspec
import pytest

from diloco_core import (
    ConfigurationError,
    StoreUnavailableError,
)
from diloco_core._store._drivers._fsspec import FsspecDriver
from diloco_core._store._drivers._obstore import ObstoreDriver
from diloco_core._store._drivers._remote import RemoteStore
from diloco_core._store._open import open_store
from diloco_protocol import MissingDependencyError


class TestBadPlaces:
    @pytest.mark.parametrize("scheme", ["obstore+s3", "fsspec+s3"])
    def test_a_bucket_that_does_not_exist(self, small_s3, scheme):
        with pytest.raises(
            StoreUnavailableError, match=r"s3://nowhere/run .*bucket does not exist: create it"
        ):
            open_store(f"{scheme}://nowhere/run")
        with pytest.raises(
            StoreUnavailableError, match=r"s3://nowhere/run .*bucket does not exist: create it"
        ):
            open_store(f"{scheme}://nowhere/run", reading=True)

    @pytest.mark.parametrize("method", ["PUT", "GET"])
    def test_a_bucket_that_is_forbidden(self, small_s3, driver, method):
        small_s3.fail(403, method, times=99, code="AccessDenied")
        with pytest.raises(
            StoreUnavailableError, match=r"Access was denied: .* may put, get, list and delete"
        ):
            RemoteStore("s3://bucket/run", driver)

    def test_a_store_that_is_down(self, small_s3, driver, patient):
        small_s3.fail(503, "PUT", times=10**6)
        retries, now = patient
        with pytest.raises(
            StoreUnavailableError, match=r"cannot write .* tried again for up to 5 s"
        ):
            RemoteStore("s3://bucket/run", driver, retries)
        assert now[0] <= 5

    def test_one_that_is_only_read_need_not_be_writable(self, small_s3, driver):
        small_s3.objects["run/k"] = b"value"
        small_s3.fail(403, "PUT", times=99, code="AccessDenied")
        small_s3.fail(403, "DELETE", times=99, code="AccessDenied")
        assert RemoteStore("s3://bucket/run", driver, reading=True).get("k") == b"value"

    def test_one_that_is_only_read_and_is_down(self, small_s3, driver, patient):
        small_s3.fail(503, "GET", times=10**6)
        retries, now = patient
        with pytest.raises(
            StoreUnavailableError, match=r"cannot be listed: .* tried again for up to 5 s"
        ):
            RemoteStore("s3://bucket/run", driver, retries, reading=True)
        assert now[0] <= 5

    @pytest.mark.parametrize("kind", [ObstoreDriver, FsspecDriver])
    def test_no_credentials(self, small_s3, monkeypatch, kind, patient):
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
        monkeypatch.setenv(
            "AWS_METADATA_ENDPOINT", "http://127.0.0.1:1"
        )  # where obstore asks a cloud machine's role
        with pytest.raises(StoreUnavailableError, match=r"s3://bucket/run.*[Cc]redentials"):
            RemoteStore("s3://bucket/run", kind("s3://bucket/run"), patient[0])


class TestChoice:
    def test_obstore_where_it_is_installed(self, small_s3):
        assert isinstance(open_store("s3://bucket/run").driver, ObstoreDriver)

    def test_fsspec_where_it_has_settings_for_s3(self, small_s3, monkeypatch):
        monkeypatch.setitem(fsspec.config.conf, "s3", {"default_fill_cache": False})
        assert isinstance(open_store("s3://bucket/run").driver, FsspecDriver)

    def test_fsspec_where_obstore_is_not_installed(self, small_s3, monkeypatch):
        monkeypatch.setitem(sys.modules, "obstore", None)
        assert isinstance(open_store("s3://bucket/run").driver, FsspecDriver)
        with pytest.raises(MissingDependencyError, match=r"pip install 'diloco-core\[obstore\]'"):
            open_store("obstore+s3://bucket/run")

    def test_by_hand(self, small_s3):
        assert isinstance(open_store("obstore+s3://bucket/run").driver, ObstoreDriver)
        assert open_store("fsspec+memory://by/hand").driver.near

    def test_obstore_is_for_s3_only(self):
        with pytest.raises(ConfigurationError, match=r"write 'gs://bucket/run'"):
            open_store("obstore+gs://bucket/run")

    def test_a_uri_without_a_bucket(self):
        with pytest.raises(ConfigurationError, match="names no bucket"):
            open_store("obstore+s3:///run")
