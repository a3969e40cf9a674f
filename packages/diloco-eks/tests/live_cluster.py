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
    """What the environment names; without a cluster and an image the whole session ends, before anything starts."""
    missing = [name for name in ("KUBECONFIG", "DILOCO_LIVE_IMAGE") if not os.environ.get(name)]
    if missing:
        pytest.exit(
            f"the live tests need {' and '.join(missing)}; the README of diloco-eks says what for",
            4,
        )
    return LiveCluster(
        os.environ["KUBECONFIG"],
        os.environ["DILOCO_LIVE_IMAGE"],
        os.environ.get("DILOCO_LIVE_NAMESPACE") or "default",
        os.environ.get("DILOCO_LIVE_CONTEXT") or None,
    )
