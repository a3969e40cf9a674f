"""These tests need transformers: ``hatch run trainers:test``."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("transformers") else ["test_*.py"]
