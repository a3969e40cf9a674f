"""Fixtures for pytest: a stand-in each, which ends with the test, and so does what it runs.

Use ``pytest_plugins = ["diloco_localcloud.testing"]`` in a ``conftest.py``, or import them by name.
Those of SageMaker and Modal need the extras ``aws`` and ``modal``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from . import (
    KubernetesProcesses,
    KubernetesStandIn,
    ModalProcesses,
    ModalStandIn,
    SageMakerProcesses,
    SageMakerStandIn,
)
from ._kubernetes._control import _delays
from ._server._service import Service

__all__ = [
    "kubernetes_processes",
    "kubernetes_stand_in",
    "modal_processes",
    "modal_stand_in",
    "sagemaker_processes",
    "sagemaker_stand_in",
]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--strict-timing``."""
    parser.addoption(
        "--strict-timing",
        type=int,
        default=0,
        metavar="SEED",
        help="have all stand-ins of Kubernetes draw the delays of a real control plane "
        "from this seed",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Set the mode for every stand-in that does not choose one.

    Only a plugin that is loaded by -p has the option.
    """
    seed = config.getoption("--strict-timing", default=0)
    _delays.default_seed = seed or _delays.default_seed


def _fixture(kind: Callable[[], Service], words: str) -> Any:
    @pytest.fixture
    def started() -> Iterator[Service]:
        with kind() as stand_in:
            yield stand_in

    started.__doc__ = f"Yield a started {words}"
    return started


kubernetes_stand_in = _fixture(KubernetesStandIn, "Kubernetes whose pods the test moves.")
kubernetes_processes = _fixture(KubernetesProcesses, "Kubernetes whose pods really run.")
sagemaker_stand_in = _fixture(SageMakerStandIn, "SageMaker whose jobs the test moves.")
sagemaker_processes = _fixture(SageMakerProcesses, "SageMaker whose jobs really run.")
modal_stand_in = _fixture(ModalStandIn, "Modal whose calls the test moves.")
modal_processes = _fixture(ModalProcesses, "Modal whose functions really run.")
