"""Fixtures for pytest: ``pytest_plugins = ["diloco_localcloud.testing"]`` in a ``conftest.py``, or import them by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    from collections.abc import Iterator

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
        help="have all stand-ins of Kubernetes draw the delays of a real control plane from this seed",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Set the mode for every stand-in that does not choose one; only a plugin that is loaded by -p has the option."""
    seed = config.getoption("--strict-timing", default=0)
    _delays.default_seed = seed or _delays.default_seed


@pytest.fixture
def kubernetes_stand_in() -> Iterator[KubernetesStandIn]:
    """A scripted stand-in that is started; it ends with the test."""
    with KubernetesStandIn() as stand_in:
        yield stand_in


@pytest.fixture
def kubernetes_processes() -> Iterator[KubernetesProcesses]:
    """A stand-in that really runs the pods; it, and they, end with the test."""
    with KubernetesProcesses() as stand_in:
        yield stand_in


@pytest.fixture
def sagemaker_stand_in() -> Iterator[SageMakerStandIn]:
    """A scripted stand-in that is started; it ends with the test.

    Needs ``diloco-localcloud[aws]``.
    """
    with SageMakerStandIn() as stand_in:
        yield stand_in


@pytest.fixture
def sagemaker_processes() -> Iterator[SageMakerProcesses]:
    """A stand-in that really runs training jobs; all ends with the test.

    Needs ``diloco-localcloud[aws]``.
    """
    with SageMakerProcesses() as stand_in:
        yield stand_in


@pytest.fixture
def modal_stand_in() -> Iterator[ModalStandIn]:
    """A scripted stand-in that is started; it ends with the test.

    Needs ``diloco-localcloud[modal]``.
    """
    with ModalStandIn() as stand_in:
        yield stand_in


@pytest.fixture
def modal_processes() -> Iterator[ModalProcesses]:
    """A stand-in that really runs what is called; all ends with the test.

    Needs ``diloco-localcloud[modal]``.
    """
    with ModalProcesses() as stand_in:
        yield stand_in
