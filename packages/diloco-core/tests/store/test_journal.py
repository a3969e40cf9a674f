"""The journal of a run in its store."""

import pytest

from diloco_core import StoreUnavailableError, open_journal
from diloco_protocol import ReplicaHandle, ReplicaState, ReplicaStatus, UnavailableError

HANDLES = [ReplicaHandle(rank, "b", run_id="monday", world_size=2) for rank in range(2)]
DONE, FAILED = (ReplicaStatus(state) for state in (ReplicaState.SUCCEEDED, ReplicaState.FAILED))


@pytest.fixture(params=["folder", "memory"])
def uri(request, tmp_path):
    return str(tmp_path / "run") if request.param == "folder" else f"memory://{tmp_path.name}/run"


def test_what_was_written_is_read_again(uri):
    journal = open_journal(uri)
    assert journal.runs() == []
    assert journal.end(HANDLES[0]) is None
    journal.record_launch(HANDLES, {"gpu": "H100"})
    journal.record_launch(HANDLES[:1])
    journal.record_launch(HANDLES, {"gpu": "H100"})
    journal.record_end(HANDLES[0], DONE, {"loss": 1.5})
    journal.record_end(HANDLES[0], FAILED, None)
    journal.keep_log(HANDLES[1], "a line\n")
    again = open_journal(uri)
    assert again.runs() == ["monday"]
    run = again.look("monday")
    assert run.ends == {HANDLES[0]: (FAILED, None)}
    assert (list(run.handles), run.logged) == (HANDLES, {HANDLES[1]})
    assert again.log(HANDLES[1]) == "a line\n"
    assert len(run.launches) == 2
    assert (run.skipped, run.left_out) == (0, 0)


def test_it_is_below_the_run(tmp_path):
    open_journal(str(tmp_path)).record_launch(HANDLES)
    (file,) = (path for path in tmp_path.rglob("*") if path.is_file())
    assert file.relative_to(tmp_path).parts[:2] == ("journal", "monday")


def test_a_store_that_fails_is_named_as_a_backend_would(tmp_path, monkeypatch):
    journal = open_journal(str(tmp_path))

    def refuse(*_):
        raise StoreUnavailableError("no room")

    monkeypatch.setattr("diloco_core._store._drivers._folder.FolderStore.create", refuse)
    with pytest.raises(UnavailableError, match=r"journal cannot be written.*no room"):
        journal.record_end(HANDLES[0], DONE, None)
