"""The path from the hook of the inner optimizer to the store stays short enough to be read."""

import runpy
from pathlib import Path

TOOL = Path(__file__).parents[3] / "tools/shape/frames.py"
MOST_FRAMES = 16  # of a contribution, with those of the hook and of the store's own method


def test_a_contribution_reaches_the_store_through_few_calls():
    frames = runpy.run_path(str(TOOL))["recorded"]()["deltas"]
    walk = "\n".join(f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames)
    assert len(frames) <= MOST_FRAMES, walk
