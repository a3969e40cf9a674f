"""The options of an executor: its arguments, checked once."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from diloco_protocol import Backoff, InvalidRequestError, RunJournal
from diloco_protocol.backend import (
    Options,
    check_backoff,
    check_callable,
    check_journal,
    check_names,
    check_restarts,
    check_run_prefix,
    check_text,
    check_variables,
    option,
    seconds,
    text_like,
)

DAY = 86_400


_check_place = text_like(
    "[a-z0-9]+(-[a-z0-9]+)*",
    "one name in Modal's words, such as 'us-east' for a region or 'aws' for a cloud",
)
check_function = text_like("[^.]+", "a name without a dot, as only methods of classes have")


def _check_client(name: str, value: object) -> Any:
    # An isinstance check would import Modal's client, which is slow.
    if isinstance(value, type) or not hasattr(value, "from_env"):
        raise InvalidRequestError(
            f"{name} must be a modal.Client, not a value of type {type(value).__name__}"
        )
    return value


@dataclass(frozen=True, eq=False, repr=False)
class ModalOptions(Options):
    """The checked arguments of the constructor of :class:`ModalSpawnExecutor`. Immutable.

    Attributes:
        app: Name of the deployed app; see :func:`build_app`.
        function: Name of its function.
        environment_name: The environment of Modal in which the app is. If it is left out, the
            environment of the first call is kept, even if the profile changes.
        client: A ``modal.Client`` to use.
        run_id: Prefix of the names of runs that the caller does not name.
        env: Environment variables for every launch; those of the launch itself win.
        app_secrets: Names of the Secrets that the app declares, for clients of Modal before 1.6,
            which cannot list them. Without this, a launch with ``secrets=`` would replace them.
        region: The region in which replicas run, as Modal names it.
        cloud: The cloud in which they run, as Modal names it.
        max_restarts: Restarts of a failed replica if the launch does not say; in the same
            container.
        pending_timeout: Seconds that a replica may wait for its GPU, from the launch that starts
            its call. A replica that gets its GPU later fails, since the others are gone by then.
        grace: Seconds between SIGTERM and SIGKILL, at most 25, since Modal kills after about 30.
        request_timeout: Seconds for every call of Modal's client.
        retry_timeout: Seconds for which calls are tried again while Modal throttles, fails or is
            away; ``collect`` has its own timeout.
        journal: Where launches and ends are written down, besides Modal's own records, which fade
            after 7 days.
        backoff: Pauses of ``collect`` and between tries, with their clock and sleep.
        clock: Unix seconds, for tests.

    Raises:
        InvalidRequestError: A value is not allowed; says what was given and what is allowed.
    """

    app: str = option("diloco", check=check_text)
    function: str = option("replica", check=check_function)
    environment_name: str | None = option(None, check=check_text, shown="the profile's")
    client: Any = option(None, check=_check_client, type="modal.Client", shown="the environment's")
    run_id: str | None = option(None, check=check_run_prefix, shown="run")
    env: Mapping[str, str] | None = option(None, check=check_variables)
    app_secrets: Sequence[str] | None = option(None, check=check_names)
    region: str | None = option(None, check=_check_place, shown="the app's")
    cloud: str | None = option(None, check=_check_place, shown="the app's")
    max_restarts: int = option(0, check=check_restarts)
    pending_timeout: float = option(3600.0, check=seconds(7 * DAY, positive=True))
    grace: float = option(10.0, check=seconds(25))
    request_timeout: float = option(30.0, check=seconds(DAY, positive=True))
    retry_timeout: float = option(60.0, check=seconds(DAY))
    journal: RunJournal | None = option(None, check=check_journal)
    backoff: Backoff | None = option(None, check=check_backoff, shown="1 s to 20 s")
    clock: Callable[[], float] = option(time.time, check=check_callable, hidden=True)
