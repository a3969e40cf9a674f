"""Replicas on Kubernetes: one Indexed Job per run, on EKS or any other cluster."""

from .__about__ import __version__
from ._executor import EKSExecutor
from ._options import EKSOptions

__all__ = ["EKSExecutor", "EKSOptions", "__version__"]
