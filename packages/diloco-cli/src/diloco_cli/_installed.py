"""Check what is installed here, and find the verbs of other packages.

Those are ``export`` and ``plan`` of diloco-core, among others.
"""

from __future__ import annotations

import platform
from dataclasses import asdict, replace
from importlib.metadata import distributions, version
from typing import Any

import click

from diloco_protocol import BaseExecutor, DilocoError, Finding, MissingDependencyError, Option
from diloco_protocol.backend import Command, get_command, redact_json

from ._backends import REQUIRED, read_value
from ._facts import FAILED, SUCCEEDED, Cell, plain
from ._session import Screen, Session
from ._texts import clean

_WORDS = {True: Cell("ok ", "green"), False: Cell("no ", "red"), None: Cell("?  ", "yellow")}


def check(session: Session, target: str | None) -> int:
    """Print what is in order and what is not, and return the exit code.

    Args:
        session: Says which backends; one that is named is also asked about a launch.
        target: A store to try; None: none.
    """
    choice = session.choice

    def look(executor: BaseExecutor) -> list[Finding]:
        known = len(executor.list_runs())
        access = [Finding("", True, f"it can be reached; runs that it has records of: {known}")]
        return access + (executor.check() if choice.backend else [])

    with session.backends(replace(choice, backend=None)) as backends:
        answers = backends.ask(look)
    findings = [_versions()]
    for name, part in answers.found.items():
        findings += [replace(entry, subject=f"{name} {entry.subject}".strip()) for entry in part]
    findings += [Finding(name, None, f"not asked: {text}") for name, text in answers.unset.items()]
    findings += [Finding(name, False, text) for name, text in answers.failed.items()]
    measured = None
    if target is not None:
        try:
            answer = find_extra("probe")(uri=target)
            measured = answer.values
            findings.append(Finding("store", True, ". ".join(answer.lines)))
        except DilocoError as error:
            findings.append(Finding("store", False, str(error)))
    facts = [plain(asdict(finding)) for finding in findings]
    passed = all(finding.ok is not False for finding in findings)
    if session.as_json:
        session.screen.json({"ok": passed, "findings": facts, "store": measured})
    else:
        for row in facts:
            session.screen.line(_WORDS[row["ok"]], f"{row['subject']}: {row['message']}")
    return SUCCEEDED if passed else FAILED


def _versions() -> Finding:
    """Return the versions of everything of ours that is installed here."""
    # What a removed package has left behind may have no name.
    names = {package.metadata["Name"] or "" for package in distributions() if package.metadata}
    packages = sorted(name for name in names if name.startswith("diloco-"))
    text = ", ".join(f"{name} {version(name)}" for name in packages)
    return Finding("versions", True, f"Python {platform.python_version()}, {text}")


def find_extra(verb: str) -> Command:
    """Return a verb of an installed package.

    Raises:
        MissingDependencyError: No installed package has it; the error says what to install.
        InvalidRequestError: It cannot be loaded.
    """
    if (extra := get_command(verb)) is None:
        raise MissingDependencyError(
            f"`{verb}` needs diloco-core, which is not installed here: pip install diloco-core "
            "(from a checkout: pip install ./packages/diloco-core)"
        )
    return extra


def make_command(verb: str) -> click.Command:
    """Return the verb of an installed package, with the options that the package describes.

    Raises:
        MissingDependencyError: No installed package has it; the error says what to install.
        InvalidRequestError: It cannot be loaded.
    """
    extra = find_extra(verb)
    options = {option.name.lower(): option for option in extra.options()}

    def callback(*, as_json: bool, **given: Any) -> int:
        screen = Screen()
        values = {
            options[name].name: text if isinstance(text, bool) else read_value(options[name], text)
            for name, text in given.items()
            if text is not None
        }
        answer = extra(**values)
        if as_json:
            screen.json({"verb": verb, **redact_json(dict(answer.values))})
        else:
            screen.lines([Cell(clean(line))] for line in answer.lines)
        return SUCCEEDED

    as_json = click.Option(["--json", "as_json"], is_flag=True, help="Print JSON.")
    parameters = [*map(_parameter, options.values()), as_json]
    return click.Command(verb, params=parameters, callback=callback, help=extra.help)


def _parameter(option: Option) -> click.Parameter:
    name = option.name.lower()
    if option.default == REQUIRED:
        return click.Argument([name])
    flag = f"--{name.replace('_', '-')}"
    if option.type == "bool":
        return click.Option([flag, name], is_flag=True, default=None, help=option.help)
    text = f"{option.help} ({option.type}; default: {option.default})"
    return click.Option([flag, name], metavar="VALUE", help=text)
