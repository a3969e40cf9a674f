"""The command line: what can be typed, and nothing else. Verbs are imported when they run.

``diloco --help`` must be quick, so this module imports click alone, and neither the protocol nor
rich.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import click

from .__about__ import __version__

EXTRA = {
    "export": "Write the model of a run from its store to a file (needs diloco-core).",
    "plan": "Estimate the time and the cost of a sync (needs diloco-core).",
}
"""Verbs of other packages, and what the help says of them without importing these."""
_PIPE_CLOSED = 141


class Verbs(click.Group):
    """The group of all verbs."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a verb; those of other packages are imported here."""
        if cmd_name in EXTRA:
            from ._installed import make_command

            return make_command(cmd_name)
        return super().get_command(ctx, "ls" if cmd_name == "ps" else cmd_name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """Write the list of verbs without importing any."""
        rows = [(name, verb.get_short_help_str(80)) for name, verb in self.commands.items()]
        with formatter.section("Verbs"):
            formatter.write_dl([*rows, *EXTRA.items()])

    def invoke(self, ctx: click.Context) -> Any:
        """Run a verb; the exit code says if a reader has gone. Help does not come here."""
        _log_as_text()
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            return _unread()


@click.group(
    cls=Verbs,
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True},
    epilog="Exit codes: 0 all succeeded, 1 a replica failed or was cancelled, 2 bad use, 3 unknown "
    "or lost, 4 cannot reach, 130 Ctrl-C.",
)
@click.version_option(__version__, package_name="diloco-cli")
def cli() -> None:
    """See, follow and end runs on every backend that is installed here."""


_SHARED = (
    click.Option(["--backend"], metavar="NAME", help="The backend; all of them if left out."),
    click.Option(
        ["--option", "options"],
        multiple=True,
        metavar="[BACKEND.]NAME=VALUE",
        help="An option of a backend's constructor. The variable DILOCO_OPTIONS has more, "
        "separated by blanks.",
    ),
    click.Option(["--json", "as_json"], is_flag=True, help="Print JSON."),
)
_TARGET = click.Argument(["target"], metavar="RUN|URI")
_YES = click.Option(["--yes"], is_flag=True, help="Do not ask.")


def _verb(module: str, *parameters: click.Parameter) -> Callable[[Callable[[], None]], None]:
    """Return what makes a verb of a function, which has its name and its help, and nothing else.

    Args:
        module: The module with the function of that name that is imported and called with a
            session, and what was given as keywords. It returns the exit code.
        parameters: Arguments and options, besides those that all verbs on backends share.
    """

    def declare(described: Callable[[], None]) -> None:
        def call(backend: str | None, options: Sequence[str], as_json: bool, **given: Any) -> int:
            from ._session import Session

            work = getattr(importlib.import_module(f"{__package__}.{module}"), described.__name__)
            return int(work(Session(backend, options, as_json), **given))

        params = [*parameters, *_SHARED]
        cli.command(described.__name__, help=described.__doc__, params=params)(call)

    return declare


@_verb(
    "_runs",
    click.Option(["--limit"], type=click.IntRange(1), default=20, help="Runs of each backend."),
)
def ls() -> None:
    """List the newest runs (also: ps)."""


@_verb("_runs", _TARGET)
def status() -> None:
    """Show the state of every replica of a run.

    RUN is its name, or the URI of its store (s3://..., or a folder with a slash in it): then it is
    what the replicas themselves tell, and no backend is asked.
    """


@_verb(
    "_logs",
    _TARGET,
    click.Option(["-f", "--follow"], is_flag=True, help="Go on until the replicas have ended."),
    click.Option(["--rank", "ranks"], multiple=True, metavar="RANKS", help="Such as 0,2,5-7."),
    click.Option(["--since"], metavar="WHEN", help="Such as 90s, 10m, 2h, 1d or 2026-03-14T15:09."),
    click.Option(["--grep"], metavar="REGEX", help="Only lines in which this is found."),
)
def logs() -> None:
    """Print the logs of all ranks of a run.

    With the URI of its store, these are the last lines that the journal there keeps, if any.
    """


@_verb("_runs", click.Argument(["target"], metavar="RUN"))
def wait() -> None:
    """Wait until a run has ended, and show how."""


@_verb(
    "_watch",
    _TARGET,
    click.Option(["--every"], type=click.IntRange(1, 3600), default=5, help="Pause in seconds."),
)
def watch() -> None:
    """Follow a run until all replicas have ended; Ctrl-C leaves it alone.

    This is what the replicas tell in its store, and what their backends say. With the URI of its
    store (s3://..., or a folder with a slash in it), those that are installed here are asked; with
    its name, its backend is, which also says where the store is.
    """


@_verb("_runs", _TARGET, _YES)
def cancel() -> None:
    """End all replicas of a run; their records stay.

    With the URI of its store, these are all runs that were launched to meet there, as their
    backends say.
    """


@_verb(
    "_runs",
    _TARGET,
    _YES,
    click.Option(["--store"], is_flag=True, help="Delete what the run has in the store."),
)
def purge() -> None:
    """Remove the backend's records of a run that has ended.

    With the URI of its store, these are all runs that were launched to meet there, as their
    backends say; what is in the store stays, but for --store (needs diloco-core).
    """


@_verb(
    "_report._page",
    _TARGET,
    click.Option(["-o", "file"], type=click.Path(dir_okay=False), metavar="FILE", help="The page."),
    click.Option(["--force"], is_flag=True, help="Replace the file if it is there."),
    click.Option(["--prices"], type=click.File("rb"), metavar="FILE", help="Prices in JSON."),
    click.Option(["--store"], metavar="URI", help="Where the replicas of RUN meet."),
)
def report() -> None:
    """Make a page about a run: what happened, where the time went, what it cost.

    Without -o and --json, the page is a file of the run's name in the current folder: RUN.html.

    RUN is its name: its backend is asked, also for the store where the replicas tell of themselves,
    if --store does not name that. URI is that of the store: no backend is asked.
    """


@_verb("_installed", click.Argument(["target"], metavar="[URI]", required=False))
def check() -> None:
    """Say what is installed here and what stands in the way.

    With the URI of a store, it is tried as a run would use it, and measured (needs diloco-core).
    With --backend, that backend is asked about a launch.
    """


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the command with arguments, those of this process if left out; return the exit code."""
    try:
        return _run(arguments)
    except BrokenPipeError:  # of standard error
        return _unread()


def _unread() -> int:
    """Write nothing more, since a reader has gone, and return the exit code for that."""
    for stream in (sys.stdout, sys.stderr):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    return _PIPE_CLOSED


def _run(arguments: Sequence[str] | None) -> int:
    try:
        code = cli.main(arguments, prog_name="diloco", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        sys.stderr.write("interrupted\n")
        return 130
    except Exception as error:  # noqa: BLE001 - each kind has its exit code
        return _failed(error)
    return code if isinstance(code, int) else 0


def _failed(error: Exception) -> int:
    """Print an error, and return its exit code."""
    from diloco_protocol.backend import readable, redact_and_cut

    from ._facts import FAULT, exit_of_error
    from ._session import Screen

    code = exit_of_error(error)
    text = "\n".join([f"diloco: {error}", *getattr(error, "__notes__", ())])
    if code == FAULT:  # of the command itself, or of a backend
        import traceback

        text = "".join(traceback.format_exception(error)).rstrip()
    Screen().say(readable(redact_and_cut(text, 20_000)))
    return code


def _log_as_text() -> None:
    """Print what libraries log as everything else that others say, and without tracebacks."""
    import logging

    class Shown(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            from ._texts import clean

            sys.stderr.write(f"{clean(record.getMessage())}\n")

    logging.basicConfig(handlers=[Shown(logging.WARNING)])
    # It reports what Modal's client leaves unfinished where it cannot connect.
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)


def main() -> NoReturn:
    """Run the command with the arguments of this process, and exit with its exit code."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # the parent process has closed it
            setattr(sys, name, open(os.devnull, mode))  # noqa: PTH123, SIM115
    sys.exit(run())
