"""The toy backend of the examples, for the tests of the suite itself."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "examples")]
