"""Replicas on Modal: one function call per replica."""

from .__about__ import __version__
from ._app import build_app
from ._executor import ModalSpawnExecutor
from ._request._options import ModalOptions
from ._wrapper import run_replica

__all__ = ["ModalOptions", "ModalSpawnExecutor", "__version__", "build_app", "run_replica"]
