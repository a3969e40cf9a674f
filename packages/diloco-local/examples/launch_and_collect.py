"""Launch replicas on this machine, read a log, let one fail, and collect all outcomes."""

import os
import sys
import tempfile
from pathlib import Path

from diloco_local import LocalProcessExecutor
from diloco_protocol import ReplicaHandle


def work(amount):
    """The entrypoint. Each replica runs it in a process of its own."""
    rank = int(os.environ["REPLICA_RANK"])
    for part in range(amount):
        sys.stdout.write(f"part {part} of rank {rank}\n")
    if rank == 1:
        raise ValueError("this rank has no data")
    return {"done": amount}


def main():
    """Launch, follow, collect, and once more from the text of a handle."""
    with tempfile.TemporaryDirectory() as root:
        options = {
            "root": root,
            "pythonpath": [str(Path(__file__).parent), *filter(None, sys.path)],
        }
        with LocalProcessExecutor(**options) as executor:
            handles = executor.launch_replicas(
                2, "launch_and_collect:work", {"amount": 3}, timeout=600, run_id="example"
            )
            for line in executor.log_iter(handles[0], follow=True):
                sys.stdout.write(f"log of rank 0: {line}\n")
            for result in executor.collect(handles):
                sys.stdout.write(f"{result['rank']} {result['status']} {result['result']}\n")
            kept = handles[1].to_json()  # into a file, say
        # Any other process can go on from here.
        with LocalProcessExecutor(**options) as another:
            status = another.describe(ReplicaHandle.from_json(kept))
            sys.stdout.write(f"rank 1 ended with exit code {status.exit_code}: {status.message}\n")


if __name__ == "__main__":
    main()
