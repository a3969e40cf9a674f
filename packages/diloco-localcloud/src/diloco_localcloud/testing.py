"""Fixtures for pytest.

Use ``pytest_plugins = ["diloco_localcloud.testing"]`` in a ``conftest.py``, or import them by name.
"""

from __future__ import annotations

from collections.abc import Iterator

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


@pytest.fixture
def kubernetes_stand_in() -> Iterator[KubernetesStandIn]:
    """Yield a started stand-in whose pods a test moves; it ends with the test."""
    with KubernetesStandIn() as stand_in:
        yield stand_in


@pytest.fixture
def kubernetes_processes() -> Iterator[KubernetesProcesses]:
    """Yield a stand-in that really runs the pods; it, and they, end with the test."""
    with KubernetesProcesses() as stand_in:
        yield stand_in


@pytest.fixture
def sagemaker_stand_in() -> Iterator[SageMakerStandIn]:
    """Yield a started stand-in whose training jobs a test moves; it ends with the test.

    Needs ``diloco-localcloud[aws]``.
    """
    with SageMakerStandIn() as stand_in:
        yield stand_in


@pytest.fixture
def sagemaker_processes() -> Iterator[SageMakerProcesses]:
    """Yield a stand-in that really runs training jobs; it, and they, end with the test.

    Needs ``diloco-localcloud[aws]``.
    """
    with SageMakerProcesses() as stand_in:
        yield stand_in


@pytest.fixture
def modal_stand_in() -> Iterator[ModalStandIn]:
    """Yield a started stand-in whose calls a test moves; it ends with the test.

    Needs ``diloco-localcloud[modal]``.
    """
    with ModalStandIn() as stand_in:
        yield stand_in


@pytest.fixture
def modal_processes() -> Iterator[ModalProcesses]:
    """Yield a stand-in that really runs the called functions; they end with the test, as it does.

    Needs ``diloco-localcloud[modal]``.
    """
    with ModalProcesses() as stand_in:
        yield stand_in
