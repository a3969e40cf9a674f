"""Read the runs of a backend from the JSON of the command.

    python what_goes_on.py [backend]

Another program that watches runs, in any language, does the same: data comes from standard output,
messages from standard error, and the exit code says whether the answer is complete.
"""

import json
import subprocess
import sys


def ask(*words):
    """Return what a verb prints as JSON; None where it could not answer."""
    command = [sys.executable, "-m", "diloco_cli", *words, "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    return json.loads(done.stdout) if done.stdout else None


def main():
    """Print one line for each run that goes on."""
    backend = sys.argv[1] if len(sys.argv) > 1 else "local_process"
    answer = ask("ls", "--backend", backend)
    if answer is None:
        sys.stdout.write(f"{backend} cannot be asked here\n")
        return
    going = [run for run in answer["runs"] if {"pending", "running"} & set(run["states"])]
    for run in going:
        sys.stdout.write(f"{run['run_id']}: {run['states']}\n")
    sys.stdout.write(f"{len(going)} runs go on\n")


if __name__ == "__main__":
    main()
