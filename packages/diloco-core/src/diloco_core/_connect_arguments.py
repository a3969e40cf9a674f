"""The arguments of :func:`connect`, or the variables that a launcher set in their place.

Nothing is opened here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch

from ._checks import check_resume, kind_of
from ._errors import ConfigurationError
from ._redact import redact_uri
from ._run._settings import Elastic
from ._timing import Timing, limits_given

T = TypeVar("T")


def given(**arguments: Any) -> dict[str, Any]:
    """The arguments that were not left out."""
    return {name: value for name, value in arguments.items() if value is not None}


def timing_of(
    timing: object, limits: Mapping[str, Any], *, elastic: bool, restarts: bool
) -> Timing:
    """The limits of an exchange, from either form in which they can be given.

    Args:
        timing: All limits together, or None.
        limits: Limits that were given one by one, by name.
        elastic: Whether the run is elastic, so that no limit depends on ``lost_after``.
        restarts: Whether the launch starts a lost replica again; otherwise the others do not
            wait for one, unless a limit says so.

    Raises:
        ConfigurationError: A limit is not allowed or has no effect, or both forms are used.
    """
    named: Mapping[str, Any] = limits
    if timing is not None:
        timing = settings_of("timing", timing, Timing, "Timing(sync_timeout=600)", limits)
        named = limits_given(timing)
    beat = named.get("beat_interval")
    seldom = elastic and isinstance(beat, (int, float)) and 2 * beat > Timing().lost_after
    for name in ("lost_after", "return_within") if elastic else ():
        # A Timing with rare signs of life must have a lost_after that is longer than the default.
        if name in named and not (seldom and timing is not None and name == "lost_after"):
            raise ConfigurationError(
                f"{name}={named[name]!r} cannot be used in an elastic run, where grace says how "
                "long a replica is waited for. Leave it out, or pass grace="
            )
    if timing is None:
        more = {"lost_after": 2 * named["beat_interval"]} if seldom else {}
        timing = Timing(**limits, **more)
    if restarts or "return_within" in named:
        return timing
    return replace(timing, return_within=0.0)


def elastic_of(elastic: object, options: Mapping[str, Any]) -> Elastic | None:
    """The settings of elastic membership; None for fixed membership.

    Args:
        elastic: All settings together, or None.
        options: Settings that were given one by one, by name.

    Raises:
        ConfigurationError: Both forms are used, or there are settings without ``min_replicas``
            other than ``resume``.
    """
    if elastic is not None:
        return settings_of("elastic", elastic, Elastic, "Elastic(min_replicas=2)", options)
    if "min_replicas" in options:
        return Elastic(**options)
    for name, value in options.items():
        if name == "resume":
            check_resume(value)
            continue
        raise ConfigurationError(
            f"{name}={value!r} is for elastic runs. Pass min_replicas= too to make the run "
            f"elastic, or leave {name}= out: with fixed membership every sync waits for all "
            "replicas, and the topology is sharded."
        )
    return None


def settings_of(
    name: str, value: object, kind: type[T], example: str, single: Mapping[str, Any]
) -> T:
    """Return settings that are given together.

    Args:
        name: The argument.
        value: Its value.
        kind: What it must be.
        example: One of that kind.
        single: The same settings, where they are given one by one.

    Raises:
        ConfigurationError: It is something else; or the settings are given in both forms, even with
            equal values: the reader could not see which one counts.
    """
    if not isinstance(value, kind):
        raise ConfigurationError(f"{name} must be settings such as {example}, not {kind_of(value)}")
    if single:
        names = ", ".join(f"{name}=" for name in single)
        raise ConfigurationError(
            f"{names} cannot be given together with {name}=, which holds the same settings: put "
            f"{names.replace('=', '')} into {kind.__name__}(...), or leave {name}= out"
        )
    return value


def check_told(environ: Mapping[str, str], **arguments: object) -> None:
    """Name everything at once that neither an argument nor a variable tells this replica.

    Raises:
        ConfigurationError: More than one thing is missing; what lacks alone is refused by its
            reader.
    """
    variables = {
        "uri": "RENDEZVOUS_URI",
        "rank": "REPLICA_RANK",
        "world_size": "REPLICA_WORLD_SIZE",
    }
    missing = [
        name
        for name, value in arguments.items()
        if value is None and not environ.get(variables[name])
    ]
    if len(missing) > 1:
        raise ConfigurationError(
            "this process does not know which replica of which run it is: set "
            f"{', '.join(variables[name] for name in missing)}, or pass "
            f"{', '.join(f'{name}=' for name in missing)} to connect(). A launcher sets them"
        )


def uri_of(given: object, environ: Mapping[str, str]) -> str:
    """The place where the replicas meet.

    Raises:
        ConfigurationError: It was not given, or is not a URI.
    """
    value = environ.get("RENDEZVOUS_URI") if given is None else given
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if value is None or value == "":
        raise ConfigurationError(
            "the place where the replicas meet is missing: pass uri= or set RENDEZVOUS_URI"
        )
    if not isinstance(value, str):
        raise ConfigurationError(
            f"uri must be text such as 's3://bucket/run', or a folder's path, not {value!r}"
        )
    if not value.strip() or not value.isprintable():
        raise ConfigurationError(
            "uri (or RENDEZVOUS_URI) must be printable text that is not blank, not "
            f"{redact_uri(value)!r}"
        )
    return value


def number_of(given: int | None, argument: str, variable: str, environ: Mapping[str, str]) -> int:
    """A number from an argument, or from a variable if the argument was left out.

    Raises:
        ConfigurationError: Neither is given, or the variable does not hold a whole number.
    """
    if given is not None:
        return given
    text = environ.get(variable)
    if text is None:
        raise ConfigurationError(f"{argument} is missing: pass {argument}= or set {variable}")
    if not re.fullmatch(r"\s*[+-]?[0-9]{1,9}\s*", text, re.ASCII):
        raise ConfigurationError(f"{variable} must be a whole number, not {text!r}")
    return int(text)


def processes_of(environ: Mapping[str, str], chosen: object = None) -> tuple[int, int] | None:
    """Return the number of this process in its replica and how many there are; None if it is alone.

    Args:
        environ: The variables of this process.
        chosen: The group of the replica's processes, if it is not torch's default one.

    Raises:
        ConfigurationError: A variable of torchrun does not hold a whole number, or the group is
            none that this process is in.
    """
    group = torch.distributed
    if group.is_available() and group.is_initialized():
        try:
            process, processes = group.get_rank(chosen), group.get_world_size(chosen)  # type: ignore[arg-type]
        except (ValueError, TypeError, AttributeError, KeyError, RuntimeError) as error:
            raise _no_group(chosen) from error
        if process < 0:
            raise _no_group(chosen)
    elif chosen is not None:
        raise _no_group(chosen)
    elif "TORCHELASTIC_RUN_ID" in environ or "LOCAL_WORLD_SIZE" in environ:
        if missing := [name for name in ("RANK", "WORLD_SIZE") if name not in environ]:
            raise ConfigurationError(
                f"{' and '.join(missing)} must be set where TORCHELASTIC_RUN_ID or "
                "LOCAL_WORLD_SIZE is, as torchrun does it. If torchrun has not started this "
                "process, unset these two"
            )
        process = number_of(None, "the number of this process", "RANK", environ)
        processes = number_of(None, "the number of processes", "WORLD_SIZE", environ)
    else:
        return None
    return (process, processes) if processes > 1 else None


def _no_group(chosen: object) -> ConfigurationError:
    return ConfigurationError(
        "process_group must be a group of torch.distributed that this process is in, not "
        f"{chosen!r}: call init_process_group() and new_group() before connect()"
    )


def world_size_of(given: int | None, environ: Mapping[str, str]) -> int:
    """Return the number of replicas.

    Raises:
        ConfigurationError: It is not given, or the variable does not hold a whole number.
    """
    if given is None and "REPLICA_WORLD_SIZE" not in environ and "WORLD_SIZE" in environ:
        raise ConfigurationError(
            "world_size is missing: pass world_size= or set REPLICA_WORLD_SIZE. "
            f"WORLD_SIZE={environ['WORLD_SIZE']} is not taken for it: torchrun and trainers count "
            "the processes of one replica with it"
        )
    return number_of(given, "world_size", "REPLICA_WORLD_SIZE", environ)
