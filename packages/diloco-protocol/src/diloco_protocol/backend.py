"""Further names for authors of backends and of commands, besides :class:`BaseExecutor`.

They are options, checks, resources, redaction, signals, processes, and verbs of the command
``diloco``. A user of a backend needs none of them, so they are not in the package itself.
"""

from ._backoff import Patiently, latest_try
from ._cancel import all_or_nothing, cancel_all, check_ended
from ._channels import variables_from_strings, variables_to_strings
from ._checks import (
    check_amount,
    check_callable,
    check_home,
    check_names,
    check_path,
    check_paths,
    check_seconds,
    check_text,
    check_texts,
    check_whole,
    or_none,
    read_whole,
    shown,
)
from ._discovery import Answer, Command, command, get_command
from ._fields import status_from_data, status_to_data
from ._follow import LINE_BYTES, LineSplitter, LogEnd, Look, follow, split_lines
from ._handle import check_metadata
from ._hooks import findings_of
from ._in_time import in_time
from ._json import OUTCOME_BYTES, RECORD_BYTES, RESULT_BYTES, check_json, check_size, read_bounded
from ._options import (
    RUNNER,
    Options,
    check_backoff,
    check_command,
    check_flag,
    check_journal,
    details,
    one_of,
    option,
    options_of,
    options_table,
    seconds,
    takes,
    text_like,
    whole,
)
from ._outcome import FINAL_CODE
from ._processes import (
    Process,
    adopt_orphans,
    descendants,
    is_shortage,
    processes,
    read_process,
    read_wait_status,
    signal_name,
)
from ._recent import Recent
from ._redact import redact, redact_and_cut, redact_json, redact_text
from ._request import MAX_REPLICAS, check_restarts, check_run_prefix, is_run_id, refuse
from ._resources import ANY, GpuRequest, parse_gpu
from ._secret_forms import REDACTED
from ._spec import check_variables, is_reserved, redact_spec
from ._texts import readable

__all__ = [
    "ANY", "FINAL_CODE", "LINE_BYTES", "MAX_REPLICAS", "OUTCOME_BYTES", "RECORD_BYTES", "REDACTED",
    "RESULT_BYTES", "RUNNER", "Answer", "Command", "GpuRequest", "LineSplitter", "LogEnd", "Look",
    "Options", "Patiently", "Process", "Recent", "adopt_orphans", "all_or_nothing", "cancel_all",
    "check_amount", "check_backoff", "check_callable", "check_command", "check_ended", "check_flag",
    "check_home", "check_journal", "check_json", "check_metadata", "check_names", "check_path",
    "check_paths", "check_restarts", "check_run_prefix", "check_seconds", "check_size",
    "check_text", "check_texts", "check_variables", "check_whole", "command", "descendants",
    "details", "findings_of", "follow", "get_command", "in_time", "is_reserved", "is_run_id",
    "is_shortage", "latest_try", "one_of", "option", "options_of", "options_table", "or_none",
    "parse_gpu", "processes", "read_bounded", "read_process", "read_wait_status", "read_whole",
    "readable", "redact", "redact_and_cut", "redact_json", "redact_spec", "redact_text", "refuse",
    "seconds", "shown", "signal_name", "split_lines", "status_from_data",
    "status_to_data", "takes", "text_like", "variables_from_strings", "variables_to_strings",
    "whole",
]  # fmt: skip
