"""These tests need transformers: ``hatch run trainers:test``."""

import sys
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
collect_ignore_glob = [] if find_spec("transformers") else ["test_*.py"]
