"""The cluster of yours that the live tests run on, as the environment names it."""

import os
from dataclasses import dataclass

import pytest


@dataclass(frozen=True)
class LiveCluster:
    """Where the live tests work.

    Attributes:
        kubeconfig: ``KUBECONFIG``.
        image: ``DILOCO_LIVE_IMAGE``, with a shell, Python and this version of diloco-protocol.
        namespace: ``DILOCO_LIVE_NAMESPACE``, else ``default``.
        context: ``DILOCO_LIVE_CONTEXT``, else the current one.
    """

    kubeconfig: str
    image: str
    namespace: str
    context: str | None


def live_cluster():
    """What the environment names.

    Raises:
        pytest.UsageError: It names no cluster, or no image.
    """
    missing = [name for name in ("KUBECONFIG", "DILOCO_LIVE_IMAGE") if not os.environ.get(name)]
    if missing:
        raise pytest.UsageError(
            f"the live tests need {' and '.join(missing)}; the README of diloco-eks says what for"
        )
    return LiveCluster(
        os.environ["KUBECONFIG"],
        os.environ["DILOCO_LIVE_IMAGE"],
        os.environ.get("DILOCO_LIVE_NAMESPACE") or "default",
        os.environ.get("DILOCO_LIVE_CONTEXT") or None,
    )
