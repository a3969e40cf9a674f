"""The command ``diloco`` in a process that has imported torch already, which saves seconds.

The tests of diloco-cli, and one here for every backend, start the console script itself.
"""

import os
import subprocess
import sys
import uuid
import warnings

from warm_processes import WarmProcess

from diloco_cli import main


def warm_command(folder, words, environment):
    """What ``diloco`` prints, and how it ends."""
    outputs = folder / f".output-{uuid.uuid4().hex}"
    process = WarmProcess(outputs, _command, str(folder), words, environment)
    try:
        return subprocess.CompletedProcess(words, *process.communicate())
    finally:
        process.kill()


def _command(folder, words, environment):
    """Run ``diloco`` as a shell does, in the folder and with no other variables."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    warnings.simplefilter("default")
    for quiet in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", quiet)
    sys.argv = ["diloco", *words]
    main()
