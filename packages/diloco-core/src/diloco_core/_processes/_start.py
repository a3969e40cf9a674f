"""Starting the processes of a replica on this machine, without torchrun."""

from __future__ import annotations

import gc
import os
import signal
import tempfile
import uuid
from collections.abc import Callable, Mapping
from typing import Any

import torch

from diloco_protocol import DilocoError

from .._checks import is_whole
from .._errors import ConfigurationError, ProcessFailedError

_FINAL = "This error is final: the replica is not started again."


def number_of_processes(asked: Any, environ: Mapping[str, str]) -> int:
    """Return how many processes are to be started; 0 means that this one does the work itself.

    One process is started only for ``"gpu"``: its trainer is made to be one of several, and needs
    the variables that these have.

    Args:
        asked: A number from 1 on, or ``"gpu"`` for as many as there are GPUs.
        environ: The variables of this process.

    Raises:
        ConfigurationError: It is neither; there is no GPU; or this process has been started as
            one of several already.
    """
    if asked == "gpu":
        number = torch.cuda.device_count()
        if number == 0:
            raise ConfigurationError(
                "processes='gpu' starts a process for each GPU, and this machine shows none to "
                "PyTorch. Ask the backend for GPUs, or pass a number, which also works on CPUs"
            )
    elif is_whole(asked) and asked >= 1:
        number = int(asked)
    else:
        raise ConfigurationError(
            f"processes must be a number from 1 on, or 'gpu' for one process per GPU, not {asked!r}"
        )
    if asked == 1:
        return 0
    inside = [name for name in ("TORCHELASTIC_RUN_ID", "LOCAL_WORLD_SIZE") if name in environ]
    if inside:
        raise ConfigurationError(
            f"processes={asked!r} would start processes inside one that torchrun has started "
            f"({inside[0]} is set): leave it out, or leave out torchrun"
        )
    return number


def run_processes(processes: int, function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """Call a function in several new processes, and return what the first one has returned.

    Each has the variables that torchrun sets. Lines of their output begin with the number of the
    process. If one fails, the others are ended (SIGTERM, and SIGKILL 30 seconds later).

    Args:
        processes: How many.
        function: The function, which a new process can import.
        arguments: Its keyword arguments.

    Raises:
        ProcessFailedError: A process has failed; it is the first that did.
        SystemExit: The replica was told to end (SIGTERM).
    """
    # These are slow to import, and a replica of one process needs none of them.
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does
    with tempfile.TemporaryDirectory(prefix="diloco-") as folder:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=processes,
            run_id=uuid.uuid4().hex,
            role="process",
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=folder, tee=Std.ALL),
        )
        try:
            return elastic_launch(config, _call)(function, arguments)[0]
        except SignalException as told:
            if told.sigval == signal.SIGINT:
                raise KeyboardInterrupt from None
            raise SystemExit(128 + told.sigval) from None
        except ChildFailedError as error:
            raise ended_by(*error.get_first_failure()) from None


def _call(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    # The defaults of its functions would keep the group that is there when it is first imported.
    import torch.distributed.nn.functional

    try:
        result = function(**arguments)
    except SystemExit as end:
        if end.code:
            raise
        result = None  # as torch has it
    except DilocoError as error:
        if error.final:
            error.add_note(_FINAL)  # torch hands on nothing of the error but the traceback
        raise
    # From here on, this process waits for the others: those that still wait for it are to notice.
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    # A model in DDP, often part of a cycle, keeps gloo's threads; at the end of the interpreter
    # these abort the process if they still hold a tensor of the last collective.
    gc.collect()
    return result if os.environ["RANK"] == "0" else None


def ended_by(process: int, failure: Any) -> BaseException:
    """Return what a process has ended its replica by."""
    code: int = failure.exitcode
    if code in {128 + signal.SIGTERM, -signal.SIGTERM}:
        return SystemExit(128 + signal.SIGTERM)  # it was told to end, and has told the others
    message, trace = failure.message, ""
    if isinstance(message, dict):  # of an exception
        trace = str(message.get("extraInfo", {}).get("py_callstack", ""))
        how = str(message.get("message", ""))
    elif code < 0:
        how = f"it was ended by {failure.signal_name()}"
    else:
        how = f"it exited with code {code}"
    error = ProcessFailedError(
        f"process {process} of this replica (pid {failure.pid}): {how}", process, code
    )
    if trace:
        error.add_note(trace)
        error.final = _FINAL in trace.splitlines()
    return error
