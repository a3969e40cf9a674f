"""What the tests share by import: how long they wait, and for what."""

import time
from pathlib import Path

from diloco_local import _runs
from diloco_local._files import write_json
from diloco_local._processes import host_name, pid_namespace
from diloco_local._record import RunRecord
from diloco_local._rundir import Root
from diloco_protocol import Outcome, Reason, ReplicaState, ReplicaStatus
from diloco_protocol.backend import status_to_data

#: Seconds after which a test that waits for real processes fails instead of hanging. Nothing passes
#: sooner or later because of it, so it is long enough for any load of the machine, and shorter than
#: pytest's ``faulthandler_timeout``.
PATIENCE = 240.0


def wait_until(condition, what="it"):
    """Poll until ``condition()`` is true, and return what it returned."""
    deadline = time.monotonic() + PATIENCE
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{what} did not happen within {PATIENCE:g} s"
        time.sleep(0.01)
    return value


def results_of(executor, handles):
    """What the replicas came to; waits for their ends."""
    return executor.collect(handles, timeout=PATIENCE)


def locate(handle):
    """The directory and the record of a handle's run, wherever it is."""
    return _runs.locate(handle, Root(Path(handle.metadata["root"])))


def ended_run(root, run_id="ended", result=3, ranks=1, uid=None):
    """The first replica's handle of a run that returned ``result`` everywhere; starts nothing."""
    record = RunRecord(
        uid=uid or f"uid-of-{run_id}",
        run_id=run_id,
        fingerprint="",
        ranks=tuple(range(ranks)),
        world_size=ranks,
        cohort=run_id,
        grace=1.0,
        timeout=None,
        max_restarts=0,
        created_at=1.0,
        host=host_name(),
        namespace=pid_namespace(),
        labels={},
    )
    place = Root(Path(root))
    staged = place.stage(record.uid)
    write_json(staged.record, record.to_dict())
    staged.lock.touch()
    status = ReplicaStatus(ReplicaState.SUCCEEDED, reason=Reason.COMPLETED, exit_code=0)
    for rank in range(ranks):
        attempt = staged.replica(rank).attempt(1)
        attempt.path.mkdir(mode=0o700, parents=True)
        staged.replica(rank).path.chmod(0o700)
        attempt.outcome.write_text(Outcome(0, result=result, reason=Reason.COMPLETED).to_json())
        attempt.log("stdout").write_text("its log\n")
        write_json(staged.replica(rank).final, status_to_data(status))
    staged.mark_started()
    assert place.publish(staged, run_id)
    return _runs.handles_of(place, record)[0]


def run_of(handle):
    """The directory of a handle's run."""
    return Root(Path(handle.metadata["root"])).run(handle.run_id, handle.metadata["uid"])


def verbs_on(executor, handle):
    """Every verb that takes a handle, by its name, to be called."""
    return {
        "poll": lambda: executor.poll(handle),
        "describe": lambda: executor.describe(handle),
        "collect": lambda: executor.collect([handle], timeout=0),
        "stream_logs": lambda: executor.stream_logs(handle),
        "log_iter": lambda: list(executor.log_iter(handle)),
        "meets_at": lambda: executor.meets_at(handle),
        "cancel": lambda: executor.cancel(handle),
        "purge": lambda: executor.purge(handle),
    }
