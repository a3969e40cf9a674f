"""Disturb a run of real processes in every way we know; see if its store tells one true story.

    python tools/chaos/run.py --seconds 60 --kill-every 4 --stop-every 8
    python tools/chaos/run.py --elastic --store obstore+s3 --seconds 60 --faults 1

Prints one line of JSON: how often what was done to the run, how often what was checked, and a
sentence for everything that is wrong. The exit status is 1 if anything is.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash
from cohort import Cohort
from damage import BucketShelf, Damage, FolderShelf, Shelf
from faults import RATES, Fault, Faults
from fixed import FixedReader
from history import FolderWatcher, History
from incarnations import IncarnationReader
from objects import Objects
from proxy import FaultProxy
from reader import Reader
from trouble import Trouble

if TYPE_CHECKING:
    from collections.abc import Iterator

SMALL_S3 = Path(__file__).parents[2] / "packages/diloco-core/tests/store/small_s3.py"
SYNC_EVERY = 4
_MOST_SECONDS_MORE = 240.0


def main() -> int:
    """The command line; returns the exit status."""
    arguments = parse()
    chance = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory(prefix="diloco-chaos-") as temporary:
        folder = Path(arguments.keep or temporary)
        folder.mkdir(parents=True, exist_ok=True)
        result = run(arguments, folder, chance)
    for violation in result["violations"]:
        print(violation, file=sys.stderr)
    print(json.dumps(result))
    return 1 if result["violations"] else 0


def parse() -> argparse.Namespace:
    """The command line's arguments."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--store", choices=["folder", "obstore+s3", "fsspec+s3"], default="folder")
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="how long the run is disturbed (default: 60)"
    )
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--grace", type=float, default=1.0)
    parser.add_argument(
        "--kill-every",
        type=float,
        default=0.0,
        help="seconds between two kill -9; 0 for none (default)",
    )
    parser.add_argument(
        "--stop-every",
        type=float,
        default=0.0,
        help="seconds between two SIGSTOP; 0 for none (default)",
    )
    parser.add_argument(
        "--damage-every",
        type=float,
        default=0.0,
        help="seconds between two damages at rest; 0 for none",
    )
    parser.add_argument(
        "--faults",
        type=float,
        default=0.0,
        help="1 for the usual rates of faults before S3; 0 for none",
    )
    parser.add_argument(
        "--without", nargs="*", default=[], choices=[fault.name.lower() for fault in Fault]
    )
    parser.add_argument("--fragments", type=int, choices=[1, 2], default=1)
    parser.add_argument(
        "--delay", type=int, default=0, help="inner steps that an exchange runs behind (default: 0)"
    )
    parser.add_argument("--codec", choices=["plain", "int8"], default="plain")
    parser.add_argument(
        "--state-codec",
        choices=["plain", "int8"],
        default="plain",
        help="how results are published",
    )
    parser.add_argument("--topology", choices=["sharded", "gather"], default="sharded")
    parser.add_argument(
        "--averaging",
        action="store_true",
        help="plain averaging as outer step, instead of Nesterov SGD",
    )
    parser.add_argument("--step-seconds", type=float, default=0.02)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--keep", help="a folder for everything that the run leaves; otherwise nothing is kept"
    )
    parser.add_argument(
        "--elastic",
        action="store_true",
        help="elastic membership, in place of fixed membership",
    )
    arguments = parser.parse_args()
    if not arguments.elastic and arguments.topology != "sharded":
        parser.error("--topology is for runs with --elastic")
    if not arguments.elastic and arguments.damage_every:
        parser.error(
            "--damage-every is for runs with --elastic: what a replica did not send cannot be made "
            "again by others, so with fixed membership a run goes back to older states, and only "
            "if it is told to"
        )
    longest = SYNC_EVERY // arguments.fragments - 1
    if not 0 <= arguments.delay <= longest:
        parser.error(
            f"--delay must be between 0 and {longest}: a fragment is synced every {longest + 1} "
            "inner steps"
        )
    if arguments.state_codec != "plain" and arguments.topology == "gather":
        parser.error("--state-codec is for sharded runs")
    if arguments.faults and arguments.store == "folder":
        parser.error("--faults is for runs over S3: a folder has no proxy before it")
    return arguments


def run(arguments: argparse.Namespace, folder: Path, chance: random.Random) -> dict[str, Any]:
    """One disturbed run, and everything that can be said of it."""
    settings = {
        "min_replicas": 2 if arguments.elastic else None,
        "contributions": str(folder / "contributions"),
        "grace": arguments.grace,
        "sync_timeout": _MOST_SECONDS_MORE,
        "topology": arguments.topology,
        "fragments": arguments.fragments,
        "delay": arguments.delay,
        "codec": arguments.codec,
        "state_codec": arguments.state_codec,
        "outer_lr": 1.0 if arguments.averaging else 0.7,
        "outer_momentum": 0.0 if arguments.averaging else 0.9,
        "sync_every": SYNC_EVERY,
        "save_inner_every": 2,
        "step_seconds": arguments.step_seconds,
    }
    rates = {
        fault: rate * arguments.faults
        for fault, rate in RATES.items()
        if fault.name.lower() not in arguments.without
    }
    faults = Faults(random.Random(arguments.seed + 1), rates)
    history = History(folder / "history", arguments.fragments)
    replicas = folder / "replicas"
    replicas.mkdir()
    started = time.monotonic()
    problems: list[str] = []
    quality: dict[str, float] = {}
    with meeting_place(arguments.store, folder, history, faults) as (uri, environment, shelf):
        damage = Damage(shelf, history, chance)
        every = (arguments.kill_every, arguments.stop_every, arguments.damage_every)
        trouble = Trouble(chance, arguments.grace, *every, damage.strike)
        with Cohort(replicas, arguments.replicas, {"uri": uri, **settings}, environment) as cohort:
            cohort.outages = lambda: "outage" in faults.counts
            try:
                disturb(cohort, trouble, arguments.seconds)
                faults.quiet = True
                quality = cohort.export(folder / "model.safetensors", _MOST_SECONDS_MORE)
            except (TimeoutError, RuntimeError) as error:
                problems.append(f"{error}")
        lines = cohort.lines()
    objects, incarnations = (
        Objects(folder / "store", folder / "history", history.damaged()),
        IncarnationReader(lines),
    )
    reader = (
        Reader(objects) if arguments.elastic else FixedReader(objects, folder / "contributions")
    )
    reader.read()
    incarnations.read(digests(reader))
    if quality:
        reader.compare_export(folder / "model.safetensors")
    for rank, first, stop in sorted(reader.gaps):
        if not incarnations.explains(rank, first, stop, arguments.delay):
            problems.append(
                f"the inner steps {first} to {stop} of rank {rank} are in no record, and nobody "
                "dropped them"
            )
    return {
        "store": arguments.store,
        "seconds": round(time.monotonic() - started, 1),
        "syncs": len(reader.commits),
        "incarnations": cohort.incarnations,
        "trouble": trouble.counts,
        "damage": damage.counts,
        "ends": dataclasses.asdict(cohort.ends),
        "faults": faults.counts,
        "written": history.written,
        "deleted": history.deleted,
        "dropped": sum(stop - first for _, first, stop in reader.gaps),
        **quality,
        "checks": {**reader.findings.counts, **incarnations.counts},
        "violations": [
            *problems,
            *cohort.violations,
            *history.violations,
            *reader.findings.violations,
            *incarnations.violations,
        ],
    }


@contextlib.contextmanager
def meeting_place(
    store: str, folder: Path, history: History, faults: Faults
) -> Iterator[tuple[str, dict[str, str], Shelf]]:
    """Where the replicas meet: its URI, environment and objects; at the end ``folder/store``."""
    if store == "folder":
        (folder / "store").mkdir()
        with FolderWatcher(folder / "store", history):
            yield str(folder / "store"), {}, FolderShelf(folder / "store")
        return
    specification = importlib.util.spec_from_file_location("small_s3", SMALL_S3)
    if specification is None or specification.loader is None:
        raise FileNotFoundError(SMALL_S3)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    with module.SmallS3() as server, FaultProxy(server.url, faults, "run/", history) as proxy:
        environment = {
            "AWS_ENDPOINT_URL": proxy.url,
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        shelf = BucketShelf(server.objects, "run/")
        try:
            yield f"{store}://bucket/run", environment, shelf
        finally:
            for key in shelf.listing():
                path = folder / "store" / key
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(shelf.read(key))


def disturb(cohort: Cohort, trouble: Trouble, seconds: float) -> None:
    """Let the run be disturbed for so long, then let it come to rest, and to its end.

    Raises:
        TimeoutError: It does not.
    """

    def wait(until: float, done: Any, what: str) -> None:
        looked = 0.0
        while time.monotonic() < until:
            cohort.look_after()
            time.sleep(0.02)
            if time.monotonic() - looked > 0.3:
                looked = time.monotonic()
                if done():
                    return
        raise TimeoutError(f"{what} within {_MOST_SECONDS_MORE:g} s; {cohort.describe()}")

    wait(
        time.monotonic() + _MOST_SECONDS_MORE, cohort.settled, "not every rank made its first sync"
    )
    end = time.monotonic() + seconds
    while time.monotonic() < end or (
        not trouble.enough and time.monotonic() < end + _MOST_SECONDS_MORE
    ):
        cohort.look_after()
        trouble.act(cohort)
        time.sleep(0.02)
    deadline = time.monotonic() + _MOST_SECONDS_MORE
    wait(
        deadline,
        lambda: trouble.let_go(cohort) and cohort.settled(),
        "the run did not come to rest",
    )
    syncs = [line["report"]["sync"] for line in cohort.lines() if line["event"] == "sync"]
    cohort.end_after(max(syncs) + 4)
    wait(time.monotonic() + _MOST_SECONDS_MORE, cohort.finished, "the run did not come to its end")


def digests(reader: Reader) -> dict[int, str]:
    """Digests of the whole published state after every sync of which all fragments are known."""
    found = {}
    for sync in range(1, len(reader.commits) + 1):
        count = len(reader.fragments)
        newest = [max(0, sync - (sync - 1 - fragment) % count) for fragment in range(count)]
        states = [reader.published.get((at, fragment)) for fragment, at in enumerate(newest)]
        if all(state is not None for state in states):
            digest = xxhash.xxh3_64()
            for state in states:
                for values in state.values if state else ():
                    digest.update(values.tobytes())
            found[sync] = digest.hexdigest()
    return found


if __name__ == "__main__":
    sys.exit(main())
