"""Records in which the replicas of a run tell of themselves while it runs, and their bounds.

Every replica rewrites ``live/{rank}.json`` below the run's prefix, and adds one line per sync to
``history/{rank}/{epoch}.{first}-{last}.jsonl``. At its end it also writes its last live record to
``history/{rank}/{epoch}.end.json``, which the next incarnation leaves alone.

Nothing decides by these objects. Anyone who can write below the prefix may have written them, so
readers accept only what our own writers write. Nothing here writes into a store, and
:class:`RunReader` reads through functions that it is given.
"""

from ._telemetry._checks import (
    MOST_METRICS,
    MOST_RANKS,
    NAME_CHARACTERS,
    TEXT_CHARACTERS,
    Metric,
    Phase,
    check_metrics,
)
from ._telemetry._keys import HistoryKey, end_key, live_key, newest_keys, parse_live_key
from ._telemetry._pace import (
    LEAST_SECONDS,
    PUTS_PER_SECOND,
    history_allowance,
    history_seconds,
    is_sealed,
    live_seconds,
)
from ._telemetry._reader import (
    MOST_BYTES,
    MOST_ENDS,
    MOST_KEYS,
    MOST_RUNS,
    RunReader,
    Told,
    find_runs,
)
from ._telemetry._records import (
    HISTORY_BYTES,
    LINE_BYTES,
    LIVE_BYTES,
    MOST_LINES,
    VERSION,
    History,
    Live,
    SyncLine,
    read_history,
)

__all__ = [
    "HISTORY_BYTES", "LEAST_SECONDS", "LINE_BYTES", "LIVE_BYTES", "MOST_BYTES", "MOST_ENDS",
    "MOST_KEYS", "MOST_LINES", "MOST_METRICS", "MOST_RANKS", "MOST_RUNS", "NAME_CHARACTERS",
    "PUTS_PER_SECOND", "TEXT_CHARACTERS", "VERSION", "History", "HistoryKey", "Live", "Metric",
    "Phase", "RunReader", "SyncLine", "Told", "check_metrics", "end_key", "find_runs",
    "history_allowance", "history_seconds", "is_sealed", "live_key", "live_seconds", "newest_keys",
    "parse_live_key", "read_history",
]  # fmt: skip
