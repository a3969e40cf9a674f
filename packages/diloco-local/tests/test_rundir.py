import os
import threading

import pytest

from diloco_local._rundir import Root


@pytest.mark.processes
def test_one_of_many_launchers_publishes(tmp_path):
    root = Root(tmp_path)
    gate = threading.Barrier(8)
    won = []

    def contend(k):
        staged = root.stage()
        (staged.path / "who").write_text(str(k))
        gate.wait()
        if root.publish(staged, "run"):
            won.append(k)
        else:
            root.discard(staged)

    threads = [threading.Thread(target=contend, args=(k,)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert (root.run("run").path / "who").read_text() == str(won[0])
    assert root.run_ids() == ["run"]
    assert not list((tmp_path / "staging").iterdir())
    assert not list((tmp_path / "trash").iterdir())


def test_nobody_else_may_look(tmp_path):
    assert Root(tmp_path).stage().path.stat().st_mode & 0o777 == 0o700


def test_a_root_that_is_made_is_its_owners_alone(tmp_path):
    """Whoever may write above it could put another one in its place."""
    root = tmp_path / "new" / "root"
    before = os.umask(0)
    try:
        Root(root).stage()
    finally:
        os.umask(before)
    made = [tmp_path / "new", root, *root.iterdir()]
    assert {path.stat().st_mode & 0o777 for path in made} == {0o700}


def test_discarding_twice_is_once(tmp_path):
    root = Root(tmp_path)
    staged = root.stage()
    root.discard(staged)
    root.discard(staged)


def test_no_root_no_runs(tmp_path):
    assert Root(tmp_path / "none").run_ids() == []
    (tmp_path / "file").write_text("no folder")
    assert Root(tmp_path / "file").run_ids() == []
    assert Root(tmp_path / "file" / "below").run_ids() == []


def test_waking_a_supervisor_that_is_not_there(tmp_path):
    run = Root(tmp_path).stage()
    run.wake_supervisor()
    os.mkfifo(run.wake)
    run.wake_supervisor()


def test_attempts_are_counted_not_spelled(tmp_path):
    replica = Root(tmp_path).run("x").replica(3)
    assert replica.attempts() == []
    for number in (10, 2, 1):
        replica.attempt(number).path.mkdir(parents=True)
    assert [attempt.path.name for attempt in replica.attempts()] == [
        "attempt-1",
        "attempt-2",
        "attempt-10",
    ]
