"""The verb ``check``: what is installed here, and what stands in the way of a run."""

from __future__ import annotations

import platform
from dataclasses import replace
from importlib.metadata import distributions, version
from typing import Any

from diloco_protocol import BaseExecutor, DilocoError, Finding

from ._exits import FAILED, SUCCEEDED
from ._extra import find_extra
from ._facts import Cell
from ._session import Session
from ._texts import clean

_WORDS = {True: Cell("ok ", "green"), False: Cell("no ", "red"), None: Cell("?  ", "yellow")}


def check(session: Session, uri: str | None) -> int:
    """Print what is in order and what is not, and return the exit code.

    Args:
        session: Says which backends; one that is named is also asked about a launch.
        uri: A store to try; None: none.
    """
    choice = session.choice

    def look(executor: BaseExecutor) -> list[Finding]:
        known = len(executor.list_runs())
        found = [Finding("", True, f"it can be reached; runs that it has records of: {known}")]
        return found + (executor.check() if choice.backend else [])

    with session.backends(replace(choice, backend=None)) as backends:
        answers = backends.ask(look)
    findings = [_versions()]
    for name, found in answers.found.items():
        findings += [replace(each, subject=f"{name} {each.subject}".strip()) for each in found]
    findings += [Finding(name, None, f"not asked: {text}") for name, text in answers.unset.items()]
    findings += [Finding(name, False, text) for name, text in answers.failed.items()]
    measured = None
    if uri is not None:
        try:
            answer = find_extra("probe")(uri=uri)
            measured = answer.values
            findings.append(Finding("store", True, ". ".join(answer.lines)))
        except DilocoError as error:
            findings.append(Finding("store", False, str(error)))
    facts: list[dict[str, Any]] = [
        {"subject": clean(each.subject), "ok": each.ok, "message": clean(each.message)}
        for each in findings
    ]
    passed = all(finding.ok is not False for finding in findings)
    if session.as_json:
        session.screen.json({"ok": passed, "findings": facts, "store": measured})
    else:
        for each in facts:
            session.screen.line(_WORDS[each["ok"]], f"{each['subject']}: {each['message']}")
    return SUCCEEDED if passed else FAILED


def _versions() -> Finding:
    """Return the versions of everything of ours that is installed here."""
    # What a removed package has left behind may have no name.
    names = {each.metadata["Name"] or "" for each in distributions() if each.metadata}
    ours = {name: version(name) for name in names if name.startswith("diloco-")}
    text = ", ".join(f"{name} {number}" for name, number in sorted(ours.items()))
    return Finding("versions", True, f"Python {platform.python_version()}, {text}")
