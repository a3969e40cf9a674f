"""The behaviour of the stand-in for Modal, and identifiers as Modal makes them."""

from __future__ import annotations

import secrets

_KNOWN_GPUS = "A10 A10G A100 A100-40GB A100-80GB B200 B200+ H100 H100! H200 L4 L40S RTX-PRO-6000 T4"


class ModalHabits:
    """The behaviour of the workspace; everything may be changed at any time.

    Attributes:
        auto_start: the seconds after which queued calls get a container by themselves; None leaves
            it to ``start``.
        interrupt_seconds: how long a program takes to end after SIGINT, unless its ``on_interrupt``
            says otherwise.
        grace_seconds: the time that Modal gives a program between SIGINT and SIGKILL.
        gpus: the types of GPU that Modal knows; another one is refused.
        retention_seconds: how long outputs of calls are kept after their end, and entries of Dicts
            after their last use.
    """

    def __init__(self) -> None:
        self.auto_start: float | None = None
        self.interrupt_seconds = 1.0
        self.grace_seconds = 30.0
        self.gpus: set[str] = set(_KNOWN_GPUS.split())
        self.retention_seconds = 7 * 86400.0


def new_id(prefix: str) -> str:
    """Return an identifier that never comes again: such as ``fc-`` and 22 letters or digits."""
    return f"{prefix}-{secrets.token_hex(11)}"
