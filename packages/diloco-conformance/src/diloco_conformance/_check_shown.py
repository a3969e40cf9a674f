"""Look for secrets in what is shown: E4."""

from __future__ import annotations

import base64
import re
from typing import Any

from diloco_protocol import BackendError, Plan

from ._lab import Lab


def is_in(value: str, text: str) -> bool:
    """Say whether a text holds an ASCII value, as it is or in base64, even if cut into pieces."""
    encoded = "".join(re.findall("[A-Za-z0-9+/]{32,}", text))
    forms = [
        # The bytes around it change the characters at both ends.
        base64.b64encode(b"\0" * place + value.encode()).decode()[4:-4]
        for place in range(3)
    ]
    return value in text or any(form in encoded for form in forms if len(form) >= 8)


class Shown:
    """A search for hidden values in whatever is shown."""

    def __init__(self, lab: Lab, hidden: list[str]) -> None:
        self._lab = lab
        self._hidden = hidden

    def check(self, what: str, *shown: Any) -> None:
        """Check that no hidden value is in any of these."""
        # A printed plan is redacted; the requests in it must be, too.
        inside = [plan.requests for plan in shown if isinstance(plan, Plan)]
        text = " ".join([*map(repr, shown), *map(str, shown), *map(repr, inside)])
        for value in self._hidden:
            if is_in(value, text):
                self._lab.broken("E4", f"{what} shows {text[:500]}", f"{value!r} is secret")

    def error(self, call: Any, *, needed: bool = True) -> None:
        """Check that neither the error that this call raises nor its causes show a hidden value.

        If ``needed``, the call must raise one.
        """
        try:
            call()
        except BackendError as error:
            cause: BaseException | None = error
            while cause is not None:
                self.check(f"{type(cause).__name__}", cause)
                cause = cause.__cause__ or cause.__context__
        else:
            if needed:
                self._lab.broken(
                    "L7",
                    "launch_replicas gave handles",
                    "its variables or secrets are others than those of the run with this run_id, "
                    "or not allowed at all, so it must be refused. Look at what the executor "
                    "compares: env and secrets belong to it",
                )
