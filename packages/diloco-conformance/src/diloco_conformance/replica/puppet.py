"""A replica that does what a test says, through files in a folder that both see. One file, standard library only.

Its folder goes onto the replica's import path (or the file into its image), and the entrypoint is ``puppet:perform``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def perform(puppets: str, **kwargs: Any) -> Any:
    """Say what it was told, then obey.

    Args:
        puppets: The folder, as :class:`diloco_conformance.Puppets` knows it.
        **kwargs: Anything; it is said back.

    Returns:
        What it is made to return.
    """
    name = (
        f"{os.environ['DILOCO_RUN_ID']}-{os.environ['REPLICA_RANK']}-{os.environ['DILOCO_ATTEMPT']}"
    )
    folder = Path(puppets)
    told = {
        "kwargs": {"puppets": puppets, **kwargs},
        "environment": dict(os.environ),
        "pid": os.getpid(),
        "parent": os.getppid(),
    }
    _write(folder / f"{name}.told", told)
    number = 0
    while True:
        try:
            order = json.loads((folder / f"{name}.order-{number}").read_text(encoding="utf-8"))
        except FileNotFoundError:
            time.sleep(0.005)
            continue
        if "print" in order:
            for line in order["print"]:
                sys.stdout.write(line + "\n")
            sys.stdout.flush()
            _write(folder / f"{name}.done-{number}", {})
            number += 1
        elif "fail" in order:
            sys.exit(order["fail"])
        else:
            return order["succeed"]


def _write(path: Path, value: Any) -> None:
    partial = path.with_name(f".{path.name}")
    partial.write_text(json.dumps(value), encoding="utf-8")
    partial.rename(path)
