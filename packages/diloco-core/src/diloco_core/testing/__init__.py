"""For tests: several replicas in one process, and what every codec has to do."""

from ._codecs import CodecConformance
from ._replicas import run_replicas

__all__ = ["CodecConformance", "run_replicas"]
