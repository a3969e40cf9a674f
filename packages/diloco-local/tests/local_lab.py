"""What the tests share by import: how long they wait, and for what."""

import time

#: Seconds after which a test that waits for real processes fails instead of hanging. Nothing passes sooner or later
#: because of it, so it is long enough for any load of the machine, and shorter than pytest's ``faulthandler_timeout``.
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
