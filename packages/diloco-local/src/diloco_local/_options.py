"""The options of an executor: its arguments, checked once."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass

from diloco_protocol import Backoff, RunJournal
from diloco_protocol.backend import (
    Options,
    check_backoff,
    check_callable,
    check_home,
    check_journal,
    check_names,
    check_paths,
    check_run_prefix,
    check_variables,
    option,
    seconds,
)

from ._gpus import check_devices

_LONGEST_GRACE = 86_400.0


def _check_inherit_env(name: str, value: object) -> bool | tuple[str, ...]:
    return value if isinstance(value, bool) else check_names(name, value)


@dataclass(frozen=True, eq=False, repr=False)
class LocalOptions(Options):
    """The options of a :class:`LocalProcessExecutor`: the arguments of its constructor, checked.

    Immutable.

    ``~`` and ``~user`` at the beginning of a path are home folders.

    Attributes:
        root: The folder that holds the runs. Must be on a local disk. Handles of runs elsewhere are
            refused.
        python: The replicas' interpreter.
        env: Environment variables for every launch; those of the launch itself win.
        inherit_env: How much of the launcher's environment replicas inherit: all, nothing, or names
            and patterns such as ``["PATH", "AWS_*"]``.
        cwd: The replicas' working directory. If it is given, modules are looked for there too.
        pythonpath: Folders in which replicas look for modules before those of their installation.
            By default a module beside the launching script is found.
        gpus: The GPUs to share out, as ``CUDA_VISIBLE_DEVICES`` names them.
        grace: Seconds between SIGTERM and SIGKILL when a replica is ended.
        run_id: Prefix of the names of runs that the caller does not name.
        journal: A second record of launches and ends, which outlives ``purge``.
        backoff: Pauses of ``collect``, with its clock and sleep.
        clock: Unix seconds, for tests.
        sleep: Waits for so many seconds between two looks at a followed log, for tests.

    Raises:
        InvalidRequestError: A value is not allowed; says what was given and what is allowed.
    """

    _: KW_ONLY
    root: str | os.PathLike[str] | None = option(
        None, check=check_home, shown="`$XDG_STATE_HOME/diloco` or `~/.local/state/diloco`"
    )
    python: str | os.PathLike[str] = option(
        sys.executable, check=check_home, shown="this interpreter"
    )
    env: Mapping[str, str] | None = option(None, check=check_variables)
    inherit_env: bool | Iterable[str] = option(True, check=_check_inherit_env)
    cwd: str | os.PathLike[str] | None = option(
        None, check=check_home, shown="the current folder at the launch"
    )
    pythonpath: Iterable[str | os.PathLike[str]] | None = option(
        None, check=check_paths, shown="this process's import path"
    )
    gpus: Sequence[str] | None = option(
        None, check=check_devices, shown="`CUDA_VISIBLE_DEVICES`, else `nvidia-smi -L`"
    )
    grace: float = option(10.0, check=seconds(_LONGEST_GRACE))
    run_id: str | None = option(None, check=check_run_prefix, shown="run")
    journal: RunJournal | None = option(None, check=check_journal)
    backoff: Backoff | None = option(None, check=check_backoff, shown="0.02 s to 0.5 s")
    clock: Callable[[], float] = option(time.time, check=check_callable, hidden=True)
    sleep: Callable[[float], None] = option(time.sleep, check=check_callable, hidden=True)
