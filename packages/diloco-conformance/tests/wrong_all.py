"""All wrong executors."""

from importlib import import_module
from pathlib import Path

from wrong import MUTANTS, harness_of

for path in sorted(Path(__file__).parent.glob("wrong_*.py")):
    if path.stem != "wrong_all":
        import_module(path.stem)

__all__ = ["MUTANTS", "harness_of"]
