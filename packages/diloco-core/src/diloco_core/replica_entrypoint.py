r"""The entrypoint of a replica: opens the rendezvous, then calls the trainer.

A launcher names it as ``diloco_core.replica_entrypoint:run``. By hand, with the rank in
``REPLICA_RANK`` or ``--rank``::

    python -m diloco_core.replica_entrypoint --rendezvous /tmp/run --world-size 2 --rank 0 \\
        --trainer-module my_trainer --trainer-fn train --trainer-kwargs-json '{"steps": 100}'
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import inspect
import json
import logging
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from ._connect import Exchange, connect
from ._errors import (
    AfterRunError,
    ConfigurationError,
    CoreError,
    CorruptedObjectError,
    ObjectNotFoundError,
    RunExistsError,
    StoreUnavailableError,
)
from ._exchange._endings import as_text
from ._processes._start import number_of_processes, run_processes
from ._run._generations._names import place_of_run
from ._run._records._keys import MANIFEST
from ._run._records._manifest import Manifest
from ._store._open import open_store

_OWN_CALLS = ("DiLoCo.__init__() ", "connect() ")
"""The beginnings of Python's refusals of arguments that our functions do not have."""

_log = logging.getLogger("diloco_core")
_torch_log = logging.getLogger("torch.distributed.elastic.multiprocessing.api")


def run(
    *,
    trainer_module: str,
    trainer_fn: str = "train",
    trainer_kwargs: Mapping[str, Any] | None = None,
    rendezvous_uri: str | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    connect_options: Mapping[str, Any] | None = None,
    processes: int | Literal["gpu"] = 1,
) -> Any:
    """Connect to the run, and return what ``trainer_module.trainer_fn(**trainer_kwargs)`` returns.

    If the trainer calls :func:`diloco_core.connect` with no arguments, it gets the exchange that
    was opened here.

    Args:
        trainer_module: Importable name of the user's module.
        trainer_fn: Name of a function in that module.
        trainer_kwargs: Keyword arguments of the function.
        rendezvous_uri: The place where the replicas meet; from ``RENDEZVOUS_URI`` if left out.
        rank: The number of this replica; taken from ``REPLICA_RANK`` if left out.
        world_size: Number of replicas; from ``REPLICA_WORLD_SIZE`` if left out.
        connect_options: More arguments of :func:`diloco_core.connect`: ``{"min_replicas": 2}``
            makes the run elastic.
        processes: How many processes are this replica; ``"gpu"`` for one per GPU. They are started
            on this machine, as torchrun would: the trainer runs in each of them, calls
            ``torch.distributed.init_process_group()`` and wraps its model. What process 0 returns
            is returned.

    Raises:
        ConfigurationError: The trainer cannot be found, or the replica cannot be identified.
        ProcessFailedError: One of several processes has failed.
        StoreUnavailableError: The URI cannot be written and read.
    """
    arguments = {**locals()}
    __tracebackhide__ = True  # a traceback that is shown begins with the trainer's own lines
    number = number_of_processes(arguments.pop("processes"), os.environ)
    if number:
        # torch logs the traceback of the process that has failed, which the error below holds too.
        _torch_log.addFilter(_has_no_traceback)
        return run_processes(number, run, arguments)
    exchange, trainer = _prepare(
        trainer_module,
        trainer_fn,
        trainer_kwargs or {},
        rendezvous_uri,
        rank,
        world_size,
        connect_options or {},
    )
    return _call(exchange, trainer, trainer_kwargs or {}, connect_options or {})


def _has_no_traceback(record: logging.LogRecord) -> bool:
    return not record.exc_info


def _prepare(
    trainer_module: str,
    trainer_fn: str,
    kwargs: Mapping[str, Any],
    rendezvous_uri: str | None,
    rank: int | None,
    world_size: int | None,
    options: Mapping[str, Any],
) -> tuple[Exchange, Callable[..., Any]]:
    trainer = _checked_trainer(trainer_module, trainer_fn, kwargs, options)
    _show_log()
    # The arguments go into the environment for the trainer's own connect() and its workers, too.
    variables = {
        "RENDEZVOUS_URI": rendezvous_uri,
        "REPLICA_RANK": rank,
        "REPLICA_WORLD_SIZE": world_size,
    }
    os.environ.update({name: str(value) for name, value in variables.items() if value is not None})
    exchange = connect(**options)  # which replica this is says the environment by now
    attempt = os.environ.get("DILOCO_ATTEMPT", "")
    if attempt.isdecimal() and int(attempt) > 1:  # in a log, it stands between two tracebacks
        _log.info("rank %d: attempt %s begins; the one before has ended", exchange.rank, attempt)
    if (devices := torch.cuda.device_count()) > 1 and exchange.processes == 1:
        _log.warning(
            "rank %d: this replica sees %d GPUs and is one process: unless the trainer itself "
            "uses them all, it trains on one, and the others are idle. Pass processes='gpu' for a "
            "process on each, or ask for one GPU per replica, and start more replicas.",
            exchange.rank,
            devices,
        )
    return exchange, trainer


def _call(
    exchange: Exchange,
    trainer: Callable[..., Any],
    kwargs: Mapping[str, Any],
    options: Mapping[str, Any],
) -> Any:
    __tracebackhide__ = True
    fixed = not options.keys() & {"min_replicas", "elastic"}
    try:
        result = trainer(**kwargs)
    except BaseException as error:
        if exchange.left and fixed and isinstance(error, Exception):
            raise AfterRunError(
                f"the trainer failed after its replica had left the run: {as_text(error)}. The "
                "replica has done its part of the run, and is not started again: what comes after "
                "the block is not repeated. The model is in the store: export() takes it out."
            ) from error
        if isinstance(error, TypeError) and str(error).startswith(_OWN_CALLS):
            refusal = ConfigurationError(str(error))  # it would come again
            exchange.abort(refusal)
            raise refusal.with_traceback(error.__traceback__) from None
        exchange.abort(error)
        _leave_out_own_frames(error)
        raise
    exchange.leave()
    return result


def _leave_out_own_frames(error: BaseException) -> None:
    """End the traceback of an error of ours where the trainer calls diloco.

    Its message says everything, and the twenty frames below would hide the trainer's line.
    """
    if isinstance(error, CoreError):
        trace, own_folder = error.__traceback__, str(Path(__file__).parent)
        while trace and trace.tb_next:
            if trace.tb_next.tb_frame.f_code.co_filename.startswith(own_folder):
                trace.tb_next = None
            trace = trace.tb_next


def _show_log() -> None:
    """Print what diloco logs from level info on, unless the program sets up logging itself.

    The program may do so later, too: then its own handlers are the only ones.
    """
    if any(isinstance(handler, _Shown) for handler in _log.handlers):
        return
    handler = _Shown()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    _log.addHandler(handler)
    if _log.level == logging.NOTSET:
        _log.setLevel(logging.INFO)


class _Shown(logging.StreamHandler[Any]):
    """Writes to stderr as long as the root logger has no handler."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            super().emit(record)


def load_trainer(module: str, function: str) -> Callable[..., Any]:
    """Import a trainer.

    Raises:
        ConfigurationError: There is no such module or function, or importing it fails.
    """
    if "/" in module or not all(module.split(".")):  # a relative name would be one of a package
        name = module.removesuffix(".py").rpartition("/")[2]
        name = ".".join(filter(None, name.split(".")))
        raise ConfigurationError(
            "trainer_module must be the name of a module, such as 'my_trainer' or "
            f"'package.my_trainer', not {module!r}" + f". Did you mean {name!r}?" * bool(name)
        )
    try:
        imported = importlib.import_module(module)
    except OSError:
        raise  # such as a download, which the next attempt may carry out
    except (Exception, SystemExit) as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        why = f"{type(error).__name__}: {error} ({last.filename}, line {last.lineno})"
        if isinstance(error, SystemExit):
            why = (
                f"it ends the program (SystemExit: {error}) while it is imported. Put what only a "
                'script does, such as parse_args(), below `if __name__ == "__main__":`'
            )
        elif isinstance(error, SyntaxError):
            why = f"SyntaxError: {error}: {(error.text or '').strip()}"
        elif isinstance(error, ModuleNotFoundError):
            # Missing is the trainer itself, or what it imports.
            is_trainer = f"{module}.".startswith(f"{error.name}.")
            which = "" if is_trainer else f", which {last.filename} imports in line {last.lineno}"
            looked = ", ".join(sys.path)
            why = f"there is no module {error.name!r}{which}. Python looked in {looked}"
        hint = f". Did you mean {module[:-3]!r}?" if module.endswith(".py") else ""
        raise ConfigurationError(
            f"the trainer module {module!r} cannot be imported: {why}{hint}"
        ) from error
    trainer: Any = imported
    for part in function.split("."):
        trainer = getattr(trainer, part, None)
    if not callable(trainer):
        raise ConfigurationError(
            f"the trainer module {module!r} ({imported.__file__}) has no function {function!r}: "
            "name the function to call with trainer_fn (by hand, --trainer-fn)"
        )
    return trainer  # type: ignore[no-any-return]


def _checked_trainer(
    module: str, function: str, kwargs: Mapping[str, Any], options: Mapping[str, Any]
) -> Callable[..., Any]:
    """Return the trainer, if it takes these arguments; nothing is opened."""
    for name, given in {"trainer_kwargs": kwargs, "connect_options": options}.items():
        if not isinstance(given, Mapping):
            raise ConfigurationError(
                f"{name} must map names to values, such as {{'name': 1}}, not {given!r}"
            )
    trainer = load_trainer(module, function)
    try:
        signature = inspect.signature(trainer)
    except ValueError:
        signature = inspect.Signature.from_callable(lambda **_: None)  # a function in C
    try:
        signature.bind(**kwargs)
    except TypeError as error:
        raise ConfigurationError(
            f"trainer_kwargs do not fit {module}.{function}{signature}: {error}; given: "
            f"{', '.join(kwargs) or 'none'}"
        ) from error
    known = set(inspect.signature(connect).parameters) - {
        "uri", "rank", "world_size", "environ", "process_group",
    }  # fmt: skip
    for name in options:
        if name not in known:
            raise ConfigurationError(
                f"connect_options has {name!r}, which is not allowed. These are: "
                f"{', '.join(sorted(known))}"
            )
    return trainer


def _check_arguments(
    *,
    trainer_module: str,
    trainer_fn: str = "train",
    trainer_kwargs: Mapping[str, Any] | None = None,
    rendezvous_uri: str | None = None,
    connect_options: Mapping[str, Any] | None = None,
    **_: Any,
) -> None:
    """Refuse arguments of :func:`run` that every replica would refuse; called before a launch."""
    options = connect_options or {}
    _checked_trainer(trainer_module, trainer_fn, trainer_kwargs or {}, options)
    run_id = options.get("run_id") or os.environ.get("DILOCO_COHORT")
    if rendezvous_uri and run_id and not options.get("resume"):
        _check_prefix(rendezvous_uri, run_id)


def _check_prefix(uri: str, run_id: str) -> None:
    """Refuse a prefix that holds another run.

    A store that cannot be reached now and a damaged run are left to the replicas, which are started
    again where the error may pass, and repair what they can.
    """
    try:
        with contextlib.closing(open_store(uri, reading=True)) as store:
            place = place_of_run(store)
            manifest = Manifest.from_json(place.get(MANIFEST), f"{place.uri}/{MANIFEST}")
    except (ObjectNotFoundError, CorruptedObjectError, StoreUnavailableError):
        return
    if manifest.run_id != run_id:
        raise RunExistsError(
            f"{store.uri} holds the run {manifest.run_id!r} already. Give this run a prefix of its "
            "own, as rendezvous_uri; or, to go on with that run when it has ended, pass "
            '"connect_options": {"resume": True}'
        )


run.check_arguments = _check_arguments  # type: ignore[attr-defined]


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m diloco_core.replica_entrypoint", description="Run one replica."
    )
    parser.add_argument(
        "--rendezvous",
        dest="rendezvous_uri",
        help="the place where the replicas meet: a folder or s3://…; default: RENDEZVOUS_URI",
    )
    parser.add_argument(
        "--world-size", type=int, help="number of replicas; default: REPLICA_WORLD_SIZE"
    )
    parser.add_argument("--rank", type=int, help="this replica, from 0; default: REPLICA_RANK")
    parser.add_argument("--trainer-module", required=True, help="importable module of the trainer")
    parser.add_argument("--trainer-fn", default="train", help="function in it (default: train)")
    parser.add_argument(
        "--trainer-kwargs-json",
        default="{}",
        type=_json_object,
        help="its keyword arguments, a JSON object",
    )
    parser.add_argument(
        "--connect-options-json",
        dest="options",
        default="{}",
        type=_json_object,
        help="more arguments of connect(), a JSON object: "
        """'{"min_replicas": 2}' makes the run elastic""",
    )
    parser.add_argument(
        "--processes",
        default="1",
        help="how many processes on this machine are this replica; 'gpu' for one per GPU",
    )
    rest = vars(parser.parse_args(argv))
    kwargs, processes = rest.pop("trainer_kwargs_json"), rest.pop("processes")
    processes = int(processes) if processes.isdecimal() else processes
    try:
        several = number_of_processes(processes, os.environ)
        prepared = None if several else _prepare(kwargs=kwargs, **rest)
    except ConfigurationError as error:
        parser.error(str(error))
    options = rest.pop("options")
    if prepared is None:
        result = run(processes=processes, trainer_kwargs=kwargs, connect_options=options, **rest)
    else:
        result = _call(*prepared, kwargs, options)
    if result is not None:
        sys.stdout.write(f"{json.dumps(result)}\n")
    return 0


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"it is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"it must be a JSON object, not {type(value).__name__}")
    return value


if __name__ == "__main__":
    sys.exit(main())
