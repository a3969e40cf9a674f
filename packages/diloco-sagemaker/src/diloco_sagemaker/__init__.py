"""Replicas on Amazon SageMaker: one training job per replica."""

from .__about__ import __version__
from ._executor import SageMakerExecutor
from ._request._options import SageMakerOptions

__all__ = ["SageMakerExecutor", "SageMakerOptions", "__version__"]
