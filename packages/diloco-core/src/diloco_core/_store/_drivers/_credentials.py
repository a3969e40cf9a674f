"""AWS credentials for drivers that do not know every source of them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from obstore.store import S3Config, S3Credential


class BotocoreCredentials:
    """Credentials from botocore's chain, which also knows profiles, SSO and credential processes.

    Thread-safe.

    It is called for every request. botocore asks their source again before they end, and only then.
    """

    def __init__(self, session: Any, credentials: Any) -> None:
        self._credentials = credentials
        self._end: object = None
        region = session.get_config_variable("region")
        self.config: S3Config = {"region": region} if region else {}

    def __call__(self) -> S3Credential:
        """The credentials of this moment."""
        frozen = self._credentials.get_frozen_credentials()
        self._ask_late()
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            # obstore keeps nothing that ends at once. Their true end is known to botocore alone.
            "expires_at": datetime.now(UTC),
        }

    def _ask_late(self) -> None:
        """Have sets that last for less than an hour renewed in the last quarter of their time.

        botocore renews every set 15 minutes before its end: sets of 15 minutes, which are the rule
        where one role assumes another, at every request. The names of its attributes may change:
        where one is missing, it is left as it is.
        """
        end = getattr(self._credentials, "_expiry_time", None)
        now = getattr(self._credentials, "_time_fetcher", None)
        if end is not None and end != self._end and now is not None:
            self._end = end
            quarter = (end - now()).total_seconds() / 4
            vars(self._credentials).update(
                _advisory_refresh_timeout=min(900.0, quarter),
                _mandatory_refresh_timeout=min(600.0, quarter / 2),
            )


def credentials_of_botocore() -> BotocoreCredentials | None:
    """Return credentials from a new session of botocore, or None if it is of no use.

    That is so if variables hold credentials, botocore is not installed, or it finds none. obstore's
    own chain is used then, which may find some.
    """
    if "AWS_ACCESS_KEY_ID" in os.environ:
        return None
    try:
        import botocore.session
    except ImportError:
        return None
    session = botocore.session.Session()
    credentials = session.get_credentials()
    return None if credentials is None else BotocoreCredentials(session, credentials)


def once_at_a_time(lock: threading.Lock, ask: Callable[[], None]) -> None:
    """Let one of the threads that are refused at the same time ask for new credentials.

    The others wait for it.
    """
    first = lock.acquire(blocking=False)
    if not first:
        lock.acquire()
    try:
        # If this fails, the next try of the request meets the same error.
        with suppress(Exception):
            if first:
                ask()
    finally:
        lock.release()
