"""What every backend does in the end: tell a replica what to do, run it, and read how it ended.

The spec goes into a file, the runner executes it in a process of its own, and the outcome comes
back in another file. A backend for a cloud has the same two, and sends them by whatever channel its
platform has.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from diloco_protocol import Outcome, ReplicaSpec


def greet(name):
    """The entrypoint: any importable function whose arguments and result are JSON."""
    rank, size = os.environ["REPLICA_RANK"], os.environ["REPLICA_WORLD_SIZE"]
    return f"hello {name}, from rank {rank} of {size}"


def run(spec, folder):
    """Run one replica; how it ended."""
    (folder / "spec.json").write_text(spec.to_json())
    subprocess.run(
        [sys.executable, "-m", "diloco_protocol.runner", "--spec", "spec.json", "--outcome",
         "outcome.json"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])},
        check=False,  # the outcome says more than the exit status
    )  # fmt: skip
    return Outcome.from_json((folder / "outcome.json").read_text())


def main():
    """One that succeeds, and one whose arguments do not fit."""
    with tempfile.TemporaryDirectory() as name:
        good = ReplicaSpec("run_one_replica:greet", {"name": "world"}, rank=1, world_size=2)
        outcome = run(good, Path(name))
        sys.stdout.write(f"exit code {outcome.exit_code}, result {outcome.result!r}\n")
        sys.stdout.write("the second replica fails on purpose:\n")
        sys.stdout.flush()  # the traceback below comes from the replica's own process
        bad = ReplicaSpec("run_one_replica:greet", {"nobody": 1}, rank=1, world_size=2)
        outcome = run(bad, Path(name))
        sys.stdout.write(f"exit code {outcome.exit_code}, {outcome.error}\n")


if __name__ == "__main__":
    main()
