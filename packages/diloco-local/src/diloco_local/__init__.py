"""Replicas as local processes: the diloco backend for a laptop, a test and a rehearsal."""

import os

if os.name != "posix":
    raise ImportError("diloco-local runs on Linux and macOS; on Windows use it inside WSL")

from .__about__ import __version__
from ._executor import LocalProcessExecutor
from ._options import LocalOptions

__all__ = ["LocalOptions", "LocalProcessExecutor", "__version__"]
