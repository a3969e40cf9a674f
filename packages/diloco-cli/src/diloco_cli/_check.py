"""The verb ``check``: what is installed here, and what stands in the way of a run."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib.metadata import distributions, version
from typing import NamedTuple

from diloco_protocol import BaseExecutor, DilocoError, Finding, InvalidRequestError
from diloco_protocol.backend import get_command

from ._backends import Answer
from ._exits import FAILED, SUCCEEDED
from ._extra import needs
from ._facts import VERSION
from ._options import UnsetError
from ._session import Session
from ._table import Cell
from ._texts import clean

_WORDS = {True: Cell("ok ", "green"), False: Cell("no ", "red"), None: Cell("?  ", "yellow")}


class Launch(NamedTuple):
    """The launch that a backend is asked about."""

    replicas: int = 1
    gpu: str | None = None


def check(session: Session, uri: str | None, launch: Launch) -> int:
    """Print what is in order and what is not, and return the exit code.

    Args:
        session: Says which backends.
        uri: A store to try; None: none.
        launch: Looked at by the backend that was named.

    Raises:
        InvalidRequestError: A launch was described, and no backend was named.
    """
    named = session.choice.backend is not None
    if not named and launch != Launch():
        raise InvalidRequestError(
            "--replicas and --gpu describe a launch to one backend: name it with --backend"
        )

    def look(executor: BaseExecutor) -> list[Finding]:
        known = len(executor.list_runs())
        found = [Finding("", True, f"it can be reached; runs that it has records of: {known}")]
        return found + (executor.check(launch.replicas, gpu=launch.gpu) if named else [])

    with session.backends(session.choice) as backends:
        answers = backends.ask(look)
    findings = [_versions(), *_of_backends(answers), *([] if uri is None else [_of_store(uri)])]
    passed = all(finding.ok is not False for finding in findings)
    if session.as_json:
        entries = [
            {"subject": clean(each.subject), "ok": each.ok, "message": clean(each.message)}
            for each in findings
        ]
        session.screen.json({"version": VERSION, "ok": passed, "findings": entries})
    else:
        for each in findings:
            text = f"{clean(each.subject)}: {clean(each.message)}"
            session.screen.line(_WORDS[each.ok], text)
    return SUCCEEDED if passed else FAILED


def _versions() -> Finding:
    """Return the versions of everything of ours that is installed here."""
    # What a removed package has left behind may have no name.
    names = {each.metadata["Name"] or "" for each in distributions() if each.metadata}
    ours = {name: version(name) for name in names if name.startswith("diloco-")}
    text = ", ".join(f"{name} {number}" for name, number in sorted(ours.items()))
    return Finding("versions", True, f"Python {platform.python_version()}, {text}")


def _of_backends(answers: Mapping[str, Answer[list[Finding]]]) -> list[Finding]:
    findings = []
    for name, answer in answers.items():
        if isinstance(answer.error, UnsetError):
            findings.append(Finding(name, None, f"not asked: {answer.error}"))
        elif answer.error is not None:
            kind = type(answer.error).__name__
            findings.append(Finding(name, False, f"{kind}: {answer.error}"))
        for each in answer.value or ():
            subject = f"{name} {each.subject}".strip()
            findings.append(Finding(subject, each.ok, each.message))
    return findings


def _of_store(uri: str) -> Finding:
    """Try a store with the probe of diloco-core."""
    try:
        probe = get_command("probe")
        if probe is None:
            return Finding("store", False, needs("probe"))
        return Finding("store", True, ". ".join(probe(uri=uri).lines))
    except DilocoError as error:
        return Finding("store", False, str(error))
