"""The command ``diloco``: see, follow and end runs on every backend."""

from .__about__ import __version__ as __version__
from ._app import main

__all__ = ["main"]
