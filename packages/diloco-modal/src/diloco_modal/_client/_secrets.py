"""The Secrets of a launch: those that it names, and those of the app.

Modal itself would replace the app's with the launch's.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from diloco_protocol import BackendError, InvalidRequestError

Ask = Callable[[Callable[[], Awaitable[Any]], str], Any]


def secrets_of(
    function: Any,
    wanted: Mapping[str, str],
    declared: Sequence[str],
    where: Mapping[str, Any],
    ask: Ask,
) -> list[Any]:
    """Return the Secrets to bind to a function: those of the app, and then those of the launch.

    From version 1.6 on, Modal's client tells which Secrets the app has. With an older one, only
    those in ``declared`` are kept.

    Args:
        function: The deployed function, which was looked up before.
        wanted: Names of Secrets by the variable that each must hold.
        declared: Names of Secrets that the app has, according to the options.
        where: Client and environment.
        ask: Makes a call of Modal's client.

    Raises:
        InvalidRequestError: A Secret or its key is missing, or the app has one without a name; says
            what to do.
    """
    named = [_named(name, [], where, ask) for name in declared]
    named += [_named(name, [key], where, ask) for key, name in sorted(wanted.items())]
    return [*_of_app(function, {secret.object_id for secret in named}, where, ask), *named]


def _named(name: str, keys: list[str], where: Mapping[str, Any], ask: Ask) -> Any:
    import modal

    secret = modal.Secret.from_name(name, required_keys=keys, **where)
    try:
        ask(secret.hydrate.aio, f"looking for the Secret {name!r}")
    except BackendError as error:
        if error.retryable:
            raise
        raise InvalidRequestError(
            f"{str(error).rstrip('.')}. Make it with all its keys: modal secret create --force "
            f"{name} NAME=VALUE ..."
        ) from error
    return secret


def _of_app(function: Any, known: set[str], where: Mapping[str, Any], ask: Ask) -> list[Any]:
    """Return the Secrets of the app that are not known yet."""
    import modal

    if isinstance(modal.Function.info, property):  # before 1.6, info is something else
        return []
    secret_ids = ask(function.info.aio, "looking at the function").secrets
    missing = [secret_id for secret_id in secret_ids if secret_id not in known]
    if not missing:
        return []
    environment = where["environment_name"] or ""
    listed = ask(
        lambda: modal.Secret.objects.list.aio(client=where["client"], environment_name=environment),
        "listing Secrets",
    )
    by_id = {secret.object_id: secret for secret in listed}
    nameless = [secret_id for secret_id in missing if secret_id not in by_id]
    if nameless:
        raise InvalidRequestError(
            f"a launch with secrets= would take {len(nameless)} of the app's Secrets away, which "
            f"have no name in this environment ({', '.join(nameless)}): have build_app use "
            "modal.Secret.from_name, and deploy it again"
        )
    return [by_id[secret_id] for secret_id in missing]
