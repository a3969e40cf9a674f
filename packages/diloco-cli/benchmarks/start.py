"""How long ``diloco --help`` takes, beside Python importing click and rich and doing nothing.

    python packages/diloco-cli/benchmarks/start.py [rounds]

Both are started in turns, so that whatever else the machine does slows both. The ratio of the
medians should be at most 1.3.
"""

import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

LIMIT = 1.3
COMMANDS = {
    "import click and rich": [sys.executable, "-c", "import click, rich"],
    "diloco --help": [str(Path(sys.executable).parent / "diloco"), "--help"],
}


def seconds(command: list[str]) -> tuple[float, float]:
    """Return the seconds of one call: of time, and of the processor."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    passed, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime
    return passed, used - before.ru_utime - before.ru_stime


def main() -> None:
    """Print the medians and their ratios."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in COMMANDS}
    for _ in range(rounds + 1):
        for name, command in COMMANDS.items():
            taken[name].append(seconds(command))
    medians = {
        name: [statistics.median(kind) for kind in zip(*times[1:], strict=True)]
        for name, times in taken.items()  # without the first, which reads files from the disk
    }
    for name, (wall, processor) in medians.items():
        print(f"{name:22} {wall * 1000:6.0f} ms, {processor * 1000:6.0f} ms of the processor")
    base, ours = medians.values()
    ratios = [mine / bare for mine, bare in zip(ours, base, strict=True)]
    print(f"ratio {ratios[0]:.2f}, of the processor {ratios[1]:.2f} (wanted: at most {LIMIT})")


if __name__ == "__main__":
    main()
