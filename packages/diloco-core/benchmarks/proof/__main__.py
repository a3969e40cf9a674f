"""``python packages/diloco-core/benchmarks/proof``: see :mod:`proof.command`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from proof.command import main

if __name__ == "__main__":
    sys.exit(main())
