"""What the tests share by import: how long they wait for processes, threads and clusters."""

#: Seconds after which a test that waits for something real fails instead of hanging. Nothing passes
#: sooner or later because of it, so it is long enough for any load of the machine.
PATIENCE = 600.0
