"""The probe says what a store can do, and leaves nothing behind."""

import pytest

from diloco_core import ConfigurationError, StoreUnavailableError
from diloco_core._store import _open as stores
from diloco_core.probe import run


def test_a_folder_will_do(tmp_path):
    found = run(str(tmp_path / "run"))
    assert found["exclusive"] is True
    assert 0 <= found["seconds"] < 60
    assert not [path for path in (tmp_path / "run").rglob("*") if path.is_file()]


def test_a_store_that_ignores_conditions_is_told(tmp_path, monkeypatch):
    class Careless(stores.open_store(str(tmp_path)).__class__):
        def create(self, key, data):
            self.put(key, [data])
            return True

    monkeypatch.setattr("diloco_core.probe.open_store", lambda uri: Careless(uri))
    assert run(str(tmp_path / "run"))["exclusive"] is False


def test_what_cannot_be_used_raises(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StoreUnavailableError):
        run(str(tmp_path / "file" / "run"))
    with pytest.raises(ConfigurationError):
        run("nonsense://bucket/run")
