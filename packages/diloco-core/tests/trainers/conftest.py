"""These tests need transformers: ``hatch run trainers:test``."""

import sys
from importlib.util import find_spec
from pathlib import Path

here = Path(__file__).parent
sys.path[:0] = [str(here), str(here.parents[1] / "examples" / "trainers")]
collect_ignore_glob = [] if find_spec("transformers") else ["test_*.py"]
