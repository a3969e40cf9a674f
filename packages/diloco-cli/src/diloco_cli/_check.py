"""The verb ``check``: what is installed here, and what stands in the way of a run."""

from __future__ import annotations

import platform
from importlib.metadata import distributions, version
from typing import Any

from diloco_protocol import BaseExecutor, DilocoError, Finding, InvalidRequestError

from ._exits import FAILED, SUCCEEDED
from ._extra import find_extra
from ._facts import Cell
from ._options import UnsetError
from ._session import Session
from ._texts import clean

_WORDS = {True: Cell("ok ", "green"), False: Cell("no ", "red"), None: Cell("?  ", "yellow")}


def check(session: Session, uri: str | None, replicas: int = 1, gpu: str | None = None) -> int:
    """Print what is in order and what is not, and return the exit code.

    Args:
        session: Says which backends.
        uri: A store to try; None: none.
        replicas: How many a launch has that the backend that was named looks at.
        gpu: What each of them has.

    Raises:
        InvalidRequestError: A launch was described, and no backend was named.
    """
    named = session.choice.backend is not None
    if not named and (replicas, gpu) != (1, None):
        raise InvalidRequestError(
            "--replicas and --gpu describe a launch to one backend: name it with --backend"
        )

    def look(executor: BaseExecutor) -> list[Finding]:
        known = len(executor.list_runs())
        found = [Finding("", True, f"it can be reached; runs that it has records of: {known}")]
        return found + (executor.check(replicas, gpu=gpu) if named else [])

    with session.backends(session.choice) as backends:
        answers = backends.ask(look)
    findings = [_versions()]
    for name, answer in answers.items():
        findings += _of_backend(name, answer)
    if uri is not None:
        findings.append(_of_store(uri))
    facts: list[dict[str, Any]] = [
        {"subject": clean(each.subject), "ok": each.ok, "message": clean(each.message)}
        for each in findings
    ]
    passed = all(finding.ok is not False for finding in findings)
    if session.as_json:
        session.screen.json({"ok": passed, "findings": facts})
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


def _of_backend(name: str, answer: list[Finding] | Exception) -> list[Finding]:
    if isinstance(answer, UnsetError):
        return [Finding(name, None, f"not asked: {answer}")]
    if isinstance(answer, Exception):
        return [Finding(name, False, f"{type(answer).__name__}: {answer}")]
    return [Finding(f"{name} {each.subject}".strip(), each.ok, each.message) for each in answer]


def _of_store(uri: str) -> Finding:
    """Try a store with the probe of diloco-core."""
    try:
        return Finding("store", True, ". ".join(find_extra("probe")(uri=uri).lines))
    except DilocoError as error:
        return Finding("store", False, str(error))
