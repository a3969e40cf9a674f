"""The probe says what a store can do, and leaves nothing behind."""

import itertools

import pytest

from diloco_core import StoreUnavailableError
from diloco_core._store import _open as stores
from diloco_core.probe import main, measure, run, speed_in_words


class TestSpeed:
    def test_it_is_measured_and_nothing_is_left(self, tmp_path):
        results = run(str(tmp_path / "run"), measured=True)
        assert results["exclusive"] is True
        assert all(results[name] > 0 for name in ("write_ms", "read_ms", "write_mb_s", "read_mb_s"))
        assert not [path for path in (tmp_path / "run").rglob("*") if path.is_file()]

    def test_a_clock_gives_the_numbers(self, tmp_path):
        ticks = itertools.accumulate([0, 0.002, 0, 0.001] * 5 + [0, 0.5, 0, 0.25])
        found = measure(stores.open_store(str(tmp_path)), lambda: next(ticks))
        assert found == {"write_ms": 2.0, "read_ms": 1.0, "write_mb_s": 16.8, "read_mb_s": 33.6}
        assert speed_in_words(found) == (
            "a small object is written in 2 ms and read in 1 ms, and one of 8 MiB at 16.8 and "
            "33.6 MB/s"
        )

    def test_nothing_is_left_after_an_error(self, tmp_path):
        store = stores.open_store(str(tmp_path))

        class Failing(store.__class__):
            def get(self, key, largest=0):
                if len(written) == 6:  # the large one
                    raise StoreUnavailableError("it is away")
                return super().get(key)

            def put(self, key, parts):
                written.append(key)
                return super().put(key, parts)

        written = []
        with pytest.raises(StoreUnavailableError):
            measure(Failing(str(tmp_path)))
        assert len(written) == 6
        assert not [path for path in tmp_path.rglob("*") if path.is_file()]


class TestTheCommandLine:
    def test_says_what_was_tried_and_for_which_runs_it_is_enough(self, tmp_path, capsys):
        assert main([str(tmp_path / "run")]) == 0
        said, nothing = capsys.readouterr()
        assert said.startswith("a small object was written, read, listed and removed in ")
        assert said.endswith("created only once: all runs can use this store\n")
        assert not nothing

    def test_says_if_elastic_runs_cannot_use_the_store(self, tmp_path, monkeypatch, capsys):
        class Careless(stores.open_store(str(tmp_path)).__class__):
            def create(self, key, data):
                self.put(key, [data])
                return True

        monkeypatch.setattr("diloco_core.probe.open_store", Careless)
        assert main([str(tmp_path / "run")]) == 0
        text = capsys.readouterr().out
        assert "fixed runs can use this store, but no rank can come back to them by itself" in text
        assert "elastic runs cannot use it" in text

    def test_fails_where_the_store_cannot_be_used(self, tmp_path, capsys):
        (tmp_path / "file").touch()
        assert main([str(tmp_path / "file" / "run")]) == 1
        said, error = capsys.readouterr()
        assert not said
        assert f"the folder '{tmp_path}/file/run' cannot be written" in error

    def test_tells_a_wrong_uri_from_a_store_that_fails(self, capsys):
        assert main(["nonsense://bucket/run"]) == 2
        assert "nonsense" in capsys.readouterr().err
        with pytest.raises(SystemExit) as ending:
            main([])
        assert ending.value.code == 2
        assert "usage: python -m diloco_core.probe" in capsys.readouterr().err
