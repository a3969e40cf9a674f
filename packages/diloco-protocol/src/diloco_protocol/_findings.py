"""Findings of a check that may fail to be made."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ._backoff import Patiently
from ._errors import BackendError
from ._hooks import Finding


def findings_of(
    subject: str,
    look: Callable[[], Iterable[Finding]],
    patiently: Patiently,
    *,
    ok: bool | None = False,
) -> list[Finding]:
    """Return what a look finds, or a finding with its error.

    Args:
        subject: The subject of the finding with the error.
        look: Asks the platform.
        patiently: Repeats the look if its error may pass.
        ok: The verdict if the look fails: False if a launch would fail too, None if the answer is
            only not known.
    """
    try:
        return patiently(lambda: list(look()))
    except BackendError as error:
        known = "" if ok is False else "this is not known: "
        return [Finding(subject, ok, f"{known}{error}")]
