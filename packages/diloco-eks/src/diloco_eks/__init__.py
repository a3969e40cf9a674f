"""Replicas on Kubernetes: one Indexed Job per run, on EKS or any other cluster."""

from .__about__ import __version__
from ._executor import EKSExecutor
from ._request._options import EKSOptions

K8sExecutor = EKSExecutor
"""Another name of :class:`EKSExecutor`, for clusters elsewhere."""

__all__ = ["EKSExecutor", "EKSOptions", "K8sExecutor", "__version__"]
