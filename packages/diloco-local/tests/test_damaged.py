"""Whatever the files of a run hold, verbs answer or raise an error of ours: a replica can write there too."""

import json
from pathlib import Path

import pytest
from local_lab import results_of

from diloco_local import LocalProcessExecutor
from diloco_protocol import BackendError, SpecVersionError

pytestmark = pytest.mark.processes

FILES = {
    "run.json": "run.json",
    "final.json": "replica-0/final.json",
    "state.json": "replica-0/state.json",
    "cancel.json": "replica-0/cancel.json",
    "outcome.json": "replica-0/attempt-1/outcome.json",
    "times.jsonl": "replica-0/attempt-1/times.jsonl",
}
VALUES = (None, True, -1, 1.5, 1e300, 10**400, "text", "", [], [1], {}, {"at": "soon"}, "\ud800")
BYTES = (b"", b"{", b"null", b"[]", b"3", b'"text"', b"\xff\xfe", b"[" * 100_000, b"{}\n{}")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run that has ended, with every file that a run can have."""
    folder = tmp_path_factory.mktemp("damaged")
    (folder / "trainer.py").write_text("def echo(**kwargs):\n    print('echo', flush=True)\n")
    executor = LocalProcessExecutor(root=folder / "state", pythonpath=[folder])
    (handle,) = executor.launch_replicas(1, "trainer:echo", {})
    results_of(executor, [handle])
    place = folder / "state" / "runs" / handle.run_id
    (place / FILES["cancel.json"]).write_text('{"at": 1.5, "by": 3}')
    return executor, handle, place


def answers(run, *, ended=True):
    """Calls every verb; what they raise is one of ours. ``purge`` comes last and is kept from doing anything."""
    executor, handle, place = run
    final = place / FILES["final.json"]
    kept = final.read_bytes()
    if not ended:
        final.unlink()
    verbs = (
        lambda: executor.describe(handle),
        lambda: executor.collect([handle], timeout=0),
        lambda: executor.stream_logs(handle),
        lambda: list(executor.log_iter(handle, since=1.0)),
        lambda: executor.attach(handle.run_id),
        executor.list_runs,
        lambda: executor.cancel(handle) if ended else None,
    )
    raised = []
    try:
        for verb in verbs:
            try:
                verb()
            except (BackendError, SpecVersionError) as error:
                raised.append(error)
    finally:
        final.write_bytes(kept)
    return raised


@pytest.fixture
def file(run, request):
    """One of the files, which is as it was when the test is over."""
    path = run[2] / FILES[request.param]
    kept = path.read_bytes()
    yield path
    path.write_bytes(kept)


@pytest.mark.parametrize("file", FILES, indirect=True)
@pytest.mark.parametrize("data", BYTES, ids=lambda data: repr(data[:8]))
@pytest.mark.parametrize("ended", [True, False])
def test_other_bytes(run, file, data, ended):
    if file.name == "final.json" and not ended:
        pytest.skip("there is none then")
    file.write_bytes(data)
    answers(run, ended=ended)


def places(value, above=()):
    """All places in a JSON value, from the outside to the inside."""
    yield above
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()  # fmt: skip
    for key, each in inside:
        yield from places(each, (*above, key))


def replaced(value, place, new):
    if not place:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[place[0]] = replaced(value[place[0]], place[1:], new)
    return copy


@pytest.mark.parametrize("file", FILES, indirect=True)
@pytest.mark.parametrize("ended", [True, False])
def test_other_values_anywhere(run, file, ended):
    if file.name == "final.json" and not ended:
        pytest.skip("there is none then")
    first = file.read_text().splitlines()[0]
    original = json.loads(first)
    for place in places(original):
        for value in VALUES:
            file.write_text(json.dumps(replaced(original, place, value)))
            answers(run, ended=ended)


@pytest.mark.parametrize("file", ["run.json", "final.json"], indirect=True)
def test_what_is_wrong_is_said_with_the_file(run, file):
    file.write_text(json.dumps({**json.loads(file.read_text()), "grace": "long", "state": 3}))
    raised = answers(run)
    assert any(str(Path(file)) in str(error) for error in raised)
