"""``python tools/bench/scale``: see :mod:`scale.command`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from scale.command import main

if __name__ == "__main__":
    sys.exit(main())
