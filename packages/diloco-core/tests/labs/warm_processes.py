"""Processes in which torch and diloco_core are imported already, which saves seconds.

One server per test process imports them once. It has no threads and has computed nothing, and every
process is a fork of it.
"""

import importlib
import importlib.util
import multiprocessing
import os
import sys
import traceback
import warnings

from training_lab import PATIENCE

_FORKS = multiprocessing.get_context("forkserver")
# torch imports torch._dynamo when the first optimizer is made, which takes as long as the import of
# torch.
_FORKS.set_forkserver_preload(["torch._dynamo", "diloco_core.replica_entrypoint"])


class WarmProcess:
    """Runs a function in a process of its own.

    What the function returns is the exit status; None is 0.

    Args:
        folder: Where its output is kept; one folder for every process.
        function: A function of a module; warnings are errors in it.
        arguments: Its arguments.
        environment: Variables that are added to the environment.
    """

    def __init__(self, folder, function, *arguments, **environment):
        folder.mkdir()
        self._outputs = [folder / "stdout", folder / "stderr"]
        module = sys.modules[function.__module__]
        named = (module.__name__, module.__file__, function.__name__)
        self._process = _FORKS.Process(
            target=_run, args=(self._outputs, {**os.environ, **environment}, named, arguments)
        )
        self._process.start()

    def communicate(self):
        """Wait for the end.

        Return the exit status, and what was written to standard output and standard error.
        """
        self._process.join(PATIENCE)
        return self._process.exitcode, *(path.read_text() for path in self._outputs)

    def kill(self):
        """End it if it is still running."""
        self._process.kill()
        self._process.join()


def _function(module, file, name):
    """A function of a package or of a test file."""
    if module.startswith("diloco_"):
        return getattr(importlib.import_module(module), name)
    spec = importlib.util.spec_from_file_location("in_warm_process", file)
    imported = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(imported)
    return getattr(imported, name)


def _run(outputs, environment, named, arguments):
    for descriptor, path in enumerate(outputs, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), descriptor)
    os.environ.clear()
    os.environ.update(environment)
    warnings.simplefilter("error")
    status = 1
    try:
        status = _function(*named)(*arguments) or 0
    except SystemExit as end:
        status = end.code
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # do not wait for threads of a process group that has failed
